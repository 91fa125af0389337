"""Preparation of images for encoders: opening, conversion to RGB, resizing with Pillow, normalisation and patches.

Every step is bit-identical to transformers' processors that use Pillow.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from localllm.errors import UsageError, path_text, warn
from localllm.models.encoders import isolation
from localllm.regular_file import open_regular, reading_error

if TYPE_CHECKING:
    from PIL.Image import Image

#: Accepted formats. Pillow's other formats are not in practical use and are rejected.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
#: Maximum number of pixels of an image (Pillow's limit). Larger images need gigabytes of memory after decoding.
MAX_PIXELS = 89_478_485

#: A path, the bytes of a file, a Pillow image, or an array.
Source = Any
#: Formats of animations.  Further images of a JPEG file are previews, and of a TIFF file pages.
_ANIMATED = ("PNG", "WEBP", "GIF", "AVIF")
#: Tags of TIFF: bits of a value, and their type.
_BITS_PER_SAMPLE, _SAMPLE_FORMAT, _SIGNED = 258, 339, 2


def open_image(source: Source, label: str = "the image") -> Image:
    """Return an image in RGB, turned as its EXIF data specifies.

    An animation becomes its first frame, and a TIFF file its first page.  Transparency is dropped, not blended, and
    colour profiles are ignored, as in transformers' ``load_image``.  Files are decoded in a worker process
    (`isolation`).

    Args:
        source: a path, the bytes of a file, a Pillow image, or an array uint8 [height, width] or [height, width, 3].
        label: the name of the image in errors, if it has no path.

    Raises:
        UsageError: the source is none of these, damaged, too large, or in another format than `FORMATS`.
    """
    from PIL import Image

    if isinstance(source, str | os.PathLike | bytes | bytearray):
        label = f"the image {path_text(source)}" if isinstance(source, str | os.PathLike) else label
        info, data = isolation.decode(decode_image, source, label)
        if info["is_animation"]:
            warn(f"{label} is an animation: the model sees its first frame")
        return Image.frombuffer("RGB", info["size"], data, "raw", "RGB", 0, 1)
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim not in (2, 3) or source.shape[2:] not in ((), (3,)):
            raise UsageError("an image as an array is uint8 [height, width] or [height, width, 3]")
        source = Image.fromarray(source)
    if not isinstance(source, Image.Image):
        raise UsageError(f"an image is a path, bytes, a Pillow image or an array, not {type(source).__name__}")
    return _upright(source, label)


def decode_image(source: str | bytes | bytearray, label: str) -> isolation.Decoded:
    """Return the pixels of a file, uint8 [height, width, 3]; see `open_image`."""
    from PIL import Image, UnidentifiedImageError

    try:
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged EXIF data and palettes with transparency
            file = stack.enter_context(open_regular(source)) if isinstance(source, str) else io.BytesIO(source)
            image = Image.open(file, formats=FORMATS)
            is_animation = image.format in _ANIMATED and getattr(image, "is_animated", False)
            upright = _upright(image, label)
    except UnidentifiedImageError:
        raise UsageError(f"{label} is not one that can be read: give a file of {', '.join(FORMATS)}") from None
    except UsageError:
        raise
    except Exception as error:  # any error of Pillow's decoders: IndexError for a palette, struct.error, …
        if isinstance(error, OSError) and error.errno is not None:
            raise reading_error(label, error) from None
        raise _damaged(label, error) from error
    return isolation.Decoded({"size": upright.size, "is_animation": is_animation}, upright.tobytes())


def _damaged(label: str, error: Exception) -> UsageError:
    return UsageError(f"{label} cannot be read ({error!s:.100}): the file is damaged, or too large")


def _upright(image: Image, label: str) -> Image:
    """Return an image in RGB, turned as its EXIF data specifies."""
    from PIL import ImageOps

    if prod(image.size) > MAX_PIXELS:
        raise UsageError(f"{label} has {prod(image.size):,} pixels; the limit is {MAX_PIXELS:,}: shrink it")
    if not prod(image.size):
        raise UsageError(f"{label} has no pixels")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tags = getattr(image, "tag_v2", {})
            n_bits, sample_format = (tags.get(tag, (0,)) for tag in (_BITS_PER_SAMPLE, _SAMPLE_FORMAT))
            n_bits = max(n_bits) - (sample_format[0] == _SIGNED)
            return _in_rgb(ImageOps.exif_transpose(image), n_bits)
    except Exception as error:
        raise _damaged(label, error) from error


def _in_rgb(image: Image, n_bits: int) -> Image:
    """Return an image in RGB.  Values of more than 8 bits are scaled, because Pillow would clip them.

    ``n_bits``: bits of an integer without its sign, or 0 if unknown.
    """
    from PIL import Image, ImageCms

    if image.mode in ("La", "RGBa"):  # premultiplied by transparency
        return image.convert(image.mode.upper()).convert("RGB")
    if image.mode == "LAB":
        profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return cast("Image.Image", ImageCms.profileToProfile(image, *profiles, outputMode="RGB"))
    if image.mode == "F":  # from 0 to 1, to 255, or to a larger maximum
        floats = np.nan_to_num(np.asarray(image, np.float64), posinf=0.0, neginf=0.0)
        largest = floats.max()
        scale = 255 if largest <= 1 else 1 if largest <= 255 else 255 / largest
        return Image.fromarray((floats * scale + 0.5).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        if image.mode == "I" and n_bits == 32:
            values = values.view(np.uint32)
        elif image.mode == "I" and not n_bits:  # an image of Pillow's: 8 bits, 16 as in PNG files, or more
            n_bits = next(n for n in (8, 16, 31) if n == 31 or values.max() < 1 << n)
        values = values.clip(0) >> max(0, (n_bits or 16) - 8)
        return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def resized(image: Image, height: int, width: int, method: str) -> Image:
    """Resize an image with one of Pillow's methods: "bilinear", "bicubic" or "lanczos"."""
    from PIL.Image import Resampling

    return image.resize((width, height), Resampling[method.upper()])


def normalised(pixels: NDArray[np.uint8], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Return (pixel / 255 - mean) / std of each colour, [height, width, 3]."""
    shares = (np.arange(256) * (1 / 255)).astype(np.float32)
    table: NDArray[Any] = np.subtract.outer(shares, np.array(mean, np.float32)) / np.array(
        std, np.float32
    )  # [256, 3]
    values: NDArray[np.float32] = table[pixels, np.arange(3)]
    return values


def patches(pixels: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Cut pixels [height, width, 3] into squares, row by row. Return [n, 3 * size * size], colour by colour."""
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    cut = pixels[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    return cut.transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1)


def block_order(rows: int, columns: int, size: int) -> NDArray[np.int64]:
    """Return the numbers of patches ordered by square blocks of ``size`` times ``size`` patches."""
    numbers = np.arange(rows * columns).reshape(rows // size, size, columns // size, size)
    return numbers.transpose(0, 2, 1, 3).reshape(-1)


def bilinear(table: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """Interpolate a square table of positions [n * n, d] to another grid with the same corners.

    Source: Qwen3-VL's ``fast_pos_embed_interpolate``.
    """
    n = int(len(table) ** 0.5)
    square = table.reshape(n, n, -1)
    for axis, size in enumerate((rows, columns)):
        places = np.linspace(0, n - 1, size, dtype=np.float32)
        low = places.astype(np.int64)
        high, share = np.minimum(low + 1, n - 1), places - low.astype(np.float32)
        share = share.reshape(-1, 1, 1) if axis == 0 else share.reshape(1, -1, 1)
        square = np.take(square, low, axis) * (1 - share) + np.take(square, high, axis) * share
    return square.reshape(rows * columns, -1)


def smart_resize(height: int, width: int, factor: int, low: int, high: int) -> tuple[int, int]:
    """Return height and width as multiples of ``factor``, with ``low`` to ``high`` pixels and a similar aspect ratio.

    Source: Qwen2-VL's ``smart_resize``.
    """
    if max(height, width) > 200 * min(height, width):
        raise UsageError(
            f"an image of {width} × {height} pixels is too long for this model, which takes sides up to 200 : 1: "
            "crop it"
        )
    tall, wide = (round(side / factor) * factor for side in (height, width))
    if tall * wide < low:
        beta = (low / (height * width)) ** 0.5
        tall, wide = (int(-(-side * beta // factor)) * factor for side in (height, width))
    if tall * wide > high:
        beta, most = (height * width / high) ** 0.5, high // factor**2 * factor
        tall, wide = (max(factor, min(int(side / beta // factor) * factor, most)) for side in (height, width))
    return tall, wide


def interpolated(
    table: NDArray[np.float32],
    rows: int,
    columns: int,
    *,
    has_antialiasing: bool = True,
    repeats_edges: bool = True,
    excess: float = 0.0,
) -> NDArray[np.float32]:
    """Interpolate a square table of positions [n * n, d] to another grid, with antialiasing for smaller grids.

    Outside the table are its edges, or zeros unless ``repeats_edges``. The sides of the grid count as longer by
    ``excess``.

    Source: SigLIP 2's ``resize_positional_embeddings``, which uses torch's bilinear interpolation.
    """
    n = int(len(table) ** 0.5)
    square = table.reshape(n, n, -1)
    for axis, size in enumerate((rows, columns)):
        scale = n / (size + excess)
        centre = (np.arange(size, dtype=np.float32) + 0.5) * scale - 0.5
        away = np.abs(np.arange(n, dtype=np.float32) - centre[:, None])
        weights = np.maximum(1 - away / (max(scale, 1) if has_antialiasing else 1), 0).astype(np.float32)
        if repeats_edges:
            weights /= weights.sum(-1, keepdims=True)
        square = np.moveaxis(np.tensordot(weights, square, (1, axis)), 0, axis)
    return square.reshape(rows * columns, -1)


def bicubic(
    table: NDArray[np.float32], rows: int, columns: int, *, has_antialiasing: bool = False
) -> NDArray[np.float32]:
    """Interpolate a square table of positions [n * n, d] to another grid with cubics.

    With ``has_antialiasing``, a smaller grid is a weighted mean. Without, edges are repeated.

    Sources: GLM-4V's ``Glm4vVisionEmbeddings``, which uses torch's ``grid_sample``; torch's ``interpolate`` with
    antialiasing.
    """
    n, a = int(len(table) ** 0.5), -0.5 if has_antialiasing else -0.75
    square = table.reshape(n, n, -1)

    def cubic(away: NDArray[np.float64]) -> NDArray[np.float64]:
        near = ((a + 2) * away - (a + 3)) * away**2 + 1
        far = ((away - 5) * away + 8) * a * away - 4 * a
        return np.where(away <= 1, near, np.where(away < 2, far, 0))

    for axis, size in enumerate((rows, columns)):
        places = (np.arange(size) + 0.5) * n / size - 0.5
        weights = np.zeros((size, n), np.float32)
        if has_antialiasing:
            weights += cubic(np.abs(np.arange(n) - places[:, None]) / max(n / size, 1))
            weights /= weights.sum(-1, keepdims=True)
        for tap in () if has_antialiasing else range(-1, 3):
            at = np.floor(places) + tap
            np.add.at(weights, (np.arange(size), at.clip(0, n - 1).astype(int)), cubic(np.abs(places - at)))
        square = np.moveaxis(np.tensordot(weights, square, (1, axis)), 0, axis)
    return square.reshape(rows * columns, -1)


def nearest_grid(width: int, height: int, least: int, most: int, side: int) -> tuple[int, int]:
    """Return columns and rows of square tiles in the nearest aspect ratio.

    Of several such grids, the largest one that the image fills at least by half is used.

    Source: InternVL's ``find_closest_aspect_ratio``.
    """
    best, nearest, ratio = (1, 1), float("inf"), width / height
    grids = [(a, b) for a in range(1, most + 1) for b in range(1, most + 1) if least <= a * b <= most]
    for grid in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        away = abs(ratio - grid[0] / grid[1])
        if away < nearest or (away == nearest and width * height > 0.5 * side**2 * grid[0] * grid[1]):
            best, nearest = grid, away
    return best


def tiles(image: Image, columns: int, rows: int, side: int, method: str) -> list[NDArray[np.uint8]]:
    """Resize an image to a grid of square tiles, and return the tiles row by row."""
    return cut(np.asarray(resized(image, rows * side, columns * side, method)), side)


def cut(pixels: NDArray[np.uint8], height: int, width: int | None = None) -> list[NDArray[np.uint8]]:
    """Cut pixels into tiles of a size, by default squares, row by row."""
    width = height if width is None else width
    starts = [(y, x) for y in range(0, pixels.shape[0], height) for x in range(0, pixels.shape[1], width)]
    return [pixels[y : y + height, x : x + width] for y, x in starts]
