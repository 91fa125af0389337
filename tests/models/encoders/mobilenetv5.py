"""Gemma 3n with MobileNetV5, which transformers takes from timm: written for tests from the source of timm.

It is independent of localllm: torch computes convolutions and attention with the channels first.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
modeling = import_module("transformers.models.gemma3n.modeling_gemma3n")
functional = torch.nn.functional

Gemma3nConfig = transformers.Gemma3nConfig

#: Blocks of each stage, of one kind with arguments:
#: edge: output channels; inverted: output channels, expansion and sides of the first and of the second convolution of
#: each channel, or 0; attention: heads, their width, and the stride of keys and values.
STAGES = (
    (("edge", 8), ("edge", 8)),
    (("inverted", 16, 3, 3, 5), ("inverted", 16, 2, 5, 0)),
    (("inverted", 24, 3, 5, 5), ("inverted", 24, 1, 0, 0), ("attention", 3, 8, 2), ("inverted", 24, 2, 0, 0)),
    (("inverted", 40, 2, 5, 3), ("attention", 2, 16, 1), ("inverted", 40, 2, 0, 0), ("inverted", 40, 2, 0, 3)),
)


class Norm(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(n))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.weight[:, None, None]


class Convolution(torch.nn.Conv2d):  # type: ignore[misc, name-defined]
    """A convolution whose result has ⌈side / stride⌉ rows and columns, as in TensorFlow."""

    def forward(self, x: Any) -> Any:
        padding = []
        for size, step, side in zip(self.kernel_size, self.stride, x.shape[2:], strict=True):
            n = max((-(-side // step) - 1) * step + size - side, 0)
            padding = [n // 2, n - n // 2, *padding]
        return super().forward(functional.pad(x, padding))


def convolution(n_in: int, n_out: int, size: int = 1, stride: int = 1, *, by_channel: bool = False) -> Any:
    return Convolution(n_in, n_out, size, stride, groups=n_in if by_channel else 1, bias=False)


def gelu(x: Any) -> Any:
    return functional.gelu(x, approximate="tanh")


class Normed(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, conv: Any, *, is_activated: bool = False) -> None:
        super().__init__()
        self.conv, self.bn, self.is_activated = conv, Norm(conv.out_channels), is_activated

    def forward(self, x: Any) -> Any:
        x = self.bn(self.conv(x))
        return gelu(x) if self.is_activated else x


class Gamma(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, n: int) -> None:
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x: Any) -> Any:
        return x * self.gamma[:, None, None]


class Edge(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, n_in: int, stride: int, n_out: int) -> None:
        super().__init__()
        self.conv_exp, self.bn1 = convolution(n_in, 3 * n_in, 3, stride), Norm(3 * n_in)
        self.conv_pwl, self.bn2 = convolution(3 * n_in, n_out), Norm(n_out)

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv_pwl(gelu(self.bn1(self.conv_exp(x)))))
        return x + y if x.shape == y.shape else y


class Inverted(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, n_in: int, stride: int, n_out: int, expansion: int, start: int, mid: int) -> None:
        super().__init__()
        n, same = expansion * n_in, torch.nn.Identity()
        self.dw_start = Normed(convolution(n_in, n_in, start, 1, by_channel=True)) if start else same
        self.pw_exp = Normed(convolution(n_in, n), is_activated=True)
        self.dw_mid = Normed(convolution(n, n, mid, stride, by_channel=True), is_activated=True) if mid else same
        self.pw_proj, self.layer_scale = Normed(convolution(n, n_out)), Gamma(n_out)

    def forward(self, x: Any) -> Any:
        y = self.layer_scale(self.pw_proj(self.dw_mid(self.pw_exp(self.dw_start(x)))))
        return x + y if x.shape == y.shape else y


class Attention(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Heads of queries with the same keys and values."""

    def __init__(self, n: int, _: int, n_heads: int, dim: int, stride: int) -> None:
        super().__init__()
        self.n_heads, self.norm, self.layer_scale = n_heads, Norm(n), Gamma(n)
        parts = {}
        for name in ("key", "value"):
            down = {"down_conv": convolution(n, n, 3, 2, by_channel=True), "norm": Norm(n)} if stride > 1 else {}
            parts[name] = torch.nn.ModuleDict(down | {"proj": convolution(n, dim)})
        parts["query"] = torch.nn.ModuleDict({"proj": convolution(n, n_heads * dim)})
        parts["output"] = torch.nn.ModuleDict({"proj": convolution(n_heads * dim, n)})
        self.attn = torch.nn.ModuleDict(parts)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        query, key, value = y, y, y
        for layer in self.attn["query"].values():
            query = layer(query)
        for layer in self.attn["key"].values():
            key = layer(key)
        for layer in self.attn["value"].values():
            value = layer(value)
        query = query.reshape(len(x), self.n_heads, -1, query.shape[2] * query.shape[3]).transpose(2, 3)
        key, value = (each.flatten(2).transpose(1, 2)[:, None] for each in (key, value))
        key, value = (each.expand(-1, self.n_heads, -1, -1) for each in (key, value))
        seen = functional.scaled_dot_product_attention(query, key, value)
        seen = seen.transpose(2, 3).reshape(len(x), -1, *x.shape[2:])
        return x + self.layer_scale(self.attn["output"]["proj"](seen))


KINDS = {"edge": Edge, "inverted": Inverted, "attention": Attention}


class MobileNetV5(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, width: int) -> None:
        super().__init__()
        stem = Normed(Convolution(3, 8, 3, 2, bias=True), is_activated=True)
        n, stages, widths = 8, [], []
        for blocks in STAGES:
            stage = []
            for i, (kind, *arguments) in enumerate(blocks):
                stage.append(KINDS[kind](n, 1 if i else 2, *arguments))
                n = n if kind == "attention" else arguments[0]
            stages.append(torch.nn.Sequential(*stage))
            widths.append(n)
        self.conv_stem, self.blocks = stem, torch.nn.Sequential(*stages)
        n = sum(widths[2:])
        expansion, projection = Normed(convolution(n, 2 * n), is_activated=True), Normed(convolution(2 * n, width))
        fusion = torch.nn.ModuleDict({"pw_exp": expansion, "pw_proj": projection})
        self.msfa = torch.nn.ModuleDict({"ffn": fusion, "norm": Norm(width)})

    def forward(self, x: Any) -> Any:
        x, stages = self.conv_stem(x), []
        for stage in self.blocks:
            x = stage(x)
            stages.append(x)
        x = torch.cat([stages[2], functional.interpolate(stages[3], size=stages[2].shape[2:])], 1)
        for layer in self.msfa["ffn"].values():
            x = layer(x)
        return self.msfa["norm"](functional.avg_pool2d(x, x.shape[-1] // 16))


class Tower(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.timm_model = MobileNetV5(width)

    def forward(self, pixel_values: Any, **_: Any) -> Any:
        hidden = self.timm_model(pixel_values)
        return transformers.modeling_outputs.BaseModelOutputWithPooling(last_hidden_state=hidden)


def from_config(config: Any) -> Any:
    if config.model_type == "gemma3n_vision":
        return Tower(config.hidden_size)
    return transformers.AutoModel.from_config(config)


class Gemma3nForConditionalGeneration(transformers.Gemma3nForConditionalGeneration):  # type: ignore[misc, name-defined]
    def __init__(self, config: Any) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(modeling, "AutoModel", SimpleNamespace(from_config=from_config))
            super().__init__(config)

    def end(self, part: Any) -> Any:
        """Return the embedding [1, width] of the token after images or audio."""
        return part(input_ids=torch.tensor([[part.vocab_offset]]))[0]
