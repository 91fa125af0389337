"""What a model must offer to be talked with; a `localllm.LLM` does, and models of tests do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Unpack

if TYPE_CHECKING:
    from localllm.chat.template import ChatTemplate
    from localllm.completion import Stream
    from localllm.info import ModelInfo
    from localllm.options import Options

Messages = Sequence[Mapping[str, object]]


class ChatModel(Protocol):
    """What is needed of a `localllm.LLM`."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def chat_template(self) -> ChatTemplate: ...
    def close(self) -> None: ...
    def tokenize(self, text: str, add_special: bool = True) -> list[int]: ...
    def tokenize_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
    ) -> list[int]: ...
    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
        **options: Unpack[Options],
    ) -> Stream: ...
