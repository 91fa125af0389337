"""The common form of conversations.  Every front end converts its messages to this form.

`read_messages` parses messages in OpenAI's format and its variants: null means absent, a content is a string or a
list of parts, arguments are a mapping or JSON.  `localllm.chat.rendering` converts the result to the form that a
model's chat template supports.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote_to_bytes, urlsplit

from localllm.cancellation import check_cancelled
from localllm.errors import TemplateError, quoted
from localllm.nesting import MAX_CALL_NESTING, parse_json

EXAMPLE = "{'role': 'user', 'content': 'Hello!'}"
_PART = "{'type': 'text', 'text': 'Hello!'}"

#: Keys of reasoning in messages of various programs.
_REASONING = ("reasoning_content", "reasoning", "thinking")
#: Types of text parts; the text has the key "text" or "refusal".
_TEXTS = ("text", "input_text", "output_text", "refusal")

#: Types and keys of image parts in the library, OpenAI's two APIs and Anthropic's API.
IMAGE_TYPES, IMAGE_KEYS = ("image", "image_url", "input_image"), ("image", "image_url", "source")
#: Types of audio parts in the library, OpenAI's chat API and others.
_AUDIO = ("audio", "input_audio", "audio_url")
#: Types of parts with a file or a passage: in OpenAI's two APIs, and in Anthropic's API.
_DOCUMENTS = ("file", "input_file", "document", "search_result")
#: Per kind: its word in errors, its keys in a part, and the media type of an example.
_MEDIA = {"image": ("image", IMAGE_KEYS, "image/png"), "audio": ("audio", _AUDIO, "audio/wav")}
#: Characters that are stripped from both ends of a URL, and characters that are removed everywhere in it.
_URL_SPACE, _NO_LINES = "".join(map(chr, range(33))), dict.fromkeys(map(ord, "\t\n\r"))
#: Maximum tokens of an image that a client sends with low detail.
_LOW_DETAIL = 256

#: Translates the URL-safe alphabet of base64.
_BASE64 = bytes.maketrans(b"-_", b"+/")

#: Maximum number of percent signs in a data URL, which bounds memory.
_MAX_PERCENT_SIGNS = 1 << 20

#: Keys of a message that are parsed; other keys are passed to the template unchanged.
_READ = {"role", "content", *_REASONING, "tool_calls", "tool_call_id", "name", "tool_name", "is_error"}


@dataclass(frozen=True)
class ToolCall:
    """A tool call."""

    name: str  # of the tool
    arguments: str  # a JSON object as a string; unchecked in a call that a client sends back
    id: str = ""  # refers a result to its call; may be empty

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a complete, valid JSON object."""
        try:
            return isinstance(parse_json(self.arguments, MAX_CALL_NESTING), dict)
        except ValueError:
            return False

    @property
    def values(self) -> dict[str, Any]:
        """Return the arguments.  A value that is not a JSON object is returned under the key ``arguments``."""
        try:
            values = parse_json(self.arguments or "{}", MAX_CALL_NESTING)
        except ValueError:
            values = None
        return values if isinstance(values, dict) else {"arguments": self.arguments}


@dataclass(frozen=True, eq=False)
class Media:
    """An image or audio clip in a message."""

    # a path or the bytes of a file; for an image also a Pillow image or an array uint8 [height, width, 3]; for audio
    # also an array of samples
    source: Any
    max_tokens: int | None = None  # None for the limit of the model's processor
    where: str = "the image"  # its name in errors
    kind: Literal["image", "audio"] = "image"  # type of the part in templates


@dataclass(frozen=True)
class Message:
    """A message of a conversation."""

    role: str  # "system", "developer", "user", "assistant", "tool", or another role of the template
    parts: tuple[str | Media, ...] = ()  # text and media, in order
    reasoning: str = ""  # reasoning before the text
    calls: tuple[ToolCall, ...] = ()  # tool calls of the assistant
    # call_id, name: the call and the tool of a result; ``name`` may also be a user's name
    call_id: str = ""
    name: str = ""
    is_error: bool = False  # whether the tool failed
    more: dict[str, Any] = field(default_factory=dict)  # other keys of the message, for the template

    @property
    def text(self) -> str:
        """The text of all parts."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def media(self) -> tuple[Media, ...]:
        """The images and audio clips."""
        return tuple(part for part in self.parts if isinstance(part, Media))


def read_messages(
    messages: Sequence[Message | Mapping[str, object]], *, may_open_files: bool = False
) -> list[Message]:
    """Convert messages to the common form.

    ``may_open_files``: whether media may be paths on this machine.  False for clients of a server.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TemplateError(f"messages must be a list of mappings, such as [{EXAMPLE}], not {quoted(messages)}")
    read = []
    for number, message in enumerate(messages):
        check_cancelled()
        read.append(message if isinstance(message, Message) else read_message(number, message, may_open_files))
    return read


def read_message(
    number: int, message: object, may_open_files: bool = False, skipped: list[str] | None = None
) -> Message:
    """Convert one message.

    Args:
        number: its position, for errors.
        skipped: collects the types of unknown parts, which are omitted.  Without it, unknown parts are errors.
    """
    if not isinstance(message, Mapping):
        raise TemplateError(f"message {number} is not a mapping such as {EXAMPLE}: {quoted(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise TemplateError(
            f"message {number} has no 'role', a string such as 'system', 'user' or 'assistant': write {EXAMPLE}"
        )
    calls = read_calls(number, message.get("tool_calls"))
    content = message.get("content")
    # Clients omit the null content of a reply that has only reasoning.
    may_be_null = role in ("assistant", "tool") and not message.keys().isdisjoint(("content", *_REASONING))
    if content is None and not calls and not may_be_null:
        raise TemplateError(f"message {number} (role {quoted(role)}) has no 'content'")
    parts, thoughts = read_parts(number, role, content, may_open_files, skipped)
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return Message(
        role,
        parts,
        thoughts if reasoning is None else str(reasoning),
        calls,
        call_id=_text(number, message, "tool_call_id"),
        name=_text(number, message, "name") or _text(number, message, "tool_name"),
        is_error=message.get("is_error") is True,
        more={str(key): value for key, value in message.items() if key not in _READ},
    )


def read_parts(
    number: int, role: str, content: object, may_open_files: bool = False, skipped: list[str] | None = None
) -> tuple[tuple[str | Media, ...], str]:
    """Return the text and media of a content, and the reasoning among its parts; see `read_message`."""
    if content is None or isinstance(content, str):
        return (() if content is None else (content,)), ""
    if isinstance(content, bytes | bytearray) or not isinstance(content, Sequence):
        raise TemplateError(f"the content of message {number} (role {quoted(role)}) is neither a string nor a list")
    parts: list[str | Media] = []
    thoughts: list[str] = []
    for part in content:
        part_type = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if part_type in ("thinking", "reasoning"):
            thoughts.append(str(part.get("thinking") or part.get("text") or ""))
        elif part_type in IMAGE_TYPES or part_type in _AUDIO:
            parts.append(_media("image" if part_type in IMAGE_TYPES else "audio", number, part, may_open_files))
        elif part_type in _DOCUMENTS:
            parts += _document(number, role, part, skipped)
        elif part_type in _TEXTS:
            text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part
            if not isinstance(text, str):
                raise TemplateError(f"a part of message {number} has no text: write {_PART}")
            parts.append(text)
        elif skipped is not None:
            skipped.append(str(part_type))
        else:
            raise TemplateError(
                f"message {number} has a part of type {quoted(part_type)}, but a message has text, images and audio: "
                f"write parts as {_PART}"
            )
    return tuple(parts), "".join(thoughts)


def kind_of(file: bytes) -> Literal["image", "audio"]:
    """Return the kind of a file by its first bytes: "audio" for WAV, MP3, FLAC and OGG, otherwise "image"."""
    is_mp3 = file[:3] == b"ID3" or (file[:1] == b"\xff" and file[1:2] >= b"\xe0")
    is_wav = file[:4] in (b"RIFF", b"RF64") and file[8:12] == b"WAVE"
    return "audio" if is_mp3 or is_wav or file[:4] in (b"fLaC", b"OggS") else "image"


def _media(kind: Literal["image", "audio"], number: int, part: Mapping[str, Any], may_open_files: bool) -> Media:
    """Return the image or audio of a part.  The audio format is detected from the bytes, not read from the part."""
    word, keys, example = _MEDIA[kind]
    name = f"the {word} of message {number}"
    source = next((part[key] for key in keys if key in part), None)
    detail = part.get("detail")
    if isinstance(source, Mapping):
        detail, data = source.get("detail", detail), source.get("data")
        encoded = data.rpartition(",")[2] if isinstance(data, str) else None
        source = source.get("url") if encoded is None else f"data:{source.get('media_type')};base64,{encoded}"
    if source is None or (isinstance(source, str | bytes) and not source):
        raise TemplateError(f"{name} is missing: give it as a data URL, 'data:{example};base64,…'")
    if isinstance(source, str):
        source = source_of_text(source, name, may_open_files, example)
    elif not may_open_files:  # a JSON value that is not a string
        raise TemplateError(f"{name} is {quoted(source)}, but must be a data URL, 'data:{example};base64,…'")
    return Media(source, _LOW_DETAIL if detail == "low" and kind == "image" else None, name, kind)


def _document(number: int, role: str, part: Mapping[str, Any], skipped: list[str] | None) -> tuple[str | Media, ...]:
    """Return the title and the contents of a document.  Files of text and PDF files become text.

    Sources: https://platform.openai.com/docs/guides/pdf-files,
    https://docs.anthropic.com/en/docs/build-with-claude/citations.
    """
    file = part["file"] if isinstance(part.get("file"), Mapping) else part  # OpenAI's chat API nests it
    source: Any = part["source"] if isinstance(part.get("source"), Mapping) else file
    if part["type"] == "search_result":
        source = {"type": "content", "content": part.get("content")}
    lines = [part.get("title"), part.get("source"), file.get("filename"), part.get("context")]
    heading = "".join(f"{line}\n" for line in lines if isinstance(line, str) and line)
    name = f"the document {quoted(heading.splitlines()[0])}" if heading else f"the document of message {number}"
    data = next((source[key] for key in ("data", "file_data") if source.get(key) is not None), None)
    if source.get("type") == "content":
        parts, _ = read_parts(number, role, source.get("content"), skipped=skipped)
    elif not isinstance(data, str):
        raise TemplateError(
            f"{name} has no data, but a name or an address of a file: send the file's bytes in base64"
        )
    elif source.get("type") == "text":
        parts = (data,)
    else:
        parts = (_file_text(source_of_text(data, name) if data[:5] == "data:" else decoded(data, name), name),)
    if not heading:
        return parts
    first, rest = (parts[0], parts[1:]) if parts and isinstance(parts[0], str) else ("", parts)
    return (f"{heading}\n{first}", *rest)


def _file_text(data: bytes, name: str) -> str:
    """Return the text of a file of UTF-8 text or of a PDF file.

    Raises:
        TemplateError: the file is in another format, or a PDF file without text.
        UsageError: the PDF file is damaged, or pypdf is not installed.
    """
    if not data.startswith(b"%PDF-"):
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise TemplateError(f"{name} is neither text nor a PDF file: send its text") from None
    from localllm import pdf  # imported here because it imports decoders

    text = pdf.page_texts(name, data)
    if not text.strip():
        raise TemplateError(f"{name} is a PDF file without text: send its pages as images")
    return text


def source_of_text(text: str, name: str, may_open_files: bool = False, example: str = "image/png") -> Any:
    """Return the bytes of a data URL, or the path that a ``file:`` URL or a plain string names."""
    url = text.strip(_URL_SPACE)
    head, comma, body = url.partition(",") if url[:5].lower() == "data:" else ("", "", "")
    if comma:  # https://fetch.spec.whatwg.org/#data-url-processor
        head = head.rstrip()
        if head[-6:].lower() == "base64" and head[:-6].rstrip(" ").endswith(";"):
            return decoded(body, name)
        return _unquoted(body.partition("#")[0].translate(_NO_LINES), name)
    scheme = urlsplit(url[:2000]).scheme
    if scheme in ("http", "https"):
        raise TemplateError(
            f"{name} is an address on the web, which localllm does not fetch: send it as a data URL, or allow the "
            "host of images with serve --allow-image-urls HOST"
        )
    if not may_open_files:
        raise TemplateError(f"{name} is not a data URL: write 'data:{example};base64,…'")
    if scheme != "file":
        return os.path.expanduser(text)
    from urllib.request import url2pathname  # imported here because it imports HTTP and TLS

    return url2pathname(urlsplit(url).path)


def _unquoted(text: str, name: str) -> bytes:
    """Return the bytes of a percent-encoded string."""
    if text.count("%") > _MAX_PERCENT_SIGNS:
        raise TemplateError(f"{name} has more than {_MAX_PERCENT_SIGNS:,} percent signs: send it in base64")
    return unquote_to_bytes(text)


def decoded(text: str, name: str) -> bytes:
    """Return the bytes of a base64 string: either alphabet, white space, no padding, or percent-encoded."""
    data = _unquoted(text, name) if "%" in text else text.encode("ascii", "replace")
    compact = data.translate(_BASE64, b" \t\n\r\v\f").rstrip(b"=")
    try:
        return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise TemplateError(f"{name} is not in base64: encode its file's bytes") from None


def read_calls(number: int, calls: object) -> tuple[ToolCall, ...]:
    """Tool calls in OpenAI's form, ``{"id": …, "function": {"name": …, "arguments": …}}``, or the inner part.

    Calls of custom tools have ``"custom": {"name": …, "input": …}``.
    """
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise TemplateError(f"tool_calls of message {number} is not a list")
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(custom := function.get("custom"), Mapping):
            function = {"name": custom.get("name"), "arguments": {"input": custom.get("input") or ""}}
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise TemplateError(f"a tool call of message {number} has no function with a name")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            try:
                arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError):
                raise TemplateError(f"the arguments of a tool call of message {number} are not JSON") from None
        read.append(ToolCall(name, arguments, str(call.get("id") or "")))
    return tuple(read)


def _text(number: int, message: Mapping[str, object], key: str) -> str:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise TemplateError(f"{key} of message {number} is {quoted(value)}, but must be a string")
    return value or ""
