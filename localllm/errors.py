"""Errors that users see.  The message of an error is one sentence that also states the remedy."""

from __future__ import annotations

import os
import reprlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Self

#: Maximum number of characters of a file's value in an error message.
_MAX_QUOTED = 60
#: Start of the paths of localllm's modules.
_HERE = os.path.join(os.path.dirname(__file__), "")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _MAX_QUOTED


def quoted(value: object) -> str:
    """Return a value from a file for an error message: on one line, escaped, at most 60 characters."""
    text = _short.repr(value).replace("\n", " ")  # line breaks of an array; line breaks in strings are escaped
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 1] + "…"


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a complete path for an error message.  Unprintable characters and invalid UTF-8 are escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in os.fspath(path))


def shown(value: object) -> str:
    """Return an argument's value for an error message."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not print numbers with thousands of digits
        return "a number of very many digits"


class Argument(NamedTuple):
    """The name of a library argument in an error message.  Front ends replace it by their own name for the argument.

    As a string it is the library's name: ``context``, or with a value ``context=4096``.
    """

    name: str
    value: object = ...

    def __str__(self) -> str:
        return self.name if self.value is ... else f"{self.name}={shown(self.value)}"


#: The remedy if no GPU can be used.
ON_CPU = Argument("device", "cpu")


class _Sentence:
    """A message that consists of strings and arguments."""

    args: tuple[Any, ...]

    def __str__(self) -> str:
        return self.worded(str)

    def worded(self, word: Callable[[Argument], str]) -> str:
        """Return the message with each argument's name replaced by ``word(argument)``."""
        return "".join(word(item) if isinstance(item, Argument) else str(item) for item in self.args)


class Notice(_Sentence, UserWarning):
    """A warning whose message contains arguments."""


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Issues a warning for the nearest line of the call stack outside localllm."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class LocalLLMError(_Sentence, Exception):
    """Base class of all errors that localllm raises on purpose.  Its arguments are the parts of the message."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickle, which sends errors to other processes; some subclasses have other constructor arguments."""
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(error_class: type[LocalLLMError], args: tuple[Any, ...], fields: dict[str, Any]) -> LocalLLMError:
    base: Any = error_class
    while base.__module__ != "builtins":  # find the built-in exception that creates these objects
        base = base.__base__
    error: LocalLLMError = base.__new__(error_class)
    error.args = args
    error.__dict__.update(fields)
    return error


class GGUFError(LocalLLMError):
    """A GGUF file is invalid.  The message states the file, the position in the file and the defect."""


class ModelError(LocalLLMError):
    """The hyperparameters or tensors of a model contradict each other."""


class UnsupportedArchitectureError(ModelError):
    """``general.architecture`` names a model family that localllm does not support."""


class TokenizerError(LocalLLMError):
    """The file's vocabulary is broken, or it cannot convert text or a token id."""


class TemplateError(LocalLLMError, ValueError):
    """The chat template is missing, invalid or exceeds its limits, or messages are malformed or rejected."""


class UsageError(LocalLLMError, ValueError):
    """An argument is out of range, or arguments contradict each other."""

    @classmethod
    def of(cls, name: str, value: object, rule: str) -> Self:
        """Return the error of an argument whose value violates ``rule``."""
        return cls(Argument(name), f" is {shown(value)}, but must be {rule}")

    @property
    def argument(self) -> str | None:
        """The name of the argument at the start of the message; None if the message starts with text."""
        return self.args[0].name if self.args and isinstance(self.args[0], Argument) else None


class GrammarError(UsageError):
    """A JSON schema, regular expression or grammar cannot be parsed or satisfied."""


class QueueFullError(LocalLLMError):
    """The model's queue of requests is full."""


class SettingsError(LocalLLMError):
    """The settings file cannot be read or has an invalid entry.  The message states the line and the valid values."""


class OutputError(LocalLLMError):
    """A file cannot be written: it exists or is not writable, the disk is full, or no program could load it."""


class ModelNotFoundError(GGUFError, FileNotFoundError):
    """The named model is not on this machine.  The message explains how to download it."""


class HubError(LocalLLMError):
    """A download from the hub failed: unknown repository, no access, no network, disk full, or a damaged file."""


class ContextLengthError(LocalLLMError, ValueError):
    """A prompt is too long for the context.

    Attributes:
        n_tokens: tokens in the prompt.
        context: tokens that fit.
        truncated: whether the prompt is too long even after truncation.
    """

    def __init__(self, n_tokens: int, context: int, *remedies: str | Argument, truncated: bool = False) -> None:
        """Create the error.  ``remedies``: remedies besides a shorter prompt and a larger context."""
        subject, target = "the prompt has", "it"
        if truncated:
            subject, target = "the last message alone makes a prompt of", "it or the system's"
        ways = f"shorten {target}{',' if remedies else ', or'} use a larger "
        end = (", or ", *remedies) if remedies else ()
        # Programs recognize llama.cpp's words "exceeds the available context size", and then shorten the prompt.
        size = f"{n_tokens:,} tokens, which exceeds the available context size of {context:,}"
        super().__init__(f"{subject} {size}: {ways}", Argument("context"), *end)
        self.n_tokens = n_tokens
        self.context = context
        self.truncated = truncated


class NotEnoughMemoryError(LocalLLMError, MemoryError):
    """The model would not fit into memory.  Raised before loading; the message states the sizes.

    Attributes:
        missing: bytes of the host's memory that are missing; None if unknown.
    """

    missing: int | None = None


class DeviceError(LocalLLMError):
    """The requested device does not exist or cannot be used.  The message states the reason."""


class DeviceLostError(DeviceError):
    """A device failed during computation: a kernel or the hardware failed.

    This process cannot use the device any longer, and the contents of its memory are lost.
    """


class DeviceMemoryError(NotEnoughMemoryError):
    """A device's memory is full.

    Attributes:
        device: the device's number.
        n_bytes: requested bytes; None if unknown, for example if the driver itself needed memory.
        free_bytes: free bytes at the time of the error.
    """

    def __init__(self, device: int, n_bytes: int | None, free_bytes: int, total_bytes: int) -> None:
        amount = "memory" if n_bytes is None else f"{n_bytes:,} bytes"
        super().__init__(
            f"CUDA device {device} cannot allocate {amount}: {free_bytes:,} of its {total_bytes:,} bytes are free; "
            f"use a smaller context or model, move fewer layers to it, or end other programs that use it"
        )
        self.device = device
        self.n_bytes = n_bytes
        self.free_bytes = free_bytes


class ExpertReadError(LocalLLMError):
    """Experts that are stored only in the model's file could not be read during a step.

    Attributes:
        sequences: sequences of the batch that need these experts.
        logits: logits of the complete batch; the logits of other sequences are valid.
    """

    def __init__(self, message: str, sequences: frozenset[int], logits: Any) -> None:
        super().__init__(message)
        self.sequences = sequences
        self.logits = logits


class KernelError(LocalLLMError):
    """No kernel supports the shapes or formats, or a kernel could not be compiled."""


class ClosedError(LocalLLMError):
    """The model or the file was closed before this call."""


class PromptCacheError(LocalLLMError):
    """A file of saved prompts does not exist, is damaged, or belongs to another model."""


class StoreError(LocalLLMError):
    """Saved chats cannot be read or written, or a file is not an exported chat."""
