"""Published checkpoints of models that transformers lacks: rewritten checkpoints of its similar models, and models
that consist of its parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.models import tiny

Image = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
siglip2 = pytest.importorskip("transformers.models.siglip2.image_processing_pil_siglip2")
got_ocr2 = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
dots3_note = pytest.importorskip("transformers.models.dots3_note.modeling_dots3_note")

Tensors = dict[str, Any]


def rewrite(folder: Path, change: Callable[[dict[str, Any], Tensors], Tensors], names: Mapping[str, str]) -> None:
    """Rewrite config.json and the tensors of a folder.

    Args:
        change: changes the values of config.json, and returns the changed tensors.
        names: replacements of parts of tensors' names, by regular expressions. They are applied in order.
    """
    from safetensors.torch import load_file, save_file

    config, tensors = json.loads((folder / "config.json").read_text("utf-8")), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    tensors = change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def save(model: Any, folder: Path, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Write config.json and a model's tensors. ``names``: as in `rewrite`."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(values))
    tensors = {}
    for name, tensor in model.state_dict().items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor.contiguous()
    if values.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")


def as_kimi_vl(folder: Path) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> Tensors:
        vision = config["vision_config"]
        for side in ("height", "width"):
            vision[f"init_pos_emb_{side}"] = vision.pop(f"pos_emb_{side}")
        for name in ("pos_emb_time", "rope_parameters", "hidden_act"):
            del vision[name]
        vision["model_type"] = "moonvit"
        del config["projection_hidden_size"], config["projection_layer_norm_eps"]
        config |= {"model_type": "kimi_vl", "architectures": ["KimiVLForConditionalGeneration"]}
        return tensors

    names = {
        r"^(model\.)?mm_projector\.pre_norm": "multi_modal_projector.pre_norm",
        r"^mm_projector\.proj\.0": "multi_modal_projector.linear_1",
        r"^mm_projector\.proj\.2": "multi_modal_projector.linear_2",
        r"^language_model\.model\.blocks": "language_model.model.layers",
        r"encoder\.patch_embed": "patch_embed",
    }
    rewrite(folder, change, names)
    most = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))["max_patches"]
    processor = {"in_token_limit": most, "patch_size": 14, "num_pooled_tokens": 1024, "pad_input": True}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_kernel_size": [2, 2]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), "utf-8")


def as_dots3_note(folder: Path) -> None:
    """Restore the names of settings in released checkpoints."""

    def change(config: dict[str, Any], tensors: Tensors) -> Tensors:
        vision, text = config.pop("vision_config"), config.pop("text_config")
        config |= tiny.as_dots3_note(text, {})[0] | {"image_token_id": 7, "audio_token_id": 8}
        experts = vision.pop("per_layer_config")
        counts = [experts.get(str(i), {}).get("num_local_experts", -1) for i in range(vision["num_hidden_layers"])]
        vision |= {"embed_dim": vision["hidden_size"], "pyramid_num_routed": counts, "model_type": "dots_vit_moe"}
        vision |= {"hidden_size": vision["adapter_out_dim"], "capacity_factor": vision.pop("num_experts_per_tok")}
        vision |= {"router_scale": vision.pop("router_scaling_factor"), "router_scoring_func": "sigmoid"}
        vision |= {"adapter_type": "patch_merger", "pre_pixel_shuffle": True, "use_qk_norm": True, "use_bias": False}
        vision |= {"temporal_patch_size": 1, "is_causal": False}
        for name in ("rope_parameters", "mlp_layer_types", "num_local_experts", "attention_bias", "mlp_bias"):
            del vision[name]
        config["vision_config"], audio = vision, config.pop("audio_config")
        names = {"hidden_size": "d_model", "intermediate_size": "encoder_ffn_dim", "feature_size": "num_mel_bins"}
        names |= {f"num_{x}": f"encoder_{x.removeprefix('hidden_')}" for x in ("hidden_layers", "attention_heads")}
        sizes = {theirs: audio[ours] for ours, theirs in names.items()} | {"activation_function": "swiglu"}
        config["audio_config"] = {"whisper_config": sizes, "use_conv2d_stem": True, "use_rope": True} | {
            "use_rms_norm": True,
            "use_causal": False,
            "merge_factor": 1,
            "chunk_seconds": 60,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "whisper_adapter_in_dim": audio["adapter_input_size"],
            "whisper_adapter_out_dim": audio["adapter_out_dim"],
            "downsample_hidden_size": audio["downsample_hidden_size"],
        }
        return tensors

    rewrite(folder, change, {})
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({"vision_config": json.loads(path.read_text("utf-8"))}), "utf-8")


def as_hunyuan_4(folder: Path) -> None:
    """Restore names that transformers' round trip changes."""
    names = {
        r"\.hc_pre\.(hc_head|hc_\w+_layer)": r".\1",
        r"_layer\.hc_": "_layer.hc_pre.hc_",
        r"(\.mlp\..*)linear_gate": r"\1gate_proj",
    }
    rewrite(folder, lambda config, tensors: tensors, names)


def as_internvl_chat(folder: Path) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> Tensors:
        vision = config["vision_config"]
        kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")
        side = vision["image_size"][0]
        config["vision_config"] = {name: vision[name] for name in (*kept, "layer_norm_eps", "norm_type")} | {
            "image_size": side,
            "patch_size": vision["patch_size"][0],
            "model_type": "intern_vit_6b",
            "qkv_bias": False,
            "qk_normalization": vision["use_qk_norm"],
            "initializer_factor": 0.1,
        }
        config["llm_config"] = config.pop("text_config")
        for name in ("image_seq_length", "projector_hidden_act", "vision_feature_layer"):
            del config[name]
        del config["vision_feature_select_strategy"]
        config |= {"model_type": "internvl_chat", "architectures": ["InternVLChatModel"], "force_image_size": side}
        config |= {"min_dynamic_patch": 1, "max_dynamic_patch": 12, "dynamic_image_size": True, "ps_version": "v2"}
        config |= {"use_thumbnail": True, "select_layer": -1, "template": "internvl2_5", "pad2square": False}
        parts: dict[str, list[Any]] = {}
        for name in [each for each in tensors if re.search(r"\.attn\.[qkv]\.", each)]:
            parts.setdefault(re.sub(r"\.attn\.[qkv]\.", ".attn.qkv.", name), []).append((name, tensors.pop(name)))
        for some in parts.values():
            some.sort(key=lambda part: "qkv".index(part[0].split(".")[-2]))
        return tensors | {name: torch.cat([part for _, part in some]) for name, some in parts.items()}

    rewrite(
        folder,
        change,
        {
            r"^vision_tower\.embeddings\.cls_token": "vision_model.embeddings.class_embedding",
            r"patch_embeddings\.projection": "patch_embedding",
            "position_embeddings": "position_embedding",
            r"^vision_tower\.": "vision_model.",
            r"encoder\.layer\.": "encoder.layers.",
            r"attention\.([qk])_norm": r"attn.\1_norm",
            r"attention\.([qkv])_proj": r"attn.\1",
            r"attention\.projection_layer": "attn.proj",
            "layernorm_before": "norm1",
            "layernorm_after": "norm2",
            "lambda_": "ls",
            r"multi_modal_projector\.layer_norm": "mlp1.0",
            r"multi_modal_projector\.linear_1": "mlp1.1",
            r"multi_modal_projector\.linear_2": "mlp1.3",
        },
    )
    side = json.loads((folder / "config.json").read_text("utf-8"))["force_image_size"]
    kept = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
    processor = {"crop_size": side, "do_center_crop": True, "do_resize": True, "do_normalize": True, "size": side}
    processor |= {"feature_extractor_type": "CLIPFeatureExtractor", "resample": 3}
    processor |= {name: kept[name] for name in ("image_mean", "image_std")}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), "utf-8")


def as_deepseek_ocr(folder: Path) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> Tensors:
        sam, clip = (config["vision_config"][name] for name in ("sam_config", "encoder_config"))
        names = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
        shapes = [{ours: part[theirs] for ours, theirs in names.items()} for part in (sam, clip)]
        shapes[0] |= {name: sam[name] for name in ("downsample_channels", "global_attn_indexes")}
        shapes[1] |= {name: clip[name] for name in ("image_size", "patch_size")}
        width = dict(zip(("sam_vit_b", "clip-l-14-224"), shapes, strict=True))
        vision = {"cls": "deeplip_b_l", "mlp_ratio": 3.7362, "model_name": "deeplip_b_l", "model_type": "vision"}
        config["vision_config"] = vision | {"image_size": sam["image_size"], "width": width}
        config["language_config"] = config.pop("text_config")
        config |= {"model_type": "deepseek_vl_v2", "architectures": ["DeepseekOCRForCausalLM"], "tile_tag": "2D"}
        config |= {"candidate_resolutions": [[1024, 1024]], "global_view_pos": "head"}
        config |= {"projector_config": {"input_dim": 64, "model_type": "mlp_projector", "projector_type": "linear"}}
        return tensors

    rewrite(folder, change, {})
    (folder / "preprocessor_config.json").unlink()
    processor = {"candidate_resolutions": [[1024, 1024]], "patch_size": 16, "image_mean": [0.5] * 3}
    (folder / "processor_config.json").write_text(json.dumps(processor), "utf-8")


class ImageModelConfig:
    """Settings of a text model and of its image encoder."""

    def __init__(self, text_config: dict[str, Any], vision_config: dict[str, Any], image_token_id: int) -> None:
        self.text, self.vision, self.image_token_id = text_config, vision_config, image_token_id


class DotsOCR(torch.nn.Module):  # type: ignore[misc, name-defined]
    """dots.ocr: the dense layers of Dots 3 Note's encoder, without norms of queries and keys, and Qwen 2."""

    def __init__(self, config: ImageModelConfig) -> None:
        super().__init__()
        self.config, n = config, config.vision["num_hidden_layers"]
        text = transformers.Qwen2Config(**config.text)
        sizes = {"adapter_in_dim": config.vision["hidden_size"], "adapter_out_dim": text.hidden_size}
        vision = dots3_note.Dots3NoteVisionConfig(**config.vision, **sizes, mlp_layer_types=["dense"] * n)
        self.vision_tower = dots3_note.Dots3NoteVisionModel(vision)
        for block in self.vision_tower.blocks:
            block.attn.q_norm = block.attn.k_norm = torch.nn.Identity()
        self.llm = transformers.Qwen2ForCausalLM(text)

    def get_input_embeddings(self) -> Any:
        return self.llm.get_input_embeddings()

    def get_image_features(self, pixel_values: Any, image_grid_thw: Any) -> SimpleNamespace:
        n = 3 * 14 * 14
        pixels = pixel_values.reshape(len(pixel_values), 3, -1, n // 3)[:, :, 0].reshape(-1, n)
        return SimpleNamespace(pooler_output=self.vision_tower(pixels, image_grid_thw).pooler_output)

    def forward(self, input_ids: Any, pixel_values: Any, image_grid_thw: Any) -> Any:
        embeddings = self.get_input_embeddings()(input_ids).clone()
        embeddings[input_ids == self.config.image_token_id] = self.get_image_features(
            pixel_values, image_grid_thw
        ).pooler_output
        return self.llm(inputs_embeds=embeddings)

    def save_pretrained(self, folder: Path) -> None:
        from safetensors.torch import save_file

        vision = {"model_type": "dots_vit", "embed_dim": self.config.vision["hidden_size"], **self.config.vision}
        vision |= {"num_channels": 3, "patch_size": 14, "post_norm": True, "rms_norm_eps": 1e-5, "use_bias": False}
        vision |= {"spatial_merge_size": 2, "temporal_patch_size": 1, "is_causal": False, "init_merger_std": 0.02}
        values = self.llm.config.to_dict() | {"model_type": "dots_ocr", "architectures": ["DotsOCRForCausalLM"]}
        values |= {"vision_config": vision, "image_token_id": 7, "video_token_id": 8}
        (folder / "config.json").write_text(json.dumps(values))
        names = {
            r"^llm\.": "",
            r"patch_embed\.": "patch_embed.patchifier.",
            r"vision_tower\.norm": "vision_tower.post_trunk_norm",
        }
        tensors = {}
        for name, tensor in self.state_dict().items():
            for pattern, replacement in names.items():
                name = re.sub(pattern, replacement, name)
            if name.startswith("vision_tower."):
                for part, number in (("gate_proj", 1), ("down_proj", 2), ("up_proj", 3)):
                    name = name.replace(f"mlp.{part}", f"mlp.fc{number}")
            tensors[name] = tensor.contiguous()
        save_file(tensors, folder / "model.safetensors")


class Phi4V(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Phi-4 reasoning vision: SigLIP 2 without its last layer, two matrices, and Phi-3."""

    def __init__(self, config: ImageModelConfig) -> None:
        super().__init__()
        self.config = config
        vision, text = transformers.Siglip2VisionConfig(**config.vision), transformers.Phi3Config(**config.text)
        self.vision_model, self.llm = transformers.Siglip2VisionModel(vision), transformers.Phi3ForCausalLM(text)
        layers = torch.nn.Linear(vision.hidden_size, text.hidden_size), torch.nn.GELU()
        self.mm_projector = torch.nn.Sequential(*layers, torch.nn.Linear(text.hidden_size, text.hidden_size))

    def get_input_embeddings(self) -> Any:
        return self.llm.get_input_embeddings()

    def get_image_features(self, **seen: Any) -> SimpleNamespace:
        states = self.vision_model(**seen, output_hidden_states=True).hidden_states[-2]
        rows = [state[mask.bool()] for state, mask in zip(states, seen["pixel_attention_mask"], strict=True)]
        return SimpleNamespace(pooler_output=[self.mm_projector(row) for row in rows])

    def forward(self, input_ids: Any, **seen: Any) -> Any:
        embeddings = self.get_input_embeddings()(input_ids).clone()
        rows = self.get_image_features(**seen).pooler_output
        embeddings[input_ids == self.config.image_token_id] = torch.cat(rows)
        return self.llm(inputs_embeds=embeddings)

    def save_pretrained(self, folder: Path) -> None:
        values = self.llm.config.to_dict() | {"model_type": "phi4-siglip", "architectures": ["Phi4ForCausalLMV"]}
        values |= {"vision_config": self.vision_model.config.to_dict(), "mm_hidden_size": 72, "use_s2": False}
        values |= {"mm_projector_type": "mlp2x_gelu", "mm_vision_tower": "google/siglip2-so400m-patch16-naflex"}
        names = {
            r"^llm\.": "",
            r"^vision_model\.": "model.vision_tower.vision_tower.vision_model.",
            "^mm": "model.mm",
        }
        save(self, folder, values, names)


class Phi4VProcessor:
    """SigLIP 2's processor, which scales only images with less or more patches than the limits."""

    def __init__(self, min_num_patches: int, max_num_patches: int) -> None:
        self.limits = min_num_patches, max_num_patches
        self.processor = siglip2.Siglip2ImageProcessorPil(max_num_patches=max_num_patches)

    def save_pretrained(self, folder: Path) -> None:
        self.processor.save_pretrained(folder)
        file = folder / "preprocessor_config.json"
        values = json.loads(file.read_text("utf-8")) | {"min_num_patches": self.limits[0]}
        file.write_text(json.dumps(values | {"image_processor_type": "Siglip2ImageProcessorNoUpscale"}), "utf-8")

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        seen: dict[str, list[Any]] = {}
        for image in images:
            n = max(1, (image.height // 16) * (image.width // 16))
            n = min(max(n, self.limits[0]), self.limits[1])
            for name, value in self.processor([image], max_num_patches=n, return_tensors=return_tensors).items():
                padding = [0] * (2 * value.ndim - 3) + [self.limits[1] - n, 0, 0]
                if name != "spatial_shapes":
                    value = torch.nn.functional.pad(value, padding)
                seen.setdefault(name, []).append(value)
        return {name: torch.cat(values) for name, values in seen.items()}


class YoutuVL(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Youtu-VL: the layers of SigLIP 2 with another attention, a merger, and Youtu-LLM. Patches stay row by row."""

    def __init__(self, config: ImageModelConfig) -> None:
        super().__init__()
        self.config = config
        vision, text = transformers.Siglip2VisionConfig(**config.vision), transformers.YoutuConfig(**config.text)
        self.vision_model, self.llm = transformers.Siglip2VisionModel(vision), transformers.YoutuForCausalLM(text)
        self.ln_q, n = torch.nn.RMSNorm(vision.hidden_size, eps=1e-6), 4 * vision.hidden_size
        layers = torch.nn.Linear(n, n), torch.nn.GELU(), torch.nn.Linear(n, text.hidden_size)
        self.mlp = torch.nn.Sequential(*layers)

    def get_input_embeddings(self) -> Any:
        return self.llm.get_input_embeddings()

    def get_image_features(self, pixel_values: Any, spatial_shapes: Any) -> SimpleNamespace:
        images = zip(pixel_values, spatial_shapes.tolist(), strict=True)
        return SimpleNamespace(pooler_output=[self.image(patches, *shape) for patches, shape in images])

    def image(self, patches: Any, rows: int, columns: int) -> Any:
        vision, values = self.vision_model, self.config.vision
        x = vision.embeddings.patch_embedding(patches[: rows * columns])
        places = torch.tensor([[row, column] for row in range(rows) for column in range(columns)])
        windows = places // (values["window_size"] // 16)
        is_near = (windows[:, None] == windows).all(-1)
        dim = x.shape[1] // values["num_attention_heads"] // 2
        angles = places[:, :, None] * 10_000 ** (-torch.arange(0, dim, 2) / dim)
        turns = torch.polar(torch.ones(1), angles.reshape(len(x), 1, -1))
        for i, layer in enumerate(vision.encoder.layers):
            seen = torch.ones_like(is_near) if i in values["fullatt_block_indexes"] else is_near
            x = x + self.attention(layer.self_attn, layer.layer_norm1(x), turns, seen)
            x = x + layer.mlp(layer.layer_norm2(x))
        x = self.ln_q(vision.post_layernorm(x)).reshape(rows, columns, -1)
        tokens = [x[i : i + 2, j : j + 2].flatten() for i in range(0, rows, 2) for j in range(0, columns, 2)]
        return self.mlp(torch.stack(tokens))

    def attention(self, weights: Any, x: Any, turns: Any, seen: Any) -> Any:
        q, k, v = (
            each(x).reshape(len(x), weights.num_heads, -1)
            for each in (weights.q_proj, weights.k_proj, weights.v_proj)
        )
        turned = [torch.complex(*each.chunk(2, dim=-1)) * turns for each in (q, k)]
        q, k = (torch.cat([each.real, each.imag], dim=-1) for each in turned)
        scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.swapaxes(0, 1)
        return weights.out_proj(mixed.swapaxes(0, 1).flatten(1))

    def forward(self, input_ids: Any, **seen: Any) -> Any:
        embeddings = self.get_input_embeddings()(input_ids).clone()
        rows = self.get_image_features(**seen).pooler_output
        embeddings[input_ids == self.config.image_token_id] = torch.cat(rows)
        return self.llm(inputs_embeds=embeddings)

    def save_pretrained(self, folder: Path) -> None:
        values = self.llm.config.to_dict() | {"model_type": "youtu_vl"}
        values |= {"architectures": ["YoutuVLForConditionalGeneration"], "image_token_id": 7}
        names = {
            r"^llm\.": "",
            r"^vision_model\.": "siglip2.vision_model.",
            r"^(ln_q|mlp)": r"merger.\1",
        }
        vision = self.vision_model.config.to_dict() | self.config.vision | {"out_hidden_size": 48}
        save(self, folder, values | {"vision_config": vision}, names)


class YoutuVLProcessor:
    """SigLIP 2's processor for images that are already scaled, by steps of 2%, to complete tokens."""

    def __init__(self, max_num_patches: int) -> None:
        self.most = max_num_patches
        self.processor = siglip2.Siglip2ImageProcessorPil(max_num_patches=max_num_patches)

    def save_pretrained(self, folder: Path) -> None:
        self.processor.save_pretrained(folder)

    def __call__(self, images: list[Any], return_tensors: str) -> Any:
        scaled = [image.resize(self.size(*image.size), Image.Resampling.BILINEAR) for image in images]
        return self.processor(scaled, do_resize=False, return_tensors=return_tensors)

    def size(self, width: int, height: int) -> tuple[int, int]:
        percent = 100
        while True:
            wide, tall = (max(32, -(-side * percent // 3200) * 32) for side in (width, height))
            if wide * tall <= self.most * 256:
                return wide, tall
            percent -= 2


class GlmEdgeV(torch.nn.Module):  # type: ignore[misc, name-defined]
    """GLM-Edge-V: SigLIP, an adapter with a convolution and a gate, and GLM."""

    def __init__(self, config: ImageModelConfig) -> None:
        super().__init__()
        self.config = config
        vision, text = transformers.SiglipVisionConfig(**config.vision), transformers.GlmConfig(**config.text)
        self.vit, self.llm = transformers.SiglipVisionModel(vision), transformers.GlmForCausalLM(text)
        linear, n, n_ff = partial(torch.nn.Linear, bias=False), text.hidden_size, text.intermediate_size
        self.conv, self.norm1 = torch.nn.Conv2d(vision.hidden_size, n, 2, stride=2), torch.nn.LayerNorm(n)
        self.linear_proj, self.gate_proj, self.dense_h_to_4h = linear(n, n), linear(n, n_ff), linear(n, n_ff)
        self.dense_4h_to_h = linear(n_ff, n)
        self.boi, self.eoi = (torch.nn.Parameter(torch.randn(1, 1, n)) for _ in range(2))

    def get_input_embeddings(self) -> Any:
        return self.llm.get_input_embeddings()

    def get_image_features(self, pixel_values: Any) -> SimpleNamespace:
        pixels = pixel_values.reshape(-1, *pixel_values.shape[-3:])
        x = self.vit(pixels).last_hidden_state
        side = int(x.shape[1] ** 0.5)
        x = self.conv(x.swapaxes(1, 2).reshape(len(x), -1, side, side)).flatten(2).swapaxes(1, 2)
        x = torch.nn.functional.gelu(self.norm1(self.linear_proj(x)))
        x = self.dense_4h_to_h(torch.nn.functional.silu(self.gate_proj(x)) * self.dense_h_to_4h(x))
        ends = [end.expand(len(x), -1, -1) for end in (self.boi, self.eoi)]
        return SimpleNamespace(pooler_output=torch.cat([ends[0], x, ends[1]], dim=1))

    def forward(self, input_ids: Any, pixel_values: Any) -> Any:
        embeddings = self.get_input_embeddings()(input_ids).clone()
        rows = self.get_image_features(pixel_values).pooler_output
        embeddings[input_ids == self.config.image_token_id] = rows.flatten(0, 1)
        return self.llm(inputs_embeds=embeddings)

    def save_pretrained(self, folder: Path) -> None:
        values = self.llm.config.to_dict() | {"architectures": ["GlmForCausalLM"], "boi_token_id": 7}
        names = {
            r"^llm\.": "",
            r"^vit\.": "model.vision.vit.model.vision_model.",
            r"^(conv|boi|eoi)": r"model.vision.adapter.\1",
            r"^(linear_proj|norm1|gate_proj|dense_)": r"model.vision.adapter.linear.\1",
        }
        save(self, folder, values | {"vision_config": self.vit.config.to_dict()}, names)


class NemotronVL(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Nemotron Nano 2 VL: transformers' RADIO, a projector and Nemotron-H."""

    def __init__(self, config: ImageModelConfig) -> None:
        super().__init__()
        self.config = config
        vision, text = transformers.RadioConfig(**config.vision), transformers.NemotronHConfig(**config.text)
        self.vision_model, self.llm = transformers.RadioModel(vision), transformers.NemotronHForCausalLM(text)
        self.vision_model.make_preprocessor_external()
        for layer in self.vision_model.encoder.layer:
            layer.layer_scale1 = layer.layer_scale2 = torch.nn.Identity()
        n = 4 * vision.hidden_size
        self.mlp1 = torch.nn.ModuleDict(
            {
                "0": torch.nn.RMSNorm(n, eps=1e-5),
                "1": torch.nn.Linear(n, 40, bias=False),
                "3": torch.nn.Linear(40, text.hidden_size, bias=False),
            }
        )

    def get_input_embeddings(self) -> Any:
        return self.llm.get_input_embeddings()

    def get_image_features(self, pixel_values: Any) -> SimpleNamespace:
        x = self.vision_model(pixel_values).features
        side = int(x.shape[1] ** 0.5)
        x = x.reshape(len(x), side // 2, 2, side // 2, 2, -1).transpose(2, 3).reshape(len(x), side**2 // 4, -1)
        x = torch.relu(self.mlp1["1"](self.mlp1["0"](x))) ** 2
        return SimpleNamespace(pooler_output=self.mlp1["3"](x))

    def forward(self, input_ids: Any, pixel_values: Any) -> Any:
        embeddings = self.get_input_embeddings()(input_ids).clone()
        rows = self.get_image_features(pixel_values).pooler_output
        embeddings[input_ids == self.config.image_token_id] = rows.flatten(0, 1)
        return self.llm(inputs_embeds=embeddings)

    def save_pretrained(self, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        self.llm.save_pretrained(folder)
        text = json.loads((folder / "config.json").read_text("utf-8"))
        sizes = ("hidden_size", "num_attention_heads", "num_hidden_layers", "patch_size")
        vision = {name: self.config.vision[name] for name in sizes}
        vision |= {"intermediate_size": 4 * vision["hidden_size"], "version": "radio_v2.5-h"}
        vision |= {"adaptor_names": None, "args": {"model": "vit_huge_patch16_224"}, "max_resolution": 64}
        values = {"model_type": "NemotronH_Nano_VL_V2", "architectures": ["NemotronH_Nano_VL_V2"]}
        values |= {"llm_config": text, "vision_config": vision, "downsample_ratio": 0.5, "ps_version": "v2"}
        values |= {"force_image_size": self.config.vision["image_size"], "image_tag_type": "internvl"}
        values |= {"img_context_token": "<image>", "img_context_token_id": 7, "use_thumbnail": True}
        (folder / "config.json").write_text(json.dumps(values))
        names = {
            r"^embeddings\.patch_projection": "model.patch_generator.embedder",
            r"^embeddings\.position_embedding": "model.patch_generator.pos_embed",
            r"^embeddings\.cls_register_token": "model.patch_generator.cls_token.token",
            r"^encoder\.layer\.": "model.blocks.",
            r"attention\.o_proj": "attn.proj",
        }
        tensors = {}
        for name, tensor in self.vision_model.state_dict().items():
            for pattern, replacement in names.items():
                name = re.sub(pattern, replacement, name)
            tensors[f"vision_model.radio_model.{name}"] = tensor
        for name in [name for name in tensors if ".q_proj." in name]:
            parts = [tensors.pop(name.replace(".q_", f".{k}_")) for k in "qkv"]
            tensors[name.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
        tensors |= {f"mlp1.{name}": tensor for name, tensor in self.mlp1.state_dict().items()}
        for name, tensor in load_file(folder / "model.safetensors").items():
            tensors[f"language_model.{name}"] = tensor
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


class NemotronVLProcessor:
    """InternVL's processor with the settings of Nemotron Nano 2 VL."""

    def __init__(self, image_size: int = 512, max_num_tiles: int = 12, **values: Any) -> None:
        self.values = {"image_size": image_size, "max_num_tiles": max_num_tiles, "use_thumbnail": True} | values
        colours = {name: self.values[f"norm_{name[6:]}"] for name in ("image_mean", "image_std")}
        size = {"height": image_size, "width": image_size}
        self.processor = got_ocr2.GotOcr2ImageProcessorPil(
            size=size, crop_to_patches=True, min_patches=1, max_patches=max_num_tiles, **colours
        )

    def save_pretrained(self, folder: Path) -> None:
        values = self.values | {"image_processor_type": "NemotronNanoVLV2ImageProcessor"}
        (folder / "preprocessor_config.json").write_text(json.dumps(values), "utf-8")

    def __call__(self, images: list[Any], return_tensors: str) -> Any:
        return self.processor(images, return_tensors=return_tensors)


class MiMoV2Config:
    def __init__(self, text_config: dict[str, Any], vision_config: dict[str, Any], image_token_id: int) -> None:
        self.text, self.vision, self.image_token_id = text_config, SimpleNamespace(**vision_config), image_token_id


class MiMoBlock(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A layer of MiMo V2.5's encoder, with names of the released code (modeling_mimo_v2.py).

    The sinks are additional scores, as in the text model, SGLang and llama.cpp. The released code adds them to the
    scores of the first patch instead.
    """

    def __init__(self, vision: Any, mode: int) -> None:
        super().__init__()
        d, n, n_kv, size = vision.hidden_size, vision.num_heads, vision.num_key_value_heads, vision.qk_channels
        self.norm1, self.norm2 = torch.nn.RMSNorm(d, 1e-6), torch.nn.RMSNorm(d, 1e-6)
        self.attn, self.mlp = torch.nn.Module(), torch.nn.Module()
        self.attn.qkv = torch.nn.Linear(d, (n + 2 * n_kv) * size)
        self.attn.proj = torch.nn.Linear(n * size, d)
        if mode >= 0:
            self.attn.sinks = torch.nn.Parameter(torch.randn(n))
        self.mlp.gate_proj, self.mlp.up_proj = (torch.nn.Linear(d, vision.intermediate_size) for _ in range(2))
        self.mlp.down_proj = torch.nn.Linear(vision.intermediate_size, d)
        self.sizes, self.mode, self.reach = (n, n_kv, size), mode, vision.visual_token_window_size

    def forward(self, x: Any, angles: Any) -> Any:
        (n, n_kv, size), t = self.sizes, len(x)
        qkv = self.attn.qkv(self.norm1(x)).view(t, n + 2 * n_kv, size).transpose(0, 1)
        q, k, v = qkv.split([n, n_kv, n_kv])
        q, k = (
            y * angles.cos() + torch.cat([-y[..., size // 2 :], y[..., : size // 2]], -1) * angles.sin()
            for y in (q, k)
        )
        k, v = (y.repeat_interleave(n // n_kv, dim=0) for y in (k, v))
        scores = q @ k.transpose(1, 2) * size**-0.5
        if self.mode >= 0:
            places = torch.arange(t)
            scores[:, (places[:, None] - places).abs() > self.reach] = -torch.inf
            scores = torch.cat([scores, self.attn.sinks[:, None, None].expand(n, t, 1)], -1)
        y = scores.softmax(-1)[..., :t] @ v
        x = x + self.attn.proj(y.transpose(0, 1).reshape(t, n * size))
        y = self.norm2(x)
        return x + self.mlp.down_proj(torch.nn.functional.silu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y))


class MiMoV2(torch.nn.Module):  # type: ignore[misc, name-defined]
    """MiMo V2.5: MiMo V2 Flash, whose products of queries, keys and values are one matrix, and an image encoder."""

    def __init__(self, config: MiMoV2Config) -> None:
        super().__init__()
        self.config, vision = config, config.vision
        self.llm = transformers.MiMoV2FlashForCausalLM(transformers.MiMoV2FlashConfig(**config.text))
        d, size, width = vision.hidden_size, vision.patch_size, self.llm.config.hidden_size
        self.visual = torch.nn.Module()
        self.visual.patch_embed = torch.nn.Module()
        self.visual.patch_embed.proj = torch.nn.Conv3d(3, d, (2, size, size), (2, size, size), bias=False)
        self.visual.blocks = torch.nn.ModuleList([MiMoBlock(vision, mode) for mode in vision.vit_window_attn_types])
        merger = self.visual.merger = torch.nn.Module()
        merger.ln_q = torch.nn.LayerNorm(d, 1e-6, bias=False)
        merger.mlp = torch.nn.Sequential(
            torch.nn.Linear(4 * d, 4 * d, bias=False), torch.nn.GELU(), torch.nn.Linear(4 * d, width, bias=False)
        )

    def get_input_embeddings(self) -> Any:
        return self.llm.get_input_embeddings()

    def get_image_features(self, pixel_values: Any, image_grid_thw: Any) -> SimpleNamespace:
        size, n = self.config.vision.patch_size, self.config.vision.qk_channels // 4
        found = []
        for pixels, (_, rows, columns) in zip(
            pixel_values.split(image_grid_thw.prod(-1).tolist()), image_grid_thw.tolist(), strict=True
        ):
            x = self.visual.patch_embed.proj(pixels.view(-1, 3, 2, size, size)).flatten(1)
            y, z = (
                axis.reshape(rows // 2, 2, columns // 2, 2).transpose(1, 2).flatten()
                for axis in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            )
            frequencies = 1e4 ** -(torch.arange(n) / n)
            angles = torch.cat([y[:, None] * frequencies, z[:, None] * frequencies] * 2, -1)
            tokens = torch.arange(rows * columns // 4).view(rows // 2, columns // 2)
            order = (tokens.T.reshape(-1, 1) * 4 + torch.arange(4)).flatten()
            for block in self.visual.blocks:
                x = block(x[order], angles[order])[order.argsort()] if block.mode == 1 else block(x, angles)
            found.append(self.visual.merger.mlp(self.visual.merger.ln_q(x).view(-1, 4 * x.shape[-1])))
        return SimpleNamespace(pooler_output=torch.cat(found))

    def forward(self, input_ids: Any, pixel_values: Any, image_grid_thw: Any) -> Any:
        embeddings = self.get_input_embeddings()(input_ids).clone()
        embeddings[input_ids == self.config.image_token_id] = self.get_image_features(
            pixel_values, image_grid_thw
        ).pooler_output
        return self.llm(inputs_embeds=embeddings)

    def save_pretrained(self, folder: Path) -> None:
        self.llm.save_pretrained(folder)

        def change(config: dict[str, Any], tensors: Tensors) -> Tensors:
            rope, layers = config.pop("rope_parameters"), config.pop("layer_types")
            config |= {"rope_theta": rope["full_attention"]["rope_theta"], "partial_rotary_factor": 0.5}
            config |= {"swa_rope_theta": rope["sliding_attention"]["rope_theta"], "rope_scaling": {"type": "default"}}
            config |= {"hybrid_layer_pattern": [int(layer != "full_attention") for layer in layers]}
            config["moe_layer_freq"] = [int(kind == "sparse") for kind in config.pop("mlp_layer_types")]
            config["layernorm_epsilon"] = config.pop("rms_norm_eps")
            config |= {"sliding_window_size": config["sliding_window"] - 1, "hybrid_block_size": None}
            config |= {f"swa_{name}": config[name] for name in ("head_dim", "v_head_dim", "num_attention_heads")}
            config |= {"add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True}
            config |= {"attention_projection_layout": "fused_qkv", "attention_chunk_size": 128}
            config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": None}
            config |= {"routed_scaling_factor": None, "audio_config": {"group_size": 4, "audio_channels": 2}}
            config |= {"swa_num_key_value_heads": 2 * config["num_key_value_heads"], "vision_model_type": "mimovl"}
            config |= {"model_type": "mimo_v2", "architectures": ["MiMoV2ForCausalLM"], "image_token_id": 7}
            vision = vars(self.config.vision)
            full = [i for i, mode in enumerate(vision["vit_window_attn_types"]) if mode < 0]
            vision |= {"fullatt_block_indexes": full, "use_sink": True, "in_chans": 3, "window_size": 128}
            vision |= {"spatial_patch_size": vision["patch_size"], "temporal_patch_size": 2, "hidden_act": "silu"}
            vision |= {"spatial_merge_size": 2, "out_hidden_size": config["hidden_size"], "tokens_per_second": 2}
            config |= {"vision_config": vision, "processor_config": {"patch_size": vision["patch_size"]}}
            for name in [name for name in tensors if name.endswith("q_proj.weight")]:
                parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
                tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
            tensors["speech_embeddings.0.weight"] = torch.zeros(2, 2)
            return tensors | {f"visual.{name}": tensor for name, tensor in self.visual.state_dict().items()}

        rewrite(folder, change, {})


def as_qwen_omni(folder: Path) -> None:
    """Rewrite a thinker as a part of a model that also speaks."""

    def change(config: dict[str, Any], tensors: Tensors) -> Tensors:
        thinker, is_3 = dict(config), config["model_type"].startswith("qwen3")
        kind, name = ("qwen3_omni_moe", "Qwen3OmniMoe") if is_3 else ("qwen2_5_omni", "Qwen2_5Omni")
        config.clear()
        config |= {"model_type": kind, "architectures": [f"{name}Model"], "thinker_config": thinker}
        config |= {"talker_config": {"model_type": f"{kind}_talker"}, "enable_audio_output": True}
        if is_3:
            config |= {"code2wav_config": {"model_type": f"{kind}_code2wav"}, "system_token_id": 8948}
            thinker |= {"seconds_per_chunk": 2, "position_id_per_seconds": 13, "audio_end_token_id": 151670}
            thinker["vision_config"] |= {"apply_vit_abs_pos_embed": True, "spatial_patch_size": 16, "in_chans": 3}
            text = thinker["text_config"]
            text |= {"use_qk_norm": True, "use_sliding_window": False, "shared_expert_intermediate_size": 0}
            rope = text.pop("rope_parameters")
            text["rope_theta"] = rope.pop("rope_theta")
            text["rope_scaling"] = rope | {"type": "default", "interleaved": True, "mrope_interleaved": True}
        return tensors | {"talker.codec_head.weight": torch.zeros(2, 2), "code2wav.weight": torch.zeros(2)}

    rewrite(folder, change, {"^": "thinker."})
