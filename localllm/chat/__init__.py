"""Conversations: chat templates of models, rendered in a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.chat.conversation import ToolCall
from localllm.chat.reply import ReplyParser
from localllm.chat.template_source import TemplateSource

if TYPE_CHECKING:
    from localllm.chat.built_in_templates import CHATML
    from localllm.chat.template import ChatTemplate, encode_chat

__all__ = ["CHATML", "ChatTemplate", "ReplyParser", "TemplateSource", "ToolCall", "encode_chat"]


def __getattr__(name: str) -> object:
    """Imports jinja2 at the first use of a name that needs it."""
    if name not in __all__:
        raise AttributeError(f"module 'localllm.chat' has no attribute {name!r}")
    from localllm.chat import template

    return getattr(template, name)
