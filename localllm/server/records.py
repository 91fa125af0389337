"""Facts about requests, for metrics, log lines and traces.

`localllm.server.monitor.Monitor` creates the record of a request.  The modules that handle the request add facts with
`note`.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.engine.request import FinishReason, Usage
from localllm.generation.completion import Stream
from localllm.llm import LLM

#: Methods by their name in metrics and traces.  Clients can send any other word, so others have a common name.
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

#: Request ids that are accepted from clients.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")


@dataclass(eq=False, slots=True)
class RequestRecord:
    """Facts about a request.

    Attributes:
        id: sent by the client in ``X-Request-ID``, or generated.
        method, path: of the request line; the path has no query string.
        address: the client's address; empty if unknown.
        started: time at which the head of the request had arrived, by `time.perf_counter`.
        key: name of the client's API key; empty without a key.
        status: status of the response; 499 if the client disconnected before a response.
        error, error_code, error_status: message, machine-readable word and status of the error that ended the request
            or its stream; empty and 0 without an error.
        operation: ``gen_ai.operation.name`` of the semantic conventions; empty if the request does not use a model.
        model: name of the model that the request uses.
        requested_model: name of the model in the request; None if the request names none.
        llm: the model of ``streams``.
        options: options of the generation.
        is_streamed: whether the replies are streamed.
        submitted: time at which the body was complete, by `time.perf_counter`.
        load_s: seconds until the model was loaded.
        streams: ``n`` replies per prompt.
        prompt_tokens: tokens of a request without replies, such as a request for embeddings.
    """

    id: str
    method: str
    path: str
    address: str
    started: float = field(default_factory=time.perf_counter)
    key: str = ""
    status: int = 499
    error: str = ""
    error_code: str = ""
    error_status: int = 0
    operation: str = ""
    model: str = ""
    requested_model: str | None = None
    llm: LLM | None = None
    options: dict[str, Any] = field(default_factory=dict)
    is_streamed: bool = False
    submitted: float = 0.0
    load_s: float = 0.0
    streams: Sequence[Stream] = ()
    n: int = 1
    prompt_tokens: int = 0

    @property
    def usage(self) -> Usage:
        """Tokens of all replies.  The prompt of several replies counts once, as in OpenAI's API."""
        usages = [stream.usage for stream in self.streams]
        firsts = usages[:: self.n]
        return Usage(
            sum(usage.prompt_tokens for usage in firsts) or self.prompt_tokens,
            sum(usage.cached_tokens for usage in firsts),
            sum(usage.completion_tokens for usage in usages),
        )

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the complete body to the first token; None without a token."""
        times = [
            stream.submitted_at + stream.timings.first_token_s
            for stream in self.streams
            if stream.timings.first_token_s
        ]
        return min(times) - self.submitted if times else None

    @property
    def discreet_error(self) -> str:
        """The error without text of the request, which messages of the status 400 may quote."""
        return self.error_code if self.error_status == 400 else self.error

    def queue_s(self, stream: Stream) -> float:
        """Return the seconds that a reply waited in the queue, until now if it has not started."""
        return stream.timings.queue_s or time.perf_counter() - stream.submitted_at

    def finish_reason(self, stream: Stream) -> FinishReason | Literal["error"]:
        """Return why a reply ended; "cancelled" if the client disconnected or the server stopped."""
        if stream.finish_reason is None and self.error_status >= 500:
            return "error"
        return stream.finish_reason or "cancelled"


#: Record of the request that the current task handles.
CURRENT: ContextVar[RequestRecord | None] = ContextVar("localllm_request", default=None)


def note(**facts: Any) -> None:
    """Set attributes of the current request's record.  Does nothing outside of a request."""
    record = CURRENT.get()
    if record is not None:
        for name, value in facts.items():
            setattr(record, name, value)


def current_id() -> str:
    """Return the id of the current request; empty outside of a request."""
    record = CURRENT.get()
    return "" if record is None else record.id


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's ``X-Request-ID`` if it is valid, otherwise a new id."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(text := value.decode("latin-1")):
            return text
    return uuid.uuid4().hex
