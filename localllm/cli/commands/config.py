"""``localllm config``: show the settings in force and their sources, or change a setting in the file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.foreign_flags import SAME, nearest
from localllm.cli.parser import Command, flag, parser_of
from localllm.cli.shared_flags import JSON
from localllm.console import say, visible_line, warn
from localllm.errors import LocalLLMError, SettingsError, UsageError
from localllm.options.declared import LoadOptions, Sampling, declared
from localllm.options.settings import (
    CONFIG_VARIABLE,
    KEYS,
    SAMPLING,
    SAMPLING_KEYS,
    Settings,
    check,
    load_settings,
    read_file,
    read_text,
    settings_path,
)
from localllm.shell import join_command

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

#: Environment variables that localllm reads.
VARIABLES = {
    CONFIG_VARIABLE: "the settings file",
    "LOCALLLM_CACHE": "the folder of compiled kernels",
    "LOCALLLM_DATA": "the folder of saved chats",
    "LOCALLLM_ISA": "the instruction set to compile for, by name (localllm doctor -v lists them)",
    "LOCALLLM_DEBUG": "if set, errors include a traceback",
    "HF_HOME": "the folder of the Hugging Face tools, which contains downloaded models",
    "HF_HUB_CACHE": "the folder of downloaded models only",
    "HF_ENDPOINT": "the address of the hub that models are downloaded from",
    "HF_HUB_OFFLINE": "if set, localllm sends no requests to the hub",
    "NO_COLOR": "if set, output has no colours",
}

_OPTIONS = declared(LoadOptions) | declared(Sampling)


def run(arguments: argparse.Namespace) -> int:
    words = [word for word in (arguments.key, arguments.value) if word is not None]
    n_expected = {None: 0, "path": 0, "get": 1, "set": 2, "unset": 1}[arguments.action]
    if len(words) != n_expected:
        usage = {"get": "get KEY", "set": "set KEY VALUE", "unset": "unset KEY"}.get(arguments.action, "path")
        raise UsageError(f"write localllm config {usage}, with quotes around a value of several words")
    if arguments.json and arguments.action is not None:
        raise UsageError(f"--json cannot be combined with {arguments.action}: remove either")
    path = settings_path()
    if path is None:
        raise LocalLLMError(
            "no home folder was found: name a settings file in the environment variable " + CONFIG_VARIABLE
        )
    if arguments.action == "path":
        print(path)
    elif arguments.action == "get":
        print(visible_line(get_key(words[0])))
    elif arguments.action == "set":
        value = set_key(path, *words)
        print(f"{words[0]} is set in {visible_line(str(path))}")
        if (problem := _likely_mistake(words[0], value)) is not None:
            warn(problem)
    elif arguments.action == "unset":
        unset_key(path, *words)
        print(f"{words[0]} is no longer in {visible_line(str(path))}")
    else:
        return _show(path, as_json=arguments.json)
    return 0


# -- Showing the settings ------------------------------------------------------------------------------------------


def _show(path: Path, *, as_json: bool) -> int:
    """Print the settings in force, even if the file has errors.  Problems are printed to stderr."""
    try:
        settings, problems = check(read_file(path), path.parent)
    except SettingsError as error:
        settings, problems = Settings(), [str(error)]
    if as_json:
        print(json.dumps(_as_json(path, settings, problems), ensure_ascii=False))
    else:
        for line in _lines(path, settings):
            print(visible_line(line))
    for problem in problems:
        prefix = "" if str(path) in problem else f"the settings file {path}: "
        say(f"localllm: error: {visible_line(prefix + problem)}")
    return int(bool(problems))


def _in_force(settings: Settings) -> Iterator[tuple[str, object, str]]:
    """Yield the name, the value and the source ("file" or "default") of each setting."""

    def source(key: str) -> str:
        return "file" if key in settings.keys_in_file else "default"

    for name, value in settings.values():
        yield name, value, source(name)
    sampling = Sampling(**settings.sampling)
    for name in SAMPLING_KEYS:
        key = f"{SAMPLING}.{name}"
        yield key, getattr(sampling, name), source(key)


def _lines(path: Path, settings: Settings) -> Iterator[str]:
    yield f"{path}" + ("" if os.path.exists(path) else " (does not exist: all settings have their defaults)")
    yield ""
    for key, value, source in _in_force(settings):
        yield f"{key:<30} {source:<8} {_value_text(key, value)}"
    if variables := _variables():
        yield ""
        for name, text in variables.items():
            yield f"{name:<30} {'variable':<8} {text}"


def _value_text(key: str, value: object) -> str:
    if value is None:
        name = key.removeprefix(f"{SAMPLING}.")
        defaults = {"model": "the demo model", "system_prompt": "-", "embedding_model": "-"}
        return defaults.get(name) or _OPTIONS[name].none
    if isinstance(value, tuple):
        return ", ".join(repr(item) if isinstance(item, str) else str(item) for item in value) or "-"
    return str(value)


def _variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def _as_json(path: Path, settings: Settings, problems: list[str]) -> dict[str, Any]:
    values = {key: {"value": value, "source": source} for key, value, source in _in_force(settings)}
    values["model_folders"]["value"] = list(map(str, settings.model_folders))
    return {
        "path": str(path),
        "exists": os.path.exists(path),
        "settings": values,
        "variables": _variables(),
        "problems": problems,
    }


def get_key(key: str) -> str:
    """Return the value in force of a setting, as text."""
    values = {name: _value_text(name, value) for name, value, _ in _in_force(load_settings())}
    if key not in values:
        suggestion = _our_key(key) or nearest(key, values) or "one of the settings that localllm config lists"
        raise UsageError(f"there is no setting {key!r:.80}: did you mean {suggestion}?")
    return values[key]


# -- Changing the file ---------------------------------------------------------------------------------------------


def set_key(path: Path, key: str, text: str) -> object:
    """Set a key, without changing the rest of the file.  Returns the value.

    Args:
        path: the settings file.
        key: a setting's name; for one in a table, such as "sampling.temperature".
        text: a value in TOML notation, or a string without quotes.
    """
    value = _value(key, text, path)
    document = _document(path)
    table, name = _table_of(document, key)
    table[name] = value
    _write(path, document)
    return value


def _likely_mistake(key: str, value: Any) -> str | None:
    """Return a warning if a new setting is probably a mistake, or None."""
    if key in ("model", "embedding_model"):
        from localllm.catalog.find import find

        try:
            path = find(value, load_settings().model_folders)
        except LocalLLMError as error:
            return str(error)
        return None if os.path.exists(path) else f"{value} does not exist yet: check the path"
    if key == "model_folders":
        missing = [str(folder) for folder in load_settings().model_folders if not folder.is_dir()]
        return f"{', '.join(missing)} cannot be found: check the path" if missing else None
    return None


def unset_key(path: Path, key: str) -> None:
    """Remove a key from the settings file, also an unknown key."""
    document = _document(path)
    tables = {f"{SAMPLING}.{name}": name for name in document.get(SAMPLING, {})} if _has_table(document) else {}
    if key in tables:
        del document[SAMPLING][tables[key]]
    elif key in document:
        del document[key]
    else:
        keys = [*document, *tables]
        near = nearest(key, keys)
        hint = f"did you mean {near}?" if near else f"its keys are: {', '.join(keys) or 'none'}"
        raise UsageError(f"{path} does not contain {key!r}: {hint}")
    _write(path, document)


def _value(key: str, text: str, path: Path) -> object:
    complaints: list[str] = []
    if key not in KEYS and (ours := _our_key(key)):
        line = join_command(["localllm", "config", "set", ours, text])
        raise UsageError(f"there is no setting {key!r:.80}: did you mean {ours}? {line}")
    for value in _readings(text):
        settings: dict[str, Any] = {key: value}
        if key.startswith(f"{SAMPLING}."):
            settings = {SAMPLING: {key.removeprefix(f"{SAMPLING}."): value}}
        _, problems = check(settings, path.parent)
        if key == "theme" and not problems:
            from textual.theme import BUILTIN_THEMES  # imported here: it takes a while

            if value not in (themes := ["dark", "light", *BUILTIN_THEMES]):
                problems = [f"theme is {value!r:.80} but must be one of {', '.join(themes)}"]
        if not problems:
            return value
        complaints += problems
    raise UsageError(f"{path} was not changed: {complaints[0]}")


def _our_key(key: str) -> str | None:
    """Return the setting that corresponds to a flag of localllm or another program, such as context for num_ctx."""
    flag = f"--{key.replace('_', '-')}"
    name = parser_of("generate").name_of.get(SAME.get(flag, flag))
    if name in KEYS:
        return name
    return f"{SAMPLING}.{name}" if name in SAMPLING_KEYS else None


def _readings(text: str) -> Iterator[object]:
    """Yield the possible values of a word of the command line: a TOML value, and the word itself."""
    import tomllib

    with contextlib.suppress(ValueError, RecursionError):
        value = tomllib.loads(f"value = {text}")
        if len(value) == 1:
            yield value["value"]
    yield text


def _document(path: Path) -> TOMLDocument:
    """Parse the settings file.  The document contains its comments and preserves the order."""
    import tomlkit

    read_file(path)  # raises SettingsError for invalid TOML
    return tomlkit.parse(read_text(path))


def _has_table(document: TOMLDocument) -> bool:
    return isinstance(document.get(SAMPLING), MutableMapping)


def _table_of(document: TOMLDocument, key: str) -> tuple[MutableMapping[str, Any], str]:
    """Return the table for a key, and the key's name in that table."""
    if key in KEYS:
        return document, key
    import tomlkit

    if not _has_table(document):
        document[SAMPLING] = tomlkit.table()
    return document[SAMPLING], key.removeprefix(f"{SAMPLING}.")


def _write(path: Path, document: TOMLDocument) -> None:
    """Replace the settings file in one step, so that no program reads half a file.  Follows symbolic links."""
    import tomlkit

    target = path.resolve()
    if target.exists() and not target.is_file():
        raise SettingsError(f"{path} is not a file: name another in the environment variable {CONFIG_VARIABLE}")
    aside = target.with_name(f"{target.name}.new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(tomlkit.dumps(document), encoding="utf-8", newline="")
        if target.exists():
            shutil.copymode(target, aside)
        aside.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise SettingsError(
            f"the settings file {path} cannot be written ({error.strerror or error}): check its folder's permissions "
            f"and the disk, or name another file in the environment variable {CONFIG_VARIABLE}"
        ) from None


COMMAND = Command(
    "[path | get KEY | set KEY VALUE | unset KEY] [--json]",
    "show or change settings",
    [
        flag("action path|get|set|unset", "what to do (default: show all settings and their sources)", nargs="?"),
        flag("key KEY", "a setting's name, such as context or sampling.temperature", nargs="?"),
        flag("value VALUE", "the new value: text, a number, or a list in TOML notation", nargs="?"),
        JSON,
    ],
    run,
    aliases="settings",
)
