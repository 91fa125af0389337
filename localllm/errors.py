"""Every failure a user can meet is one of these: one clear sentence that says what to do about it."""

from __future__ import annotations

import os
import reprlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Self

#: Characters of a value from a file that an error text shows.
_MAX_QUOTED = 60
#: How the paths of localllm's own modules begin.
_HERE = os.path.join(os.path.dirname(__file__), "")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _MAX_QUOTED


def quoted(value: object) -> str:
    """A value that a file gave, for an error text: on one line, escaped, and at most 60 characters long."""
    text = _short.repr(value).replace("\n", " ")  # of an array; a text's are escaped
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 1] + "…"


def path_text(path: str | os.PathLike[str]) -> str:
    """A path for an error text: whole, with escapes for what cannot be printed or is not UTF-8."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in os.fspath(path))


def shown(value: object) -> str:
    """A value that was given, for an error text."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # a number with thousands of digits, which Python does not print
        return "a number of very many digits"


class Argument(NamedTuple):
    """An argument of the library in the text of an error, which each front end calls by a name of its own.

    Its text is the library's: ``context``, or with a value ``context=4096``.
    """

    name: str
    value: object = ...

    def __str__(self) -> str:
        return self.name if self.value is ... else f"{self.name}={shown(self.value)}"


#: What to do where no GPU serves.
ON_CPU = Argument("device", "cpu")


class _Sentence:
    """A text in parts, some of which are arguments."""

    args: tuple[Any, ...]

    def __str__(self) -> str:
        return self.worded(str)

    def worded(self, word: Callable[[Argument], str]) -> str:
        """The text with what ``word`` calls each argument."""
        return "".join(word(part) if isinstance(part, Argument) else str(part) for part in self.args)


class Notice(_Sentence, UserWarning):
    """A warning whose text names arguments."""


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warns of the line outside localllm that called it, however deep in localllm we are."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class LocalLLMError(_Sentence, Exception):
    """The root of all errors that localllm raises on purpose; made of the parts of its text."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, by which other processes are told: not all are made of the parts of their text alone."""
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[LocalLLMError], parts: tuple[Any, ...], fields: dict[str, Any]) -> LocalLLMError:
    base: Any = kind
    while base.__module__ != "builtins":  # that of Python's own exceptions which makes objects of this kind
        base = base.__base__
    error: LocalLLMError = base.__new__(kind)
    error.args = parts
    error.__dict__.update(fields)
    return error


class GGUFError(LocalLLMError):
    """A GGUF file that cannot be believed.  The text names the file, the place in it and the defect."""


class ModelError(LocalLLMError):
    """A model whose hyper-parameters or tensors do not fit together."""


class UnsupportedArchitectureError(ModelError):
    """``general.architecture`` names a model family that localllm does not have."""


class TokenizerError(LocalLLMError):
    """The vocabulary in the file is broken, or a text or id cannot be translated with it."""


class TemplateError(LocalLLMError, ValueError):
    """The chat template is missing, not valid, or ran past its bounds; or messages are malformed or refused."""


class UsageError(LocalLLMError, ValueError):
    """An argument out of range, or arguments that contradict each other."""

    @classmethod
    def of(cls, name: str, value: object, rule: str) -> Self:
        """The error of an argument that ``rule`` does not allow."""
        return cls(Argument(name), f" is {shown(value)}, but must be {rule}")

    @property
    def argument(self) -> str | None:
        """The name of the argument that the text begins with, if it does."""
        return self.args[0].name if self.args and isinstance(self.args[0], Argument) else None


class GrammarError(UsageError):
    """A JSON schema, regular expression or grammar that cannot be read or satisfied."""


class QueueFullError(LocalLLMError):
    """More requests wait for the model already than it accepts."""


class SettingsError(LocalLLMError):
    """The settings file cannot be read, or has what it cannot have; says where, and what it can."""


class OutputError(LocalLLMError):
    """A file cannot be written: its place is taken or not writable, the disk is full, or no program would load it."""


class ModelNotFoundError(GGUFError, FileNotFoundError):
    """A model was named that is not on this machine; says how to get it."""


class HubError(LocalLLMError):
    """A model cannot be fetched from the hub: no such repository, no access, no network, no room, or a bad file."""


class ContextLengthError(LocalLLMError, ValueError):
    """A prompt too long for the context.

    Attributes:
        n_tokens: tokens in the prompt.
        context: tokens that fit.
        truncated: whether what may be left out of it was.
    """

    def __init__(self, n_tokens: int, context: int, *other: str | Argument, truncated: bool = False) -> None:
        """``other`` is what can be done beside shortening the prompt and a larger context."""
        what, shorten = "the prompt has", "it"
        if truncated:
            what, shorten = "the last message alone makes a prompt of", "it or the system's"
        ways = f"shorten {shorten}{',' if other else ', or'} give a larger "
        end = (", or ", *other) if other else ()
        # Programs know by llama.cpp's words, "exceeds the available context size", that they have to shorten it.
        holds = f"{n_tokens:,} tokens, which exceeds the available context size of {context:,}"
        super().__init__(f"{what} {holds}: {ways}", Argument("context"), *end)
        self.n_tokens = n_tokens
        self.context = context
        self.truncated = truncated


class NotEnoughMemoryError(LocalLLMError, MemoryError):
    """The model would not fit into memory; said before loading, with the numbers."""


class DeviceError(LocalLLMError):
    """A device was asked for that is not there or cannot be used; says why."""


class DeviceLostError(DeviceError):
    """A device failed while it worked: a kernel went wrong, or the hardware did.

    Nothing more can be done with it in this process, and what was in its memory is gone.
    """


class DeviceMemoryError(NotEnoughMemoryError):
    """A device's memory is full.

    Attributes:
        device: the device's number.
        n_bytes: what was asked for; None if that is not known, as where a driver wants memory of its own.
        free_bytes: what was free then.
    """

    def __init__(self, device: int, n_bytes: int | None, free_bytes: int, total_bytes: int) -> None:
        wanted = "memory" if n_bytes is None else f"{n_bytes:,} bytes"
        super().__init__(
            f"CUDA device {device} has no room for {wanted}: {free_bytes:,} of its {total_bytes:,} bytes are free; "
            f"use a smaller context or model, put fewer layers on it, or end other programs that use it"
        )
        self.device = device
        self.n_bytes = n_bytes
        self.free_bytes = free_bytes


class ExpertReadError(LocalLLMError):
    """Experts that stay in a model's file could not be read while it was in use.

    Attributes:
        sequences: those of the batch that lack them.
        logits: of the whole batch; those of other sequences are good.
    """

    def __init__(self, message: str, sequences: frozenset[int], logits: Any) -> None:
        super().__init__(message)
        self.sequences = sequences
        self.logits = logits


class KernelError(LocalLLMError):
    """No kernel fits the shapes or formats at hand, or one could not be compiled."""


class ClosedError(LocalLLMError):
    """The model or the file was closed before this call."""


class PromptCacheError(LocalLLMError):
    """A file of saved prompts that is not there, damaged, or of another model."""


class StoreError(LocalLLMError):
    """Saved chats cannot be read or written, or a file is no exported chat."""
