"""Keys of released checkpoints' configuration files, by family of `tests.models.encoders.families` or architecture.

Sizes are left out where a tiny model has its own.  Processors' files are complete: a tiny model's file has these keys,
with its own values.  Other files have further keys besides a tiny model's.
"""

# ruff: noqa: E501, RUF005
from __future__ import annotations

from typing import Any

HALF = [0.5, 0.5, 0.5]
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
STEPS = {"do_normalize": True, "do_rescale": True, "do_resize": True, "rescale_factor": 0.00392156862745098}
#: What transformers 4.57 writes for processors that use torchvision.
FAST = dict.fromkeys(
    ("crop_size", "device", "disable_grouping", "do_center_crop", "do_pad", "input_data_format", "pad_size")
    + ("return_tensors",)
) | {"data_format": "channels_first", "default_to_square": True, "do_convert_rgb": True}
#: Settings of the base class, which transformers 4 wrote in sections.
BASE: dict[str, Any] = {
    "_attn_implementation_autoset": True, "_name_or_path": "", "add_cross_attention": False, "architectures": None,
    "bad_words_ids": None, "begin_suppress_tokens": None, "bos_token_id": None, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "decoder_start_token_id": None, "diversity_penalty": 0.0, "do_sample": False,
    "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "eos_token_id": None, "finetuning_task": None,
    "exponential_decay_length_penalty": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False, "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
    "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False, "prefix": None,
    "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1.0,
    "return_dict": True, "return_dict_in_generate": False, "sep_token_id": None, "suppress_tokens": None,
    "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False,
    "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torch_dtype": "bfloat16", "torchscript": False,
    "transformers_version": "4.46.0", "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
QWEN_PROCESSOR = CLIP | {
    "merge_size": 2, "patch_size": 14, "temporal_patch_size": 2, "image_processor_type": "Qwen2VLImageProcessor",
}  # fmt: skip
GLM_PROCESSOR = QWEN_PROCESSOR | {"do_rescale": True, "processor_class": "Glm4vProcessor", "size": {}}
CONFIG = {"torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "initializer_range": 0.02}
TOKENS = {"boi_token_index": 255, "eoi_token_index": 256, "eos_token_id": [1, 106], "image_token_index": 7}

#: By family: keys of config.json, of its sections, and of files.
IMAGES: dict[str, dict[str, dict[str, Any]]] = {
    "gemma3": {
        "config.json": CONFIG | TOKENS,
        "text_config": {"attn_logit_softcapping": None, "cache_implementation": "hybrid", "use_cache": True},
        "vision_config": {"attention_dropout": 0.0, "vision_use_head": False} | BASE,
        "preprocessor_config.json": STEPS
        | {"do_convert_rgb": None, "do_pan_and_scan": None, "image_mean": HALF, "image_std": HALF, "size": {}}
        | {"image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256, "resample": 2}
        | {"pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None}
        | {"pan_and_scan_min_ratio_to_activate": None, "processor_class": "Gemma3Processor"},
        "processor_config.json": {"image_seq_length": 256, "processor_class": "Gemma3Processor"},
        "generation_config.json": {"cache_implementation": "hybrid", "do_sample": True, "eos_token_id": [1, 106]}
        | {"pad_token_id": 0, "top_k": 64, "top_p": 0.95, "transformers_version": "4.50.0.dev0"},
        "tokenizer_config.json": {"add_bos_token": True, "add_eos_token": False, "boi_token": "<start_of_image>"}
        | {"clean_up_tokenization_spaces": False, "extra_special_tokens": {"image_token": "<image_soft_token>"}}
        | {"model_max_length": 1e30, "sp_model_kwargs": None, "spaces_between_special_tokens": False}
        | {"tokenizer_class": "GemmaTokenizer", "use_default_system_prompt": False, "processor_class": "x"},
    },
    "gemma4v": {
        "config.json": CONFIG | {"audio_token_id": 8, "boa_token_id": 9, "eoa_token_id": 10, "boi_token_id": 11},
        "vision_config": BASE | {"default_output_length": 280, "pooling_kernel_size": 3, "use_bidirectional_attention": None},
        "preprocessor_config.json": STEPS
        | {"do_convert_rgb": True, "do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
        | {"image_processor_type": "Gemma4ImageProcessor", "image_seq_length": 280, "max_soft_tokens": 280}
        | {"patch_size": 16, "pooling_kernel_size": 3, "resample": 3, "size": None},
        "processor_config.json": {"audio_ms_per_token": 40, "audio_seq_length": 750, "image_seq_length": 280}
        | {"processor_class": "Gemma4Processor", "video_processor": {"max_soft_tokens": 70}},
        "generation_config.json": {"do_sample": True, "eos_token_id": [1, 106, 50], "pad_token_id": 0, "top_k": 64}
        | {"suppress_tokens": [258, 259], "temperature": 1.0, "top_p": 0.95},
    },
    "glm4v": {
        "config.json": CONFIG | {"image_start_token_id": 8, "image_end_token_id": 9, "video_start_token_id": 10},
        "text_config": {"attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 0, "use_cache": True},
        "vision_config": {"attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "initializer_range": 0.02},
        "preprocessor_config.json": GLM_PROCESSOR | {"image_processor_type": "Glm4vImageProcessor"},
    },
    "hunyuanvl": {
        "config.json": CONFIG | {"im_start_id": 8, "im_end_id": 9, "im_newline_id": 10, "image_start_token_id": 11},
        "text_config": {"eod_token_id": 120, "org_vocab_size": 300, "sep_token_id": 0, "routed_scaling_factor": False},
        "vision_config": {"add_patchemb_bias": True, "attention_dropout": 0.0, "cat_extra_token": 1}
        | {"anyres_vit_max_image_size": None, "anyres_vit_two_views": False, "hidden_dropout": 0.0, "img_max_token_num": 4096}
        | {"interpolate_mode": "bilinear", "max_vit_seq_len": 16384, "vision_use_head": True, "img_max_size": None},
        "preprocessor_config.json": QWEN_PROCESSOR
        | {"min_pixels": 262144, "max_pixels": 4194304, "image_processor_type": "HunYuanVLImageProcessor"},
    },
    "idefics3": {
        "config.json": CONFIG | {"use_reentrant_checkpointing": False, "image_token_id": 7, "pad_token_id": 2},
        "text_config": {"_flash_attn_2_enabled": True, "is_llama_config": True, "neftune_noise_alpha": 0.0}
        | {"perceiver_config": BASE | {"hidden_act": "silu", "resampler_depth": 6}, "pixel_shuffle_factor": 4}
        | {"qk_layer_norms": False, "rope_interleaved": False, "use_resampler": False, "pretraining_tp": 1}
        | {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
        "vision_config": {"max_image_size": {"longest_edge": 56}, "size": {"longest_edge": 168}, "tie_word_embeddings": False}
        | {"use_base_siglip": False},
        "preprocessor_config.json": STEPS
        | {"do_convert_rgb": True, "do_image_splitting": True, "do_pad": True, "image_mean": HALF, "image_std": HALF}
        | {"image_processor_type": "Idefics3ImageProcessor", "max_image_size": {}, "processor_class": "Idefics3Processor"}
        | {"resample": 1, "size": {}, "video_sampling": {"fps": 1, "max_frames": 64}},
        "processor_config.json": {"image_seq_len": 64, "processor_class": "Idefics3Processor"},
        "generation_config.json": {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        "tokenizer_config.json": {"add_prefix_space": False, "truncation_side": "left", "legacy": False}
        | {"additional_special_tokens": ["<image>"], "processor_class": "Idefics3Processor", "vocab_size": 300},
    },
    "internvl": {
        "config.json": CONFIG,
        "text_config": BASE | {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False},
        "vision_config": {"attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "layer_scale_init_value": 0.7}
        | {"projection_dropout": 0.0, "use_mask_token": False, "initializer_factor": 0.1},
        "preprocessor_config.json": STEPS
        | FAST
        | {"crop_to_patches": False, "image_mean": HALF, "image_std": HALF, "max_patches": 12, "min_patches": 1}
        | {"image_processor_type": "GotOcr2ImageProcessorFast", "processor_class": "InternVLProcessor", "resample": 3}
        | {"size": {}},
        "processor_config.json": {"image_seq_length": 256, "processor_class": "InternVLProcessor"},
    },
    "kimik25": {
        "config.json": CONFIG
        | {"auto_map": {"AutoConfig": "x"}, "ignore_index": -100, "media_placeholder_token_id": 7}
        | {"use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>"},
        "vision_config": {"_attn_implementation": "flash_attention_2", "merge_type": "sd2_tpool", "mm_hidden_size": 72}
        | {"mm_projector_type": "patchmerger", "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu"}
        | {"projector_ln_eps": 1e-05, "text_hidden_size": 48, "video_attn_type": "spatial_temporal"},
    },
    "lfm2": {
        "config.json": CONFIG
        | {"do_image_splitting": True, "encoder_patch_size": 16, "max_image_tokens": 256, "max_num_patches": 1024}
        | {"max_pixels_tolerance": 2.0, "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2, "tile_size": 512}
        | {"use_image_special_tokens": True, "use_thumbnail": True, "vision_feature_layer": -1},
        "vision_config": {"attention_dropout": 0.0, "vision_use_head": False, "num_patches": 16},
        "preprocessor_config.json": STEPS
        | FAST
        | {"do_image_splitting": True, "downsample_factor": 2, "encoder_patch_size": 16, "image_mean": HALF}
        | {"image_std": HALF, "image_processor_type": "Lfm2VlImageProcessorFast", "max_image_tokens": 256}
        | {"max_num_patches": 1024, "max_pixels_tolerance": 2.0, "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2}
        | {"processor_class": "Lfm2VlProcessor", "resample": 2, "return_row_col_info": True, "size": {}, "tile_size": 512}
        | {"use_thumbnail": True, "do_pad": True},
    },
    "llama4": {
        "config.json": CONFIG | {"boi_token_index": 8, "eoi_token_index": 9, "image_token_index": 7},
        "text_config": {"attention_dropout": 0.0, "for_llm_compressor": False, "output_router_logits": False}
        | {"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_cache": True, "attn_temperature_tuning": 4},
        "vision_config": {"attention_dropout": 0.0, "projector_dropout": 0.0, "vision_feature_layer": -1}
        | {"multi_modal_projector_bias": False, "initializer_range": 0.02, "vision_feature_select_strategy": "default"},
        "preprocessor_config.json": STEPS
        | FAST
        | {"image_mean": HALF, "image_std": HALF, "image_processor_type": "Llama4ImageProcessorFast", "max_patches": 16}
        | {"processor_class": "Llama4Processor", "resample": 2, "resize_to_max_canvas": False, "size": {}},
        "processor_config.json": {"fake_image_token": "<|image|>", "image_token": "<|image|>", "patch_size": 14},
        "generation_config.json": {"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 260], "temperature": 0.6},
    },
    "mlp": {
        "config.json": {"ignore_index": -100, "image_token_index": 7, "pad_token_id": 0, "projector_hidden_act": "gelu"}
        | {"tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 300},
        "text_config": {"_name_or_path": "lmsys/vicuna-7b-v1.5", "torch_dtype": "float16", "vocab_size": 300},
        "vision_config": {"projection_dim": 768, "vocab_size": 32000} | BASE,
        "preprocessor_config.json": STEPS
        | CLIP
        | {"crop_size": {}, "do_center_crop": True, "do_convert_rgb": True, "image_processor_type": "CLIPImageProcessor"}
        | {"processor_class": "LlavaProcessor", "resample": 3, "size": {}},
        "processor_config.json": {"image_token": "<image>", "num_additional_image_tokens": 1, "patch_size": 14}
        | {"processor_class": "LlavaProcessor", "vision_feature_select_strategy": "default"},
    },
    "mlp 1.6": {
        "config.json": {"ignore_index": -100, "image_token_index": 7, "use_image_newline_parameter": True},
        "preprocessor_config.json": STEPS
        | CLIP
        | {"aspect_ratio_setting": "anyres", "crop_size": {}, "do_center_crop": True, "do_convert_rgb": True}
        | {"image_grid_pinpoints": [], "image_processor_type": "LlavaNextImageProcessor", "resample": 3, "size": {}}
        | {"processor_class": "LlavaNextProcessor", "do_pad": True},
    },
    "paddleocr": {
        "config.json": CONFIG
        | {"auto_map": {"AutoConfig": "x"}, "compression_ratio": 1.0, "head_dim": 12, "ignored_index": -100}
        | {"rope_is_neox_style": True, "sliding_window": None, "use_3d_rope": True, "use_bias": False}
        | {"use_flash_attention": False, "vision_start_token_id": 8, "weight_share_add_bias": True},
        "vision_config": {"auto_map": {}, "pad_token_id": 0, "tokens_per_second": 2, "temporal_patch_size": 2} | BASE,
        "preprocessor_config.json": STEPS
        | {"auto_map": {}, "do_convert_rgb": True, "image_mean": HALF, "image_std": HALF, "merge_size": 2}
        | {"image_processor_type": "SiglipImageProcessor", "max_pixels": 2822400, "min_pixels": 147384, "patch_size": 14}
        | {"processor_class": "PaddleOCRVLProcessor", "resample": 3, "temporal_conv_size": 1, "temporal_patch_size": 1},
    },
    "pixtral": {
        "config.json": CONFIG | {"image_token_index": 7, "multimodal_projector_bias": False},
        "text_config": {"attention_dropout": 0.0, "sliding_window": None, "use_cache": True},
        "vision_config": {"attention_dropout": 0.0, "initializer_range": 0.02, "is_composition": True},
        "preprocessor_config.json": STEPS
        | CLIP
        | {"do_convert_rgb": True, "image_processor_type": "PixtralImageProcessorFast", "patch_size": {}, "resample": 3}
        | {"processor_class": "PixtralProcessor", "size": {}},
        "processor_config.json": {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
        | {"image_token": "[IMG]", "patch_size": 14, "processor_class": "PixtralProcessor", "spatial_merge_size": 2},
    },
    "qwen2.5vl_merger": {
        "config.json": CONFIG | {"vision_start_token_id": 8, "vision_end_token_id": 9, "vision_token_id": 10},
        "text_config": {"max_window_layers": 28, "sliding_window": 32768, "use_sliding_window": False},
        "vision_config": {"in_chans": 3, "spatial_patch_size": 14, "tokens_per_second": 2},
        "preprocessor_config.json": QWEN_PROCESSOR
        | {"min_pixels": 3136, "max_pixels": 12845056, "processor_class": "Qwen2_5_VLProcessor"},
        "generation_config.json": {"attn_implementation": "flash_attention_2", "do_sample": True, "pad_token_id": 0}
        | {"repetition_penalty": 1.05, "temperature": 1e-06},
        "tokenizer_config.json": {"add_prefix_space": False, "split_special_tokens": False, "errors": "replace"}
        | {"clean_up_tokenization_spaces": False, "add_bos_token": False, "model_max_length": 131072, "unk_token": None},
    },
    "qwen2vl_merger": {
        "config.json": CONFIG | {"vision_start_token_id": 8, "vision_end_token_id": 9, "vision_token_id": 10},
        "text_config": {"max_window_layers": 28, "sliding_window": 32768, "use_sliding_window": False},
        "vision_config": {"in_chans": 3, "spatial_patch_size": 14},
        "preprocessor_config.json": QWEN_PROCESSOR
        | {"min_pixels": 3136, "max_pixels": 12845056, "processor_class": "Qwen2VLProcessor"},
    },
    "qwen3vl_merger": {
        "config.json": CONFIG | {"vision_start_token_id": 8, "vision_end_token_id": 9, "video_token_id": 10},
        "text_config": {"attention_bias": False, "attention_dropout": 0.0, "use_cache": True},
        "vision_config": {"initializer_range": 0.02},
        "preprocessor_config.json": QWEN_PROCESSOR
        | {"image_mean": HALF, "image_std": HALF, "size": {}, "processor_class": "Qwen3VLProcessor"}
        | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "generation_config.json": {"do_sample": True, "eos_token_id": [2, 260], "repetition_penalty": 1.0, "top_k": 20},
    },
    "resampler": {
        "config.json": CONFIG
        | {"auto_map": {}, "batch_vision_input": True, "image_size": 448, "slice_mode": True, "use_image_id": True}
        | {"slice_config": {"max_slice_nums": 9, "model_type": "minicpmv", "patch_size": 14}, "vision_batch_size": 16}
        | {"batch_3d_resampler": True, "resampler_attn_implementation": None, "drop_vision_last_layer": False},
        "vision_config": {"attention_dropout": 0.0, "model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh"},
        "preprocessor_config.json": {
            "auto_map": {}, "image_processor_type": "MiniCPMVImageProcessor", "processor_class": "MiniCPMVProcessor",
            "max_slice_nums": 9, "scale_resolution": 448, "patch_size": 14, "use_image_id": True, "slice_mode": True,
            "image_feature_size": 64, "im_start": "<image>", "im_end": "</image>", "slice_start": "<slice>",
            "slice_end": "</slice>", "unk": "<unk>", "im_id_start": "<image_id>", "im_id_end": "</image_id>",
            "norm_mean": HALF, "norm_std": HALF, "version": 2.6,
        },
    },
}  # fmt: skip

#: By architecture: keys of config.json and of files.
TEXTS: dict[str, dict[str, dict[str, Any]]] = {
    "bloom": {
        "config.json": {"apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "hidden_dropout": 0.0}
        | {"attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True, "n_inner": None}
        | {"offset_alibi": 100, "pretraining_tp": 2, "skip_bias_add": True, "skip_bias_add_qkv": False, "seq_length": 2048}
        | {"slow_but_exact": False, "unk_token_id": 0, "torch_dtype": "float16", "use_cache": True},
    },
    "command-r": {
        "config.json": CONFIG
        | {"attention_bias": False, "attention_dropout": 0.0, "use_qk_norm": False},
    },
    "deepseek-v2": {
        "config.json": CONFIG
        | {"attention_bias": False, "attention_dropout": 0.0, "auto_map": {}, "aux_loss_alpha": 0.001, "ep_size": 1}
        | {"moe_layer_freq": 1, "pretraining_tp": 1, "seq_aux": True, "scoring_func": "softmax"},
    },
    "deepseek-v3": {
        "config.json": CONFIG
        | {"attention_bias": False, "attention_dropout": 0.0, "auto_map": {}, "ep_size": 1, "moe_layer_freq": 1}
        | {"num_nextn_predict_layers": 0, "pretraining_tp": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | {"quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}},
    },
    "ernie4_5": {
        "config.json": CONFIG
        | {"compression_ratio": 1.0, "fuse_swiglu": True, "rope_scaling": None, "use_flash_attention": True, "use_bias": False}
        | {"head_dim": 16, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    },
    "falcon": {
        "config.json": CONFIG
        | {"alibi": False, "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "bias": False}
        | {"auto_map": {}, "hidden_dropout": 0.0, "parallel_attn": True},
    },
    "gemma2": {
        "config.json": CONFIG
        | {"attention_dropout": 0.0, "cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}
        | {"sliding_window_size": 4096},
    },
    "gemma3": {
        "config.json": CONFIG | {"attn_logit_softcapping": None, "cache_implementation": "hybrid", "use_cache": True}
        | {"final_logit_softcapping": None, "_sliding_window_pattern": 6, "use_bidirectional_attention": False},
    },
    "glm4moe": {
        "config.json": CONFIG | {"attention_dropout": 0.0, "num_nextn_predict_layers": 0, "pad_token_id": 0},
    },
    "gpt-oss": {
        "config.json": CONFIG
        | {"attention_dropout": 0.0, "initial_context_length": 4096, "output_router_logits": False}
        | {"router_aux_loss_coef": 0.9, "swiglu_limit": 7.0, "pad_token_id": 0}
        | {"quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}},
    },
    "gpt2": {
        "config.json": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "n_ctx": 1024, "n_inner": None}
        | {"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True}
        | {"summary_type": "cls_index", "summary_use_proj": True, "reorder_and_upcast_attn": False}
        | {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
    },
    "gptneox": {
        "config.json": CONFIG | {"attention_dropout": 0.0, "classifier_dropout": 0.1, "hidden_dropout": 0.0},
    },
    "hunyuan-moe": {
        "config.json": CONFIG
        | {"add_classification_head": False, "class_num": 0, "cla_share_factor": 2, "dense_list": [48, 0]}
        | {"group_limited_greedy": False, "im_end_id": 5, "im_newline_id": 11, "im_start_id": 4, "mask_init_id": 12}
        | {"kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": None, "qk_rope_head_dim": None, "v_head_dim": None}
        | {"mlp_bias": False, "moe_drop_tokens": False, "moe_layer_num_skipped": 0, "n_group": None, "topk_group": None}
        | {"moe_random_routing_dropped_token": False, "norm_topk_prob": True, "num_media_embeds": 257, "pool_type": "last"}
        | {"position_embedding_xdrope": False, "routed_scaling_factor": 1.0, "skip_cls_token": False, "text_end_id": 7}
        | {"text_start_id": 6, "use_cla": False, "use_mixed_mlp_moe": True, "use_mla": False, "use_rotary_pos_emb": True},
    },
    "lfm2": {
        "config.json": CONFIG
        | {"block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0}
        | {"block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True}
        | {"block_use_xavier_init": True, "conv_dim_out": 64, "conv_use_xavier_init": True, "use_pos_enc": True},
    },
    "llama": {
        "config.json": CONFIG
        | {"_name_or_path": "meta-llama/Llama-2-7b-hf", "attention_bias": False, "attention_dropout": 0.0}
        | {"max_sequence_length": 2048, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None},
        "tokenizer_config.json": {"add_bos_token": True, "add_eos_token": False, "legacy": False, "padding_side": "left"}
        | {"clean_up_tokenization_spaces": False, "model_max_length": 1000000000000000019884624838656}
        | {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False}}
        | {"sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizer", "pad_token": None},
        "generation_config.json": {"do_sample": True, "max_length": 4096, "pad_token_id": 0, "temperature": 0.6}
        | {"top_p": 0.9, "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.32.0.dev0"},
    },
    "mixtral": {
        "config.json": CONFIG
        | {"attention_dropout": 0.0, "output_router_logits": False, "router_aux_loss_coef": 0.02, "sliding_window": None},
    },
    "mpt": {
        "config.json": {"embedding_fraction": 1.0, "init_device": "cpu", "logit_scale": None, "no_bias": True, "verbose": 0}
        | {"init_config": {"emb_init_std": None, "init_nonlinearity": "relu", "name": "kaiming_normal_", "verbose": 0}}
        | {"norm_type": "low_precision_layernorm", "tokenizer_name": "EleutherAI/gpt-neox-20b", "use_cache": False}
        | {"emb_pdrop": 0, "resid_pdrop": 0, "learned_pos_emb": True, "torch_dtype": "bfloat16"},
    },
    "olmoe": {
        "config.json": CONFIG
        | {"attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None, "output_router_logits": False}
        | {"rope_scaling": None, "router_aux_loss_coef": 0.01},
    },
    "phi2": {
        "config.json": CONFIG
        | {"attention_dropout": 0.0, "embd_pdrop": 0.0, "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None},
    },
    "qwen2": {
        "config.json": CONFIG
        | {"attention_dropout": 0.0, "max_window_layers": 21, "sliding_window": 32768, "use_mrope": False}
        | {"use_sliding_window": False},
    },
    "qwen2moe": {
        "config.json": CONFIG
        | {"attention_dropout": 0.0, "decoder_sparse_step": 1, "max_window_layers": 28, "mlp_only_layers": []}
        | {"output_router_logits": False, "router_aux_loss_coef": 0.001, "sliding_window": 32768}
        | {"use_sliding_window": False},
    },
    "qwen3next": {
        "config.json": CONFIG
        | {"attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1, "mlp_only_layers": []}
        | {"output_router_logits": False, "router_aux_loss_coef": 0.001, "use_sliding_window": False, "rope_scaling": None},
    },
    "stablelm": {
        "config.json": CONFIG
        | {"attention_dropout": 0.0, "hidden_dropout": 0.0, "norm_eps": 1e-05, "qk_layernorm": False, "rope_scaling": None},
    },
    "starcoder2": {
        "config.json": CONFIG
        | {"activation_function": "gelu", "attention_dropout": 0.1, "attention_softmax_in_fp32": True}
        | {"embedding_dropout": 0.1, "mlp_type": "default", "norm_type": "layer_norm", "residual_dropout": 0.1}
        | {"scale_attention_softmax_in_fp32": True, "scale_attn_weights": True},
    },
    "gemma": {
        "config.json": CONFIG | {"hidden_act": "gelu", "attention_dropout": 0.0},
        "generation_config.json": {"_from_model_config": True, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
    },
    "gemma3n": {
        "config.json": CONFIG | {"vocab_size_per_layer_input": 300, "cache_implementation": "hybrid"},
        "generation_config.json": {"cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95},
    },
    "glm4": {
        "config.json": CONFIG | {"attention_dropout": 0.0, "pad_token_id": 0},
        "generation_config.json": {"do_sample": True, "eos_token_id": [2, 260], "temperature": 0.8, "top_p": 0.8},
        "tokenizer_config.json": {"do_lower_case": False, "padding_side": "left", "remove_space": False}
        | {"clean_up_tokenization_spaces": False, "extra_special_tokens": {}},
    },
    "granite": {
        "config.json": CONFIG | {"attention_dropout": 0.1, "mlp_bias": False, "rope_scaling": None, "bos_token_id": 0},
        "generation_config.json": {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
        "tokenizer_config.json": {"add_prefix_space": False, "padding_side": "left", "vocab_size": 300, "errors": "replace"},
    },
    "phi3": {
        "config.json": CONFIG
        | {"auto_map": {}, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_dropout": 0.0, "full_attn_mod": 1}
        | {"interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "attention_bias": False, "partial_rotary_factor": 1.0},
        "generation_config.json": {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": [2, 260]},
        "tokenizer_config.json": {"add_bos_token": False, "legacy": False, "sp_model_kwargs": {}, "padding_side": "left"},
    },
}  # fmt: skip
