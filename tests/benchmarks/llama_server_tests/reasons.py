"""Reasons why tests of llama.cpp's server do not pass; docs/serve.md has the list for readers."""

from __future__ import annotations

from tests.benchmarks.llama_server_tests.server import NO_MODEL

_ROUTER = "needs llama-server's router, or its built-in tools"
_CORS = "tests CORS, or llama-server's proxy"
#: Reasons of tests that do not count.
NOT_HERE = {NO_MODEL, _ROUTER, _CORS}

_PARTS = "parts of a message are joined without a newline"
_TEMPLATE_NAMES = "--chat-template accepts jinja2, or a name of localllm.chat.built_in_templates"
_ALWAYS_THERE = "/metrics and the page need no flag"
_ONE_CACHE = "all slots share one cache, which is saved as a whole and keeps prompts"
_UNSEEN = "an image for a model without images is an error 400, not 500"
_TEXT_VECTORS = "only texts can be embedded"

#: Reasons why tests fail or cannot run, by prefix of their names.
_BY_NAME = {
    "test_router::": _ROUTER,
    "test_mcp_servers::": _ROUTER,
    "test_tools_builtin::": _ROUTER,
    "test_stream::": _ROUTER,
    "test_proxy::": _CORS,
    "test_security::test_local_media_file": "no flag names a media folder: clients cannot read files of this machine",
    "test_security::test_cors": _CORS,
    "test_speculative::": NO_MODEL,
    "test_lora::": NO_MODEL,
    "test_chat_completion::test_chat_completion[None-Book-user_prompt": _PARTS,
    "test_ctx_shift::test_ctx_shift_disabled_short": "the last token of a full context is returned, too",
    "test_ctx_shift::test_ctx_shift_enabled": "a text ends when the context is full; --context-shift is refused",
    "test_chat_completion::test_chat_completion[None-Book-What is the best book-8-^ blue": _TEMPLATE_NAMES,
    "test_chat_completion::test_chat_template": _TEMPLATE_NAMES,
    "test_chat_completion::test_chat_template_assistant_prefill[prefill1": _PARTS,
    "test_chat_completion::test_invalid_chat_completion_req[messages7": "two replies in a row are accepted",
    "test_chat_completion::test_return_progress": "prompts are evaluated in different batches",
    "test_metrics::test_metrics_disabled": _ALWAYS_THERE,
    "test_basic::test_no_ui": _ALWAYS_THERE,
    "test_security::test_access_static_assets": "the page is one file, and requires the key like all paths",
    "test_slot_save::": _ONE_CACHE,
    "test_kv_keep_only_active::": _ONE_CACHE,
    "test_sleep::test_server_sleep_read_only": "/metrics reports whether the model is loaded",
    "test_embedding::test_embedding_pooling_none": "vectors are pooled as the model's file specifies",
    "test_embedding::test_embedding_error_prompt_too_long": "the text of an error differs",
    "test_compat_oai_responses::test_responses_stream_with": "a truncated response is incomplete, as in OpenAI's API",
    "test_compat_gcp::": "paths of Google's Vertex AI are not supported",
    "test_compat_anthropic::test_anthropic_vision": _UNSEEN,
    "test_compat_anthropic::test_anthropic_tool_result_with_image": _UNSEEN,
    "test_vision_api::test_vision_embeddings": _TEXT_VECTORS,
    "test_compat_anthropic::test_anthropic_empty_messages": "a chat without messages is error 400, as at Anthropic",
}


def reason_of(name: str, text: str) -> str | None:
    """Return why a test failed; None if the reason is unknown."""
    if NO_MODEL in text:
        return NO_MODEL
    found = [start for start in _BY_NAME if name.startswith(start)]
    return _BY_NAME[max(found, key=len)] if found else None
