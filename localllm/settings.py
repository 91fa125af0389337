"""What a user has settled for good: one TOML file, read by the command line and the chat app, never by the library.

A file has keys of `Settings`, and a table ``[sampling]`` with settings of `localllm.Sampling`::

    model = "org/repo:Q4_K_M"
    context = 8192
    model_folders = ["~/models"]

    [sampling]
    temperature = 0.7

Flags override it, and it overrides defaults.  Without a file everything is as by default.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from localllm.errors import SettingsError, UsageError

if TYPE_CHECKING:
    from localllm.kernels.graph import CacheType

#: Environment variable that names another settings file.
CONFIG_VARIABLE = "LOCALLLM_CONFIG"

#: The table of sampling settings, and what of `localllm.Sampling` is not for a file: functions, and what depends on
#: the model or on one request.
SAMPLING = "sampling"
_NOT_SETTLED = ("logit_bias", "logprobs", "processors")

#: A settings file of more bytes than this is another file.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What is in force where no flag says otherwise.

    Attributes:
        model: as ``-m`` takes it; None for the demo model.
        device: see `localllm.load`, as of the next five.
        n_gpu_layers, tensor_split: hold for that device only.
        context: tokens.
        threads: how many compute.
        cache_type: what keys and values are kept in.
        system_prompt: the message before the user's first.
        stop: texts that end an answer.
        theme: the chat app's.
        model_folders: where GGUF files are looked for, beside the cache of the Hugging Face hub.
        sampling: those settings of `localllm.Sampling` that the file has, as the keywords of `LLM.chat`.
        given: the keys that the file has; those of sampling as "sampling.temperature".
    """

    model: str | None = None
    device: str = "auto"
    n_gpu_layers: int | None = None
    tensor_split: tuple[float, ...] | None = None
    context: int | None = None
    threads: int | None = None
    cache_type: CacheType = "f16"
    system_prompt: str | None = None
    stop: tuple[str, ...] = ()
    theme: str = "dark"
    model_folders: tuple[Path, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    given: frozenset[str] = frozenset()

    def values(self) -> Iterator[tuple[str, object]]:
        """Every key but for sampling's, and its value."""
        return ((name, getattr(self, name)) for name in KEYS)


def settings_path() -> Path | None:
    """The settings file: ``LOCALLLM_CONFIG``, or one in the platform's folder; None where there is no home for it."""
    if named := os.environ.get(CONFIG_VARIABLE):
        return _expanded(named)
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Application Support"
        else:
            base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    except RuntimeError:  # no variable names a home, and the system does not know the user
        return None
    return base / "localllm" / "config.toml"


def _expanded(name: str) -> Path:
    """A path, its ``~`` replaced by the home that it means; as it is, if there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def load_settings(path: Path | None = None) -> Settings:
    """The settings of a file, by default the user's own; without a file, the defaults.

    Raises:
        SettingsError: the file cannot be read, is no TOML, or has a key or a value that it cannot have; names it and
            says what it can.
    """
    path = path or settings_path()
    values = {} if path is None else read_file(path)
    if not values or path is None:
        return Settings()
    settings, problems = check(values, path.parent)
    if problems:
        more = f" (and {len(problems) - 1} more, which localllm config lists)" if len(problems) > 1 else ""
        raise SettingsError(f"the settings file {path}: {problems[0]}{more}")
    return settings


def read_file(path: Path) -> dict[str, Any]:
    """The values in a settings file, not checked; none if there is no file.

    Raises:
        SettingsError: it cannot be read, or is no TOML.
    """
    text = read_text(path)
    if not text:
        return {}
    # Imported here: most have no such file, and a start should not wait for it.
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"the settings file {path} is not valid TOML: {error}; mend it with an editor") from None


def read_text(path: Path) -> str:
    """The text of a settings file; empty if there is no file.

    Raises:
        SettingsError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        return data.decode()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SettingsError(
            f"the settings file {path} cannot be read ({reason}): mend it, or name another one in the environment "
            f"variable {CONFIG_VARIABLE}"
        ) from None


# -- What a file may have ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A key of the settings file.

    Attributes:
        words: what its value must be.
        read: the value as `Settings` has it; None if it is not so.
    """

    words: str
    read: Callable[[Any], Any]


def _whole(least: int) -> Key:
    def read(value: Any) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None

    return Key(f"a whole number of at least {least}", read)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: Any) -> tuple[str, ...] | None:
    """A text, or several; none of them empty."""
    several = [value] if isinstance(value, str) else value
    return tuple(several) if isinstance(several, list) and all(map(_text, several)) else None


def _proportions(value: Any) -> tuple[float, ...] | None:
    from localllm.checks import proportions

    try:
        return proportions("", value)
    except UsageError:
        return None


def _device(value: Any) -> str | None:
    return value if isinstance(value, str) and _DEVICE.fullmatch(value) else None


def _cache_type(value: Any) -> str | None:
    from localllm.kernels.graph import CACHE_TYPES

    return value if isinstance(value, str) and value in CACHE_TYPES else None


_DEVICE = re.compile(r"auto|cpu|reference|(cuda|gpu)(:\d+(,\d+)*)?")

#: All keys but for those of the table of sampling settings.
KEYS: Mapping[str, Key] = {
    "model": Key("a GGUF file's path, or ORG/REPO[:QUANT]", _text),
    "device": Key("'auto', 'cpu', 'cuda', 'cuda:0,1' or 'reference'", _device),
    "n_gpu_layers": _whole(0),
    "tensor_split": Key("a list of numbers of at least 0, not all of them 0", _proportions),
    "context": _whole(1),
    "threads": _whole(1),
    "cache_type": Key("'f16' or 'q8_0'", _cache_type),
    "system_prompt": Key("a text that is not empty", _text),
    "stop": Key("a text that is not empty, or a list of such", _texts),
    "theme": Key("the name of a theme, such as 'dark' or 'light'", _text),
    "model_folders": Key("a folder's path, or a list of such", _texts),
}


def sampling_names() -> tuple[str, ...]:
    """The keys that the table of sampling settings may have."""
    from localllm.sampling import Sampling

    return tuple(each.name for each in fields(Sampling) if each.name not in _NOT_SETTLED)


def check(values: Mapping[str, Any], folder: Path) -> tuple[Settings, list[str]]:
    """The settings that a file's values come to, and what is wrong with the rest.

    Args:
        folder: of the file, which paths in it begin at.
    """
    good: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in values.items():
        if name == SAMPLING:
            continue
        key = KEYS.get(name)
        if key is None:
            problems.append(_unknown(name, [*KEYS, SAMPLING], f"{SAMPLING}."))
        elif (read := key.read(value)) is None:
            problems.append(f"{name} is {_short(value)} but must be {key.words}")
        else:
            good[name] = read
    if "model_folders" in good:
        good["model_folders"] = tuple(folder / _expanded(each) for each in good["model_folders"])
    settings = Settings(**good, given=frozenset(good))
    if SAMPLING not in values:
        return settings, problems
    sampling, wrong = _check_sampling(values[SAMPLING])
    given = settings.given | {f"{SAMPLING}.{name}" for name in sampling}
    return replace(settings, sampling=MappingProxyType(sampling), given=given), problems + wrong


def _check_sampling(table: object) -> tuple[dict[str, Any], list[str]]:
    from localllm.sampling import Sampling

    if not isinstance(table, dict):
        return {}, [f"{SAMPLING} is {_short(table)} but must be a table: a line [{SAMPLING}], and settings below it"]
    good: dict[str, Any] = {}
    problems: list[str] = []
    names = sampling_names()
    for name, value in table.items():
        if name not in names:
            problems.append(_unknown(name, names, where=f" in [{SAMPLING}]"))
            continue
        setting: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value}
        try:
            good[name] = getattr(Sampling(**setting), name)
        except UsageError as error:
            problems.append(f"{SAMPLING}.{error}")
        except ValueError:  # of a number that cannot be printed
            problems.append(f"{SAMPLING}.{name} is {_short(value)}, but must be in range")
    return good, problems


def _short(value: object) -> str:
    """A value for a message."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # a number with thousands of digits, which Python does not print
        return "a number of very many digits"


def _unknown(name: str, names: Any, table: str = "", where: str = "") -> str:
    """That there is no such key, and which one may be meant: also one of the table, if ``table`` is its prefix."""
    there = [*names, *sampling_names()] if table else list(names)
    near = difflib.get_close_matches(name.replace("-", "_"), there, n=1)
    if not near:
        return f"there is no setting {name!r:.80}{where}: there are {', '.join(names)}"
    meant = near[0] if near[0] in names else table + near[0]
    return f"there is no setting {name!r:.80}{where}: did you mean {meant}?"
