"""Chat templates: from a list of messages to the prompt that the model was trained on.

A template is a jinja2 program in the model file (``tokenizer.chat_template``).  It is untrusted, so it runs in the
sandbox of `localllm.chat.sandbox`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from localllm.cancellation import check_cancelled
from localllm.chat import sandbox
from localllm.chat.built_in_templates import CHATML
from localllm.chat.calls.declaration import CallFormat
from localllm.chat.conversation import EXAMPLE, Media, Message, read_messages
from localllm.chat.rendering import Rendering
from localllm.chat.template_source import USES, TemplateSource
from localllm.errors import TemplateError, quoted, warn
from localllm.tokenizer import Tokenizer

#: Words for several media of a kind.
_PLURALS = {"image": "images", "audio": "audio"}

#: Roles that a template supports even if its source does not contain them, because most templates write any role.
_ROLES = frozenset({"system", "user", "assistant", "tool"})


#: Inserted into user text that looks like a media marker.  No other text contains it.
_APART = "\ue000\uf8ff"


class ChatTemplate:
    """One compiled chat template.  It can render in several threads at once.

    Attributes:
        source: the jinja2 text.
        is_fallback: the file has no template and this is `CHATML`, which the model may not support.
        named: jinja2 texts that replace the template for tools (``tool_use``) or documents (``rag``).
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        where: str = "the chat template",
        is_fallback: bool = False,
        named: Mapping[str, str] | None = None,
    ) -> None:
        """Compile a template.

        Args:
            source: jinja2 text.
            bos_token, eos_token: texts of these tokens, which templates may write.
            where: the template's name in error messages.
            named: as the attribute.

        Raises:
            TemplateError: ``source`` is not a valid template, or too long.
        """
        self.source = source
        self.is_fallback = is_fallback
        self._where = where
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.named = dict(named or {})
        self._compiled: dict[str, ChatTemplate] = {}  # compiled named templates
        try:
            self._template, self._names = sandbox.compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{where} is not valid (line {error.lineno}): {_short_reason(error)}") from error
        except (RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise TemplateError(f"{where} cannot be compiled: {_short_reason(error)}") from error
        self._rendering = Rendering(source, self._attempt)

    @classmethod
    def compile(cls, source: TemplateSource, tokenizer: Tokenizer) -> ChatTemplate:
        """Compile a template source, or `CHATML` (``is_fallback``) if its text is None.

        Raises:
            TemplateError: the template is not valid, or too long.
        """
        return cls(
            CHATML if source.text is None else source.text,
            bos_token=_token_text(tokenizer, tokenizer.bos_id),
            eos_token=_token_text(tokenizer, tokenizer.eos_id),
            where=source.where,
            is_fallback=source.text is None,
            named=source.named,
        )

    def reads(self, name: str) -> bool:
        """Return whether the template, or a named template used for it, reads ``name``, such as ``tools``."""
        return name in self._names or any(USES[key] == name for key in self.named)

    @property
    def call_format(self) -> CallFormat | None:
        """The template's format of tool calls; None if it is unknown."""
        return self._rendering.call_format

    @property
    def capabilities(self) -> dict[str, bool]:
        """Features of the template, under llama.cpp's names."""
        return self._rendering.capabilities(self.reads("tools"))

    def used_for(self, variables: Mapping[str, object]) -> ChatTemplate:
        """Return the named template for these variables, or this template.

        Raises:
            TemplateError: the named template is not valid.
        """
        for name, text in self.named.items():
            if variables.get(USES[name]):
                if name not in self._compiled:
                    title = f"{self._where} called {quoted(name)}"
                    bos, eos = self._tokens.values()
                    self._compiled[name] = ChatTemplate(text, bos_token=bos, eos_token=eos, where=title)
                return self._compiled[name]
        return self

    def render(
        self,
        messages: Sequence[Message | Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """Return the prompt for ``messages``.

        Args:
            messages: mappings with a ``role`` and a ``content``: a string, or a list of text parts.  An assistant
                message with ``tool_calls`` needs no content.  Messages are converted to the form that the template
                supports (`localllm.chat.rendering`).
            add_generation_prompt: end with the start of the assistant's turn.
            tools: JSON schemas of functions that the model may call.
            variables: further variables of the template (``documents=...``).  ``enable_thinking`` defaults to true.

        Raises:
            TemplateError: a message is malformed; the template rejects the messages (the error quotes the
                template), fails, or exceeds the limits of time and memory.
        """
        conversation = read_messages(messages)
        if media := [medium for message in conversation for medium in message.media]:
            kinds = " and ".join(sorted({_PLURALS[medium.kind] for medium in media}))
            raise TemplateError(f"these messages have {kinds}, which this model does not accept: send only text")
        return self._rendered(conversation, tools, {"add_generation_prompt": add_generation_prompt, **variables})

    def render_with_media(
        self,
        messages: Sequence[Message],
        markers: Mapping[str, tuple[str, str, str]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> list[str | Media]:
        """Return the prompt for messages with images or audio, as a list of texts with the media between them.

        Args:
            markers: per kind, the marker that templates of the model's family write for a medium, and the text
                around a marker, which is added if the template does not write it.  The result omits the marker.

        Raises:
            TemplateError: as in `render`, or the template does not write a marker for every medium.
        """
        media = [medium for message in messages for medium in message.media]
        kind_by_marker = {marker: kind for kind, (_, marker, _) in markers.items()}
        pattern = re.compile("|".join(map(re.escape, kind_by_marker)))
        # A marker in user text must not become an image.
        plain = [replace(m, parts=tuple(_set_apart(part, pattern) for part in m.parts)) for m in messages]
        words = {kind: "".join(marker) for kind, marker in markers.items()}
        texts_of = (["".join(p if isinstance(p, str) else words[p.kind] for p in m.parts)] for m in plain)
        as_words = [replace(m, parts=tuple(t)) if m.media else m for m, t in zip(plain, texts_of, strict=True)]
        problem: TemplateError | None = None
        for conversation in (plain, as_words):
            try:
                text = self._rendered(conversation, tools, variables)
            except TemplateError as error:
                problem = error
                continue
            if [kind_by_marker[marker] for marker in pattern.findall(text)] == [medium.kind for medium in media]:
                texts = [_rejoined(piece, kind_by_marker) for piece in pattern.split(text)]
                pieces: list[str | Media] = [texts[0]]
                for medium, following in zip(media, texts[1:], strict=True):
                    pieces += [medium, following]
                return pieces
        kinds = " and ".join(sorted({_PLURALS[medium.kind] for medium in media}))
        raise problem or TemplateError(f"{self._where} has no place for {kinds} in some of these messages")

    def _rendered(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        template_variables: Mapping[str, object],
    ) -> str:
        if (used := self.used_for({"tools": tools, **template_variables})) is not self:
            return used._rendered(conversation, tools, template_variables)
        variables = self._default_variables(tools) | self._rendering.variables(template_variables)
        try:
            text = self._text(self._rendering.messages(conversation), tools, **variables)
        except TemplateError:
            raise
        except sandbox.RefusedError as error:
            alternating = self._rendering.alternating(conversation)
            merged_text = None if alternating is None else self._attempt(alternating, tools, **variables)
            if merged_text is None:
                raise TemplateError(f"{self._where} refuses these messages: {_short_reason(error)}") from error
            text = merged_text
        except SecurityError as error:
            reason = _short_reason(error)
            raise TemplateError(f"{self._where} was stopped: {reason}; give another template") from error
        except Exception as error:  # an untrusted program can fail in any way
            raise TemplateError(f"{self._where} failed on these messages: {_short_reason(error)}") from error
        # Unknown roles, which the template writes or omits without an error.
        roles = {message.role for message in conversation} - {"developer"} - _ROLES
        if unknown := sorted(role for role in roles if role not in self.source):
            warn(
                f"{self._where} says nothing of the role {quoted(unknown[0])}, which the model may not know: "
                f"there are {', '.join(sorted(_ROLES))}"
            )
        return text

    def _default_variables(self, tools: Sequence[Mapping[str, object]] | None) -> dict[str, object]:
        """Return variables with a default, in llama.cpp's format: the date, and tools as JSON."""
        now = datetime.now()
        defaults = {
            "date_string": now.strftime("%d %b %Y"),  # Llama 3's
            "datetime": now.strftime("%b %d %Y %H:%M:%S"),  # FireFunction's
            "functions": "" if not tools else json.dumps(tools, indent=2),
        }
        return {
            name: value for name, value in defaults.items() if self.reads(name) and not self.reads("strftime_now")
        }

    def _text(self, messages: object, tools: object, /, **more: object) -> str:
        inputs = {"messages": messages, "tools": tools, "add_generation_prompt": True, **more}
        variables = {**self._tokens, **inputs}
        return sandbox.render(self._template, {name: _plain(value, name) for name, value in variables.items()})

    def _attempt(self, messages: object, tools: object, /, **more: object) -> str | None:
        """Return the prompt; None if the template fails or rejects the messages."""
        try:
            return self._text(messages, tools, **more)
        except Exception:
            return None


def _rejoined(text: str, markers: Iterable[str]) -> str:
    """The inverse of `_set_apart`."""
    for marker in markers:
        text = text.replace(marker[:1] + _APART + marker[1:], marker)
    return text


def _set_apart(part: str | Media, pattern: re.Pattern[str]) -> str | Media:
    """Return the part with broken-up markers, so that they stay text."""
    return pattern.sub(lambda m: m[0][:1] + _APART + m[0][1:], part) if isinstance(part, str) else part


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message | Mapping[str, object]],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    **variables: Any,
) -> list[int]:
    """Return the token ids of the prompt for ``messages``, with exactly one BOS if the model requires it.

    It does not matter whether the template writes BOS.  EOS is not added, because it would end the conversation.
    """
    if isinstance(messages, Sequence) and not messages:
        raise TemplateError(f"there are no messages to answer: give at least one, such as {EXAMPLE}")
    text = template.render(messages, tools=tools, **variables)
    return tokenizer.with_bos(tokenizer.encode(text, add_special=False, parse_special=True))


def _token_text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)


def _short_reason(error: BaseException) -> str:
    """Return an error's message as one short line, because a template controls its contents."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(error.message if isinstance(error, jinja2.TemplateSyntaxError) else error)[:1000]
    words = "".join(letter if letter.isprintable() else " " for letter in text).split()
    return " ".join(words)[:250] or type(error).__name__


def _plain(value: object, name: str) -> object:
    """Convert ``value`` to plain dicts, lists, strings, numbers, booleans and ``None``, without custom methods."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    check_cancelled()
    if isinstance(value, Mapping):
        return {_plain(key, name): _plain(item, name) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, name) for item in value]
    raise TemplateError(f"{name} holds a {type(value).__name__}: templates take text, numbers, lists and mappings")
