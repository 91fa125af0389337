"""Images and audio in unusual formats: pixels and samples match other programs' results."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pytest
from PIL import Image

from localllm.errors import UsageError
from localllm.models.encoders.images import open_image
from localllm.models.encoders.sounds import RATE, open_audio
from tests.helpers.images import file_of

#: Black to white.
RAMP = np.tile(np.linspace(0, 255, 16).astype(np.uint8), (4, 1))
RGB = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)


def pixels(data: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return np.asarray(open_image(data)).astype(int)


def grey(image: Image.Image, kind: str, **options: Any) -> Any:
    seen = pixels(file_of(image, kind, **options))
    assert (seen[..., 0] == seen[..., 1]).all()
    assert (seen[..., 0] == seen[..., 2]).all()
    return seen[..., 0]


WIDE = RAMP.astype(np.uint16) * 257


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_of_grey_are_scaled(kind: str) -> None:
    np.testing.assert_array_equal(grey(Image.fromarray(WIDE), kind), RAMP)
    np.testing.assert_array_equal(pixels(Image.fromarray(WIDE))[..., 0], RAMP)
    dark = Image.fromarray((WIDE // 16).astype(np.uint16))  # 12 bits; the file does not state it
    np.testing.assert_array_equal(grey(dark, kind), RAMP // 16)


def test_integers_of_other_sizes_are_scaled() -> None:
    big_endian = Image.frombytes("I;16B", (16, 4), WIDE.astype(">u2").tobytes())
    np.testing.assert_array_equal(pixels(big_endian)[..., 0], RAMP)
    np.testing.assert_array_equal(grey(big_endian, "TIFF"), RAMP)
    half = Image.fromarray((RAMP.astype(np.int32) << 23) + (1 << 22))  # signed: up to 2^31
    np.testing.assert_array_equal(grey(half, "TIFF"), RAMP)
    np.testing.assert_array_equal(pixels(Image.fromarray(RAMP.astype(np.int32)))[..., 0], RAMP)
    np.testing.assert_array_equal(pixels(Image.fromarray(WIDE.astype(np.int32)))[..., 0], RAMP)


@pytest.mark.parametrize("scale", [1 / 255, 1, 257, 1e-9])
def test_floats_are_scaled(scale: float) -> None:
    values = RAMP.astype(np.float32) * np.float32(scale)
    expected = RAMP * 0 if scale < 1e-6 else RAMP
    assert np.abs(grey(Image.fromarray(values), "TIFF") - expected).max() <= 1


def test_floats_that_are_no_numbers_are_black() -> None:
    values = (RAMP / 255).astype(np.float32)
    values[0, :3] = np.nan, np.inf, -np.inf
    seen = grey(Image.fromarray(values), "TIFF")
    assert not seen[0, :3].any()
    np.testing.assert_array_equal(seen[1:], RAMP[1:])


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa", "RGBX", "P", "1", "L", "LAB", "HSV", "YCbCr"])
def test_modes_of_pillow_are_converted(mode: str) -> None:
    via = {"La": "LA", "RGBa": "RGBA", "PA": "P", "LAB": "RGB"}.get(mode)
    image = Image.fromarray(RGB)
    if mode == "LAB":
        from PIL import ImageCms

        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        image = ImageCms.profileToProfile(image, *profiles, outputMode="LAB")
    elif via is not None:
        image = image.convert(via)
    image = image.convert(mode) if image.mode != mode else image
    expected = Image.fromarray(RGB).convert({"LAB": "RGB", "PA": "P", "La": "L", "RGBa": "RGB"}.get(mode, mode))
    near = {"LAB": 40, "P": 0}.get(mode, 3)
    assert np.abs(pixels(image) - np.asarray(expected.convert("RGB")).astype(int)).max() <= near


def test_transparent_palettes_keep_their_colours() -> None:
    image = Image.fromarray(RGB).quantize(16)
    expected = np.asarray(image.convert("RGB"))
    for kind, transparency in (("PNG", bytes(range(0, 256, 16))), ("GIF", 3)):
        np.testing.assert_array_equal(pixels(file_of(image, kind, transparency=transparency)), expected)


def test_cmyk_jpeg_files_are_not_inverted() -> None:
    image = Image.new("RGB", (16, 16), (200, 60, 20)).convert("CMYK")
    for kind in ("JPEG", "TIFF"):
        assert np.abs(pixels(file_of(image, kind)) - [200, 60, 20]).max() < 12


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(kind: str, orientation: int) -> None:
    if kind == "AVIF":
        pytest.importorskip("PIL._avif")
    from PIL import ImageOps

    image = Image.fromarray(np.kron(RGB[:2, :3], np.ones((16, 16, 1), np.uint8)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(image, kind, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")).astype(int)
    seen = pixels(data)
    assert seen.shape == ((32, 48, 3) if orientation < 5 else (48, 32, 3))
    np.testing.assert_array_equal(seen, expected)


def test_upright_16_bits() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    np.testing.assert_array_equal(grey(Image.fromarray(WIDE), "PNG", exif=exif), RAMP.T)


def test_further_images_of_a_file_are_no_animation() -> None:
    """The preview of a phone's photo (MPO), TIFF pages, and single-frame files of formats with several frames."""

    def file(kind: str, *more: Image.Image) -> bytes:
        return file_of(Image.fromarray(RGB), kind, save_all=True, append_images=more)

    assert pixels(file("MPO", Image.new("RGB", (4, 4)))).shape == (8, 8, 3)
    np.testing.assert_array_equal(pixels(file("TIFF", Image.new("RGB", (4, 4)))), RGB)
    for kind in ("GIF", "PNG", "WEBP"):
        assert pixels(file(kind)).shape == (8, 8, 3)
    with pytest.warns(UserWarning, match="is an animation: the model sees its first frame"):
        open_image(file("PNG", Image.new("RGB", (8, 8))))


def test_colour_profiles_are_ignored_as_in_transformers() -> None:
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    np.testing.assert_array_equal(pixels(file_of(Image.fromarray(RGB), "PNG", icc_profile=profile)), RGB)


def test_files_of_unknown_formats_name_the_known_ones() -> None:
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
    with pytest.raises(UsageError, match="give a file of PNG, JPEG, WEBP"):
        open_image(heic)


# -- Sounds ----------------------------------------------------------------------------------------------------------

TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE // 4) / RATE)).astype(np.float32)


@pytest.mark.parametrize("kind", ["WAV", "WAVEX", "RF64"])
@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"])
def test_audio_of_odd_sample_formats(kind: str, subtype: str) -> None:
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, TONE, RATE, format=kind, subtype=subtype)
    bound = {"PCM_U8": 1e-2, "ULAW": 3e-2, "ALAW": 3e-2}.get(subtype, 1e-4)
    assert np.abs(open_audio(file.getvalue()) - TONE).max() < bound
