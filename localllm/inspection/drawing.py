"""Heat maps and bar charts of values inside a model, as text for a terminal or as a PNG file."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from localllm.errors import OutputError, UsageError, path_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Background and text colours of cells, from small to large values. The smallest values have the terminal's colours.
_SHADES = ("", "white on #1d3557", "white on #2a5783", "white on #3a7cb0", "black on #74b3d8", "black on #cbe6f5")
#: Least width of a chart in characters, also on narrower terminals.
_MIN_WIDTH = 20


class Drawing(Protocol):
    """A chart."""

    @property
    def title(self) -> str: ...
    def text(self, width: int) -> Text:
        """Return the chart in lines of at most ``width`` characters."""

    def draw(self, axes: Axes) -> None:
        """Draw the chart with matplotlib."""

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in a PNG file, in inches."""


@dataclass(frozen=True, eq=False)
class HeatMap:
    """A table whose cells are shaded by values.

    Attributes:
        rows, columns: labels.
        values: [n_rows, n_columns]. 0 has no shade, 1 has the strongest one.
        cells: text of each cell.
        cell_width: most characters of a cell.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: NDArray[np.float32]
    cells: Sequence[Sequence[str]]
    cell_width: int = 10

    def text(self, width: int) -> Text:
        """Return the table. Columns that do not fit in the width follow below, with the row labels repeated."""
        width = max(width, _MIN_WIDTH)
        label = min(max(map(cell_len, self.rows), default=0), width // 3)
        texts = [*self.columns, *(cell for row in self.cells for cell in row)]
        cell = min(max(map(cell_len, texts), default=1), self.cell_width, width - label - 1)
        n = max(1, (width - label) // (cell + 1))
        text = _heading(self.title, width)
        for first in range(0, len(self.columns), n):
            columns = slice(first, first + n)
            text.append("\n" + " " * label)
            for name in self.columns[columns]:
                text.append(" " + _fitted(name, cell), "dim")
            for name, cells, values in zip(self.rows, self.cells, self.values, strict=True):
                text.append(f"\n{_fitted(name, label)}", "dim")
                for content, value in zip(cells[columns], values[columns], strict=True):
                    text.append(" ").append(_fitted(content, cell), _shade(float(value)))
        return text

    def draw(self, axes: Axes) -> None:
        axes.imshow(self.values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(self.columns)), self.columns, rotation=60, ha="right", parse_math=False)
        axes.set_yticks(range(len(self.rows)), self.rows, parse_math=False)
        if max(len(self.rows), len(self.columns)) > 40:
            return
        for (row, column), value in np.ndenumerate(self.values):
            colour = "white" if value > 0.5 else "black"
            options: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "parse_math": False}
            axes.text(column, row, self.cells[row][column][: self.cell_width], color=colour, **options)

    @property
    def size(self) -> tuple[float, float]:
        return 2 + max(4, 0.6 * len(self.columns)), 2 + 0.25 * len(self.rows)


@dataclass(frozen=True, eq=False)
class Bars:
    """A horizontal bar for each value. Bars of negative values have another pattern."""

    title: str
    labels: Sequence[str]
    values: NDArray[np.float32]

    def text(self, width: int) -> Text:
        width = max(width, _MIN_WIDTH)
        label = min(max(map(cell_len, self.labels), default=0), width // 3)
        numbers = [f"{value:.3g}" for value in self.values.tolist()]
        number = max(map(len, numbers), default=0)
        longest = max(width - label - number - 2, 1)
        most = float(np.abs(self.values).max(initial=0)) or 1.0
        text = _heading(self.title, width)
        for name, shown, value in zip(self.labels, numbers, self.values.tolist(), strict=True):
            bar = ("█" if value >= 0 else "▒") * round(longest * abs(value) / most)
            text.append(f"\n{_fitted(name, label)} {shown:>{number}} ")
            text.append(bar, "blue" if value >= 0 else "red")
        return text

    def draw(self, axes: Axes) -> None:
        places = range(len(self.labels))
        axes.barh(places, self.values)
        axes.set_yticks(places, self.labels, parse_math=False)
        axes.invert_yaxis()

    @property
    def size(self) -> tuple[float, float]:
        return 7, 1.5 + 0.25 * len(self.labels)


def require_matplotlib() -> None:
    """Raise UsageError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError('a PNG file needs matplotlib: pip install "localllm[plot]"') from None


def save_png(path: Path, drawings: Sequence[Drawing]) -> None:
    """Write charts to a PNG file, one below the other.

    Raises:
        UsageError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    sizes = [drawing.size for drawing in drawings]
    heights = [height for _, height in sizes]
    figure = Figure(figsize=(max(width for width, _ in sizes), sum(heights)), layout="constrained")
    axes = figure.subplots(len(drawings), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for drawing, place in zip(drawings, axes, strict=True):
        drawing.draw(place)
        place.set_title(drawing.title, fontsize=10, parse_math=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the font lacks a character of a token
            figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        words = f"{path_text(path)} cannot be written ({error.strerror or error}): choose another folder"
        raise OutputError(words) from error


def _heading(title: str, width: int) -> Text:
    return Text.assemble(("\n".join(textwrap.wrap(title, width)), "bold"))


def _fitted(text: str, width: int) -> str:
    """Return text of exactly ``width`` characters. Longer text ends with an ellipsis."""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _shade(value: float) -> str:
    """Return the style of a cell for a value from 0 to 1."""
    step = int(np.clip(value, 0, 1) * len(_SHADES))
    return _SHADES[min(step, len(_SHADES) - 1)]
