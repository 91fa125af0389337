"""Names that users of other libraries try, above all of llama-cpp-python, and what to write in their place."""

from __future__ import annotations

from collections.abc import Mapping

_BY_ITSELF = "localllm sees to it by itself: leave it out"
_IN_THE_FILE = "it is read from the file: leave it out"
_NOT_HERE = "this version of localllm has nothing like it"


def _each(advice: Mapping[str, str]) -> Mapping[str, str]:
    """One entry for each of the names in a key."""
    return {name: text for names, text in advice.items() for name in names.split()}


#: Keywords that `localllm.load` does not have.
THEIR_LOAD = _each(
    {
        "model_path model": "it is the first argument of load, or path=",
        "n_ctx": "write context=, or leave it out for as many tokens as the model was trained on, at most 4,096",
        "n_threads": "write threads=",
        "n_threads_batch": "threads= holds for the prompt too: leave it out",
        "n_batch n_ubatch use_mmap use_mlock numa flash_attn offload_kqv op_offload swa_full no_perf": _BY_ITSELF,
        "type_k type_v": "write cache_type='f16' or 'q8_0', which holds for keys and values",
        "main_gpu": "write device='cuda:1' for the second GPU",
        "split_mode": "models are split by layers, see n_gpu_layers= and tensor_split=: leave it out",
        "chat_format chat_handler": "the file's own chat template is used, or the source in chat_template=",
        "seed last_n_tokens_size": "give seed= and repeat_last_n= to generate or chat",
        "logits_all": "generate(logprobs=...) and LLM.logits need no such switch: leave it out",
        "verbose": "nothing is printed but warnings, the rest goes to logging.getLogger('localllm'): leave it out",
        "rope_scaling_type rope_freq_base rope_freq_scale yarn_orig_ctx": _IN_THE_FILE,
        "yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow": _IN_THE_FILE,
        "embedding pooling_type lora_base lora_path lora_scale vocab_only kv_overrides tokenizer": _NOT_HERE,
    }
)

#: Keywords that `LLM.generate`, `LLM.chat` and their kin do not have.
THEIR_OPTIONS = _each(
    {
        "temp": "write temperature=",
        "n_predict max_new_tokens max_length num_predict max_completion_tokens": "write max_tokens=",
        "stream": "call stream or stream_chat, which give chunks as they come",
        "echo": "the prompt is never part of the text: leave it out",
        "stop_sequences stop_strings": "write stop=",
        "repetition_penalty": "write repeat_penalty=",
        "mirostat_mode": "write mirostat=",
        "logits_processor": "write processors=, a tuple of functions",
        "top_logprobs": "write logprobs=, with that number",
        "do_sample": "temperature=0 always takes the likeliest token",
        "response_format": "write json_schema=, with the schema",
        "suffix tfs_z stopping_criteria functions tool_choice": _NOT_HERE,
    }
)

#: Attributes that `localllm.LLM` does not have.
THEIR_METHODS = _each(
    {
        "create_completion __call__": "LLM.generate, or LLM.stream for chunks",
        "create_chat_completion": "LLM.chat, or LLM.stream_chat for chunks",
        "eval sample": "LLM.logits",
        "n_ctx": "LLM.info.context",
        "n_vocab": "LLM.info.n_vocab",
        "token_bos": "LLM.tokenizer.bos_id",
        "token_eos": "LLM.tokenizer.eos_id",
        "reset": "LLM.forget",
    }
)
