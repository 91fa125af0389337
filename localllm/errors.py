"""Every failure a user can meet is one of these: one clear sentence that says what to do about it."""

from __future__ import annotations

import os
import reprlib
import sys
import warnings

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


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns of the line outside localllm that called it, however deep in localllm we are."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class LocalLLMError(Exception):
    """The root of all errors that localllm raises on purpose."""


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
        truncatable: whether some of it can be left out.
    """

    def __init__(
        self, n_tokens: int, context: int, advice: str, *, truncated: bool = False, truncatable: bool = False
    ) -> None:
        super().__init__(f"the prompt has {n_tokens:,} tokens but the context holds {context:,}: {advice}")
        self.n_tokens = n_tokens
        self.context = context
        self.truncated = truncated
        self.truncatable = truncatable


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


class KernelError(LocalLLMError):
    """No kernel fits the shapes or formats at hand, or one could not be compiled."""


class ClosedError(LocalLLMError):
    """The model or the file was closed before this call."""


class PromptCacheError(LocalLLMError):
    """A file of saved prompts that is not there, damaged, or of another model."""


class StoreError(LocalLLMError):
    """Saved chats cannot be read or written, or a file is no exported chat."""
