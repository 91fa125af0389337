"""Which process something was made in.

A forked child (``os.fork``, and `multiprocessing`'s "fork" method) has a copy of its parent's memory, but of its
threads only the one that forked: locks that the others held stay held, and what they worked on stays half done.
"""

from __future__ import annotations

import os

from localllm.errors import DeviceError

#: Forks between the process that imported this and the one at hand.
_generation = 0


class Process:
    """The process that makes this object, told apart from its forked children.

    A number of our own, not the process's: in a container of its own a child may have the number of its parent.
    """

    def __init__(self) -> None:
        self._generation = _generation

    @property
    def is_current(self) -> bool:
        """Whether this is that process, not a child."""
        return self._generation == _generation

    def check(self) -> None:
        """Makes sure that this is that process.

        Raises:
            DeviceError: it is a child.
        """
        if not self.is_current:
            raise DeviceError(
                "this model was loaded before the process was forked, and its threads are not in the child: load the "
                "model after the fork, or start the process with multiprocessing's 'spawn' method"
            )


def _count_fork() -> None:
    global _generation
    _generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)
