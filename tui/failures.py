"""What goes wrong, in one sentence for whoever sits before the screen."""

from __future__ import annotations

import errno

from localllm.cli.terminal import visible_line
from localllm.errors import LocalLLMError


def sentence(error: BaseException) -> str:
    """What happened and what to do about it, in one line that a terminal can be given."""
    return visible_line(_sentence(error))


def _sentence(error: BaseException) -> str:
    if isinstance(error, LocalLLMError):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "memory ran out: close other programs, or choose a smaller model or context"
    if isinstance(error, OSError):
        return f"the system refused: {error}"
    return f"something went wrong inside localllm ({type(error).__name__}: {error}): please report it"
