"""Run large language models (GGUF files) on your own computer, in pure Python.

    import localllm

    with localllm.load("model.gguf") as llm:  # without a path: the small demo model
        print(llm.generate("Once upon a time", max_tokens=50).text)
        for chunk in llm.stream("Once upon a time", temperature=0, stop="\\n"):
            print(chunk.text, end="", flush=True)
        print(llm.chat([{"role": "user", "content": "Hello!"}]).text)
        print(llm.info)  # devices and memory of the model

help() describes these names:

    load              loads a model file, or a model downloaded from the hub
    LLM               a loaded model: generate, chat, stream, score, tokenize, ...
    Options           keywords of generate, chat and stream: max_tokens, stop, ...
    Sampling          options for choosing the next token: temperature, top_k, seed, ...
    Completion        generated text
    Stream, Chunk     generated text as an iterator
    Usage, Timings, Drafts          counts of tokens, seconds and drafts
    Choice, Score     log-probabilities of a token, and of a continuation
    ModelInfo         facts about a model, in LLM.info
    Tokenizer, ChatTemplate, GGUFFile    components of LLM

Failures raise a LocalLLMError whose message states the remedy.  An unknown keyword is a TypeError.

    GGUFError         the file is damaged, or not a GGUF; its subclass is
    ModelNotFoundError               the file does not exist (a FileNotFoundError)
    ModelError, UnsupportedArchitectureError, TokenizerError, TemplateError
                      the file's model is not supported, or broken
    UsageError        an argument is out of range (a ValueError)
    GrammarError                     a JSON schema or grammar cannot be used (a ValueError)
    ContextLengthError               the prompt is too long (a ValueError)
    NotEnoughMemoryError, DeviceMemoryError    the model does not fit (a MemoryError)
    DeviceError, DeviceLostError, KernelError  a device cannot be used, or failed
    ExpertReadError   experts in the model's file could not be read
    ClosedError, QueueFullError      the model was closed; the queue of requests is full
    HubError, OutputError, PromptCacheError, SettingsError, StoreError    files and downloads

localllm.compat runs programs written for llama-cpp-python.  Names are loaded at the first use, so the import is fast.
"""

import atexit as _atexit
import os as _os
import sys as _sys

from localllm.version import __version__ as __version__

# In a checkout kernels/, models/, quant/ and tui/ are next to this folder, which contains symlinks to them.  On
# Windows git may write the symlinks as small files; the real folders are then added to the search path.
if _os.path.isfile(_os.path.join(__path__[0], "kernels")):
    __path__.append(_os.path.dirname(__path__[0]))

# Type checkers assume that this is true.  Importing `typing` for it would take longer than the rest of this module.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from localllm.chat import ChatTemplate as ChatTemplate
    from localllm.engine.drafting import Drafts as Drafts
    from localllm.engine.request import Timings as Timings
    from localllm.engine.request import Usage as Usage
    from localllm.errors import ClosedError as ClosedError
    from localllm.errors import ContextLengthError as ContextLengthError
    from localllm.errors import DeviceError as DeviceError
    from localllm.errors import DeviceLostError as DeviceLostError
    from localllm.errors import DeviceMemoryError as DeviceMemoryError
    from localllm.errors import ExpertReadError as ExpertReadError
    from localllm.errors import GGUFError as GGUFError
    from localllm.errors import GrammarError as GrammarError
    from localllm.errors import HubError as HubError
    from localllm.errors import KernelError as KernelError
    from localllm.errors import LocalLLMError as LocalLLMError
    from localllm.errors import ModelError as ModelError
    from localllm.errors import ModelNotFoundError as ModelNotFoundError
    from localllm.errors import NotEnoughMemoryError as NotEnoughMemoryError
    from localllm.errors import OutputError as OutputError
    from localllm.errors import PromptCacheError as PromptCacheError
    from localllm.errors import QueueFullError as QueueFullError
    from localllm.errors import SettingsError as SettingsError
    from localllm.errors import StoreError as StoreError
    from localllm.errors import TemplateError as TemplateError
    from localllm.errors import TokenizerError as TokenizerError
    from localllm.errors import UnsupportedArchitectureError as UnsupportedArchitectureError
    from localllm.errors import UsageError as UsageError
    from localllm.generation.completion import Chunk as Chunk
    from localllm.generation.completion import Completion as Completion
    from localllm.generation.completion import Stream as Stream
    from localllm.generation.scoring import Score as Score
    from localllm.gguf import GGUFFile as GGUFFile
    from localllm.llm import LLM as LLM
    from localllm.llm import load as load
    from localllm.loading.model_info import ModelInfo as ModelInfo
    from localllm.options.keywords import Options as Options
    from localllm.sampling import Choice as Choice
    from localllm.sampling import Sampling as Sampling
    from localllm.tokenizer import Tokenizer as Tokenizer


#: Module of each public name.  __all__ is not defined, because help() would then print every class in full.
_HOMES = {
    name: home
    for home, names in (
        ("chat", "ChatTemplate"),
        ("engine.drafting", "Drafts"),
        ("engine.request", "Timings Usage"),
        (
            "errors",
            "ClosedError ContextLengthError DeviceError DeviceLostError DeviceMemoryError ExpertReadError "
            "GGUFError GrammarError HubError KernelError LocalLLMError ModelError ModelNotFoundError "
            "NotEnoughMemoryError OutputError PromptCacheError QueueFullError SettingsError StoreError "
            "TemplateError TokenizerError UnsupportedArchitectureError UsageError",
        ),
        ("generation.completion", "Chunk Completion Stream"),
        ("generation.scoring", "Score"),
        ("gguf", "GGUFFile"),
        ("llm", "LLM load"),
        ("loading.model_info", "ModelInfo"),
        ("options.keywords", "Options"),
        ("sampling", "Choice Sampling"),
        ("tokenizer", "Tokenizer"),
    )
    for name in names.split()
}


@_atexit.register
def _end() -> None:
    """Registered at the import.  Functions that a program registers later run earlier, and can still use models."""
    if (process := _sys.modules.get("localllm.kernels.process")) is not None:
        process.end()


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        from localllm.options.foreign_names import THEIR_NAMES, no_attribute

        raise no_attribute("module 'localllm'", name, THEIR_NAMES)
    # Imported here, so that import_module is not a name of the package.
    from importlib import import_module

    value = getattr(import_module(f"localllm.{home}"), name)
    globals()[name] = value  # so that the name is resolved only once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES} - {"TYPE_CHECKING", "__getattr__", "__dir__"})
