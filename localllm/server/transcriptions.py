"""OpenAI's transcriptions API.  Audio and instruction become a chat message.

Source: https://platform.openai.com/docs/api-reference/audio/createTranscription; ``prompt`` is the instruction, as in
llama.cpp's server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localllm.chat.conversation import Media, Message
from localllm.generation.completion import Chunk
from localllm.server.answers import GenerationFields, GenerationJob, Reply
from localllm.server.dispatcher import Dispatcher
from localllm.server.endpoint import ReplyWriter, respond
from localllm.server.http import HTTPError, event, json_response
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
    return body.job(options, messages=messages)


async def transcriptions(request: Request, dispatcher: Dispatcher, body: TranscriptionRequest) -> Response:
    return await respond(request, dispatcher, body, _job, _TranscriptWriter)


class _TranscriptWriter(ReplyWriter[TranscriptionRequest]):
    """Writes a transcript, without the language at its start."""

    _n_sent = 0  # characters

    def lines(self, reply: Reply, chunk: Chunk) -> Iterator[bytes]:
        begin = "language "
        is_complete = chunk.finish_reason is not None or _TEXT_BEGINS in reply.text
        if not is_complete and (reply.text + begin).startswith(begin):
            return
        transcript = _transcript(reply)
        delta, self._n_sent = transcript[self._n_sent :], len(transcript)
        if delta:
            yield event({"type": "transcript.text.delta", "delta": delta})

    def end(self, replies: list[Reply]) -> Iterator[bytes]:
        yield event({"type": "transcript.text.done", **_result(replies[0])})

    def answer(self, replies: list[Reply]) -> Response:
        if self.body.response_format == "text":
            return PlainTextResponse(f"{_transcript(replies[0])}\n")
        return json_response(_result(replies[0]))


def _transcript(reply: Reply) -> str:
    return reply.text.rpartition(_TEXT_BEGINS)[2]


def _result(reply: Reply) -> dict[str, Any]:
    n_prompt, n_reply = reply.usage.prompt_tokens, reply.usage.completion_tokens
    counts = {"input_tokens": n_prompt, "output_tokens": n_reply, "total_tokens": n_prompt + n_reply}
    return {"text": _transcript(reply), "usage": {"type": "tokens", **counts}, **warnings_json(reply)}
