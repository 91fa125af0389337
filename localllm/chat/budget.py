"""What one rendering of an untrusted template may use: processor time, and bytes of values it makes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 2.0
"""Processor time for one rendering.  Real templates need some milliseconds."""

BASE_BYTES = 4 << 20
BYTES_PER_INPUT_BYTE = 64
"""All values that a template makes may take the base and this many times the size of its input."""

MAX_INT_BITS = 4096
MAX_CALL_DEPTH = 64
_NODE_BYTES = 64  # about what a small object and the reference to it take


class OverBudgetError(Exception):
    """A template asked for more than it may use; the text completes "the chat template …"."""


class Budget:
    """The account of one rendering.

    A template's only means are loops, operators, calls and filters over values it was given or has made.
    So it is bounded if each of those steps ticks, each new value is charged (`admit`), and each step that
    could make a value far larger than its operands first asks whether there is room (`require`).
    """

    def __init__(self, input_bytes: int) -> None:
        self._deadline = time.thread_time() + SECONDS
        self._left = BASE_BYTES + BYTES_PER_INPUT_BYTE * input_bytes
        # id -> (the container, its weight); holding the container keeps the id from being used again.
        self._weights: dict[int, tuple[object, int]] = {}
        self._call_depth = 0

    def tick(self) -> None:
        """One more step."""
        if time.thread_time() > self._deadline:
            raise OverBudgetError(f"runs for more than {SECONDS:g} seconds")

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call, around what it calls in turn."""
        self.tick()
        if self._call_depth == MAX_CALL_DEPTH:
            raise OverBudgetError("calls itself without end")
        self._call_depth += 1
        try:
            yield
        finally:
            self._call_depth -= 1

    def require(self, n_bytes: int) -> None:
        """Stop before a step that would need ``n_bytes``, if they are not there."""
        if n_bytes > self._left:
            raise OverBudgetError("builds far more text than the messages call for")

    def charge(self, n_bytes: int) -> None:
        """Take ``n_bytes`` for good."""
        self.require(n_bytes)
        self._left -= n_bytes

    def admit(self, value: Any) -> Any:
        """Charge a value that the template made, and return it, an iterator as one that admits its items."""
        if isinstance(value, str):
            self.charge(sys.getsizeof(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise OverBudgetError("computes with huge numbers")
        elif isinstance(value, list | tuple | dict):
            self.charge(_NODE_BYTES + 16 * len(value))
            self.require(self.weight(value))
        elif isinstance(value, Iterator):
            return self._admit_each(value)
        return value

    def _admit_each(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.tick()
            yield self.admit(item)

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """``items``, each of them a step."""
        for item in items:
            self.tick()
            yield item

    def weight(self, value: Any) -> int:
        """About the bytes of ``value`` written out.

        A list that holds another one twice counts it twice: that is what makes a few lines of template
        able to write out more than any memory holds, so it must show when the list is made.
        """
        if isinstance(value, str):
            return _NODE_BYTES + len(value)
        if not isinstance(value, list | tuple | dict):
            return _NODE_BYTES
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        weight = _NODE_BYTES + sum(map(self.weight, value))
        if isinstance(value, dict):
            weight += sum(map(self.weight, value.values()))
        self._weights[id(value)] = (value, weight)
        return weight

    def admit_sum(self, total: Any, left: Any, right: Any) -> Any:
        """`admit` for ``left + right``: a list that grows item by item is not weighed anew each time."""
        if isinstance(total, list | tuple):
            self._weights[id(total)] = (total, self.weight(left) + self.weight(right))
        return self.admit(total)
