"""Python imports this module first in child processes of a test run that simulates another system."""

import os

if "TEST_AS" in os.environ:
    from tests.helpers.other_system import simulate

    simulate(os.environ["TEST_AS"])
