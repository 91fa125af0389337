"""Python runs this first in the child processes of a run of the tests as on another system."""

import os

if "TEST_AS" in os.environ:
    from tests.helpers.other_system import simulate

    simulate(os.environ["TEST_AS"])
