"""Names from other libraries, mainly llama-cpp-python, with advice for their replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

_BY_ITSELF = "localllm sees to it by itself: leave it out"
_IN_THE_FILE = "it is read from the file: leave it out"
_NOT_HERE = "this version of localllm has nothing like it"


def split_names(advice: Mapping[str, T]) -> dict[str, T]:
    """Return a mapping with one entry per name in a key."""
    return {name: value for names, value in advice.items() for name in names.split()}


#: Keywords that `localllm.load` does not have.
THEIR_LOAD = split_names(
    {
        "model_path model": "it is the first argument of load, or path=",
        "n_ctx": "write context=; the default is as many as the model was trained on, or as fit in memory",
        "n_threads": "write threads=",
        "n_threads_batch": "threads= holds for the prompt too: leave it out",
        "n_batch n_ubatch use_mmap use_mlock numa flash_attn offload_kqv op_offload swa_full no_perf": _BY_ITSELF,
        "type_k type_v": "write cache_type='q8_0', or 'q8_0/q4_0' for keys and values",
        "main_gpu": "write device='cuda:1' for the second GPU",
        "chat_format chat_handler": "the file's own chat template is used, or the source in chat_template=",
        "seed last_n_tokens_size": "give seed= and repeat_last_n= to generate or chat",
        "logits_all": "generate(logprobs=...) and LLM.logits need no such switch: leave it out",
        "verbose": "nothing is printed but warnings, the rest goes to logging.getLogger('localllm'): leave it out",
        "rope_scaling_type rope_freq_base rope_freq_scale yarn_orig_ctx": _IN_THE_FILE,
        "yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow": _IN_THE_FILE,
        "torch_dtype dtype quantization quantization_config load_in_4bit load_in_8bit": (
            "the file has its types, and localllm quantize writes others: leave it out"
        ),
        "device_map gpu": "write device=",
        "num_ctx max_seq_len max_model_len context_length": "write context=",
        "num_thread": "write threads=",
        "temperature top_k top_p max_tokens stop": "give it to generate or chat",
        "embedding pooling_type": "a file of a model that embeds says so: call embed",
        "lora_path lora_base lora_scale": "write adapters={'name': path}, and adapters={'name': 0.8} in each call",
        "vocab_only kv_overrides tokenizer": _NOT_HERE,
    }
)

#: Keywords that `LLM.generate` and `LLM.chat` do not have.
THEIR_OPTIONS = split_names(
    {
        "temp": "write temperature=",
        "n_predict max_new_tokens max_length num_predict max_completion_tokens": "write max_tokens=",
        "stream": "call stream or stream_chat, which give chunks as they come",
        "echo return_full_text": "the prompt is never part of the text: leave it out",
        "stop_sequences stop_strings": "write stop=",
        "repetition_penalty": "write repeat_penalty=",
        "mirostat_mode": "write mirostat=",
        "logits_processor": "write processors=, a tuple of functions",
        "top_logprobs": "write logprobs=, with that number",
        "do_sample": "temperature=0 always takes the likeliest token",
        "response_format format guided_json": "write json_schema=, with the schema; {'type': 'object'} is any object",
        "guided_regex": "write regex=",
        "guided_grammar": "write grammar=",
        "num_return_sequences n best_of": "give the prompt so many times to generate_many",
        "system system_prompt": "begin the messages with {'role': 'system', 'content': ...}",
        "messages": "call chat, or stream_chat for chunks, with the messages as its first argument",
        "enable_thinking think": "give template_variables={'enable_thinking': ...} to chat",
        "options": "give each option as a keyword",
        "model": "the model is the one that was loaded: leave it out",
        "num_ctx n_ctx context": "give context= to localllm.load",
        "pad_token_id eos_token_id bos_token_id": _IN_THE_FILE,
        "keep_alive use_cache": _BY_ITSELF,
        "loop": "a stream can be read in any event loop: leave it out",
        "suffix tfs_z stopping_criteria functions tool_choice images num_beams": _NOT_HERE,
    }
)

_CHAT = "LLM.chat, or LLM.stream_chat for chunks"
_OR_COMPAT = ", or localllm.compat.Llama in place of llama_cpp.Llama"

#: Attributes that `localllm.LLM` does not have.
THEIR_METHODS = split_names(
    {
        "create_completion": f"LLM.generate, or LLM.stream for chunks{_OR_COMPAT}",
        "create_chat_completion": f"{_CHAT}{_OR_COMPAT}",
        "complete completion predict invoke prompt ask run": f"LLM.generate, or {_CHAT}",
        "chat_stream chat_completion stream_completion generate_chat": _CHAT,
        "generate_stream stream_generate generate_streaming": "LLM.stream",
        "chat_many batch generate_batch create_many": "LLM.generate_many, which takes chats too",
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
        "set_cache save_state load_state": "LLM.generate: what prompts have in common is kept by itself",
        "embeddings create_embedding encode_embeddings": "LLM.embed",
    }
)

#: Attributes that `localllm.Completion` does not have.
THEIR_RESULTS = split_names(
    {
        "content message choices response generated_text outputs": "Completion.text",
        "tokens token_ids": "Completion.ids",
        "stop_reason done_reason": "Completion.finish_reason",
        "json dict model_dump": "Completion.to_dict()",
    }
)

#: Attributes that the module does not have.
THEIR_NAMES = split_names(
    {
        "Llama": "localllm.compat.Llama, or localllm.load",
        "LlamaGrammar": "localllm.compat.LlamaGrammar, or grammar= of LLM.generate",
        "Model AutoModel AutoModelForCausalLM pipeline Client load_model from_pretrained": "localllm.load",
        "generate chat stream complete": "localllm.load() and the LLM that it gives",
        "AsyncStream": "localllm.Stream, which is for async for too",
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
