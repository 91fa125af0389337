"""Names of settings that change nothing in a converted file, with any value.

`CheckpointSettings.check_all_read` refuses every other setting that the conversion does not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable

#: Settings of training, memory, generation and other programs, and of biases and norms that the tensors show.
_GENERAL = """
    adapt add_bias_linear add_classification_head add_qkv_bias allow_global_per_layer_attribute_access
    architectures attention_bias attention_out_bias attention_softmax_in_fp32 attn_bias attn_impl
    attn_implementation attn_layer_indices attn_type_list auto_map bad_words_ids base_model batch_size
    begin_suppress_tokens bf16 bias bilinear_pooling block_dim block_norm_eps block_use_xavier_init bos_token
    cache_implementation calc_logits_for_entire_prompt capacity_factor chunk_size chunk_size_feed_forward
    cla_share_factor class_num classifier_activation classifier_bias compression_config compression_ratio
    continuous_training conv_bias conv_dim conv_dim_out conv_use_xavier_init custom_pipelines d_inner
    decoder_bias dense_list dense_seq_output diversity_penalty do_sample dtype early_stopping
    enable_audio_output enable_lm_head_fp32 enable_moe_fp32_combine enable_talker encoder_no_repeat_ngram_size
    eos_token ep_size exponential_decay_length_penalty finetuning_task flash_attention for_llm_compressor fp16
    fp32 fp32_residual_connection freeze_mm_mlp_adapter freeze_mm_vision_resampler fused_add_norm fused_bias_fc
    fused_qkv gradient_checkpointing gradient_checkpointing_kwargs group_limited_greedy has_no_defaults_at_init
    hidden_bias hub_model_id id2label ignore_index ignored_index inference_runner initial_context_length
    is_composition is_encoder_decoder is_llama_config keys_to_ignore_at_inference kv_channels label2id language
    layer_norm_eps_init layer_norm_type learnable_sink_init length_penalty lm_head_bias load_balance_coeff
    logits_to_keep low_cpu_mem_usage mamba_chunk_size mamba_conv_bias mamba_dt_init_floor mamba_dt_max
    mamba_dt_min mamba_num_groups mamba_proj_bias mask_init_id mask_token masked_softmax_fusion max_batch_size
    max_length max_sequence_length max_trained_positions min_length mlp_bias mlp_expansion_factor mlp_fc1_bias
    mlp_fc2_bias model_type moe_drop_tokens moe_layer_recompute moe_random_routing_dropped_token
    moe_router_enable_expert_bias mup_denominator n_ctx n_inputs name_or_path neftune_noise_alpha no_bias
    no_repeat_ngram_size norm_before_gate norm_bias num_beam_groups num_beams num_experts_per_group
    num_key_value_groups num_labels num_logits_to_keep num_mtp_layers num_mtp_modules num_nextn_predict_layers
    num_return_sequences num_vocab onnx_safe org_vocab_size output_attentions output_hidden_states output_past
    output_router_logits output_scores pack_qkv pad_id pad_key_length pad_token pad_vocab_size_multiple
    padded_vocab_size perceiver_config pixel_shuffle_factor pool_type pooler_type position_id_per_seconds
    pre_allocate_kv_cache prefix pretraining_tp problem_type pruned_heads qk_layernorm qk_norm_type qkv_bias
    qkv_proj_bias quantization_config reference_compile remove_invalid_values reorder_and_upcast_attn
    repad_logits_with_grad repetition_penalty rescale_every rescale_prenorm_residual residual_in_fp32
    return_dict return_dict_in_generate rms_norm rope_is_neox_style routed_scaling router_bias
    runner_max_sequence_length scale_attention_softmax_in_fp32 seconds_per_chunk seq_aux seq_length
    shared_moe_mode skip_bias_add skip_bias_add_qkv slow_but_exact softmax_in_fp32 sparse_pred_ignore_index
    sparse_prediction ssm_cfg static_cache suppress_tokens task_specific_params temperature text_end_id
    text_start_id tf_legacy_loss tie_embedding tie_encoder_decoder tie_word_embeddings time_step_floor
    time_step_limit time_step_max time_step_min time_step_scale token_classification_bias tokenizer_class
    tokenizer_model_max_length tokenizer_name tokenizer_padding_side top_k top_p torch_compile torchscript
    transformers.js_config transformers_version tune_mm_mlp_adapter tune_mm_vision_resampler typical_p
    unfreeze_mm_vision_tower unk_token unpadded_vocab_size use_3d_rope use_associative_scan use_bfloat16
    use_bias use_cache use_cache_kernel use_cache_quantization use_conv_bias use_dynamic_ntk
    use_embedding_sharing use_expert_bias use_falcon_mambapy use_flash_attention use_flash_attention_2
    use_fused_cross_entropy use_fused_mlp use_fused_rms_norm use_fused_rope use_grouped_mm use_grouped_topk
    use_liger use_logn_attn use_mamba_kernels use_mambapy use_mem_eff_path use_mlp_bias use_mm_proj use_mrope
    use_mtp use_parallel_embedding use_qkv_bias use_reentrant_checkpointing use_return_dict use_rmsnorm
    use_routing_bias use_unpad use_xentropy validate_runner_input verbose version vocab_size
    vocab_size_per_layer_input weight_share_add_bias
"""
_GENERAL_PATTERN = (
    r"_.*|.*dropout.*|.*_pdrop|.*layerdrop|.*initializer.*|.*init_(range|std|scheme|method|value|scale)"
    r"|init_(std|config|device)|.*_token_(ids?|index)|.*aux_loss.*|.*_loss_(coef|weight|function)|.*jitter.*"
    r"|mtp_.*|.*_dtype|layernorm_\w+_(alpha|beta)|summary_.*|unsloth_.*|.*flash_attn.*|fuse_.*"
)
#: Settings of encoders of images and audio, outside of their section.
_MEDIA = """
    batch_3d_resampler batch_vision_input downsample_mode drop_vision_last_layer im_end_id im_newline_id
    im_start_id init_audio init_tts init_vision insert_layer_id max_num_patches max_slice_nums merge_kernel_size
    min_num_patches multimodal_projector_bias num_media_embeds patch_size projector_bias projector_hidden_act
    projectors_bias query_num resampler_attn_implementation s2_scales scale_resolution slice_config slice_mode
    spatial_merge_size use_image_id use_s2 visual
"""
_MEDIA_PATTERN = r"(audio|image|mm|sound|speech|video|vision)_.*"


def _matcher(names: str, pattern: str) -> Callable[[str], object]:
    """Return a function whose result is true for ``names`` and for names that match ``pattern``."""
    return re.compile("|".join([*map(re.escape, names.split()), pattern])).fullmatch


_is_general = _matcher(_GENERAL, _GENERAL_PATTERN)
#: Whether a setting outside of an encoder's section is one of encoders.
is_media = _matcher(_MEDIA, _MEDIA_PATTERN)


def is_irrelevant(name: str) -> bool:
    """Return whether a setting changes nothing in the file of a text model."""
    return bool(_is_general(name) or is_media(name))


def is_irrelevant_to_encoder(name: str) -> bool:
    """Return whether a setting of an encoder or of the fused model changes nothing in the encoder's file."""
    return bool(_is_general(name)) or name.startswith("video_")


#: Settings of processors: form and place of the results, texts of the prompt, number of placeholders, and videos. An
#: image processor may share its file with the processor of audio.
_PROCESSOR = """
    auto_map chat_template config_type data_format default_to_square device disable_grouping do_convert_rgb
    do_sample_frames feature_extractor_type fps im_end im_id_end im_id_start im_start image_feature_size
    image_processor_type image_seq_len image_seq_length in_patch_limit_each_frame in_patch_limit_video
    input_data_format max_frames max_num_frames_each_video min_frames num_additional_image_tokens num_frames
    pad_size processor_class return_metadata return_row_col_info return_tensors sample_fps size_divisor slice_end
    slice_start temporal_conv_size temporal_merge_kernel_size timestamp_mode tokenizer_class transformers_version
    unk version
"""
_PROCESSOR_PATTERN = r"_.*|video.*|.*_token"
#: Settings of processors of audio: padding of batches, and lengths that follow from the encoder.
_AUDIO_PROCESSOR = """
    chunk_length max_length n_samples nb_max_frames padding padding_side padding_value return_attention_mask
    truncation
"""
#: Whether a setting of a processor changes nothing in the encoder's file.
is_irrelevant_to_processor = _matcher(_PROCESSOR + _AUDIO_PROCESSOR, _PROCESSOR_PATTERN)
