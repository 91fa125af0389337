"""A reply as it is generated: what a model must offer for it, and its stream with the progress of the prompt."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, Unpack

from localllm.completion import Chunk
from localllm.engine.request import FinishReason, Timings, Usage
from localllm.options import Options
from localllm.tui.chat.events import Prefill

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
    def tokenize(self, text: str, add_special: bool = True) -> list[int]: ...
    def tokenize_chat(
        self,
        messages: Messages,
        *,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
    ) -> list[int]: ...
    def stream_chat(
        self,
        messages: Messages,
        *,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
        **options: Unpack[Options],
    ) -> ReplyStream: ...


#: What the first step of a stream reports: progress of the prompt, and in the end a chunk, what failed, or nothing.
Reports = SimpleQueue[tuple[int, int] | Chunk | BaseException | None]


def with_prefill(stream: ReplyStream, reports: Reports) -> Generator[Prefill | Chunk, None, None]:
    """The chunks of a stream, and before them, while the prompt is evaluated, how far that is.

    The prompt is evaluated by a thread of its own, or nothing could be said meanwhile.

    Args:
        stream: has not been asked for anything yet.
        reports: where its ``progress`` goes.
    """

    def evaluate() -> None:
        try:
            reports.put(next(stream, None))
        except BaseException as error:  # the reader's to handle
            reports.put(error)

    thread = threading.Thread(target=evaluate, name="prefill", daemon=True)
    thread.start()
    try:
        while isinstance(report := reports.get(), tuple):
            yield Prefill(*report)
    except BaseException:
        stream.close()
        raise
    finally:
        thread.join()
    if isinstance(report, BaseException):
        raise report
    if report is not None:
        yield report
        yield from stream
