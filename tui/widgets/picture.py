"""Pictures drawn with characters."""

from __future__ import annotations

import warnings

import numpy as np
from textual.color import Color
from textual.content import Content
from textual.style import Style

from localllm.errors import UsageError
from localllm.models.vision.pictures import open_picture

#: Columns and lines that a picture has at most.
_COLUMNS, _LINES = 40, 14


def half_blocks(picture: bytes) -> Content:
    """A picture in its proportions: each character has two pixels, one above the other."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its warnings were shown when it was attached
            image = open_picture(picture)
    except UsageError as error:
        return Content(f"({error})")
    scale = min(1.0, _COLUMNS / image.width, 2 * _LINES / image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale / 2)) * 2
    pixels = np.asarray(image.resize(size)).tolist()
    lines = [
        Content.assemble(
            *(
                ("▀", Style(foreground=Color(*above), background=Color(*below)))
                for above, below in zip(pixels[row], pixels[row + 1], strict=True)
            )
        )
        for row in range(0, size[1], 2)
    ]
    return Content("\n").join(lines)
