"""Encoders whose checkpoints lack CLIP, in llama.cpp's files: Yi-VL and MobileVLM 1 and 2, compared with torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.errors import ModelError, UsageError
from localllm.gguf import GGUFFile
from localllm.loading.devices import open_devices
from localllm.loading.media_encoder import MediaEncoder
from localllm.models.encoders.registry import PROJECTORS, read_encoder
from localllm.quant.types import GGMLType
from tests.helpers.gguf_writer import write_gguf
from tests.models.encoders.families import SIZES, make, picture, processor_of, torch
from tests.models.encoders.test_numbers import check, mutations
from tests.models.encoders.test_transformers import WITHOUT_CHECKPOINTS, encoded

#: Widths of the encoder and of the text model.
D, N = 72, 48


class ChannelNorm(torch.nn.LayerNorm):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Squeeze(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Conv2d(N, N // 4, 1), torch.nn.Conv2d(N // 4, N, 1)

    def forward(self, x: Any) -> Any:
        factors = self.fc2(torch.relu(self.fc1(torch.nn.functional.adaptive_avg_pool2d(x, 1))))
        return x * torch.nn.functional.hardsigmoid(factors)


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """An inverted residual block of MobileNet V3, without an expansion."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        conv = torch.nn.Conv2d
        first = conv(N, N, 3, stride, 1, groups=N, bias=False), ChannelNorm(N), torch.nn.Hardswish()
        last = conv(N, N, 1, bias=False), ChannelNorm(N)
        self.block = torch.nn.Sequential(torch.nn.Sequential(*first), Squeeze(), torch.nn.Sequential(*last))
        self.has_residual = stride == 1

    def forward(self, x: Any) -> Any:
        return self.block(x) + x if self.has_residual else self.block(x)


class Projector(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A projector by its name. Names of parameters are llama.cpp's, without the start."""

    def __init__(self, name: str) -> None:
        super().__init__()
        linear, gelu = torch.nn.Linear, torch.nn.GELU()
        self.name, norm = name, torch.nn.LayerNorm
        if name == "mlp_norm":
            self.layers = torch.nn.Sequential(linear(D, N), norm(N), gelu, linear(N, N), norm(N))
        elif name == "ldp":
            self.mlp = torch.nn.Sequential(torch.nn.Identity(), linear(D, N), gelu, linear(N, N))
            self.mb_block = torch.nn.Sequential(torch.nn.Identity(), Block(1), Block(2))
        else:
            self.mlp = torch.nn.Sequential(linear(D, N), gelu, linear(N, N))
            self.peg = torch.nn.Sequential(torch.nn.Conv2d(N, N, 3, padding=1, groups=N))

    def forward(self, x: Any) -> Any:
        if self.name == "mlp_norm":
            return self.layers(x)
        x = self.mlp(x).swapaxes(1, 2).unflatten(2, (4, 4))
        if self.name == "ldp":
            x = self.mb_block(x)
        else:
            x = torch.nn.functional.adaptive_avg_pool2d(x, (2, 2))
            x = x + self.peg(x)
        return x.flatten(2).swapaxes(1, 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Callable[[Any], Any], Path]]:
    """Return transformers' encoder with a projector, and their file."""
    model = make("mlp padded", folder := tmp_path_factory.mktemp("llava"))
    vision = model.model.vision_tower

    @cache
    def of(name: str) -> tuple[Callable[[Any], Any], Path]:
        torch.manual_seed(len(name))
        projector = Projector(name)
        with torch.no_grad():
            for parameter in projector.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

        def features(pixels: Any) -> Any:
            with torch.no_grad():
                states = vision(pixels, output_hidden_states=True).hidden_states[-1]
                return projector(states[:, 1:])[0].numpy()

        with GGUFFile.open(folder / "mmproj.gguf") as file:
            assert {tensor.type for tensor in file.tensors.values()} == {GGMLType.F32}
            tensors = {
                key: np.array(tensor.data).view(np.float32).reshape(tensor.shape)
                for key, tensor in file.tensors.items()
                if not key.startswith("mm.")
            }
            metadata = dict(file.metadata) | {"clip.projector_type": "mlp" if name == "mlp_norm" else name}
        for key, tensor in projector.state_dict().items():
            key = f"mm.{key.removeprefix('layers.')}" if name == "mlp_norm" else f"mm.model.{key}"
            tensors[key] = tensor.squeeze().numpy()
        return features, write_gguf(folder / f"{name}.gguf", metadata, tensors)

    return of


@pytest.mark.parametrize("name", ["mlp_norm", "ldp", "ldpv2"])
@pytest.mark.parametrize(("device", "bound"), [("reference", 1e-3), ("cpu", 5e-3)])
def test_embeddings_are_those_of_torch(made: Any, name: str, device: str, bound: float) -> None:
    features, file = made(name)
    encoder, (host, *_) = MediaEncoder.open(file), open_devices(device, threads=2 if device == "cpu" else None)
    encoder.backend = host.backend
    images = [picture(*size) for size in SIZES]
    prepared = [encoder.prepare(image) for image in images]
    for image, each, rows in zip(images, prepared, encoded(encoder, prepared), strict=True):
        expected = features(processor_of("mlp padded")(images=[image], return_tensors="pt")["pixel_values"])
        assert rows.shape == (each.n_tokens, 1, N)
        assert expected.shape == (16 if name == "mlp_norm" else 4, N)
        error = np.abs(rows[:, 0] - expected).max() / np.abs(expected).max()
        assert error < bound
    encoder.close()
    host.close()


@pytest.mark.parametrize("name", ["mlp_norm", "ldp", "ldpv2"])
def test_broken_files_are_refused(made: Any, name: str) -> None:
    with GGUFFile.open(made(name)[1]) as file:
        metadata = {
            key: getattr(value, "tolist", lambda value=value: value)() for key, value in file.metadata.items()
        }
        check(metadata, file)
        n_refused = 0
        for key, value in mutations(metadata):
            try:
                check(metadata | {key: value}, file)
            except (ModelError, UsageError):
                n_refused += 1
        assert n_refused
        for missing in [key for key in file.tensors if key.startswith("mm.") and key.endswith(".weight")]:
            tensors = {key: tensor for key, tensor in file.tensors.items() if key != missing}
            with pytest.raises(ModelError):
                read_encoder(SimpleNamespace(metadata=metadata, tensors=tensors))  # type: ignore[arg-type]


def test_projectors_without_checkpoints_are_compared() -> None:
    names = {name for name, each in PROJECTORS.items() if each.kind == "image" and not each.hf_types}
    assert names == {*WITHOUT_CHECKPOINTS}
