"""WebP files: Pillow's own pixels, decoded without Python's lock."""

from __future__ import annotations

import ctypes
import io
import sys
from typing import Any

import numpy as np
import pytest

from localllm.models.vision.pictures import open_picture

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")
WebPImageFile = pytest.importorskip("PIL.WebPImagePlugin").WebPImageFile


def webp(mode: str, turned: int, **options: Any) -> bytes:
    rng = np.random.default_rng(turned)
    image = Image.fromarray(rng.integers(0, 256, (40, 61, 4), dtype=np.uint8), "RGBA").convert(mode)
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = turned
    image.save(file, "WEBP", exif=exif, **options)
    return file.getvalue()


@pytest.mark.skipif(sys.platform == "win32", reason="Pillow hides libwebp there")
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("options", [{"quality": 70}, {"lossless": True}, {"lossless": True, "exact": True}])
def test_pixels_are_pillow_s(mode: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for turned in (1, 3, 6, 7):
        file = webp(mode, turned, **options)
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB"))
        with monkeypatch.context() as patched:
            patched.setattr(WebPImageFile, "load", None)  # which holds the lock
            np.testing.assert_array_equal(np.asarray(open_picture(file)), expected)
        with monkeypatch.context() as patched:
            patched.setattr(ctypes, "CDLL", lambda _: object())  # a Pillow that hides libwebp
            np.testing.assert_array_equal(np.asarray(open_picture(file)), expected)
