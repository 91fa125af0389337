"""Why tests of llama.cpp's server do not pass here: docs/serve.md has the same list for readers."""

from __future__ import annotations

from tests.benchmarks.llama_server_tests.server import NO_MODEL

_NO_MODEL = "needs a model that is not here"
_ROUTER = "needs llama-server's router, or tools that it runs itself"
_CORS = "is of CORS, or of llama-server's proxy"
#: Those that are not compared.
NOT_HERE = {_NO_MODEL, _ROUTER, _CORS}

_PARTS = "parts of a message are joined without a line end between them"
_TEMPLATE_NAMES = "--chat-template takes jinja2, or a name of localllm.chat.built_in_templates"
_ALWAYS_THERE = "/metrics and the page are there without a flag"
_ONE_CACHE = "there is one cache for all slots, of which all is saved, and prompts stay in it"
_UNSEEN = "a picture for a model that sees none is 400, not 500"
_TEXT_VECTORS = "vectors are made of texts alone"

#: Why tests fail or cannot run, by the beginnings of their names.
_BY_NAME = {
    "test_router::": _ROUTER,
    "test_mcp_servers::": _ROUTER,
    "test_tools_builtin::": _ROUTER,
    "test_stream::": _ROUTER,
    "test_proxy::": _CORS,
    "test_security::test_local_media_file": "no flag names a media folder: no client reads files of this machine",
    "test_security::test_cors": _CORS,
    "test_speculative::": _NO_MODEL,
    "test_lora::": _NO_MODEL,
    "test_chat_completion::test_chat_completion[None-Book-user_prompt": _PARTS,
    "test_ctx_shift::test_ctx_shift_disabled_short": "the last token of a full context is given, too",
    "test_ctx_shift::test_ctx_shift_enabled": "a text ends where the context is full: --context-shift is refused",
    "test_chat_completion::test_chat_completion[None-Book-What is the best book-8-^ blue": _TEMPLATE_NAMES,
    "test_chat_completion::test_chat_template": _TEMPLATE_NAMES,
    "test_chat_completion::test_chat_template_assistant_prefill[prefill1": _PARTS,
    "test_chat_completion::test_invalid_chat_completion_req[messages7": "two replies in a row are taken",
    "test_chat_completion::test_return_progress": "a prompt is evaluated in other batches",
    "test_metrics::test_metrics_disabled": _ALWAYS_THERE,
    "test_basic::test_no_ui": _ALWAYS_THERE,
    "test_security::test_access_static_assets": "the page is one file, and asks for the key as all else does",
    "test_slot_save::": _ONE_CACHE,
    "test_kv_keep_only_active::": _ONE_CACHE,
    "test_sleep::test_server_sleep_read_only": "/metrics says whether the model is loaded",
    "test_embedding::test_embedding_pooling_none": "vectors are pooled as the model's file says",
    "test_embedding::test_embedding_error_prompt_too_long": "an error has other words",
    "test_compat_oai_responses::test_responses_stream_with": "a response that is cut is incomplete, as with OpenAI",
    "test_compat_gcp::": "paths of Google's Vertex AI are not there",
    "test_compat_anthropic::test_anthropic_vision": _UNSEEN,
    "test_compat_anthropic::test_anthropic_tool_result_with_image": _UNSEEN,
    "test_vision_api::test_vision_embeddings": _TEXT_VECTORS,
    "test_compat_anthropic::test_anthropic_empty_messages": "a chat without messages is 400, as with Anthropic",
}


def reason_of(name: str, text: str) -> str | None:
    """Why a test failed; None if nobody knows."""
    if NO_MODEL in text:
        return _NO_MODEL
    found = [start for start in _BY_NAME if name.startswith(start)]
    return _BY_NAME[max(found, key=len)] if found else None
