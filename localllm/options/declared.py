"""The options of loading, sampling and single calls, each declared once: name, default, range, help, flag, label.

The checks, `help`, the command line's flags, the settings keys and the chat's form are derived from the declarations.
Nothing slow to import is imported here, so that ``localllm --help`` is fast.
"""

# Fields are declared by function calls, as in dataclasses.
# ruff: noqa: RUF009

from __future__ import annotations

import inspect
import json
import math
import numbers
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

from localllm.errors import Argument, UsageError
from localllm.nesting import parse_json
from localllm.options.checks import as_int, check_keywords
from localllm.options.foreign_names import THEIR_OPTIONS
from localllm.options.types import (
    DEFAULT_DRAFTS,
    MAX_DRAFTS,
    CacheScope,
    DiffusionAlgorithm,
    Overflow,
    Speculate,
    SplitMode,
)

if TYPE_CHECKING:
    from localllm.kernels.graph import CacheType
    from localllm.options.types import Hook, LoadProgress, LogitsProcessor, OnValues, Priority, Progress

_Documented = TypeVar("_Documented")

_MAX = sys.float_info.max

# -- Kinds of values -----------------------------------------------------------------------------------------------


class OptionKind(NamedTuple):
    """The kind of an option's values: how they are read, checked and shown."""

    words: str  # description of valid values
    read: Callable[[Any], Any]  # converts a value to its plain Python type; returns None if it is invalid
    parse: Callable[[str], Any] = str  # parses a word of the command line
    metavar: str = "NAME"  # placeholder of the value in the command line's help
    json: Any = None  # type in requests of the server; None if requests cannot set it


def _real(value: object, low: float, high: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # the integer exceeds the range of floats
        return None
    return number if low <= number <= high else None


def _integer(value: object, low: int, below: float) -> int | None:
    number = as_int(value)
    return number if number is not None and low <= number < below else None


def _number(low: float, words: str, high: float = _MAX) -> OptionKind:
    return OptionKind(words, partial(_real, low=low, high=high), float, "X", float)


def _whole(low: int, words: str = "", below: float = math.inf) -> OptionKind:
    words = words or f"a whole number of at least {low}"
    return OptionKind(words, partial(_integer, low=low, below=below), int, "N", int)


def _of_type(words: str, types: Any, metavar: str = "NAME", json: Any = None) -> OptionKind:
    return OptionKind(words, lambda value: value if isinstance(value, types) else None, metavar=metavar, json=json)


def _mapping_of(key: Callable[[Any], Any], value: Callable[[Any], Any]) -> Callable[[object], dict[Any, Any] | None]:
    """Return a reader of mappings whose keys and values are read by ``key`` and ``value``."""

    def read(mapping: object) -> dict[Any, Any] | None:
        if not isinstance(mapping, Mapping):
            return None
        read = {key(name): value(item) for name, item in mapping.items()}
        return None if None in read or None in read.values() else read

    return read


def _tuple_of(is_valid: Callable[[Any], object]) -> Callable[[object], tuple[Any, ...] | None]:
    """Return a reader of iterables other than strings."""

    def read(value: object) -> tuple[Any, ...] | None:
        items = None if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
        return items if items is not None and all(map(is_valid, items)) else None

    return read


def _read_processors(value: object) -> tuple[Any, ...] | None:
    """Return one or several logits processors as a tuple.  A list that can be called is one processor."""
    return (value,) if callable(value) else _tuple_of(callable)(value)


_read_texts = _tuple_of(lambda text: isinstance(text, str) and text)


def _read_proportions(value: object) -> tuple[float, ...] | None:
    numbers = [_real(number, 0.0, _MAX) for number in value] if isinstance(value, list | tuple) else []
    return None if None in numbers or not any(numbers) else tuple(map(float, numbers))  # type: ignore[arg-type]


def _floats(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _one_of(*choices: str) -> OptionKind:
    words = f"one of {', '.join(map(repr, choices))}"
    read = {choice: choice for choice in choices}.get
    return OptionKind(words, lambda value: read(value) if isinstance(value, str) else None, metavar="WHAT", json=str)


def _read_cache_type(value: object) -> str | None:
    types = value.split("/") if isinstance(value, str) else []
    if len(types) not in (1, 2) or not {*types} <= {"f16", "q8_0", "q5_0", "q4_0"}:
        return None
    return "/".join(dict.fromkeys(types))


def _read_schema(value: Any) -> str | None:
    """Return the JSON text of a schema, which may be a dict, JSON text or a pydantic model class."""
    schema = value.model_json_schema() if callable(getattr(value, "model_json_schema", None)) else value
    try:
        schema = parse_json(schema) if isinstance(schema, str) else schema
        # Keys are not sorted: the reply's properties have the schema's order.
        return json.dumps(schema, allow_nan=False) if isinstance(schema, Mapping) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _parse_schema(text: str) -> str:
    """Return a JSON schema of the command line unchanged.  Raises UsageError if it is not valid JSON."""
    try:
        parse_json(text)
    except ValueError as error:
        raise UsageError(f"{text!r:.80} is not valid JSON ({error}); -jf FILE reads a schema from a file") from None
    return text


def _read_rules(value: object) -> tuple[str, ...] | None:
    """Return the single rules of strings with commas; None if one is not a regular expression, "=" and a device."""
    rules = _read_texts((value,) if isinstance(value, str) else value)
    single = [rule for rule_list in rules or () for rule in rule_list.split(",")]
    try:
        for rule in single:
            pattern, _, device = rule.partition("=")
            re.compile(pattern)
            if not pattern or not re.fullmatch(r"CPU|CUDA[0-9]{1,3}", device):
                return None
    except (re.error, OverflowError, RecursionError):
        return None
    return tuple(single) or None


def _text_with_content(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _read_steer(value: object) -> tuple[Any, ...] | None:
    """Return vectors and `localllm.Steering` as a tuple. `LLM` checks them."""
    if isinstance(value, Mapping) or hasattr(value, "vectors"):
        return (value,)
    return tuple(value) if isinstance(value, list | tuple) else None


_PROBABILITY = _number(0.0, "a number from 0 to 1", 1.0)
_ANY_NUMBER = _number(-_MAX, "a finite number")
_NOT_NEGATIVE = _number(0.0, "a finite number of at least 0")
_WINDOW = _whole(-1, "a whole number of at least -1 (-1 is the whole text, 0 is off)")
_MIROSTAT = OptionKind("0 (off) or 2", lambda value: n if (n := as_int(value)) in (0, 2) else None, int, "N", int)
_TOKENS = _whole(1, "a whole number from 1 to 2^63 - 1", 1 << 63)
_TEXT, _NAME = _of_type("text (str)", str), _of_type("", str).read
_PATH = _of_type("the path of a GGUF file, as str or Path", (str, os.PathLike), "FILE")
_FOLDER = _of_type("the path of a folder, as str or Path", (str, os.PathLike), "DIR")
_MMPROJ = OptionKind(
    "the path of a GGUF file, as str or Path, or False",
    lambda value: value if value is False or isinstance(value, str | os.PathLike) else None,
    metavar="FILE",
)
_PROPORTIONS = OptionKind("a list of numbers of at least 0, not all 0", _read_proportions, _floats, "X,…")
_CACHE_TYPE = OptionKind(
    "one of 'f16', 'q8_0', 'q5_0', 'q4_0', or one type for keys and one for values, such as 'q8_0/q4_0'",
    _read_cache_type,
    metavar="TYPE",
    json=str,
)
_SPLIT_MODE = _one_of("layer", "row")._replace(metavar="MODE")
_TEXTS = OptionKind("non-empty strings", _read_texts, json=list[str])
STOPS = OptionKind(
    "a non-empty string, or a list of non-empty strings",
    lambda value: _read_texts((value,) if isinstance(value, str) else value),
    metavar="TEXT",
    json=str | list[str],
)
_RULES = OptionKind(
    "rules such as 'exps=CPU' or 'blk.0.ffn=CUDA0,exps=CPU', or a list of rules: each is a valid regular expression, "
    "followed by =CPU or =CUDA0",
    _read_rules,
    metavar="RULES",
)
_SECONDS = _number(math.ulp(0.0), "a number of seconds above 0")
_SCHEMA = OptionKind(
    "a JSON schema: a dict, JSON text, or a pydantic model class",
    _read_schema,
    _parse_schema,
    "SCHEMA",
    dict[str, Any],
)
_REGEX = OptionKind("a non-empty regular expression", _text_with_content, metavar="REGEX", json=str)
_GRAMMAR = OptionKind("a grammar in Lark's or llama.cpp's notation", _text_with_content, metavar="TEXT", json=str)
_SHARES = OptionKind("a mapping of adapters' names to finite numbers", _mapping_of(_NAME, _ANY_NUMBER.read))
_ADAPTERS = OptionKind("a mapping of names to the paths of adapters", _mapping_of(_NAME, _PATH.read))
_WATCH = OptionKind("a name of a value inside the model, or a list of names", STOPS.read)
_STEER = OptionKind("a mapping of names to vectors, a Steering, or a list of Steering", _read_steer)
_HOOKS = OptionKind(
    "a mapping of names of values to functions",
    _mapping_of(_NAME, lambda value: value if callable(value) else None),
)
_BIASES = OptionKind(
    "a mapping of token ids to finite numbers or -inf",
    _mapping_of(_whole(0).read, _number(-math.inf, "").read),
    json=dict[str, float] | list[tuple[int | str, float | bool]],  # OpenAI's form, and llama.cpp's
)

#: A boolean.  Its flag of the command line has no value.
SWITCH = _of_type("True or False", bool, json=bool)


# -- Options -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """Metadata of an option's field, in addition to its name, type and default."""

    kind: OptionKind
    help: str  # one line, followed by two spaces and sentences that only `help` shows
    flags: str = ""  # command-line flags, separated by spaces; "--" is the flag with the field's name
    label: str = ""  # label in the chat's form; empty if the form omits the option
    none: str = ""  # meaning of None; empty if None is invalid
    is_setting: bool = True  # whether the settings file and chats may store it
    key: str = ""  # suffix of "general.sampling." for the model file's default

    @property
    def brief(self) -> str:
        """The first line of ``help``, without the sentences after it."""
        return self.help.partition(".  ")[0]


def _setting(default: Any, kind: OptionKind, help: str, flags: str = "--", label: str = "", **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(kind, help, flags, label, **more)})


def _call_option(default: Any, kind: OptionKind, help: str, flags: str = "", *, none: str = "") -> Any:
    """Declare an option of single calls, which is not stored."""
    return field(default=default, metadata={"option": Option(kind, help, flags, none=none, is_setting=False)})


def declared(cls: type[Any]) -> dict[str, Option]:
    return {f.name: f.metadata["option"] for f in fields(cls)}


def flags_of(name: str, option: Option) -> list[str]:
    return [f"--{name.replace('_', '-')}"] if option.flags == "--" else option.flags.split()


def default_text(cls: type[Any], name: str) -> str:
    default = getattr(cls, name, None)
    return declared(cls)[name].none if default in (None, ()) else str(default)


class _Checked:
    """Options whose values are checked, and stored in their plain Python types."""

    def __post_init__(self) -> None:
        for name, option in declared(type(self)).items():
            value = getattr(self, name)
            if value is None and option.none:
                continue
            if value is None:
                field = type(self).__dataclass_fields__[name]  # type: ignore[attr-defined]
                value = field.default if field.default_factory is MISSING else field.default_factory()
            if (read := option.kind.read(value)) is None:
                also = f", or None ({option.none})" if option.none else ""
                raise UsageError.of(name, value, f"{option.kind.words}{also}")
            object.__setattr__(self, name, read)


def describes(cls: type[Any]) -> Callable[[_Documented], _Documented]:
    """Return a decorator that replaces ``{options}`` in a docstring with one paragraph per option of ``cls``."""
    lines: list[str] = []
    for name, option in declared(cls).items():
        default = default_text(cls, name)
        first, _, more = option.help.partition(".  ")
        words = f"; {option.kind.words}" if option.kind.parse is not str else ""
        text = f"{name}: {first}{words}." + (f"  By default {default}." if default else "") + f"  {more}"
        lines += textwrap.wrap(text.rstrip(), 110, subsequent_indent="    ")

    def add(target: _Documented) -> _Documented:
        if target.__doc__:  # None under python -OO
            # Python 3.13 and later remove the common indentation of docstrings; `cleandoc` does it on 3.11 and 3.12.
            text = inspect.cleandoc(target.__doc__)
            target.__doc__ = text.replace("    {options}", textwrap.indent("\n".join(lines), "    "))
        return target

    return add


@dataclass(frozen=True)
class LoadOptions(_Checked):
    """The arguments of `localllm.load`, checked."""

    path: str | os.PathLike[str] | None = _call_option(
        None,
        _PATH,
        "a GGUF file, any file of a split model, or a name that ``localllm models`` lists.  ``~`` is the home "
        "folder.  A name selects a model in the cache of the Hugging Face hub, such as 'qwen3.5:4b' or "
        "'ORG/REPO:QUANT' (``localllm pull`` downloads it), a file in the folders of the setting ``model_folders``, "
        "or 'demo'.  A Path is always a file.",
        none="the demo model",
    )
    device: str = _setting(
        "auto",
        _TEXT,
        "where to run: auto, cpu, cuda (all GPUs), cuda:0,1 (these GPUs) or reference.  'auto' is 'cuda' with a "
        "working GPU, otherwise 'cpu'.  With 'cuda', the CPU runs layers that do not fit on the GPUs.  'reference' "
        "is plain numpy, slow and exact.",
    )
    n_gpu_layers: int | None = _setting(
        None,
        _whole(0),
        "number of layers to run on GPUs, counted from the last; the CPU runs the rest.  A number above the model's "
        "number of layers means all layers.",
        "-ngl --gpu-layers --n-gpu-layers",
        none="the largest number that fits",
    )
    tensor_split: Sequence[float] | None = _setting(
        None,
        _PROPORTIONS,
        "proportions of the layers per GPU, such as 3,1",
        "-ts --tensor-split",
        none="in proportion to free memory",
    )
    split_mode: SplitMode | None = _setting(
        None,
        _SPLIT_MODE,
        "how GPUs share a model: 'layer' runs whole layers on each GPU; 'row', for 2 to 8 GPUs with fast links, "
        "computes a part of every layer on each GPU",
        "-sm --split-mode",
        none="layer",
    )
    n_cpu_moe: int | None = _call_option(
        None,
        _whole(0),
        "number of first layers whose routed experts the CPU computes.  The GPU computes the rest of these layers: "
        "attention, shared experts and the cache.",
        "-ncmoe --n-cpu-moe",
        none="the smallest number that fits, if that is faster than whole layers on the CPU",
    )
    cpu_moe: bool | None = _call_option(
        None,
        SWITCH,
        "let the CPU compute the routed experts of all layers",
        "-cmoe --cpu-moe",
        none="False",
    )
    override_tensor: str | Sequence[str] | None = _call_option(
        None,
        _RULES,
        "matrices that the CPU multiplies although their layer is on a GPU: regular expressions of tensor names, "
        "such as 'exps=CPU'.  The first expression that matches a name counts; CUDA0 instead of CPU leaves a matrix "
        "on the GPU of its layer.",
        "-ot --override-tensor",
        none="none",
    )
    max_memory: float | None = _call_option(
        None,
        _number(math.ulp(0.0), "a number of gigabytes above 0"),
        "GB of the host's memory that the model may use.  Experts of a mixture that do not fit stay in the file, "
        "and are read when tokens are routed to them.",
        "--max-memory",
        none="all free memory, or 1 GiB less if the model is larger",
    )
    context: int | None = _setting(
        None,
        _TOKENS,
        "tokens of context, for the prompt and the answer together.  By default the cache takes at most half of the "
        "memory that the weights leave free, or up to 4,096 tokens if that is more.  A context longer than in "
        "training is allowed, with a warning.",
        "-c --ctx-size --context",
        none="the training context, or less if memory is short",
    )
    threads: int | None = _setting(
        None,
        _whole(1),
        "number of threads.  For decoding, localllm measures once per machine which number reads memory fastest, and "
        "stores it.",
        "-t --threads",
        none="one per physical core; for decoding, the number that localllm doctor shows",
    )
    isa: str | None = _call_option(
        None,
        _TEXT,
        "the instruction set of the CPU kernels, such as avx2; localllm doctor -v lists the supported ones",
        "--",
        none="the best supported one",
    )
    parallel: int | None = _call_option(
        1,
        _TOKENS,
        "number of sequences of full length that fit in the cache.  Concurrent requests share it, and wait for "
        "each other if it is too small.",
        none="up to 4, as memory allows",
    )
    cache_type: CacheType = _setting(
        "f16",
        _CACHE_TYPE,
        "type of the KV cache: f16; q8_0, q5_0 or q4_0, which take 1/2, 1/3 or 2/7 of the memory of f16; or a type "
        "for keys and a type for values, such as q8_0/q4_0.  Heads are rotated before they are rounded, so the loss "
        "is small (docs/speed.md).",
    )
    chat_template: str | None = _call_option(
        None,
        _TEXT,
        "Jinja source of a chat template, or llama.cpp's name of one such as llama3, instead of the file's template",
        none="the file's template",
    )
    adapters: Mapping[str, str | os.PathLike[str]] | None = _call_option(
        None,
        _ADAPTERS,
        "low-rank adapters (LoRA), GGUF files or PEFT folders, by names that you choose.  Calls select adapters and "
        "their scales: ``generate(..., adapters={'name': 0.8})``.",
        none="none",
    )
    draft_model: str | os.PathLike[str] | None = _call_option(
        None,
        _PATH,
        "a smaller model with the same vocabulary, or a drafter made for the model (EAGLE-3, DFlash, DSpark, Gemma "
        "4's), which drafts tokens.  It accepts the same names as ``path``; see ``speculate`` in `localllm.Options`.",
        "-md --draft-model --model-draft",
        none="no draft model",
    )
    mmproj: str | os.PathLike[str] | Literal[False] | None = _call_option(
        None,
        _MMPROJ,
        "file with the model's encoder of images or audio (mmproj-….gguf).  False loads no encoder.",
        "--mmproj -mm",
        none="a matching file in the model's folder",
    )
    image_max_tokens: int | None = _call_option(
        None,
        _TOKENS,
        "maximum number of tokens of an image; larger images are scaled down",
        "--",
        none="the limit of the model's released processor",
    )
    prompt_cache: str | os.PathLike[str] | None = _call_option(
        None,
        _FOLDER,
        "folder that stores evaluated prompts, so that they are not evaluated again after a restart.  Prompts and "
        "replies are stored while the model runs, and found by any later prompt with the same beginning.  The folder "
        "contains your texts as token ids; only its owner can read it.",
        "--prompt-cache --slot-save-path",
        none="no folder",
    )
    prompt_cache_size: float | None = _call_option(
        None,
        _number(0.01, "a number of gigabytes of at least 0.01"),
        "most GB of the folder.  Prompts that were not used for the longest time are removed first, beginnings that "
        "several prompts share last.",
        "--prompt-cache-size",
        none="4, or a twentieth of the free space if that is less",
    )
    cache_scope: CacheScope = _call_option(
        "all",
        _one_of("all", "key"),
        "which requests share evaluated prompts, in memory and in the folder: all requests, or only requests with "
        "the same API key (the option ``client``).  If all share them, a client can measure whether another client "
        "has sent the same words.",
        "--",
    )
    progress: LoadProgress | None = _call_option(
        None,
        _of_type("a function of a stage and two numbers", Callable),
        "called while kernels are compiled and weights are packed, with 'kernels' or 'weights', the number of "
        "finished kernels or bytes, and the total",
        none="a line on standard error if that is a terminal and compiling takes long",
    )
    planned: Callable[[Any], object] | None = _call_option(
        None,
        _of_type("a function of a plan", Callable),
        "called once, before the weights are loaded, with the `localllm.loading.placement.Plan`",
        none="nothing",
    )
    max_waiting: int = _call_option(
        1024, _whole(1), "maximum number of queued requests.  Further requests raise `QueueFullError`."
    )
    step_s: float = _call_option(
        0.1,
        _SECONDS,
        "maximum seconds for a step that evaluates a part of a long prompt.  Other streams pause for up to this "
        "time, and cancelling can take this time.  Steps of a very slow model take longer, because a part has "
        "at least 16 tokens, or 64 tokens if no other request decodes.",
    )


#: Settings that constrain the text to a grammar.  At most one can be given.
GRAMMARS = ("json_schema", "regex", "grammar")


@dataclass(frozen=True, kw_only=True)
class Sampling(_Checked):
    """Options for choosing the next token.  Names and defaults are llama.cpp's; see `localllm.sampling.sampler`.

    Attributes:
        {options}
    """

    temperature: float = _setting(
        0.8,
        _number(0.0, "a finite number of at least 0 (0 is greedy)"),
        "divides the logits; 0 selects the likeliest token, without truncation, XTC and mirostat",
        "--temp --temperature",
        "Temperature",
        key="temp",
    )
    top_k: int = _setting(40, _whole(0), "sample from the N likeliest tokens; 0 is off", "--", "Top k", key="top_k")
    top_p: float = _setting(
        0.95, _PROBABILITY, "the likeliest tokens of this total; 1 is off", "--", "Top p", key="top_p"
    )
    min_p: float = _setting(
        0.05, _PROBABILITY, "minimum relative to the likeliest token; 0 is off", "--", "Min p", key="min_p"
    )
    top_n_sigma: float = _setting(
        0.0,
        _ANY_NUMBER,
        "keep logits within this many standard deviations of the highest; 0 or less is off.  arXiv:2411.07641.",
        "--top-n-sigma --top-nsigma",
    )
    typical_p: float = _setting(
        1.0,
        _PROBABILITY,
        "locally typical sampling; 1 is off.  Keeps the tokens whose surprise is nearest to the entropy, until their "
        "probabilities exceed this sum.",
        "--typical --typical-p",
    )
    repeat_penalty: float = _setting(
        1.0,
        _number(math.ulp(0.0), "a finite number above 0 (1 is off)"),
        "penalty on tokens that occurred before; 1 is off.  Positive logits are divided by it, and negative logits "
        "multiplied.",
        "--",
        "Repeat penalty",
        key="penalty_repeat",
    )
    repeat_last_n: int = _setting(
        64, _WINDOW, "the penalties apply to the last N tokens; -1 means all", key="penalty_last_n"
    )
    presence_penalty: float = _setting(
        0.0, _ANY_NUMBER, "subtracted from the logits of tokens that occurred; 0 is off"
    )
    frequency_penalty: float = _setting(
        0.0, _ANY_NUMBER, "subtracted from a token's logit for each occurrence; 0 is off"
    )
    dry_multiplier: float = _setting(
        0.0,
        _NOT_NEGATIVE,
        "strength of DRY, which penalises repetition; 0 is off.  A token that extends a repetition of ``length`` "
        "tokens gets the penalty ``multiplier * base ** (length - allowed_length)``, from ``allowed_length`` on.",
    )
    dry_base: float = _setting(
        1.75, _number(1.0, "a finite number of at least 1"), "growth of the DRY penalty per repeated token"
    )
    dry_allowed_length: int = _setting(2, _whole(0), "length of repetitions without a DRY penalty")
    dry_penalty_last_n: int = _setting(-1, _WINDOW, "DRY applies to the last N tokens; -1 means all")
    dry_sequence_breakers: tuple[str, ...] = _setting(
        ("\n", ":", '"', "*"), _TEXTS, "DRY does not match repetitions across these texts", ""
    )
    xtc_probability: float = _setting(
        0.0,
        _PROBABILITY,
        "probability that XTC applies to a token; 0 is off.  XTC removes all tokens with at least the probability "
        "``xtc_threshold``, except the least likely of these tokens.",
        key="xtc_probability",
    )
    xtc_threshold: float = _setting(
        0.1,
        _PROBABILITY,
        "minimum probability of tokens that XTC removes; above 0.5, XTC has no effect",
        key="xtc_threshold",
    )
    mirostat: int = _setting(
        0,
        _MIROSTAT,
        "2 selects mirostat 2; 0 is off.  It controls the surprise of the text and replaces the samplers "
        "from top-k to XTC.",
        key="mirostat",
    )
    mirostat_tau: float = _setting(
        5.0, _NOT_NEGATIVE, "mirostat's target surprise in bits, tau", "--mirostat-ent", key="mirostat_tau"
    )
    mirostat_eta: float = _setting(
        0.1, _NOT_NEGATIVE, "mirostat's learning rate, eta", "--mirostat-lr", key="mirostat_eta"
    )
    adaptive_target: float = _setting(
        -1.0,
        _number(-1.0, "a number from 0 to 1, or -1 (off)", 1.0),
        "adaptive-p favours tokens near this probability; -1 is off.  It samples from the tokens that the other "
        "samplers kept.",
    )
    adaptive_decay: float = _setting(
        0.9, _number(0.0, "a number from 0 to 0.99", 0.99), "decay of adaptive-p's memory, from 0 to 0.99"
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        hash=False,
        metadata={"option": Option(_BIASES, "added to the logits of tokens; -inf forbids a token", is_setting=False)},
    )
    seed: int | None = _setting(
        None,
        _whole(0, "a whole number from 0 to 2^64 - 1", 1 << 64),
        "seed of the random numbers; the same seed gives the same text.  Sampling matches llama.cpp's.",
        "-s --seed",
        "Seed",
        none="a new seed for each call",
    )
    logprobs: int | None = _call_option(
        None,
        _whole(0),
        "log-probabilities of each token and of the N likeliest tokens, before all samplers",
        none="no log-probabilities",
    )
    post_sampling_probs: bool = _call_option(
        False,
        SWITCH,
        "report the probabilities after all samplers.  Tokens that samplers removed are then not listed.",
        "--",
    )
    json_schema: str | Mapping[str, Any] | type | None = _call_option(
        None,
        _SCHEMA,
        "generate JSON that follows this schema: a dict, JSON text, or a pydantic model class.  As with ``regex`` "
        "and ``grammar``, reasoning before the answer is not constrained, and only ``max_tokens`` and ``stop`` can "
        "end the answer before it is complete.  An object has only the properties that the schema names, unless "
        "``additionalProperties`` allows more.",
        "-j --json-schema",
        none="any text",
    )
    regex: str | None = _call_option(
        None, _REGEX, "generate text that this regular expression matches completely", "--", none="any text"
    )
    grammar: str | None = _call_option(
        None,
        _GRAMMAR,
        "generate text that follows a grammar in Lark's notation or in GBNF.  The first rule is ``start`` in "
        "Lark's notation, and ``root`` in GBNF.",
        "--",
        none="any text",
    )
    processors: tuple[LogitsProcessor, ...] = _call_option(
        (),
        OptionKind("a function or a list of functions", _read_processors),
        "called in order after ``logit_bias``, with the tokens of prompt and reply, int32 [n], and the logits, "
        "float32 [n_vocab].  Each returns the new logits.  A ``transformers.LogitsProcessor`` gets and returns torch "
        "tensors, int64 [1, n] and float32 [1, n_vocab].  Calls also accept the name ``logits_processor``.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(names) > 1:
            arguments = [piece for name in names[1:] for piece in (" and ", Argument(name))]
            both = " each constrain the text to a grammar: use only one"
            raise UsageError(Argument(names[0]), *arguments, both)

    @property
    def draws_depend(self) -> bool:
        """Whether a sampled token changes how the next tokens are sampled."""
        return bool(self.mirostat) or self.adaptive_target >= 0

    @property
    def grammar_kind(self) -> str | None:
        """The name of the given option among ``json_schema``, ``regex`` and ``grammar``; None without one."""
        return next((name for name in GRAMMARS if getattr(self, name) is not None), None)

    def replace(self, **changes: Any) -> Self:
        """Return a copy of the settings with ``changes``."""
        names = declared(type(self))
        for name in changes:
            if name not in names:
                raise UsageError(f"{name!r} is not a sampling setting; the settings are {', '.join(names)}")
        return replace(self, **changes)


describes(Sampling)(Sampling)


@dataclass(frozen=True)
class CheckedOptions(_Checked):
    """Checked `localllm.Options`, in plain Python types and with defaults."""

    max_tokens: int | None = _call_option(
        None,
        _whole(0),
        "maximum number of tokens to generate.  0 evaluates the prompt and generates nothing.",
        "-n --predict --n-predict --max-tokens",
        none="until the model ends its text or the context is full",
    )
    stop: tuple[str, ...] = _call_option((), STOPS, "stop before this text, which is omitted", "--")
    reasoning_budget: int | None = _call_option(
        None,
        _whole(-1, "a whole number of at least -1 (-1 is no limit)"),
        "maximum number of tokens of reasoning.  Then the text ``reasoning_budget_message`` and the tag that closes "
        "the reasoning follow, and the model answers.  0 closes the reasoning at once.",
        "--",
        none="no limit",
    )
    reasoning_budget_message: str | None = _call_option(
        None,
        _of_type("text (str)", str, "TEXT", str),
        "text at the end of reasoning that exceeds its budget",
        "--",
        none="no text",
    )
    ignore_eos: bool = _call_option(False, SWITCH, "continue after the model ends its text", "--")
    overflow: Overflow = _call_option(
        "error",
        _one_of("error", "truncate"),
        "treatment of a prompt that is too long for the context: 'error' raises `ContextLengthError`, 'truncate' "
        "drops the oldest part.  BOS and a chat's system messages are never dropped.  A chat loses its oldest turns "
        "until ``max_tokens`` fit (by default a quarter, and at most half of the context).",
        "--",
    )
    sampling: Sampling = field(
        default_factory=Sampling,
        metadata={
            "option": Option(
                _of_type("a localllm.Sampling", Sampling),
                "settings to start from; keywords of single settings replace them",
                is_setting=False,
            )
        },
    )
    progress: Progress | None = _call_option(
        None,
        _of_type("a function of two numbers", Callable),
        "called while a long prompt is evaluated, with the number of evaluated tokens and of all tokens",
        none="nothing",
    )
    speculate: Speculate | None = _call_option(
        "auto",
        _one_of("auto", "lookup", "draft", "mtp"),
        "how to draft several tokens, which the model then verifies in one step.  The text is the same, and is "
        "generated faster if drafts are good; `Completion.drafts` counts accepted drafts.  'lookup' drafts the text "
        "that followed the same words earlier in the prompt or reply.  'draft' uses the ``draft_model`` of "
        "`localllm.load`.  'mtp' uses a block of the model's file that predicts several tokens.  'auto' uses 'draft' "
        "or 'mtp', if available.  None drafts nothing.",
        none="no drafts",
    )
    draft_max: int = _call_option(
        DEFAULT_DRAFTS,
        _whole(1, f"a whole number from 1 to {MAX_DRAFTS}", MAX_DRAFTS + 1),
        "maximum number of tokens to draft per step",
        "--draft-max --draft --draft-n",
    )
    draft_always: bool = _call_option(
        False,
        SWITCH,
        "draft ``draft_max`` tokens in every step, even if that is not expected to be faster: to measure drafts, or "
        "if you know their costs better than localllm.",
    )
    diffusion_steps: int | None = _call_option(
        None,
        _TOKENS,
        "number of steps of a model that writes by diffusion (LLaDA, Dream, RND1).  Fewer steps are faster, because "
        "each step keeps more tokens, and the text is usually worse.",
        "--",
        none="one step per token",
    )
    diffusion_block_length: int | None = _call_option(
        None,
        _whole(0),
        "tokens per block of a model that writes by diffusion.  Blocks are written in order.  0 writes the whole "
        "text at once, with Dream's schedule.",
        "--",
        none="the model's default",
    )
    diffusion_algorithm: DiffusionAlgorithm | None = _call_option(
        None,
        _one_of("origin", "entropy", "margin", "random", "confidence"),
        "measure that selects the tokens which a step of diffusion keeps: the largest probability ('confidence'), "
        "the smallest entropy ('entropy'), the largest distance to the second token ('margin') or a random number "
        "('random').  With 'origin', the number of tokens is random too.",
        "--",
        none="the model's default",
    )
    diffusion_eps: float | None = _call_option(
        None,
        _number(0.0, "a number from 0 to 0.99", 0.99),
        "last time of Dream's schedule, for ``diffusion_block_length`` 0",
        "--",
        none="0.001",
    )
    priority: Priority = _call_option(
        "normal",
        _one_of("normal", "background"),
        "'background' requests let other requests start first, for up to 30 seconds.  Requests that already decode "
        "share every step.",
    )
    client: str = _call_option(
        "", _TEXT, "name of the client; clients share the model evenly, independent of their numbers of requests"
    )
    adapters: Mapping[str, float] | None = _call_option(
        None,
        _SHARES,
        "scales of loaded adapters, such as {'name': 0.8}; adapters without a scale are off",
        none="no adapters",
    )
    tool_grammar: bool = _call_option(
        True,
        SWITCH,
        "constrain tool calls to the model's format and the schemas of the tools.  Other text is free.  A call that "
        "must be made (``tool_choice`` of the server) is always constrained.",
    )
    timeout: float | None = _call_option(
        None,
        _SECONDS,
        "maximum seconds for the text, including the time in the queue.  After it, ``finish_reason`` is 'timeout'",
        none="no limit",
    )
    watch: tuple[str, ...] = _call_option(
        (),
        _WATCH,
        "names of values inside the model (`LLM.graph`) that ``on_values`` receives for each generated token.  ``*`` "
        "matches any layer.  As with ``steer`` and ``hooks``, no tokens are drafted.",
    )
    on_values: OnValues | None = _call_option(
        None,
        _of_type("a function of positions and values", Callable),
        "called in the model's thread with the positions of tokens and the rows of each value in ``watch``, starting "
        "with the last token of the prompt",
        none="nothing",
    )
    steer: tuple[Any, ...] = _call_option(
        (),
        _STEER,
        "vectors that change values inside the model: {'layers.10.output': vector} adds a vector, and "
        "`localllm.Steering` also removes, limits or replaces",
    )
    hooks: Mapping[str, Hook] | None = _call_option(
        None,
        _HOOKS,
        "functions that change values inside the model: {'layers.10.output': f} calls f(rows, positions), which "
        "returns new rows or None.  They run in the model's thread: all requests wait for a slow function.",
        none="no hooks",
    )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        call_options, sampling_options = declared(cls), declared(Sampling)
        if "logits_processor" in options:
            if options.get("processors"):
                both = " is another name of ", Argument("processors"), ": use only one"
                raise UsageError(Argument("logits_processor"), *both)
            renamed = {"logits_processor": "processors"}
            options = {renamed.get(name, name): value for name, value in options.items()}
        check_keywords(options, [*call_options, *sampling_options], THEIR_OPTIONS)
        sampling = options.get("sampling") or Sampling()
        settings = {name: value for name, value in options.items() if name in sampling_options}
        if isinstance(sampling, Sampling):
            values = {k: value for k, value in settings.items() if value is not None or sampling_options[k].none}
            sampling = sampling.replace(**values)
        values = {name: value for name, value in options.items() if name in call_options}
        return cls(**values | {"sampling": sampling})

    def reserved_for_reply(self, context: int) -> int:
        """Return the number of tokens that a truncated prompt reserves for the answer."""
        n_tokens = context // 4 if self.max_tokens is None else self.max_tokens
        return min(n_tokens, context // 2)


#: Flags of arguments without a flag in their declaration, and of arguments that are not options.
_FLAGS = {
    "path": "-m",
    "adapters": "--lora",
    "dry_sequence_breakers": "--dry-sequence-breaker",
    "logit_bias": "-l",
    "steer": "--control-vector",
} | {
    name: flags_of(name, option)[0]
    for cls in (LoadOptions, Sampling, CheckedOptions)
    for name, option in declared(cls).items()
    if option.flags
}


def in_flags(argument: Argument, from_settings: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the command line's name of a library argument: "--top-k", "--device cpu".

    ``from_settings``: names of arguments that come from the settings file, in place of flags.
    """
    name, value = argument
    unknown = name if name.startswith("-") else f"--{name.replace('_', '-')}"  # bench's -p is unchanged
    flag = from_settings.get(name) or _FLAGS.get(name) or unknown
    return flag if value is ... else f"{flag} {value}"
