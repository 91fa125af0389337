"""Tiny random transformers models that see, as GGUF files: the text model and its encoder."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from localllm.convert import Checkpoint, MmprojCheckpoint
from localllm.quantize import plan, run
from tests.helpers.checkpoints import parsed, write_tokenizer
from tests.models import tiny

Image = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
minicpmv, mobilenetv5, released = (
    import_module(f"tests.models.encoders.{name}") for name in ("minicpmv", "mobilenetv5", "released")
)

#: Height and width of odd images: larger than a tile, elongated, and one pixel.
SIZES = ((75, 130), (211, 64), (1, 1))


@dataclass(frozen=True)
class Family:
    """A tiny model.

    Attributes:
        model, config: names of a class of transformers, `minicpmv`, `mobilenetv5` or `released`, and of its
            configuration, and the settings.
        processor: module and name of the class that preprocesses images, and its arguments.
        seen: key in the processor's result of pixels [frames of [3, height, width]] or patches.
        arguments: keys in that result of the arguments of the model's ``get_image_features``.
        sizes: sizes of the images.
        release: changes the saved folder to a published checkpoint of a model that transformers lacks.
    """

    model: str
    config: str
    settings: dict[str, Any]
    processor: tuple[str, str]
    options: dict[str, Any]
    arguments: tuple[str, ...] = ("pixel_values",)
    sizes: tuple[tuple[int, int], ...] = SIZES
    release: Callable[[Path], None] | None = None


TEXT = parsed("hidden_size=48 intermediate_size=64 num_hidden_layers=1 num_attention_heads=4 vocab_size=300")
TEXT |= {"num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 1024, "pad_token_id": 0}
SIGLIP = {"hidden_size": 72, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3}
QWEN = {"depth": 3, "hidden_size": 72, "num_heads": 3, "out_hidden_size": 48}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}}
GLM_MROPE = {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}}
GLM_VISION = QWEN | {"intermediate_size": 80, "image_size": 56, "patch_size": 14}
QWEN_35 = TEXT | GLM_MROPE | {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
QWEN_35 |= {"num_hidden_layers": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
QWEN_35 |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
GEMMA_4 = TEXT | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA_4 |= {"global_head_dim": 12}
GEMMA_3N = TEXT | parsed("vocab_size=316 vocab_size_per_layer_input=300 hidden_size_per_layer_input=8 laurel_rank=8")
GEMMA_3N |= parsed("hidden_size=64 num_hidden_layers=2 num_kv_shared_layers=0 intermediate_size=[64,64]")
GEMMA_3N |= {"activation_sparsity_pattern": [0.95, 0.0], "layer_types": GEMMA_4["layer_types"]}
#: Ids of images and audio follow the text model's.
GEMMA_3N_VISION = {"hidden_size": 32, "vocab_offset": 300, "vocab_size": 8}
GEMMA_3N_AUDIO = {"hidden_size": 64, "conf_num_hidden_layers": 2, "conf_num_attention_heads": 2, "vocab_size": 8}
GEMMA_3N_AUDIO |= {"vocab_offset": 308}
GEMMA_3N_TOKENS = {"eoi_token_id": 300, "image_token_id": 301, "eoa_token_id": 308, "audio_token_id": 309}


def siglip(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIGLIP, **more}


def family(
    name: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    processor: str,
    options: dict[str, Any],
    arguments: str = "pixel_values",
    sizes: tuple[tuple[int, int], ...] = SIZES,
    **more: Any,
) -> Family:
    """Return a family with the classes ``name``ForConditionalGeneration and ``name``Config.

    ``processor`` is "module class" without their usual parts: "gemma3 Gemma3" is class Gemma3ImageProcessorPil of
    module gemma3.image_processing_pil_gemma3; with "torch " in front, the class needs torchvision.
    """
    *torch_only, module, kind = processor.split()
    which = "" if torch_only else "pil_"
    path = f"{module}.image_processing_{which}{module}", f"{kind}ImageProcessor{'' if torch_only else 'Pil'}"
    settings = {"text_config": text, "vision_config": vision, **more}
    model, config = f"{name}ForConditionalGeneration", f"{name}Config"
    return Family(model, config, settings, path, options, (*arguments.split(),), sizes)


LLAMA, MISTRAL, QWEN_2 = ({"model_type": name, **TEXT} for name in ("llama", "mistral", "qwen2"))
CLIP = siglip("clip_vision_model", image_size=56, patch_size=14, num_hidden_layers=3)
SQUARE = {"size": {"height": 56, "width": 56}}
CROPPED = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
GRIDS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
WIDE_GRIDS = [[112, 224], [224, 112], [112, 336]]
QWEN_2_PROCESSOR, ON_GRID = "qwen2_vl Qwen2VL", "pixel_values image_grid_thw"


SLIDING = "sliding_attention"
HALF_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SAM = parsed("hidden_size=32 num_hidden_layers=3 num_attention_heads=2 output_channels=16 mlp_dim=48 window_size=3")
SAM |= {"image_size": 128, "patch_size": 16, "global_attn_indexes": [1], "downsample_channels": [16, 32]}
DEEPSEEK_OCR = TEXT | {"num_key_value_heads": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]}
DEEPSEEK_OCR |= {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "num_hidden_layers": 2}


def edges(shortest: int, longest: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": shortest, "longest_edge": longest}}


FAMILIES: dict[str, Family] = {
    "step3vl": family(
        "Step3p7",
        TEXT
        | parsed("head_dim=16 share_expert_dim=32 n_routed_experts=4 num_experts_per_tok=2 moe_intermediate_size=32")
        | {"mlp_layer_types": ["sparse"], "partial_rotary_factors": [0.5], "sliding_window": 64},
        {"width": 72, "layers": 2, "heads": 3, "mlp_ratio": 1.5, "image_size": 728, "patch_size": 56},
        "torch step3p7 Step3p7",
        {},
        "pixel_values pixel_values_local num_local_patches",
        ((75, 130), (800, 150), (1, 1)),
    ),
    "deepseekocr": family(
        "UnlimitedOcr",
        DEEPSEEK_OCR | {"sliding_window": 1024},
        {
            "sam_config": SAM,
            "encoder_config": parsed("hidden_size=32 intermediate_size=48 num_hidden_layers=2 num_attention_heads=2")
            | {"image_size": 28, "patch_size": 14},
        },
        "torch unlimited_ocr UnlimitedOcr",
        {"size": {"height": 128, "width": 128}, "tile_size": 64, "max_patches": 6},
        "pixel_values pixel_values_local num_local_patches patches_grid",
    ),
    "deepseekocr2": family(
        "DeepseekOcr2",
        DEEPSEEK_OCR,
        {
            "sam_config": SAM,
            "encoder_config": parsed("hidden_size=32 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4")
            | {
                "num_key_value_heads": 2,
                "vocab_size": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
        "deepseek_ocr2 DeepseekOcr2",
        {"size": {"height": 128, "width": 128}, "tile_size": 64, "max_patches": 2},
        "pixel_values pixel_values_local num_local_patches",
    ),
    "dots3note_v": Family(
        "Dots3NoteForConditionalGeneration",
        "Dots3NoteConfig",
        {
            "text_config": tiny.CONFIG
            | tiny.LATENTS
            | tiny.INDEXER
            | tiny.DOTS3
            # All experts are selected: rounding cannot select others.
            | {"max_position_embeddings": 1024, "index_topk": 512, "n_routed_experts": 2},
            "vision_config": SIGLIP
            | parsed("hidden_size=96 moe_intermediate_size=32 capacity_factor=2 adapter_in_dim=96 adapter_out_dim=64")
            | {"num_hidden_layers": 3, "pyramid_num_routed": [-1, 4, 6]},
            "audio_config": SIGLIP
            | {"hidden_size": 96, "downsample_hidden_size": 16, "adapter_input_size": 96, "adapter_out_dim": 64},
        },
        ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
        edges(3136, 16 * 28 * 28) | {"temporal_patch_size": 1},
        ("pixel_values", "image_grid_thw"),
        release=released.as_dots3_note,
    ),
    "dots_ocr": Family(
        "DotsOCR",
        "ImageModelConfig",
        {
            "text_config": TEXT | {"hidden_size": 48, "tie_word_embeddings": False},
            "vision_config": SIGLIP,
        },
        ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
        edges(3136, 16 * 28 * 28),
        ("pixel_values", "image_grid_thw"),
    ),
    "gemma3": family(
        "Gemma3",
        TEXT | {"query_pre_attn_scalar": 12, "sliding_window": 3},
        siglip("siglip_vision_model", image_size=56, patch_size=14, vision_use_head=False),
        "gemma3 Gemma3",
        SQUARE,
        mm_tokens_per_image=4,
    ),
    "gemma3nv": family(
        "Gemma3n",
        GEMMA_3N,
        GEMMA_3N_VISION,
        "siglip Siglip",
        {"size": {"height": 512, "width": 512}, "do_normalize": False, "resample": 2},
        audio_config=GEMMA_3N_AUDIO,
        **GEMMA_3N_TOKENS,
    ),
    "gemma4v": family(
        "Gemma4",
        GEMMA_4 | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300},
        SIGLIP
        | {"num_key_value_heads": 3, "head_dim": 24, "position_embedding_size": 512, "standardize": True}
        | {"use_clipped_linears": True},
        "gemma4 Gemma4",
        {"max_soft_tokens": 70},
        "pixel_values image_position_ids",
        (*SIZES[:2], (1, 700)),
        audio_config=None,
    ),
    "glm4v": family("Glm4v", TEXT | GLM_MROPE, GLM_VISION, "glm4v Glm4v", edges(12544, 32 * 28 * 28), ON_GRID),
    "glm5v": family(
        "Glm5Next",
        {key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")}
        | parsed("""
            num_key_value_heads=4 q_lora_rank=24 kv_lora_rank=32 qk_nope_head_dim=32 qk_rope_head_dim=0 v_head_dim=32
            n_routed_experts=4 num_experts_per_tok=2 moe_intermediate_size=32 index_n_heads=2 index_head_dim=32
            index_topk=512 index_kpool=4 linear_head_dim=16 linear_num_heads=4 num_hidden_layers=2
        """)
        | {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]}
        | {"indexer_types": ["full", "full"]},
        GLM_VISION | {"projection_intermediate_size": 64, "swiglu_limit": 0.7},
        "glm5_next Glm5Next",
        {"min_image_tokens": 4, "max_image_tokens": 16},
        ON_GRID,
        (*SIZES, (20, 300), (1, 2000)),
    ),
    "granite4_vision": Family(
        "Granite4VisionForConditionalGeneration",
        "Granite4VisionConfig",
        {
            "text_config": TEXT
            | parsed(
                "model_type=granite4_vision_text num_hidden_layers=6 embedding_multiplier=3.0 logits_scaling=2.0"
            ),
            "vision_config": siglip("siglip_vision_model", hidden_size=128, image_size=112, patch_size=14)
            | {"num_attention_heads": 2, "vision_use_head": False, "num_hidden_layers": 3},
            "qformer_config": parsed("model_type=blip_2_qformer num_hidden_layers=1 cross_attention_frequency=1")
            | {"intermediate_size": 80},
            "downsample_rate": "2/4",
            "deepstack_layer_map": [[-2, 3], [-1, 0]],
            "spatial_target_layers": [1, 2, 4, 5],
            "spatial_vision_layer": -1,
            "image_grid_pinpoints": WIDE_GRIDS,
            "vision_feature_select_strategy": "full",
        },
        ("llava_next.image_processing_pil_llava_next", "LlavaNextImageProcessorPil"),
        {"size": {"height": 112, "width": 112}, "crop_size": {"height": 112, "width": 112}}
        | {"image_grid_pinpoints": WIDE_GRIDS},
        ("pixel_values", "image_sizes"),
    ),
    "hunyuanvl": family(
        "HunYuanVL",
        TEXT
        | {"head_dim": 16, "tie_word_embeddings": True}
        | {
            "rope_parameters": parsed("rope_type=dynamic rope_theta=1e4 alpha=10.0 factor=1.0")
            | {"mrope_section": [2] * 4}
        },
        SIGLIP | {"max_image_size": 112, "text_hidden_size": 48, "out_hidden_size": 48},
        "hunyuan_vl HunYuanVL",
        edges(4096, 16 * 32 * 32),
        ON_GRID,
    ),
    "hunyuanvl4": replace(
        family(
            "HYV4VL",
            {key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")}
            | parsed("""
            q_lora_rank=24 kv_lora_rank=32 qk_nope_head_dim=32 qk_rope_head_dim=32 v_head_dim=32 n_routed_experts=4
            num_experts_per_tok=2 moe_intermediate_size=32 index_n_heads=8 index_head_dim=48 index_topk=512
            num_hidden_layers=2 swiglu_limit=0.7 hc_magnitude=1.7 hc_eps=1e-3
        """)
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}},
            SIGLIP | {"max_image_size": 112, "out_hidden_size": 48},
            "hy_v4_vl HYV4VL",
            edges(4096, 16 * 32 * 32),
            ON_GRID,
        ),
        release=released.as_hunyuan_4,
    ),
    "idefics3": family(
        "Idefics3",
        LLAMA,
        siglip("idefics3_vision", image_size=56, patch_size=14),
        "idefics3 Idefics3",
        {"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 56}},
        scale_factor=2,
    ),
    "internvl": family(
        "InternVL",
        QWEN_2,
        siglip("internvl_vision", image_size=[56, 56], patch_size=[14, 14], layer_scale_init_value=0.7),
        "got_ocr2 GotOcr2",
        SQUARE | {"crop_to_patches": True, "min_patches": 1, "max_patches": 12},
        image_seq_length=4,
    ),
    "janus_pro": family(
        "Janus",
        LLAMA,
        siglip("janus_vision_model", image_size=56, patch_size=14, mlp_ratio=1.5, projection_dim=48),
        "janus Janus",
        SQUARE,
        vq_config=parsed("embed_dim=4 latent_channels=32 base_channels=32 num_embeddings=8 num_patches=4")
        | {"channel_multiplier": [1], "num_res_blocks": 1, "image_token_embed_dim": 16, "projection_dim": 48},
    ),
    "kimik25": family(
        "Kimi_K25",
        TEXT
        | parsed("""
            model_type=deepseek_v3 num_key_value_heads=4 q_lora_rank=24 kv_lora_rank=32 qk_nope_head_dim=32
            qk_rope_head_dim=32 v_head_dim=32 head_dim=32 first_k_dense_replace=1
        """),
        SIGLIP | {"hidden_size": 72, "pos_emb_height": 4, "pos_emb_width": 4},
        "torch kimi_k25 Kimi_K25",
        {"max_patches": 36},
        ON_GRID,
        projection_hidden_size=72,
    ),
    "lfm2": family(
        "Lfm2Vl",
        {"model_type": "lfm2", "layer_types": ["full_attention", "conv"], "conv_L_cache": 3}
        | TEXT
        | {"num_hidden_layers": 2, "block_auto_adjust_ff_dim": False},
        siglip("siglip2_vision_model", num_patches=16, patch_size=16, vision_use_head=False, num_hidden_layers=3),
        "torch lfm2_vl Lfm2Vl",
        {"min_image_tokens": 2, "max_image_tokens": 4, "tile_size": 64, "max_tiles": 6},
        "pixel_values spatial_shapes pixel_attention_mask",
        projector_hidden_size=40,
    ),
    "resampler": Family(
        "MiniCPMV",
        "MiniCPMVConfig",
        {
            "text_config": TEXT | {"hidden_size": 256, "head_dim": 64},
            "vision_config": SIGLIP | {"image_size": 112, "patch_size": 14},
            "query_num": 5,
            "version": 4.5,
        },
        ("minicpmv", "MiniCPMVProcessor"),
        {"scale_resolution": 84, "max_slice_nums": 4},
        ("pixel_values", "target_sizes"),
    ),
    "lightonocr": family(
        "LightOnOcr",
        TEXT | {"model_type": "qwen3"},
        siglip("pixtral", image_size=112, patch_size=14, head_dim=24, hidden_act="silu"),
        "pixtral Pixtral",
        {"size": {"longest_edge": 112}, "patch_size": {"height": 28, "width": 28}},
        "pixel_values image_sizes",
        (*SIZES[:2], (1, 40)),
    ),
    "llama4": family(
        "Llama4",
        TEXT | {"intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 1024, "pad_token_id": 0},
        SIGLIP
        | {"image_size": 56, "patch_size": 14, "vision_output_dim": 40, "intermediate_size": 288}
        | {"projector_input_dim": 40, "projector_output_dim": 40},
        "torch llama4 Llama4",
        SQUARE | {"max_patches": 5},
    ),
    "mimovl": Family(
        "MiMoV2",
        "MiMoV2Config",
        {
            "text_config": TEXT
            | parsed("head_dim=16 v_head_dim=8 n_routed_experts=4 num_experts_per_tok=2 moe_intermediate_size=32")
            | {"num_hidden_layers": 3, "num_key_value_heads": 1, "layer_types": [*["full_attention"] * 2, SLIDING]}
            | {"sliding_window": 20, "rope_parameters": {"full_attention": HALF_ROTATED, SLIDING: HALF_ROTATED}},
            "vision_config": parsed("depth=6 hidden_size=72 num_heads=4 num_key_value_heads=2 qk_channels=16")
            | parsed("intermediate_size=80 patch_size=14 visual_token_window_size=5")
            | {"vit_window_attn_types": [-1, 0, 1, 1, 0, 1]},
        },
        ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
        edges(3136, 16 * 28 * 28),
        ("pixel_values", "image_grid_thw"),
    ),
    "minicpmv4_6": family(
        "MiniCPMV4_6",
        QWEN_35,
        SIGLIP | {"image_size": 112, "patch_size": 14, "num_hidden_layers": 3},
        "minicpmv4_6 MiniCPMV4_6",
        {"scale_resolution": 112, "max_slice_nums": 4},
        "pixel_values target_sizes",
        insert_layer_id=1,
    ),
    "muse-glimmer": family(
        "MuseGlimmer",
        TEXT,
        SIGLIP | parsed("num_hidden_layers=5 patch_size=14 pos_emb_height=4 pos_emb_width=4"),
        "torch muse_glimmer MuseGlimmer",
        {"max_image_tokens": 30},
        ON_GRID,
        out_hidden_size=288,
        projector_hidden_size=40,
    ),
    "minimax_m3": Family(
        "MiniMaxM3SparseForConditionalGeneration",
        "MiniMaxM3VLConfig",
        {
            "text_config": TEXT
            | {"num_experts_per_tok": 2, "num_local_experts": 4, "rotary_dim": 12, "dense_intermediate_size": 64}
            | {"shared_intermediate_size": 64, "index_n_heads": 2},
            "vision_config": SIGLIP | {"image_size": 56, "patch_size": 14},
            "projector_hidden_size": 40,
        },
        ("minimax_m3_vl.image_processing_minimax_m3_vl", "MiniMaxM3VLImageProcessor"),
        edges(3136, 16 * 28 * 28),
        ("pixel_values", "image_grid_thw"),
    ),
    "mlp": family("Llava", LLAMA, CLIP, "llava Llava", CROPPED, image_seq_length=16),
    "mlp 1.6": family(
        "LlavaNext",
        LLAMA,
        CLIP,
        "llava_next LlavaNext",
        CROPPED | {"image_grid_pinpoints": GRIDS},
        "pixel_values image_sizes",
        image_grid_pinpoints=GRIDS,
    ),
    "paddleocr": family(
        "PaddleOCRVL",
        TEXT | MROPE,
        siglip("paddleocr_vl_vision", image_size=112, patch_size=14),
        "paddleocr_vl PaddleOCRVL",
        edges(3136, 24 * 28 * 28),
        ON_GRID,
    ),
    "phi4": Family(
        "Phi4V",
        "ImageModelConfig",
        {
            "text_config": TEXT,
            "vision_config": siglip("siglip2_vision_model", num_patches=16, num_hidden_layers=3)
            | {"vision_use_head": False},
        },
        ("released", "Phi4VProcessor"),
        {"min_num_patches": 6, "max_num_patches": 30},
        ("pixel_values", "spatial_shapes", "pixel_attention_mask"),
        (*SIZES, (80, 96)),
    ),
    "pixtral": family(
        "Mistral3",
        MISTRAL,
        siglip("pixtral", image_size=112, patch_size=14, head_dim=24),
        "pixtral Pixtral",
        {"size": {"longest_edge": 112}, "patch_size": {"height": 28, "width": 28}},
        "pixel_values image_sizes",
        (*SIZES[:2], (1, 40)),  # transformers fails for images of one token
        spatial_merge_size=2,
    ),
    "qwen2.5vl_merger": family(
        "Qwen2_5_VL",
        TEXT | MROPE,
        QWEN | {"intermediate_size": 80, "depth": 4, "fullatt_block_indexes": [1, 3]},
        QWEN_2_PROCESSOR,
        edges(3136, 64 * 28 * 28),
        ON_GRID,
        ((275, 330), (611, 64), (1, 1)),
    ),
    "pixtral 12B": family(
        "Llava",
        MISTRAL,
        siglip("pixtral", image_size=56, patch_size=14, head_dim=24),
        "pixtral Pixtral",
        {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
        "pixel_values image_sizes",
        (*SIZES[:2], (1, 40)),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "qwen2vl_merger": family(
        "Qwen2VL",
        TEXT | MROPE,
        {"depth": 2, "embed_dim": 72, "hidden_size": 48, "num_heads": 3, "patch_size": 14},
        QWEN_2_PROCESSOR,
        edges(3136, 16 * 28 * 28),
        ON_GRID,
    ),
    "qwen3vl_merger": family(
        "Qwen3VL",
        TEXT | MROPE,
        QWEN | {"intermediate_size": 80, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        QWEN_2_PROCESSOR,
        edges(4096, 16 * 32 * 32) | {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        ON_GRID,
    ),
}


def like(name: str, settings: dict[str, Any], **changes: Any) -> Family:
    """Return another family with some changes."""
    return replace(FAMILIES[name], settings=FAMILIES[name].settings | settings, **changes)


YOUTU = parsed("q_lora_rank=24 kv_lora_rank=32 qk_nope_head_dim=32 qk_rope_head_dim=32 v_head_dim=32 head_dim=32")
NEMOTRON = parsed("ssm_state_size=16 mamba_num_heads=8 mamba_head_dim=16 n_groups=2 mlp_hidden_act=relu2")
EXAONE_VISION = FAMILIES["qwen2.5vl_merger"].settings["vision_config"]
GLM_46V = ("glm46v.image_processing_pil_glm46v", "Glm46VImageProcessorPil")
INTERN_VISION = FAMILIES["internvl"].settings["vision_config"]
FAMILIES |= {
    "exaone4_5": like(
        "qwen2.5vl_merger",
        {
            "text_config": TEXT | {"model_type": "exaone4"},
            "vision_config": EXAONE_VISION | {"num_heads": 6, "num_key_value_heads": 2},
        },
        model="Exaone4_5_ForConditionalGeneration",
        config="Exaone4_5_Config",
    ),
    "youtuvl": Family(
        "YoutuVL",
        "ImageModelConfig",
        {
            "text_config": TEXT | YOUTU | {"num_key_value_heads": 4},
            "vision_config": siglip("siglip2_vision_model", num_patches=16, num_hidden_layers=3)
            | {"vision_use_head": False, "window_size": 64, "fullatt_block_indexes": [1], "spatial_merge_size": 2},
        },
        ("released", "YoutuVLProcessor"),
        {"max_num_patches": 64},
        ("pixel_values", "spatial_shapes"),
        (*SIZES, (400, 250)),
    ),
    "adapter": Family(
        "GlmEdgeV",
        "ImageModelConfig",
        {
            "text_config": TEXT | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
            "vision_config": siglip("siglip_vision_model", image_size=56, patch_size=14, vision_use_head=False),
        },
        ("mllama.image_processing_pil_mllama", "MllamaImageProcessorPil"),
        SQUARE | {"max_image_tiles": 1, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3},
    ),
    "nemotron_v2_vl": Family(
        "NemotronVL",
        "ImageModelConfig",
        {
            "text_config": TEXT | NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
            "vision_config": SIGLIP
            | {"intermediate_size": 288, "image_size": 64, "patch_size": 16, "max_img_size": 128}
            | {"num_hidden_layers": 4},
        },
        ("released", "NemotronVLProcessor"),
        parsed("image_size=64 max_num_tiles=6 patch_size=16 downsample_ratio=0.5 do_rescale=True num_image_token=4")
        | {"norm_mean": [0.48, 0.45, 0.4], "norm_std": [0.26, 0.25, 0.27]},
    ),
    "gemma4uv": like(
        "gemma4v",
        {
            "text_config": GEMMA_4,
            "vision_config": {"mm_embed_dim": 48, "output_proj_dims": 48, "mm_posemb_size": 128},
        },
        model="Gemma4UnifiedForConditionalGeneration",
        config="Gemma4UnifiedConfig",
    ),
    "glm4v moe": like(
        "glm4v",
        {
            "text_config": (TEXT | GLM_MROPE | {"num_hidden_layers": 2, "n_routed_experts": 4})
            | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
        },
        model="Glm4vMoeForConditionalGeneration",
        config="Glm4vMoeConfig",
        processor=GLM_46V,
    ),
    "glm4v ocr": like("glm4v", {}, model="GlmOcrForConditionalGeneration", config="GlmOcrConfig", processor=GLM_46V),
    "internvl 6B": like(
        "internvl", {"vision_config": INTERN_VISION | {"norm_type": "rms_norm", "use_qk_norm": True}}
    ),
    "internvl chat": like("internvl", {}, release=released.as_internvl_chat),
    "kimivl": like("kimik25", {}, release=released.as_kimi_vl),
    "minicpmv4_6 4x": like(
        "minicpmv4_6", {"downsample_mode": "4x"}, options={"scale_resolution": 84, "downsample_mode": "4x"}
    ),
    "qwen2.5o": like(
        "qwen2.5vl_merger",
        {
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                "output_dim": 48,
            }
        },
        model="Qwen2_5OmniThinkerForConditionalGeneration",
        config="Qwen2_5OmniThinkerConfig",
    ),
    "qwen3vl_merger omni": like(
        "qwen3vl_merger",
        {
            "text_config": TEXT | MROPE | parsed("num_experts=4 num_experts_per_tok=2 moe_intermediate_size=32"),
            "audio_config": parsed("d_model=32 encoder_layers=1 encoder_attention_heads=2 encoder_ffn_dim=32")
            | {"downsample_hidden_size": 8, "output_dim": 48},
        },
        model="Qwen3OmniMoeThinkerForConditionalGeneration",
        config="Qwen3OmniMoeThinkerConfig",
        release=released.as_qwen_omni,
    ),
    "mlp padded": like(
        "mlp",
        {
            "vision_config": siglip("clip_vision_model", image_size=56, patch_size=14, hidden_act="gelu"),
            "vision_feature_layer": -1,
        },
        options=FAMILIES["mlp"].options | {"do_pad": True},
    ),
    "resampler 2.5": like(
        "resampler",
        parsed("query_num=3 drop_vision_last_layer=True version=None")
        | {
            "text_config": TEXT | {"hidden_size": 128},
            "vision_config": SIGLIP | {"image_size": 140, "patch_size": 14},
        },
        options={"scale_resolution": 70, "max_slice_nums": 9},
    ),
}


def picture(height: int, width: int) -> Any:
    """Return an image with smooth and rough areas in three colours."""
    rng = np.random.default_rng([height, width])
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 9 + c) * np.cos(y / (5 + c)) for c in range(3)], axis=-1)
    return Image.fromarray((127 + 60 * waves + rng.integers(-60, 60, (height, width, 3))).astype(np.uint8))


def padded(images: Any, padding: tuple[int, int, int, int], fill: Any = (0, 0, 0), **_: Any) -> Any:
    left, top, right, bottom = padding
    colours = torch.tensor(fill, dtype=images.dtype)[:, None, None]
    return torch.nn.functional.pad(images - colours, (left, right, top, bottom)) + colours


def by_pillow(module: str, kind: str) -> Any:
    """Return a variant of a torchvision-only processor class that resizes with Pillow."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    stubs = {name: ModuleType(name) for name in (*names, "torchvision.transforms.v2.functional")}
    with pytest.MonkeyPatch.context() as patched:
        for name, stub in stubs.items():
            if name not in sys.modules:
                patched.setitem(sys.modules, name, stub)
        functional = stubs[names[-1]].__dict__["functional"] = stubs["torchvision.transforms.v2.functional"]
        functional.__dict__.update(pad=padded, InterpolationMode=object)  # an annotation
        own = getattr(import_module(f"transformers.models.{module}"), kind)

    class Resizing(own.__mro__[1]):  # type: ignore[misc]
        def resize(self, image: Any, size: Any, resample: Any, **_: Any) -> Any:
            shape = size.width, size.height
            arrays = [
                np.asarray(Image.fromarray(x).resize(shape, resample)) for x in image.permute(0, 2, 3, 1).numpy()
            ]
            return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)

        def pad(self, images: Any, pad_size: Any) -> Any:
            return padded(images, (0, 0, pad_size.width - images.shape[-1], pad_size.height - images.shape[-2]))

        def normalize(self, images: Any, mean: Any, std: Any) -> Any:
            mean, std = (torch.tensor(x, dtype=images.dtype)[:, None, None] for x in (mean, std))
            return (images - mean) / std

        def rescale_and_normalize(self, images: Any, _: bool, factor: float, __: bool, mean: Any, std: Any) -> Any:
            mean, std = (torch.tensor(x)[:, None, None] for x in (mean, std))
            return (images.float() - mean / factor) / (std / factor)

    class ByPillow(own, Resizing):  # type: ignore[misc]
        def __call__(self, images: Any, return_tensors: str) -> Any:
            given = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
            settings = {
                key: getattr(self, key)
                for key in inspect.signature(self._preprocess).parameters
                if hasattr(self, key)
            }
            seen = self._preprocess(given, **settings | {"return_tensors": return_tensors, "disable_grouping": False})
            return seen | {"pixel_values": seen["pixel_values"].float()}  # Llama 4's are bfloat16

    return ByPillow


@functools.cache
def processor_of(name: str) -> Any:
    return make_processor(name, FAMILIES[name].options)


def make_processor(name: str, options: dict[str, Any]) -> Any:
    """A family's image processor with other options."""
    module, kind = FAMILIES[name].processor
    if (own := next((each for each in (minicpmv, released) if hasattr(each, kind)), None)) is not None:
        return getattr(own, kind)(**options)
    if "_pil_" not in module:
        return by_pillow(module, kind)(**options)
    processor = getattr(import_module(f"transformers.models.{module}"), kind)(**options)
    return MergedPatches(processor) if name == "gemma4uv" else processor


@dataclass
class MergedPatches:
    """Gemma 4's processor with the patches of each token joined, as in the 12B's torchvision processor."""

    processor: Any

    def save_pretrained(self, folder: Path) -> None:
        self.processor.save_pretrained(folder)

    def __call__(self, **given: Any) -> dict[str, Any]:
        seen = self.processor(**given)
        merged, places = [], []
        for patches, at in zip(seen["pixel_values"], seen["image_position_ids"], strict=True):
            columns, rows = (at.max(0).values + 1).tolist()
            image = patches[: rows * columns].reshape(rows, columns, 16, 16, 3).permute(0, 2, 1, 3, 4)
            cut = image.reshape(rows // 3, 48, columns // 3, 48, 3).permute(0, 2, 1, 3, 4).reshape(-1, 48 * 48 * 3)
            y, x = torch.meshgrid(torch.arange(rows // 3), torch.arange(columns // 3), indexing="ij")
            n = 70 - len(cut)
            merged.append(torch.nn.functional.pad(cut, (0, 0, 0, n)))
            places.append(torch.nn.functional.pad(torch.stack([x, y], -1).reshape(-1, 2), (0, 0, 0, n), value=-1))
        return {"pixel_values": torch.stack(merged), "image_position_ids": torch.stack(places)}


def in_sections(rope: Any, waves: Any) -> Any:
    """Convert [axes, 1, n, pairs] to [1, n, 2 * pairs]: each section of pairs rotates by a separate axis.

    transformers 5.24 splits the doubled row instead, so that the two values of a pair rotate by different axes, which
    is not a rotation.  HunyuanOCR's code and llama.cpp agree with this function.
    """
    parts = [part[i] for i, part in enumerate(waves.split(rope.mrope_section, dim=-1))]
    return torch.cat(2 * parts, dim=-1)


def make(name: str, folder: Path) -> Any:
    """Return the model of a family, saved in a folder with its files, model.gguf and mmproj.gguf."""
    family = FAMILIES[name]
    torch.manual_seed(len(name))
    libraries = minicpmv, mobilenetv5, released, transformers
    library = next(each for each in libraries if hasattr(each, family.model))
    config = getattr(library, family.config)(**{"image_token_id": 7} | family.settings)
    model = getattr(library, family.model)(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():
            if key.endswith(("_min", "_max")):  # bounds that clip some values
                buffer.fill_(-2.0 if key.endswith("_min") else 1.5)
            elif key.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
            elif ".std_" in key:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    if name == "hunyuanvl":
        import_module(
            "transformers.models.hunyuan_vl.modeling_hunyuan_vl"
        ).HunYuanVLRotaryEmbedding.recomposition_frequencies = in_sections
    if name == "llama4":  # transformers 5.24 expects the text model's result
        transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    model.save_pretrained(folder)
    processor_of(name).save_pretrained(folder)
    if family.release is not None:
        family.release(folder)
    write_tokenizer(folder, 300)
    for checkpoint, file in ((Checkpoint(folder), "model.gguf"), (MmprojCheckpoint(folder), "mmproj.gguf")):
        list(run(plan(checkpoint, folder / file, "F32" if file == "model.gguf" else None)))
    return model
