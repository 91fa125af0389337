"""Images drawn with characters."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from textual.color import Color
from textual.content import Content
from textual.style import Style

from localllm.errors import UsageError
from localllm.models.encoders.images import open_image

#: Maximum number of columns and lines of an image.
_COLUMNS, _LINES = 40, 14


def half_blocks(file: bytes) -> Content:
    """Return an image with its aspect ratio. Each character shows two pixels, one above the other."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings were shown when the image was attached
            image = open_image(file)
    except UsageError as error:
        return Content(f"({error})")
    scale = min(1.0, _COLUMNS / image.width, 2 * _LINES / image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale / 2)) * 2
    pixels = np.asarray(image.resize(size)).tolist()

    def line(upper: list[list[Any]], lower: list[list[Any]]) -> Content:
        styles = (Style(foreground=Color(*a), background=Color(*b)) for a, b in zip(upper, lower, strict=True))
        return Content.assemble(*(("▀", style) for style in styles))

    return Content("\n").join(line(*pixels[row : row + 2]) for row in range(0, size[1], 2))
