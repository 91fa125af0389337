"""Files of Gemma 3n's image encoder: the released sizes are accepted, and damaged or hostile ones are refused."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.errors import ModelError
from localllm.models.encoders.registry import read_encoder
from localllm.quant.types import GGMLType


@dataclass(frozen=True)
class Shape:
    """A tensor without data."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType = GGMLType.F32


Stage = tuple[tuple[Any, ...], ...]
#: Kind, output channels and expansion of the blocks of each stage; then the sides of two convolutions per channel.
#: For attention: the number of heads, the width of keys, and whether keys and values have half the sides.
SMALL: tuple[Stage, ...] = (
    (("edge", 8, 4),),
    (("inverted", 8, 2, 3, 5),),
    (("inverted", 8, 2, 0, 3), ("attention", 8, 2, 4, True)),
    (("inverted", 8, 2, 5, 5),),
)
#: Sizes of timm's mobilenetv5_300m.
RELEASED: tuple[Stage, ...] = (
    (("edge", 128, 4),) * 3,
    (("inverted", 256, 6, 3, 5), ("inverted", 256, 4, 5, 0), ("inverted", 256, 4, 3, 0)),
    (
        ("inverted", 640, 6, 5, 5),
        *(("inverted", 640, 4, 5, 0),) * 7,
        ("inverted", 640, 1, 0, 0),
        *(("attention", 640, 12, 64, True), ("inverted", 640, 2, 0, 0)) * 14,
    ),
    (("inverted", 1280, 6, 5, 5), *(("attention", 1280, 16, 96, False), ("inverted", 1280, 2, 0, 0)) * 19),
)


def shapes_of(stages: tuple[Stage, ...], stem: int, width: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"v.conv_stem.conv.weight": (stem, 3, 3, 3), "v.conv_stem.bn.weight": (stem,)}
    found["v.conv_stem.conv.bias"] = (1, stem, 1, 1)
    n, widths = stem, []
    for i, stage in enumerate(stages):
        for j, (kind, n_out, *sizes) in enumerate(stage):
            block: dict[str, tuple[int, ...]] = {}
            if kind == "edge":
                mid = n * sizes[0]
                block |= {"conv_exp": (mid, n, 3, 3), "bn1": (mid,), "conv_pwl": (n_out, mid, 1, 1), "bn2": (n_out,)}
            elif kind == "inverted":
                mid, start, side = n * sizes[0], *sizes[1:]
                block |= {"pw_exp.conv": (mid, n, 1, 1), "pw_exp.bn": (mid,)}
                block |= {"pw_proj.conv": (n_out, mid, 1, 1), "pw_proj.bn": (n_out,)}
                block |= {"dw_start.conv": (n, 1, start, start), "dw_start.bn": (n,)} if start else {}
                block |= {"dw_mid.conv": (mid, 1, side, side), "dw_mid.bn": (mid,)} if side else {}
            else:
                n_heads, dim, is_halved = sizes
                block |= {"norm": (n,), "attn.query.proj": (n_heads * dim, n, 1, 1)}
                block |= {"attn.output.proj": (n, n_heads * dim, 1, 1)}
                for part in ("attn.key", "attn.value"):
                    block[f"{part}.proj"] = (dim, n, 1, 1)
                    block |= {f"{part}.down_conv": (n, 1, 3, 3), f"{part}.norm": (n,)} if is_halved else {}
            found |= {f"v.blk.{i}.{j}.{name}.weight": shape for name, shape in block.items()}
            if kind != "edge":
                found[f"v.blk.{i}.{j}.layer_scale.gamma"] = (1, n_out, 1, 1)
            n = n_out
        widths.append(n)
    fused = sum(widths[2:])
    found |= {"v.msfa.ffn.pw_exp.conv.weight": (2 * fused, fused, 1, 1), "v.msfa.ffn.pw_exp.bn.weight": (2 * fused,)}
    found |= {"v.msfa.ffn.pw_proj.conv.weight": (width, 2 * fused, 1, 1), "v.msfa.ffn.pw_proj.bn.weight": (width,)}
    found |= {
        "v.msfa.norm.weight": (width,),
        "mm.embedding.weight": (128, width),
        "mm.hard_emb_norm.weight": (width,),
    }
    return found | {"mm.soft_emb_norm.weight": (width,), "mm.input_projection.weight": (64, width)}


def read(shapes: dict[str, tuple[int, ...]], width: int, image_size: int) -> Any:
    keys: dict[str, Any] = {"image_size": image_size, "patch_size": 3, "embedding_length": width, "block_count": 128}
    keys |= {"feed_forward_length": 4 * width, "projection_dim": 64, "attention.head_count": 8}
    keys |= {"attention.layer_norm_epsilon": 1e-6, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    metadata = {"general.architecture": "clip"} | {f"clip.vision.{key}": value for key, value in keys.items()}
    metadata |= {"clip.vision.projector_type": "gemma3nv", "clip.has_vision_encoder": True}
    tensors: Any = {name: Shape(name, shape) for name, shape in shapes.items()}
    return read_encoder(SimpleNamespace(metadata=metadata, tensors=tensors), "image")


def test_the_released_sizes_are_accepted() -> None:
    model = read(shapes_of(RELEASED, 64, 2048), 2048, 768)
    assert [len(blocks) for blocks in model._blocks] == [3, 3, 37, 39]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v.conv_stem.conv.weight": (1 << 20, 3, 3, 3)}, "too many for images of this size"),
        ({"v.blk.2.0.pw_exp.conv.weight": (1 << 18, 8, 1, 1)}, "too many for images of this size"),
        ({"v.blk.2.1.attn.value.proj.weight": (1 << 22, 8, 1, 1)}, "too many for images of this size"),
        ({"v.blk.2.1.attn.key.proj.weight": (3, 8, 1, 1)}, "contradict each other"),
        ({"v.blk.2.1.attn.key.down_conv.weight": None, "v.blk.2.1.attn.key.norm.weight": None}, "contradict"),
        ({"v.blk.1.0.dw_mid.conv.weight": (16, 1, 7, 7)}, "sides of 3 and 5"),
        ({"v.blk.2.0.dw_mid.conv.weight": None, "v.blk.2.0.dw_mid.bn.weight": None}, "no convolution over pixels"),
        ({"v.blk.3.0.pw_exp.conv.weight": None}, "has no tensors of v.blk.3.0"),
        ({"v.msfa.norm.weight": (31,)}, "v.msfa.norm.weight"),
        ({"v.blk.0.0.bn1.weight": None}, "v.blk.0.0.bn1.weight"),
        ({"v.blk.3.1.other.weight": (1,)}, "v.blk.3.1.other.weight"),
    ],
)
def test_damaged_and_hostile_files_are_refused(changes: dict[str, Any], words: str) -> None:
    shapes = shapes_of(SMALL, 8, 32)
    read(shapes, 32, 256)
    changed = {name: shape for name, shape in {**shapes, **changes}.items() if shape is not None}
    with pytest.raises(ModelError, match=words):
        read(changed, 32, 256)


@pytest.mark.parametrize("image_size", [1, 300, 8192])
def test_sizes_of_images_are_bounded(image_size: int) -> None:
    with pytest.raises(ModelError, match=r"multiple of 256|too many"):
        read(shapes_of(SMALL, 8, 32), 32, image_size)
