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
