"""Python's garbage collector, kept from holding up the screen.

With a model loaded there are a million objects that stay, and looking through all of them takes a tenth of a second,
during which no key is handled.  So they are set aside once they are there.
"""

from __future__ import annotations

import gc


def set_aside() -> None:
    """Collects what is garbage now, and leaves what is not out of later collections."""
    gc.collect()
    gc.freeze()


def take_back() -> None:
    """Lets everything be collected again, for some of it may be garbage soon."""
    gc.unfreeze()
