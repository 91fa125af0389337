"""A user's settings: one TOML file, read by the command line and the chat app, never by the library.

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
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from localllm.errors import SettingsError, shown
from localllm.files import expanded
from localllm.options.declared import STOPS, LoadOptions, OptionKind, Sampling, declared

if TYPE_CHECKING:
    from localllm.kernels.graph import CacheType
    from localllm.options.types import SplitMode

#: Environment variable that names another settings file.
CONFIG_VARIABLE = "LOCALLLM_CONFIG"

#: The table of sampling settings.
SAMPLING = "sampling"

#: The table of the chat's tools; `localllm.tui.chat.tools` knows what is in it.
TOOLS = "tools"

#: The table of the chat's keys; `localllm.tui.commands` knows their names.
CHAT_KEYS = "keys"

#: A settings file of more bytes than this is another file.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    model: str | None = None  # as ``-m`` takes it; None for the demo model
    device: str = "auto"  # see `localllm.load`, as of the next six
    # n_gpu_layers, tensor_split, split_mode: hold for that device only
    n_gpu_layers: int | None = None
    tensor_split: tuple[float, ...] | None = None
    split_mode: SplitMode | None = None
    context: int | None = None  # tokens
    threads: int | None = None  # how many compute
    cache_type: CacheType = "f16"  # what keys and values are kept in
    system_prompt: str | None = None  # the message before the user's first
    stop: tuple[str, ...] = ()  # texts that end an answer
    theme: str = "dark"  # the chat app's
    # ranks pieces of large files in the chat, as ``-m`` takes it; None goes by their words
    embedding_model: str | None = None
    model_folders: tuple[Path, ...] = ()  # where GGUF files are looked for, beside the cache of the Hugging Face hub
    # those settings of `localllm.Sampling` that the file has, as the keywords of `LLM.chat`
    sampling: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    given: frozenset[str] = frozenset()  # the keys that the file has; those of sampling as "sampling.temperature"
    # the table of the chat's tools, as it is
    tools: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # the table of the chat's keys, by the commands that they call
    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def values(self) -> Iterator[tuple[str, object]]:
        """Every key but for sampling's, and its value."""
        return ((name, getattr(self, name)) for name in KEYS)


def settings_path() -> Path | None:
    """The settings file: ``LOCALLLM_CONFIG``, or one in the platform's folder; None where there is no home for it."""
    if named := os.environ.get(CONFIG_VARIABLE):
        return expanded(named)
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


def load_settings(path: Path | None = None) -> Settings:
    """The settings of a file, by default the user's own; without a file, the defaults."""
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
    """The values in a settings file, not checked; none if there is no file."""
    text = read_text(path)
    if not text:
        return {}
    # Imported here: most have no such file, and a start should not wait for it.
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"the settings file {path} is not valid TOML: {error}; correct it with an editor"
        ) from None


def read_text(path: Path) -> str:
    """The text of a settings file; empty if there is no file."""
    try:
        if path.is_fifo():
            raise ValueError("it is a pipe, which may have no end")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        return data.decode()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SettingsError(
            f"the settings file {path} cannot be read ({reason}): correct it, or name another one in the environment "
            f"variable {CONFIG_VARIABLE}"
        ) from None


# -- What a file may have ------------------------------------------------------------------------------------------

_DEVICE = re.compile(r"auto|cpu|reference|(cuda|gpu)(:\d+(,\d+)*)?")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _device(value: Any) -> str | None:
    return value if isinstance(value, str) and _DEVICE.fullmatch(value) else None


_LOAD = {name: option.kind for name, option in declared(LoadOptions).items() if option.is_setting}

#: All keys but for those of the table of sampling settings.
KEYS: Mapping[str, OptionKind] = {
    "model": OptionKind("a GGUF file's path, or ORG/REPO[:QUANT]", _text),
    **_LOAD,
    "device": OptionKind("'auto', 'cpu', 'cuda', 'cuda:0,1' or 'reference'", _device),
    "system_prompt": OptionKind("a text that is not empty", _text),
    "stop": STOPS,
    "theme": OptionKind("the name of a theme, such as 'dark' or 'light'", _text),
    "embedding_model": OptionKind("a GGUF file's path, or ORG/REPO[:QUANT]", _text),
    "model_folders": OptionKind("a folder's path, or a list of such", STOPS.read),
}

#: The keys of the table of sampling settings.
SAMPLING_KEYS = {name: option.kind for name, option in declared(Sampling).items() if option.is_setting}


def check(values: Mapping[str, Any], folder: Path) -> tuple[Settings, list[str]]:
    """The settings that a file's values come to, and what is wrong with the rest.  ``folder``: of the file, which
    paths in it begin at."""
    top = {name: value for name, value in values.items() if name not in (SAMPLING, TOOLS, CHAT_KEYS)}
    good, problems = _check_keys(top, KEYS, lambda name: _unknown(name, [*KEYS, SAMPLING], f"{SAMPLING}."))
    if "model_folders" in good:
        good["model_folders"] = tuple(folder / expanded(each) for each in good["model_folders"])
    table = values.get(SAMPLING, {})
    if not isinstance(table, dict):
        wrong = f"{SAMPLING} is {shown(table)}, but must be a table: a line [{SAMPLING}], and settings below it"
        return Settings(**good, given=frozenset(good)), [*problems, wrong]
    sampling, more = _check_keys(
        table, SAMPLING_KEYS, lambda name: _unknown(name, SAMPLING_KEYS, where=f" in [{SAMPLING}]"), f"{SAMPLING}."
    )
    given = {*good, *(f"{SAMPLING}.{name}" for name in sampling)}
    keys = values.get(CHAT_KEYS, {})
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys.values()):
        keys, more = {}, [*more, f"{CHAT_KEYS} is {shown(keys)}, but must be a table of texts, as fork = 'ctrl+b'"]
    more_values = {"sampling": MappingProxyType(sampling), "tools": values.get(TOOLS, {}), "keys": keys}
    return Settings(**good, **more_values, given=frozenset(given)), problems + more


def _check_keys(
    values: Mapping[str, Any], keys: Mapping[str, OptionKind], unknown: Callable[[str], str], table: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The values of a table that are good, and what is wrong with the rest."""
    good: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in values.items():
        if name not in keys:
            problems.append(unknown(name))
        elif (read := keys[name].read(value)) is None:
            problems.append(f"{table}{name} is {shown(value)}, but must be {keys[name].words}")
        else:
            good[name] = read
    return good, problems


def _unknown(name: str, names: Any, table: str = "", where: str = "") -> str:
    """That there is no such key, and which one may be meant: also one of the table, if ``table`` is its prefix."""
    there = [*names, *SAMPLING_KEYS] if table else list(names)
    near = difflib.get_close_matches(name.replace("-", "_"), there, n=1, cutoff=0.75)
    if not near:
        return f"there is no setting {name!r:.80}{where}: there are {', '.join(names)}"
    meant = near[0] if near[0] in names else table + near[0]
    return f"there is no setting {name!r:.80}{where}: did you mean {meant}?"
