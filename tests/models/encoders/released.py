"""Published checkpoints of models that transformers lacks: rewritten checkpoints of its similar models, and dots.ocr,
which consists of its parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.models import tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
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


class DotsOCRConfig:
    def __init__(self, text_config: dict[str, Any], vision_config: dict[str, Any], image_token_id: int) -> None:
        self.text, self.vision, self.image_token_id = text_config, vision_config, image_token_id


class DotsOCR(torch.nn.Module):  # type: ignore[misc, name-defined]
    """dots.ocr: the dense layers of Dots 3 Note's encoder, without norms of queries and keys, and Qwen 2."""

    def __init__(self, config: DotsOCRConfig) -> None:
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
        thinker = dict(config)
        config.clear()
        config |= {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}
        config |= {"talker_config": {"model_type": "qwen2_5_omni_talker"}, "enable_audio_output": True}
        return tensors | {"talker.codec_head.weight": torch.zeros(2, 2)}

    rewrite(folder, change, {"^": "thinker."})
