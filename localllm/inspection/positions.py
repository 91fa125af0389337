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

#: Bound of the numbers of a slice, which may exceed numpy's integers. Sequences are shorter.
_LARGEST = 1 << 62


@dataclass(frozen=True)
class Selection:
    """Some positions of a sequence."""

    numbers: tuple[int, ...] | None  # ascending; None: the range of ``start``, ``stop`` and ``step``
    start: int = 0
    stop: int = _LARGEST  # by default no end, so that generated tokens are included
    step: int = 1

    def among(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each position is selected."""
        if self.numbers is not None:
            return np.isin(positions, self.numbers)
        in_step: NDArray[np.bool_] = (positions - self.start) % self.step == 0
        return in_step & (positions >= self.start) & (positions < self.stop)


def select(positions: Positions, n_prompt: int) -> Selection:
    """Return the selection of ``positions``, where negative numbers count from the end of the prompt.

    Raises:
        UsageError: a number is outside the prompt, or the value has another type.
    """
    if positions is None:
        return Selection(None)
    if isinstance(positions, slice):
        defaults = (positions.start, 0), (positions.stop, _LARGEST), (positions.step, 1)
        numbers = [default if x is None else as_int(x) for x, default in defaults]
        match numbers:
            case [int(start), int(stop), int(step)] if step >= 1:
                start, stop = (x if x >= 0 else max(0, n_prompt + x) for x in (start, stop))
                return Selection(None, min(start, _LARGEST), min(stop, _LARGEST), min(step, _LARGEST))
        raise UsageError.of("positions", positions, "a slice of whole numbers with a positive step")
    items = [positions] if as_int(positions) is not None else positions
    # Iterators are empty after their first use.
    if isinstance(items, str | bytes | Iterator) or not isinstance(items, Iterable):
        raise UsageError.of(
            "positions", positions, "a position, a list of positions, a slice, or None for all positions"
        )
    chosen = set[int]()
    for i, item in enumerate(items):
        if i >= 2 * n_prompt:  # each position has two numbers
            rule = f"at most {2 * n_prompt:,} numbers, for a prompt of {n_prompt:,} tokens"
            raise UsageError.of("positions", positions, rule)
        number = as_int(item)
        if number is None:
            raise UsageError.of("positions", item, "a whole number")
        if not -n_prompt <= number < n_prompt:
            rule = f"from {-n_prompt} to {n_prompt - 1}, for a prompt of {n_prompt:,} tokens"
            raise UsageError.of("positions", number, rule)
        chosen.add(number % n_prompt)
    return Selection(tuple(sorted(chosen)))
