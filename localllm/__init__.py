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
    Steering          vectors that change values inside a model
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
    from localllm.engine.request import Timings as Timings, Usage as Usage
    from localllm.errors import (
        ClosedError as ClosedError,
        ContextLengthError as ContextLengthError,
        DeviceError as DeviceError,
        DeviceLostError as DeviceLostError,
        DeviceMemoryError as DeviceMemoryError,
        ExpertReadError as ExpertReadError,
        GGUFError as GGUFError,
        GrammarError as GrammarError,
        HubError as HubError,
        KernelError as KernelError,
        LocalLLMError as LocalLLMError,
        ModelError as ModelError,
        ModelNotFoundError as ModelNotFoundError,
        NotEnoughMemoryError as NotEnoughMemoryError,
        OutputError as OutputError,
        PromptCacheError as PromptCacheError,
        QueueFullError as QueueFullError,
        SettingsError as SettingsError,
        StoreError as StoreError,
        TemplateError as TemplateError,
        TokenizerError as TokenizerError,
        UnsupportedArchitectureError as UnsupportedArchitectureError,
        UsageError as UsageError,
    )
    from localllm.generation.completion import Chunk as Chunk, Completion as Completion, Stream as Stream
    from localllm.generation.scoring import Score as Score
    from localllm.gguf import GGUFFile as GGUFFile
    from localllm.inspection.steering import Steering as Steering
    from localllm.llm import LLM as LLM, load as load
    from localllm.loading.model_info import ModelInfo as ModelInfo
    from localllm.options.keywords import Options as Options
    from localllm.sampling import Choice as Choice, Sampling as Sampling
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
        ("inspection.steering", "Steering"),
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
