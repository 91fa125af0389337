"""Positions of a sequence that a trace reads, or that steering and hooks change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from localllm.errors import UsageError
from localllm.options.checks import as_int

#: Positions of a prompt: a number, several numbers, a slice or a range, as indices of a list. None: all positions.
Positions: TypeAlias = "int | Iterable[int] | slice | range | None"

_LARGEST = 1 << 62
_RULE = "a position, a list of positions, a slice, or None for all positions"


@dataclass(frozen=True)
class Selection:
    """Some positions of a sequence."""

    numbers: tuple[int, ...] | None  # ascending; None: positions from ``start`` on
    start: int = 0
    stop: int | None = None  # None: no end, so that generated tokens are included
    step: int = 1

    def among(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each position is selected."""
        if self.numbers is not None:
            selected: NDArray[np.bool_] = np.isin(positions, self.numbers)
        else:
            end = np.iinfo(np.int64).max if self.stop is None else self.stop
            in_step = (positions - self.start) % self.step == 0
            selected = (positions >= self.start) & (positions < end) & in_step
        return selected


def select(positions: Positions, n_prompt: int, argument: str = "positions") -> Selection:
    """Return the selection of ``positions``, where negative numbers count from the end of the prompt.

    Raises:
        UsageError: a number is outside the prompt, or the value has another type.
    """
    if positions is None:
        return Selection(None)
    if isinstance(positions, slice):
        start, stop, step = (
            None if x is None else as_int(x) for x in (positions.start, positions.stop, positions.step)
        )
        is_number = [x is None or as_int(x) is not None for x in (positions.start, positions.stop, positions.step)]
        if not all(is_number) or (step is not None and step < 1):
            raise UsageError.of(argument, positions, "a slice of whole numbers with a positive step")
        start, stop = (x if x is None or x >= 0 else max(0, n_prompt + x) for x in (start, stop))
        # Larger numbers are the same for a sequence, and not numpy integers.
        start, stop, step = (x if x is None else min(x, _LARGEST) for x in (start, stop, step))
        return Selection(None, start or 0, stop, step or 1)
    items = [positions] if as_int(positions) is not None else positions
    # Iterators are empty after their first use.
    if isinstance(items, str | bytes | Iterator) or not isinstance(items, Iterable):
        raise UsageError.of(argument, positions, _RULE)
    numbers = set[int]()
    for i, item in enumerate(items):
        if i >= 2 * n_prompt:  # each position has two numbers
            rule = f"at most {2 * n_prompt:,} numbers, for a prompt of {n_prompt:,} tokens"
            raise UsageError.of(argument, positions, rule)
        number = as_int(item)
        if number is None:
            raise UsageError.of(argument, item, "a whole number")
        if not -n_prompt <= number < n_prompt:
            raise UsageError.of(
                argument, number, f"from {-n_prompt} to {n_prompt - 1}, for a prompt of {n_prompt:,} tokens"
            )
        numbers.add(number % n_prompt)
    return Selection(tuple(sorted(numbers)))
