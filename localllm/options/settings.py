"""A user's settings: one TOML file, read by the command line and the chat app, never by the library.

A file has keys of `Settings`, and a table ``[sampling]`` with settings of `localllm.Sampling`::

    model = "org/repo:Q4_K_M"
    context = 8192
    model_folders = ["~/models"]

    [sampling]
    temperature = 0.7

Flags override the file, which overrides defaults.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from localllm.errors import SettingsError, shown
from localllm.files import expanded
from localllm.options.declared import STOPS, LoadOptions, OptionKind, Sampling, declared
from localllm.regular_file import refuse_named_pipe

if TYPE_CHECKING:
    from localllm.kernels.graph import CacheType
    from localllm.options.types import SplitMode

#: Environment variable that names another settings file.
CONFIG_VARIABLE = "LOCALLLM_CONFIG"

#: The table of sampling settings.
SAMPLING = "sampling"

#: The table of the chat's tools, which `localllm.agent_tools.toolbox` parses.
TOOLS = "tools"

#: The table of the chat's keys, whose names are in `localllm.tui.commands`.
CHAT_KEYS = "keys"

#: Maximum size of a settings file in bytes.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    model: str | None = None  # value of ``-m``; None for the demo model
    device: str = "auto"  # see `localllm.load` for this field and the next six
    # n_gpu_layers, tensor_split, split_mode: apply only to that device
    n_gpu_layers: int | None = None
    tensor_split: tuple[float, ...] | None = None
    split_mode: SplitMode | None = None
    context: int | None = None  # tokens
    threads: int | None = None  # number of compute threads
    cache_type: CacheType = "f16"  # type of the KV cache
    system_prompt: str | None = None  # system message of new chats
    stop: tuple[str, ...] = ()  # stop strings
    theme: str = "dark"  # theme of the chat app
    # model that ranks passages of large files in the chat, a value of ``-m``; None ranks by words
    embedding_model: str | None = None
    model_folders: tuple[Path, ...] = ()  # folders of GGUF files, in addition to the cache of the hub
    # settings of `localllm.Sampling` in the file, as keywords of `LLM.chat`
    sampling: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    keys_in_file: frozenset[str] = frozenset()  # keys in the file; sampling keys as "sampling.temperature"
    # the unparsed table of the chat's tools
    tools: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # the chat's keys by command
    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def values(self) -> Iterator[tuple[str, object]]:
        """Yield the keys and values, except sampling."""
        return ((name, getattr(self, name)) for name in KEYS)


def settings_path() -> Path | None:
    """Return ``LOCALLLM_CONFIG``, or the settings file in the platform's folder; None without a home folder."""
    if variable := os.environ.get(CONFIG_VARIABLE):
        return expanded(variable)
    from platformdirs import user_config_path

    try:
        return user_config_path("localllm", appauthor=False) / "config.toml"
    except RuntimeError:  # no variable names a home, and the system does not know the user
        return None


def skills_folder() -> Path | None:
    """Return the user's folder of skills, next to the settings file; None without a home folder."""
    settings = settings_path()
    return None if settings is None else settings.with_name("skills")


def load_settings(path: Path | None = None) -> Settings:
    """Return the settings of a file (default: the user's settings file); the defaults if it does not exist."""
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
    """Return the unchecked values of a settings file; empty if it does not exist."""
    text = read_text(path)
    if not text:
        return {}
    # Imported here because most users have no settings file.
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"the settings file {path} is not valid TOML: {error}; correct it with an editor"
        ) from None


def read_text(path: Path) -> str:
    """Return the text of a settings file; empty if it does not exist."""
    try:
        refuse_named_pipe(path)
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES:,} bytes")
        return data.decode()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SettingsError(
            f"the settings file {path} cannot be read ({reason}): correct it, or name another file in the "
            f"environment variable {CONFIG_VARIABLE}"
        ) from None


# -- Keys of a file ------------------------------------------------------------------------------------------------

_DEVICE = re.compile(r"auto|cpu|reference|(cuda|gpu)(:\d+(,\d+)*)?")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _device(value: Any) -> str | None:
    return value if isinstance(value, str) and _DEVICE.fullmatch(value) else None


_LOAD = {name: option.kind for name, option in declared(LoadOptions).items() if option.is_setting}

#: All keys except sampling settings.
KEYS: Mapping[str, OptionKind] = {
    "model": OptionKind("a GGUF file's path, or ORG/REPO[:QUANT]", _text),
    **_LOAD,
    "device": OptionKind("'auto', 'cpu', 'cuda', 'cuda:0,1' or 'reference'", _device),
    "system_prompt": OptionKind("a non-empty string", _text),
    "stop": STOPS,
    "theme": OptionKind("the name of a theme, such as 'dark' or 'light'", _text),
    "embedding_model": OptionKind("a GGUF file's path, or ORG/REPO[:QUANT]", _text),
    "model_folders": OptionKind("a folder's path, or a list of folders", STOPS.read),
}

#: The keys of the table of sampling settings.
SAMPLING_KEYS = {name: option.kind for name, option in declared(Sampling).items() if option.is_setting}


def check(values: Mapping[str, Any], folder: Path) -> tuple[Settings, list[str]]:
    """Convert the values of a file to settings.  Also return the problems of invalid values.

    Relative paths start at ``folder``, the folder of the file.
    """
    top = {name: value for name, value in values.items() if name not in (SAMPLING, TOOLS, CHAT_KEYS)}
    good, problems = _check_keys(top, KEYS, lambda name: _unknown(name, [*KEYS, SAMPLING], f"{SAMPLING}."))
    if "model_folders" in good:
        good["model_folders"] = tuple(folder / expanded(name) for name in good["model_folders"])
    table = values.get(SAMPLING, {})
    if not isinstance(table, dict):
        wrong = f"{SAMPLING} is {shown(table)}, but must be a table: write its settings below a line [{SAMPLING}]"
        return Settings(**good, keys_in_file=frozenset(good)), [*problems, wrong]
    sampling, more = _check_keys(
        table,
        SAMPLING_KEYS,
        lambda name: _unknown(name, SAMPLING_KEYS, table_name=f" in [{SAMPLING}]"),
        f"{SAMPLING}.",
    )
    keys_in_file = {*good, *(f"{SAMPLING}.{name}" for name in sampling)}
    keys = values.get(CHAT_KEYS, {})
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys.values()):
        keys, more = {}, [*more, f"{CHAT_KEYS} is {shown(keys)}, but must be a table, such as fork = 'ctrl+b'"]
    more_values = {"sampling": MappingProxyType(sampling), "tools": values.get(TOOLS, {}), "keys": keys}
    return Settings(**good, **more_values, keys_in_file=frozenset(keys_in_file)), problems + more


def _check_keys(
    values: Mapping[str, Any], keys: Mapping[str, OptionKind], unknown: Callable[[str], str], table: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return the valid values of a table, and the problems of the invalid values."""
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


def _unknown(name: str, names: Any, table: str = "", table_name: str = "") -> str:
    """Return the message for an unknown key of a table, with the most similar key, which may be in ``table``."""
    candidates = [*names, *SAMPLING_KEYS] if table else list(names)
    near = difflib.get_close_matches(name.replace("-", "_"), candidates, n=1, cutoff=0.75)
    if not near:
        return f"there is no setting {name!r:.80}{table_name}: the settings are {', '.join(names)}"
    suggestion = near[0] if near[0] in names else table + near[0]
    return f"there is no setting {name!r:.80}{table_name}: did you mean {suggestion}?"
