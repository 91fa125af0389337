"""What a model must offer to be talked with; a `localllm.LLM` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack

from localllm.completion import Chunk
from localllm.engine.request import FinishReason, Timings, Usage
from localllm.options import Options

Messages = Sequence[Mapping[str, object]]


class Template(Protocol):
    """What is needed of a `localllm.ChatTemplate`."""

    def render(self, messages: Messages, **variables: Any) -> str: ...


class Info(Protocol):
    """What is needed of a `localllm.ModelInfo`."""

    @property
    def path(self) -> Path: ...
    @property
    def name(self) -> str | None: ...
    @property
    def context(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def gpu_bytes(self) -> int: ...


class ReplyStream(Protocol):
    """What is needed of a `localllm.Stream`."""

    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def timings(self) -> Timings: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...
    def __next__(self) -> Chunk: ...
    def __iter__(self) -> Iterator[Chunk]: ...


class ChatModel(Protocol):
    """What is needed of a `localllm.LLM`; tests have models of their own."""

    @property
    def info(self) -> Info: ...
    @property
    def chat_template(self) -> Template: ...
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
    ) -> ReplyStream: ...
