"""Custom chat formats: functions that convert messages to a prompt, in place of the file's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, Protocol, TypeVar

from localllm.chat import ChatTemplate
from localllm.errors import UsageError


@dataclass
class ChatFormatterResponse:
    """A prompt, and the stop strings of its answer."""

    prompt: str
    stop: str | list[str] | None = None
    stopping_criteria: Any = None
    added_special: bool = False  # whether the prompt starts with BOS


class ChatFormatter(Protocol):
    """Converts messages to a prompt."""

    def __call__(self, *, messages: Sequence[Mapping[str, Any]], **more: Any) -> ChatFormatterResponse: ...


class LlamaChatCompletionHandler(Protocol):
    """Answers a chat.  Called with the `Llama` and the keywords of `Llama.create_chat_completion`."""

    # Not annotated as `Llama`, because the module of `Llama` imports this one.
    def __call__(self, *, llama: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any: ...


_F = TypeVar("_F", bound=ChatFormatter)
_H = TypeVar("_H", bound=LlamaChatCompletionHandler)
_handlers: dict[str, LlamaChatCompletionHandler] = {}


def register_chat_format(name: str) -> Callable[[_F], _F]:
    """Return a decorator that registers a `ChatFormatter`, for ``chat_format=name`` of `Llama`."""

    def register(formatter: _F) -> _F:
        register_chat_completion_handler(name)(chat_formatter_to_chat_completion_handler(formatter))
        return formatter

    return register


def register_chat_completion_handler(name: str) -> Callable[[_H], _H]:
    """Return a decorator that registers a function that answers chats, for ``chat_format=name`` of `Llama`."""

    def register(handler: _H) -> _H:
        if name in _handlers:
            raise UsageError(f"there is a chat format {name!r:.80} already: choose another name")
        _handlers[name] = handler
        return handler

    return register


def registered_formats() -> list[str]:
    """Return the names of registered chat formats."""
    return list(_handlers)


def get_chat_completion_handler(name: str) -> LlamaChatCompletionHandler:
    """Return the handler registered under a name.

    Raises:
        UsageError: no handler has this name.
    """
    if name not in _handlers:
        raise UsageError(f"there is no chat format {name!r:.80}: register_chat_format makes one")
    return _handlers[name]


def chat_formatter_to_chat_completion_handler(formatter: ChatFormatter) -> LlamaChatCompletionHandler:
    """Return a handler that answers the formatter's prompts with the model."""

    def handler(*, llama: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        return llama._chat(messages, formatter, **options)

    return handler


class NotAvailableError(UsageError, NotImplementedError):
    """A function of llama-cpp-python that localllm does not support."""


@dataclass(frozen=True)
class MTMDChatHandler:
    """Argument ``chat_handler`` of `Llama`: names the encoder of images.  The model's chat template is used.

    Attributes:
        clip_model_path: the model's ``mmproj`` file.
    """

    clip_model_path: str | Path
    verbose: bool = True
    use_gpu: bool = True

    @classmethod
    def from_pretrained(cls, *repo: object, **options: object) -> Never:
        """Raises NotAvailableError: `Llama.from_pretrained` fetches the encoder with its model."""
        instead = "Llama.from_pretrained fetches the mmproj file with the model, which then needs no handler"
        raise NotAvailableError(f"{cls.__name__}.from_pretrained is not available: {instead}")


#: llama-cpp-python's handlers of other families of models.
Llava15ChatHandler = Llava16ChatHandler = ObsidianChatHandler = MoondreamChatHandler = MTMDChatHandler
NanoLlavaChatHandler = Llama3VisionAlphaChatHandler = MiniCPMv26ChatHandler = MTMDChatHandler
Qwen25VLChatHandler = Gemma4ChatHandler = MTMDChatHandler


class Jinja2ChatFormatter:
    """A formatter that renders a chat template.

    Args:
        stop_token_ids: tokens that end a reply, in addition to the model's EOS tokens.
    """

    def __init__(
        self,
        template: str,
        eos_token: str,
        bos_token: str,
        add_generation_prompt: bool = True,
        stop_token_ids: Sequence[int] | None = None,
    ) -> None:
        self._template = ChatTemplate(template, bos_token=bos_token, eos_token=eos_token)
        self._eos_token, self._adds, self._stops = eos_token, add_generation_prompt, frozenset(stop_token_ids or ())

    def __call__(self, *, messages: Sequence[Mapping[str, Any]], **more: Any) -> ChatFormatterResponse:
        prompt = self._template.render(messages, tools=more.get("tools"), add_generation_prompt=self._adds)
        ends = (lambda ids, logits: int(ids[-1]) in self._stops) if self._stops else None
        return ChatFormatterResponse(prompt, [self._eos_token], ends, added_special=True)

    def to_chat_handler(self) -> LlamaChatCompletionHandler:
        """Return the formatter as a ``chat_handler`` of `Llama`."""
        return chat_formatter_to_chat_completion_handler(self)
