"""Image encoders compared with transformers: tiny converted random models produce its pixels and its features."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.convert import MmprojCheckpoint
from localllm.engine.media import Embeddings
from localllm.errors import NotEnoughMemoryError
from localllm.gguf import GGUFFile
from localllm.kernels.backend import weights_of
from localllm.loading.devices import open_devices
from localllm.loading.media_encoder import MediaEncoder, Prepared, _Encoder
from localllm.models.encoders import images as image_functions
from localllm.models.encoders.images import block_order
from localllm.models.encoders.registry import PROJECTORS, read_encoder
from localllm.quant.formats import dequantize
from localllm.quant.types import GGMLType
from localllm.quantize import plan, run
from tests.helpers.command_line import run_main
from tests.models.encoders.families import (
    FAMILIES,
    make,
    make_processor,
    picture,
    processor_of,
    released,
    torch,
    transformers,
)

#: Families whose processors make torchvision scale and normalise in one step.
SCALED_AND_NORMALISED = ("deepseekocr", "kimik25", "kimivl", "lfm2", "minimax_m3", "muse-glimmer", "step3vl")

#: Projectors that `test_llava_projectors` compares.
WITHOUT_CHECKPOINTS = ("ldp", "ldpv2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path, Path]]:
    """Yield the model of each family, its folder and its encoder file."""

    @functools.cache
    def cached(name: str) -> tuple[Any, Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        return make(name, folder), folder, folder / "mmproj.gguf"

    return cached


def features(model: Any, name: str, image: Any, processor: Any = None) -> tuple[Any, NDArray[np.float32]]:
    """Return the processor's result and the model's rows [n, n_embeddings, width] for it."""
    family = FAMILIES[name]
    seen = (processor or processor_of(name))(images=[image], return_tensors="pt")
    inner = getattr(model, "model", model)
    with torch.no_grad():
        out = inner.get_image_features(**{key: seen[key] for key in family.arguments if key in seen})
        if name == "muse-glimmer":  # before the norm, which is part of the text model's file
            out.pooler_output = inner.vision_projection(inner.vision_adapter(out.last_hidden_state))
        if name == "gemma3nv":
            out.pooler_output = [*out.pooler_output, model.end(inner.embed_vision)]
        if name == "granite4_vision":
            packed = [torch.cat([*rows]) for _, rows in sorted(out.deepstack_features, key=lambda each: each[0])]
            return seen, torch.stack(packed, dim=1).detach().numpy()
        if name == "llama4":
            out.pooler_output = model.multi_modal_projector(out.last_hidden_state)
    joined = [
        torch.cat([*each]) if isinstance(each, list | tuple) else each.reshape(-1, each.shape[-1])
        for each in (out.pooler_output, *(getattr(out, "deepstack_features", None) or []))
    ]
    return seen, torch.stack(joined, dim=1).detach().numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_and_features_are_those_of_transformers(made: Any, name: str) -> None:
    model, _, file = made(name)
    images = [picture(*size) for size in FAMILIES[name].sizes]
    expected = [features(model, name, image) for image in images]
    for device, bound in (("reference", 1e-3), ("cpu", 5e-3)):
        encoder, (host, *_) = MediaEncoder.open(file), open_devices(device, threads=2 if device == "cpu" else None)
        encoder.backend = host.backend
        assert encoder.family == name.partition(" ")[0]
        prepared = [encoder.prepare(image) for image in images]
        for each, (seen, _) in zip(prepared, expected, strict=True):
            if name == "gemma3nv":  # which has no patches
                pixels = np.moveaxis(encoder.model.normalised(each.frames[0]), -1, 0)
                np.testing.assert_array_equal(pixels, seen["pixel_values"][0].numpy())
                continue
            frames = [patches_of(encoder, frame) for frame in each.frames]
            theirs = seen["pixel_values"].numpy()
            if name.startswith(("gemma4", "lfm2", "phi4", "youtuvl")):
                theirs = by_colour(encoder, each, theirs)
            elif name.startswith(("minicpm", "resampler")):
                theirs = in_slices(encoder, each.frames, theirs)
            elif name.startswith(("deepseekocr", "step3vl")):
                views = [*seen.get("pixel_values_local", ()), *theirs]
                theirs = np.concatenate(
                    [
                        image_functions.patches(np.moveaxis(np.asarray(view), 0, -1), encoder.model.patch_size)
                        for view in views
                    ]
                )
            elif name == "muse-glimmer":  # both halves of a patch are the same image
                theirs = np.split(theirs, 2, axis=1)[0][in_blocks(encoder, each.frames[0])]
            elif name in ("hunyuanvl", "hunyuanvl4", "kimik25", "kimivl", "paddleocr"):
                theirs = theirs.reshape(len(theirs), -1)[in_blocks(encoder, each.frames[0])]
            check_pixels(encoder, frames, theirs)
        for each, rows, (_, theirs) in zip(prepared, encoded(encoder, prepared), expected, strict=True):
            assert rows.shape == theirs.shape == (each.n_tokens, 1 + len(encoder.model.further), encoder.width)
            error = np.abs(rows - theirs).max() / np.abs(theirs).max()
            assert error < bound, (device, error)
        encoder.close()
        host.close()


def encoded(encoder: MediaEncoder, prepared: list[Prepared]) -> list[Embeddings]:
    """Return the images' embeddings, computed in steps like in the engine."""
    work = encoder.encode([encoder.as_media(each) for each in prepared])
    while True:
        try:
            next(work)
        except StopIteration as done:
            found: list[Embeddings] = done.value
            return found


def patches_of(encoder: MediaEncoder, frame: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the graph's input patches, grouped by token, in token order."""
    rows = encoder.model.rows(frame)
    if encoder.family == "mimovl":  # the outputs are in the order of the second stage
        return rows.inputs
    return rows.inputs[(rows.outputs[:, None] + np.arange(encoder.model.n_joined)).ravel()]


def check_pixels(encoder: MediaEncoder, frames: list[NDArray[np.float32]], theirs: NDArray[np.float32]) -> None:
    """Check that the graph's input patches have transformers' pixels."""
    model = encoder.model
    n = 3 * model.patch_size**2
    own = np.concatenate([rows[:, :n] for rows in frames])
    if theirs.shape[1:] == (2 * n,):  # patches of two equal images each
        theirs = theirs.reshape(len(theirs), 3, 2, -1)[:, :, 0].reshape(len(theirs), n)
    elif theirs.ndim > 2:
        theirs = theirs.reshape(-1, *theirs.shape[-3:])
        size, merge = model.patch_size, model.merge
        rows, columns = (side // size for side in theirs.shape[-2:])
        cut = theirs.reshape(len(theirs), 3, rows // merge, merge, size, columns // merge, merge, size)
        theirs = cut.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, n)
    if encoder.family in SCALED_AND_NORMALISED:
        np.testing.assert_allclose(own, theirs, rtol=0, atol=5e-7)
    else:
        np.testing.assert_array_equal(own, theirs)


def in_blocks(encoder: MediaEncoder, frame: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the patch indices in token order."""
    model = encoder.model
    return block_order(frame.shape[0] // model.patch_size, frame.shape[1] // model.patch_size, model.merge)


def in_slices(
    encoder: MediaEncoder, frames: Sequence[NDArray[np.uint8]], theirs: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Reorder [1, 3, size, patches of all frames times size] to token order, within windows."""
    size = encoder.model.patch_size
    patches = theirs[0].reshape(3, size, -1, size).transpose(2, 0, 1, 3).reshape(-1, 3 * size * size)
    counts = [frame.shape[0] * frame.shape[1] // size**2 for frame in frames]
    cut = np.split(patches, np.cumsum(counts)[:-1])
    found = np.concatenate([rows[in_blocks(encoder, frame)] for rows, frame in zip(cut, frames, strict=True)])
    if encoder.model.merge == 4:
        found = found.reshape(-1, 2, 2, 2, 2, found.shape[1]).swapaxes(2, 3).reshape(found.shape)
    return found


def by_colour(encoder: MediaEncoder, prepared: Prepared, theirs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reorder patches to this project's layout without empty patches: grouped by token, colours separate."""
    found = []
    for frame, patches in zip(prepared.frames, theirs, strict=True):
        order = in_blocks(encoder, frame)
        found.append(patches[order].reshape(len(order), -1, 3).swapaxes(1, 2).reshape(len(order), -1))
    own = np.concatenate(found)
    return 2 * (own - np.float32(0.5)) if encoder.family == "gemma4v" else own


def test_many_small_images_after_a_larger_one(made: Any) -> None:
    """Each image needs one page of the cache; a larger image needed few pages for the same number of patches."""
    encoder, (host, *_) = MediaEncoder.open(made("pixtral")[2]), open_devices("cpu", threads=2)
    encoder.backend = host.backend
    large, small = (encoder.prepare(picture(side, side)) for side in (112, 28))
    (alone,) = encoded(encoder, [small])
    encoded(encoder, [large])
    for rows in encoded(encoder, [small] * 12):
        np.testing.assert_array_equal(rows, alone)
    encoder.close()
    host.close()


def test_an_image_too_large_for_memory_is_refused(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, (host, *_) = MediaEncoder.open(made("pixtral")[2]), open_devices("reference")
    encoder.backend = host.backend
    monkeypatch.setattr("localllm.loading.media_encoder.available_memory", lambda: 1000)
    with pytest.raises(NotEnoughMemoryError, match="send a smaller image"):
        encoded(encoder, [encoder.prepare(picture(112, 112))])
    encoder.close()
    host.close()


def test_a_stream_continues_while_weights_are_packed(made: Any) -> None:
    """Weights are packed one at a time, and packing resumes after a request was cancelled in between."""
    encoder, (host, *_) = MediaEncoder.open(made("pixtral")[2]), open_devices("cpu", threads=2)
    encoder.backend = host.backend
    image = encoder.prepare(picture(75, 130))
    for n_pieces in (3, len(weights_of(encoder.model.graph))):
        work = encoder.encode([encoder.as_media(image)])
        for _ in range(n_pieces):
            next(work)
            assert encoder.encoders["image"].stages[0].step is None
        work.close()
    assert np.isfinite(encoded(encoder, [image])[0]).all()
    encoder.close()
    host.close()


def test_the_command_line_writes_the_same_file(
    made: Any, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    _, folder, file = made("qwen3vl_merger")
    written = tmp_path / "mmproj.gguf"
    outcome = run_main(capfdbinary, "convert", folder, written, "--mmproj", "-q")
    assert (outcome.code, outcome.err) == (0, "")
    with GGUFFile.open(file) as ours, GGUFFile.open(written) as theirs:
        assert ours.fingerprint() == theirs.fingerprint()
        assert len(ours.tensors) == len(theirs.tensors) > 30


def test_a_token_embedding_has_llama_cpps_name_in_the_encoder_file(made: Any, tmp_path: Path) -> None:
    model, folder, file = made("pixtral")
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy/tokenizer.json").write_text('{"added_tokens": [{"id": 7, "content": "[IMG_BREAK]"}]}', "utf-8")
    list(run(plan(MmprojCheckpoint(tmp_path / "copy"), tmp_path / "mmproj.gguf", None)))
    row = model.get_input_embeddings().weight[7].detach().float().numpy()
    with GGUFFile.open(tmp_path / "mmproj.gguf") as theirs, GGUFFile.open(file) as ours:
        np.testing.assert_array_equal(dequantize(theirs.tensors["v.token_embd.img_break"].data, GGMLType.F32), row)
        assert theirs.tensors.keys() - ours.tensors.keys() == {"v.token_embd.img_break"}
        read_encoder(theirs)


@pytest.mark.parametrize(
    ("name", "renamed", "keys"),
    [
        # LLaVA files of 2023 swap an MLP's matrices, omit the feature layer, and state CLIP's width.
        ("mlp", {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}, {"clip.vision.projection_dim": 768}),
        ("llama4", {"ln2": "attn_post_norm"}, {}),
        ("qwen2vl_merger", {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}, {"clip.vision.feed_forward_length": 0}),
        ("qwen2vl_merger", {}, {"clip.vision.feed_forward_length": 48}),
    ],
)
def test_other_names_of_llama_cpp_s_converters(
    made: Any, name: str, renamed: dict[str, str], keys: dict[str, Any]
) -> None:
    ours, (host, *_) = MediaEncoder.open(made(name)[2]), open_devices("cpu", threads=2)
    tensors = {
        re.sub("|".join(renamed) or "$^", lambda found: renamed[found[0]], each): tensor
        for each, tensor in ours._file.tensors.items()
    }
    left = {key: value for key, value in ours._file.metadata.items() if not key.endswith("feature_layer")}
    file: Any = SimpleNamespace(metadata=left | keys, tensors=tensors)
    theirs = MediaEncoder(ours.path, {"image": _Encoder(name, read_encoder(file))}, ours._file)
    ours.backend = theirs.backend = host.backend
    expected, found = (encoded(each, [each.prepare(picture(75, 130))])[0] for each in (ours, theirs))
    np.testing.assert_array_equal(found, expected)
    ours.close()
    host.close()


def test_a_published_checkpoint_of_deepseek_ocr_has_the_same_file(tmp_path: Path) -> None:
    """Its config.json lacks many sizes, which are constants of DeepSeek's code."""
    family = FAMILIES["deepseekocr"].settings
    sam, clip = (family["vision_config"][name] for name in ("sam_config", "encoder_config"))
    sam, clip = sam | {"image_size": 1024, "window_size": 14}, clip | {"intermediate_size": 128}
    vision = {"sam_config": sam, "encoder_config": clip}
    config = transformers.UnlimitedOcrConfig(text_config=family["text_config"], vision_config=vision)
    transformers.UnlimitedOcrForConditionalGeneration(config).save_pretrained(tmp_path)
    make_processor("deepseekocr", {}).save_pretrained(tmp_path)
    expected = MmprojCheckpoint(tmp_path)
    released.as_deepseek_ocr(tmp_path)
    found = MmprojCheckpoint(tmp_path)
    assert str({**found.metadata}) == str({**expected.metadata, "clip.vision.preproc_max_tiles": 9})
    assert {name: each.shape for name, each in found.tensors.items()} == {
        name: each.shape for name, each in expected.tensors.items()
    }


@pytest.mark.parametrize("name", ["qwen2vl_merger", "qwen2.5vl_merger"])
@pytest.mark.parametrize("size", [(3000, 4000), (3500, 4200), (9000, 500), (30, 40)])
def test_qwen_2_takes_images_as_large_as_its_released_processor(made: Any, name: str, size: tuple[int, int]) -> None:
    """llama.cpp's converter writes no pixel limits.  preprocessor_config.json has 3136 and 12845056."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    encoder = MediaEncoder.open(made(name)[2])
    metadata = {key: value for key, value in encoder._file.metadata.items() if not key.endswith("_pixels")}
    file: Any = SimpleNamespace(metadata=metadata, tensors=encoder._file.tensors)
    model: Any = read_encoder(file)
    factor = model.patch_size * model.merge
    scaled = [side * factor // 28 for side in size]  # the tiny model's tokens may have other sizes
    height, width = smart_resize(*scaled, factor=factor, min_pixels=3136, max_pixels=12845056)
    image = SimpleNamespace(height=scaled[0], width=scaled[1])
    assert model.grid(image, None) == (height // factor, width // factor)
    encoder.close()


@pytest.mark.parametrize(
    "name",
    [
        "deepseekocr",
        "gemma4v",
        "glm4v",
        "hunyuanvl",
        "hunyuanvl4",
        "kimik25",
        "lfm2",
        "llama4",
        "mimovl",
        "minicpmv4_6",
        "mlp 1.6",
        "muse-glimmer",
        "phi4",
        "pixtral",
        "qwen3vl_merger",
        "resampler",
        "youtuvl",
    ],
)
def test_a_pixel_budget_is_respected_for_any_shape(made: Any, name: str) -> None:
    encoder = MediaEncoder.open(made(name)[2])
    for shape in ((1, 150), (150, 1), (1, 1), (3, 7), (300, 200)):
        for max_tokens in (
            (1, 5, 100)
            if name not in ("deepseekocr", "hunyuanvl", "hunyuanvl4", "llama4", "mlp 1.6", "resampler")
            else (17, 40, 100)
        ):  # whose minimum is a tile
            assert encoder.prepare(np.zeros((*shape, 3), np.uint8), max_tokens).n_tokens <= max_tokens
    encoder.close()


def test_all_families_are_compared() -> None:
    pictures = {name for name, projector in PROJECTORS.items() if projector.kind == "image"}
    assert {name.partition(" ")[0] for name in FAMILIES} == pictures - {*WITHOUT_CHECKPOINTS}
