"""Log lines of the server: messages, errors, and one line per request.

They use the standard library's `logging`.  Without `logging_to_stderr`, requests are not logged, and errors go to the
handlers of the program that runs the server.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from localllm.console import messages_to, visible, visible_line
from localllm.server.records import RequestRecord, current_id

LogFormat = Literal["text", "json"]

LOG = logging.getLogger("localllm.server")
ACCESS = logging.getLogger("localllm.access")

#: Maximum length of a logged prompt in tokens, and of another value in characters.
_MAX_PROMPT, _MAX_VALUE = 4096, 500


@contextmanager
def logging_to_stderr(log_format: LogFormat) -> Iterator[None]:
    """Write log lines with time stamps to stderr, and `localllm.console` messages as log lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_TextLines() if log_format == "text" else _JSONLines())
    logging.getLogger().addHandler(handler)
    for logger in (LOG, ACCESS):
        logger.setLevel(logging.INFO)
    try:
        with messages_to(_log_message):
            yield
    finally:
        logging.getLogger().removeHandler(handler)
        for logger in (LOG, ACCESS):
            logger.setLevel(logging.NOTSET)


def _log_message(text: str, is_warning: bool) -> None:
    for line in text.splitlines():
        LOG.log(logging.WARNING if is_warning else logging.INFO, "%s", line)


def log_request(record: RequestRecord, *, has_prompts: bool, trace_id: str = "") -> None:
    """Log a request at its end.  ``has_prompts``: whether the line contains the start of the prompt."""
    if not ACCESS.isEnabledFor(logging.INFO):
        return
    fields = _fields_of(record) | {"trace_id": trace_id}
    if has_prompts:
        fields |= {"error": record.error, "prompt": _prompts(record)}
    ACCESS.info(
        "request", extra={"fields": {name: value for name, value in fields.items() if value not in ("", None)}}
    )


def _fields_of(record: RequestRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "duration_s": time.perf_counter() - record.started,
        "address": record.address,
        "key": record.key,
        "model": record.model,
        "error": record.discreet_error,
    }
    if record.streams:
        timings = [stream.timings for stream in record.streams]
        reasons = dict.fromkeys(record.finish_reason(stream) for stream in record.streams)
        fields |= {
            "stream": record.is_streamed,
            "finish_reason": ",".join(reasons),
            "load_s": record.load_s,
            "queue_s": max(record.queue_s(stream) for stream in record.streams),
            "first_token_s": record.first_token_s,
            "prefill_s": max(of.prefill_s for of in timings),
            "decode_s": max(of.decode_s for of in timings),
        }
    if record.operation:
        usage = record.usage
        fields["prompt_tokens"] = usage.prompt_tokens
        fields["cached_tokens"] = usage.cached_tokens
        fields["generated_tokens"] = usage.completion_tokens
    return fields


def _prompts(record: RequestRecord) -> str:
    """Return the start of each prompt, including the names of control tokens."""
    if record.llm is None:
        return ""
    texts = []
    for stream in record.streams[:: record.n]:
        ids = stream.prompt_ids
        text = record.llm.tokenizer.decode(ids[:_MAX_PROMPT], special=True)
        texts.append(f"{text} …" if len(ids) > _MAX_PROMPT else text)
    return "\n\n".join(texts)


def _parts(record: logging.LogRecord) -> dict[str, Any]:
    """Return the parts of a line, without a traceback."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    parts: dict[str, Any] = {"time": f"{seconds}.{int(record.msecs):03}Z", "level": record.levelname.lower()}
    parts |= {"message": record.getMessage(), "request_id": current_id()} | getattr(record, "fields", {})
    return {name: _value(name, value) for name, value in parts.items() if value != ""}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    is_long = isinstance(value, str) and name not in ("prompt", "message") and len(value) > _MAX_VALUE
    return f"{value[:_MAX_VALUE]}…" if is_long else value


class _JSONLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        parts = _parts(record)
        if record.exc_info:
            parts["traceback"] = self.formatException(record.exc_info)
        return json.dumps(parts).replace("\x7f", "\\u007f")


class _TextLines(logging.Formatter):
    """Time, level and message, followed by ``name=value``.  The lines of a traceback follow, indented."""

    def format(self, record: logging.LogRecord) -> str:
        parts = _parts(record)
        head = f"{parts.pop('time')} {parts.pop('level').upper()} {visible_line(parts.pop('message'))}"
        line = " ".join([head, *(f"{name}={_word(value)}" for name, value in parts.items())])
        if record.exc_info:
            line += "".join(f"\n  {visible(row)}" for row in self.formatException(record.exc_info).splitlines())
        return line


def _word(value: Any) -> str:
    """Return a value as one word, in quotation marks if necessary."""
    text = (
        f"{value:.6f}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
    )
    if any(char in text for char in ' "=\\') or not text.isprintable():
        return visible_line(json.dumps(text, ensure_ascii=False))
    return text
