"""Names from other libraries, mainly llama-cpp-python, with advice for their replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

_BY_ITSELF = "localllm does this automatically: remove the argument"
_IN_THE_FILE = "the value is read from the file: remove the argument"
_NOT_HERE = "localllm has no equivalent"


def split_names(advice: Mapping[str, T]) -> dict[str, T]:
    """Return a mapping with one entry per name in a key."""
    return {name: value for names, value in advice.items() for name in names.split()}


#: Advice for keywords of other libraries in calls of `localllm.load`.
THEIR_LOAD = split_names(
    {
        "model_path model": "pass it as the first argument of load, or as path=",
        "n_ctx": "write context=; the default is the training context, or less if memory is short",
        "n_threads": "write threads=",
        "n_threads_batch": "threads= applies to the prompt too: remove the argument",
        "n_batch n_ubatch use_mmap use_mlock numa flash_attn offload_kqv op_offload swa_full no_perf": _BY_ITSELF,
        "type_k type_v": "write cache_type='q8_0', or 'q8_0/q4_0' for keys and values",
        "main_gpu": "write device='cuda:1' for the second GPU",
        "chat_format chat_handler": "the template of the file is used; chat_template= replaces it",
        "seed last_n_tokens_size": "pass seed= and repeat_last_n= to generate or chat",
        "logits_all": "generate(logprobs=...) and LLM.logits need no switch: remove the argument",
        "verbose": "only warnings are printed, other messages are sent to logging.getLogger('localllm'): remove it",
        "rope_scaling_type rope_freq_base rope_freq_scale yarn_orig_ctx": _IN_THE_FILE,
        "yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow": _IN_THE_FILE,
        "torch_dtype dtype quantization quantization_config load_in_4bit load_in_8bit": (
            "the types are in the file; localllm quantize changes them: remove the argument"
        ),
        "device_map gpu": "write device=",
        "num_ctx max_seq_len max_model_len context_length": "write context=",
        "num_thread": "write threads=",
        "temperature top_k top_p max_tokens stop": "pass it to generate or chat",
        "embedding pooling_type": "the file determines this: call embed",
        "lora_path lora_base lora_scale": "write adapters={'name': path}, and adapters={'name': 0.8} in calls",
        "vocab_only kv_overrides tokenizer": _NOT_HERE,
    }
)

#: Advice for keywords of other libraries in calls of `LLM.generate` and `LLM.chat`.
THEIR_OPTIONS = split_names(
    {
        "temp": "write temperature=",
        "n_predict max_new_tokens max_length num_predict max_completion_tokens": "write max_tokens=",
        "stream": "call stream or stream_chat, which yield chunks during the generation",
        "echo return_full_text": "the text never contains the prompt: remove the argument",
        "stop_sequences stop_strings": "write stop=",
        "repetition_penalty": "write repeat_penalty=",
        "mirostat_mode": "write mirostat=",
        "top_logprobs": "write logprobs=, with the number of tokens",
        "do_sample": "temperature=0 always selects the likeliest token",
        "response_format format guided_json": "write json_schema=, with the schema; {'type': 'object'} is any object",
        "guided_regex": "write regex=",
        "guided_grammar": "write grammar=",
        "num_return_sequences n best_of": "pass a list with n copies of the prompt to generate_many",
        "system system_prompt": "start the messages with {'role': 'system', 'content': ...}",
        "messages": "call chat, or stream_chat for chunks, with the messages as its first argument",
        "enable_thinking think": "pass template_variables={'enable_thinking': ...} to chat",
        "options": "pass each option as a keyword",
        "model": "an LLM is one loaded model: remove the argument",
        "num_ctx n_ctx context": "pass context= to localllm.load",
        "pad_token_id eos_token_id bos_token_id": _IN_THE_FILE,
        "keep_alive use_cache": _BY_ITSELF,
        "loop": "a stream works in any event loop: remove the argument",
        "suffix tfs_z stopping_criteria functions tool_choice images num_beams": _NOT_HERE,
    }
)

_CHAT = "LLM.chat, or LLM.stream_chat for chunks"
_OR_COMPAT = ", or localllm.compat.Llama instead of llama_cpp.Llama"

#: Replacements for attributes of other libraries, on `localllm.LLM`.
THEIR_METHODS = split_names(
    {
        "create_completion": f"LLM.generate, or LLM.stream for chunks{_OR_COMPAT}",
        "create_chat_completion": f"{_CHAT}{_OR_COMPAT}",
        "complete completion predict invoke prompt ask run": f"LLM.generate, or {_CHAT}",
        "chat_stream chat_completion stream_completion generate_chat": _CHAT,
        "generate_stream stream_generate generate_streaming": "LLM.stream",
        "chat_many batch generate_batch create_many": "LLM.generate_many, which accepts chats too",
        "apply_chat_template": "LLM.tokenize_chat, or LLM.chat_template.render",
        "encode": "LLM.tokenize",
        "decode": "LLM.detokenize",
        "eval sample scores forward eval_logits": "LLM.logits",
        "n_ctx context context_length": "LLM.info.context",
        "n_vocab vocab_size": "LLM.info.n_vocab",
        "n_embd hidden_size": "LLM.info.config.n_embd",
        "config": "LLM.info.config",
        "metadata": "localllm.GGUFFile.open(LLM.info.path).metadata",
        "model_path path name": "LLM.info",
        "device": "LLM.info.device; it is chosen by localllm.load(device=...)",
        "to cuda cpu half": "localllm.load(device=...)",
        "token_bos bos_token_id bos_id": "LLM.tokenizer.bos_id",
        "token_eos eos_token_id eos_id": "LLM.tokenizer.eos_id",
        "reset": "LLM.forget",
        "unload free": "LLM.close",
        "set_cache save_state load_state": "LLM.generate: common prefixes of prompts are cached automatically",
        "embeddings create_embedding encode_embeddings": "LLM.embed",
    }
)

#: Replacements for attributes of other libraries, on `localllm.Completion`.
THEIR_RESULTS = split_names(
    {
        "content message choices response generated_text outputs": "Completion.text",
        "tokens token_ids": "Completion.ids",
        "stop_reason done_reason": "Completion.finish_reason",
        "json dict model_dump": "Completion.to_dict()",
    }
)

#: Replacements for names of other libraries, in the module ``localllm``.
THEIR_NAMES = split_names(
    {
        "Llama": "localllm.compat.Llama, or localllm.load",
        "LlamaGrammar": "localllm.compat.LlamaGrammar, or grammar= of LLM.generate",
        "Model AutoModel AutoModelForCausalLM pipeline Client load_model from_pretrained": "localllm.load",
        "generate chat stream complete": "localllm.load() and the LLM that it returns",
        "AsyncStream": "localllm.Stream, which also supports async for",
        "AutoTokenizer": "LLM.tokenizer",
        "pull download": "the command localllm pull, or localllm.catalog.pull.pull",
        "list models list_models": "the command localllm models",
        "serve Server server_app": "the command localllm serve",
        "SamplingParams GenerationConfig": "localllm.Sampling, or keywords of LLM.generate",
    }
)


def no_attribute(owner: str, name: str, theirs: Mapping[str, str]) -> AttributeError:
    """Return the error for a missing attribute, with the replacement for an attribute of another library."""
    hint = f": use {theirs[name]}" if name in theirs else ""
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")
