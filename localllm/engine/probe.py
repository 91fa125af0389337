"""Values inside the model that a request reads or changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localllm.options.types import OnValues

#: Returns the new rows of a value, or None to keep the rows. Arguments: rows float32 [n, width], and their positions
#: int64 [n].
Edit: TypeAlias = Callable[[NDArray[np.float32], NDArray[np.int64]], "NDArray[np.float32] | None"]


@dataclass(eq=False)
class Probe:
    """The values that one request reads and changes, by name. The engine thread uses it."""

    watched: tuple[str, ...] = ()  # values to read
    edits: Mapping[str, Sequence[Edit]] = field(default_factory=dict)  # changes of values, in order
    on_values: OnValues | None = None  # called in the engine thread
    values_from: int = 0  # position of the next values to report; reported values are not reported again
    # cached prefixes are shared by requests with equal keys; None if the request changes nothing
    key: Hashable = None
    # residual stream after the last layer, float32 [n_tokens, width]: the program only computes logits of its rows
    stream: NDArray[np.float32] | None = None
    error: BaseException | None = None  # error of an edit

    @property
    def program(self) -> tuple[frozenset[str], frozenset[str], bool]:
        """Values that the program reads and changes, and whether it only computes logits of a residual stream.

        Requests with the same program share steps.
        """
        return frozenset(self.watched), frozenset(self.edits), self.stream is not None

    def report(self, stop: int, rows: Mapping[str, NDArray[Any]]) -> None:
        """Report the values of the tokens before position ``stop``, which the last rows belong to."""
        n_new = stop - self.values_from
        if n_new > 0 and self.on_values is not None:
            n_rows = min(n_new, max(map(len, rows.values()), default=0))
            values = {name: of_value[max(0, len(of_value) - n_rows) :].copy() for name, of_value in rows.items()}
            self.on_values(np.arange(stop - n_rows, stop), values)
            self.values_from = stop

    def apply(
        self, name: str, rows: NDArray[np.float32], base: NDArray[np.float32] | None, positions: NDArray[np.int64]
    ) -> None:
        """Change rows of a value in place: the rows, or with ``base`` the difference of rows and base.

        An error is stored, and ends the request after the step.
        """
        if self.error is not None or not len(rows):
            return
        before = rows.copy() if base is None else rows - base
        try:
            values = before.copy()
            for edit in self.edits.get(name, ()):
                if (edited := edit(values, positions)) is not None:
                    values = edited
            rows[:] = values if base is None else rows + (values - before)
        except BaseException as error:
            self.error = error
