"""MiniCPM-V up to 4.5, which transformers lacks: written for tests from its paper (arXiv:2408.01800) and llama.cpp's
``tools/mtmd``, with transformers' Idefics 2 encoder, torch's attention and transformers' text models.

It is independent of localllm: Pillow crops the slices, and positions are computed one by one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

Image = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
idefics2 = pytest.importorskip("transformers.models.idefics2.modeling_idefics2")


class MiniCPMVConfig:
    def __init__(self, text_config: dict[str, Any], **values: Any) -> None:
        self.text, self.values = text_config, values
        self.image_token_id = values.pop("image_token_id")


class Resampler(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, n_queries: int, d: int, d_vision: int) -> None:
        super().__init__()
        norm = torch.nn.LayerNorm
        self.query = torch.nn.Parameter(torch.randn(n_queries, d))
        self.kv_proj = torch.nn.Linear(d_vision, d, bias=False)
        self.attn = torch.nn.MultiheadAttention(d, d // 128)
        self.ln_q, self.ln_kv, self.ln_post = norm(d, eps=1e-6), norm(d, eps=1e-6), norm(d, eps=1e-6)
        self.proj = torch.nn.Parameter(d**-0.5 * torch.randn(d, d))

    def forward(self, x: Any, rows: int, columns: int) -> Any:
        d = self.proj.shape[0]
        x = self.ln_kv(self.kv_proj(x))
        places = torch.stack([position(i % columns, i // columns, d) for i in range(rows * columns)])
        seen, _ = self.attn(self.ln_q(self.query), x + places, x, need_weights=False)
        return self.ln_post(seen) @ self.proj


def position(column: int, row: int, d: int) -> Any:
    """Return sines and cosines of the column, then of the row, a quarter of the width each."""
    waves = [[at / 10000 ** (i / (d // 4)) for i in range(d // 4)] for at in (column, row)]
    return torch.tensor([f(angle) for angles in waves for f in (math.sin, math.cos) for angle in angles])


class MiniCPMV(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__()
        self.config, values = config, config.values
        self.kind = {None: "Llama", 2.6: "Qwen2", 4.5: "Qwen3"}[values.get("version")]
        text = getattr(transformers, f"{self.kind}Config")(**config.text)
        vision = idefics2.Idefics2VisionConfig(**values["vision_config"], hidden_act="gelu_pytorch_tanh")
        self.llm = getattr(transformers, f"{self.kind}ForCausalLM")(text)
        self.vpm = idefics2.Idefics2VisionTransformer(vision)
        if values.get("drop_vision_last_layer"):
            self.vpm.encoder.layers = self.vpm.encoder.layers[:-1]
        self.resampler = Resampler(values["query_num"], text.hidden_size, vision.hidden_size)
        for parameter in self.resampler.attn.in_proj_bias, self.resampler.attn.out_proj.bias:
            torch.nn.init.normal_(parameter)

    def get_input_embeddings(self) -> Any:
        return self.llm.get_input_embeddings()

    def get_image_features(self, pixel_values: Any, target_sizes: Any) -> SimpleNamespace:
        found, at, size = [], 0, pixel_values.shape[2]
        for rows, columns in target_sizes.tolist():
            strip = pixel_values[0, :, :, at : at + rows * columns * size]
            at += rows * columns * size
            frame = strip.reshape(3, size, rows, columns, size).permute(0, 2, 1, 3, 4)
            mask = torch.ones(1, rows, columns, dtype=torch.bool)
            x = self.vpm(frame.reshape(1, 3, rows * size, columns * size), patch_attention_mask=mask)
            found.append(self.resampler(x.last_hidden_state[0], rows, columns))
        return SimpleNamespace(pooler_output=found)

    def forward(self, input_ids: Any, pixel_values: Any, target_sizes: Any) -> Any:
        embeddings = self.get_input_embeddings()(input_ids).clone()
        rows = self.get_image_features(pixel_values, target_sizes).pooler_output
        embeddings[input_ids == self.config.image_token_id] = torch.cat(rows)
        return self.llm(inputs_embeds=embeddings)

    def save_pretrained(self, folder: Path) -> None:
        from safetensors.torch import save_file

        text = self.llm.config.to_dict()
        values = text | self.config.values | {"model_type": "minicpmv", "architectures": ["MiniCPMV"]}
        (folder / "config.json").write_text(json.dumps(values))
        save_file({name: each.contiguous() for name, each in self.state_dict().items()}, folder / "model.safetensors")


class MiniCPMVProcessor:
    """Preprocess images like MiniCPM-V's processor, which transformers lacks."""

    def __init__(self, scale_resolution: int = 448, max_slice_nums: int = 9, patch_size: int = 14) -> None:
        self.scale, self.most, self.patch = scale_resolution, max_slice_nums, patch_size

    def save_pretrained(self, folder: Path) -> None:
        half = [0.5] * 3
        values = {"scale_resolution": self.scale, "max_slice_nums": self.most, "norm_mean": half, "norm_std": half}
        (folder / "preprocessor_config.json").write_text(json.dumps(values))

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        strips, sizes = [], []
        for frame in [frame for image in images for frame in self.frames(image)]:
            pixels = (torch.tensor(list(frame.convert("RGB").tobytes())).float() / 255 - 0.5) / 0.5
            pixels = pixels.reshape(frame.height, frame.width, 3).permute(2, 0, 1)
            cut = [part for row in pixels.split(self.patch, 1) for part in row.split(self.patch, 2)]
            strips.append(torch.cat(cut, 2))
            sizes.append([frame.height // self.patch, frame.width // self.patch])
        return {"pixel_values": torch.cat(strips, 2)[None], "target_sizes": torch.tensor(sizes)}

    def frames(self, image: Any) -> list[Any]:
        width, height = image.size
        n = min(math.ceil(width * height / self.scale**2), self.most)
        if n <= 1:
            return [image.resize(self.fitted(width, height), Image.Resampling.BICUBIC)]
        counts = [each for each in (n - 1, n, n + 1) if 1 < each <= self.most]
        grids = [(m, count // m) for count in counts for m in range(1, count + 1) if count % m == 0]
        across, down = min(grids, key=lambda grid: abs(math.log(width / height) - math.log(grid[0] / grid[1])))
        wide, tall = self.fitted(self.multiple(width, across) / across, self.multiple(height, down) / down)
        whole = image.resize(self.fitted(width, height), Image.Resampling.BICUBIC)
        refined = image.resize((wide * across, tall * down), Image.Resampling.BICUBIC)
        boxes = [(x * wide, y * tall, (x + 1) * wide, (y + 1) * tall) for y in range(down) for x in range(across)]
        return [whole, *(refined.crop(box) for box in boxes)]

    def fitted(self, width: float, height: float) -> tuple[int, int]:
        """Return the size with about ``scale`` squared pixels and the same aspect ratio."""
        ratio = width / height
        height = int(self.scale / math.sqrt(ratio))
        return self.multiple(int(height * ratio), self.patch), self.multiple(height, self.patch)

    @staticmethod
    def multiple(length: float, of: int) -> int:
        return max(round(length / of) * of, of)
