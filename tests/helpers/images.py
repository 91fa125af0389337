"""Image files in memory."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
