"""OpenAI's transcriptions API.  Audio and instruction become a chat message.

Source: https://platform.openai.com/docs/api-reference/audio/createTranscription; ``prompt`` is the instruction, as in
llama.cpp's server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localllm.chat.conversation import Media, Message
from localllm.generation.completion import Chunk
from localllm.server.answers import GenerationFields, GenerationJob, Reply
from localllm.server.bodies import decode
from localllm.server.dispatcher import Dispatcher
from localllm.server.http import EventStream, HTTPError, cancel_on_disconnect, event, json_response
from localllm.server.openai import warnings_json

#: Tag after the language in Qwen 3 ASR's output: "language English<asr_text>".
_TEXT_BEGINS = "<asr_text>"


class TranscriptionRequest(GenerationFields, kw_only=True):
    file: bytes  # the audio file; base64 in JSON
    prompt: str = "Transcribe audio to text"
    language: str = ""
    response_format: str = "json"


def _job(body: TranscriptionRequest) -> GenerationJob:
    if body.response_format not in ("json", "text"):
        raise HTTPError(400, f"response_format is {body.response_format!r:.40}, but json and text are known here")
    instruction = f"{body.prompt} (language: {body.language})" if body.language else body.prompt
    audio = Media(body.file, where="the audio in file", kind="audio")
    options = {"temperature": 0, **body.options()}
    messages = [Message("user", (audio, instruction))]
    return GenerationJob(body.model, options, messages=messages, variables=body.template_variables())


async def transcriptions(request: Request, dispatcher: Dispatcher) -> Response:
    body = await decode(request, TranscriptionRequest)
    pending = await dispatcher.begin(await dispatcher.read(request, _job, body), request)
    if body.stream:
        lines = pending.lines(partial(_piece, _Transcript()), (), _end)
        return EventStream(lines, pending.close, path=request.url.path)
    with closing(pending):
        (reply,) = await cancel_on_disconnect(request, pending.read())
    if body.response_format == "text":
        return PlainTextResponse(f"{_transcript(reply.text)}\n")
    return json_response({"text": _transcript(reply.text), "usage": _usage(reply), **warnings_json(reply)})


class _Transcript:
    """Yields the pieces of a transcript, without the language at the start."""

    def __init__(self) -> None:
        self._text, self._n_sent = "", 0

    def add(self, text: str, is_last: bool) -> str:
        self._text += text
        begin = "language "
        if not is_last and _TEXT_BEGINS not in self._text and (self._text + begin).startswith(begin):
            return ""
        start, self._n_sent = self._n_sent, len(transcript := _transcript(self._text))
        return transcript[start:]


def _transcript(text: str) -> str:
    return text.rpartition(_TEXT_BEGINS)[2]


def _piece(transcript: _Transcript, reply: Reply, chunk: Chunk) -> Iterator[bytes]:
    if delta := transcript.add(chunk.text, chunk.finish_reason is not None):
        yield event({"type": "transcript.text.delta", "delta": delta})


def _end(replies: Sequence[Reply]) -> Iterator[bytes]:
    text, usage = _transcript(replies[0].text), _usage(replies[0])
    yield event({"type": "transcript.text.done", "text": text, "usage": usage, **warnings_json(replies[0])})


def _usage(reply: Reply) -> dict[str, Any]:
    n_prompt, n_reply = reply.usage.prompt_tokens, reply.usage.completion_tokens
    counts = {"input_tokens": n_prompt, "output_tokens": n_reply, "total_tokens": n_prompt + n_reply}
    return {"type": "tokens", **counts}
