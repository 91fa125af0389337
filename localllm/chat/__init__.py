"""Conversations: a model's own chat template, run where it can do no harm."""

from localllm.chat.template import CHATML, ChatTemplate, encode_chat

__all__ = ["CHATML", "ChatTemplate", "encode_chat"]
