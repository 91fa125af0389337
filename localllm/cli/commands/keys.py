"""``localllm keys``: add, list and remove the keys of ``localllm serve --keys``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.argument_types import whole
from localllm.cli.parser import Command, flag, several
from localllm.cli.shared_flags import JSON
from localllm.console import print_columns, say, visible_line
from localllm.errors import OutputError, UsageError, path_text
from localllm.files import NewFile, expanded
from localllm.options.settings import settings_path

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

    from localllm.server.keys import ClientKey


def run(arguments: argparse.Namespace) -> None:
    path = _file(arguments.file)
    limits = {"role": arguments.role, "models": arguments.models}
    limits |= {name: getattr(arguments, name) for name in ("requests_per_minute", "tokens_per_minute")}
    if arguments.action != "add" and any(limits.values()):
        raise UsageError(f"keys {arguments.action} has no roles and limits: they are flags of localllm keys add")
    if (arguments.name is None) == (arguments.action != "list"):
        line = "localllm keys list" if arguments.action == "list" else f"localllm keys {arguments.action} NAME"
        raise UsageError(f"a key's name is {'not ' * (arguments.action == 'list')}needed: write {line}")
    if arguments.action == "list":
        _list(path, as_json=arguments.json)
    elif arguments.action == "add":
        key = add(path, arguments.name, limits)
        say(f"[{arguments.name}] was added to {path_text(path)}, which contains no copy of the key: store it now")
        print(json.dumps({"name": arguments.name, "key": key}) if arguments.json else key)
    else:
        revoke(path, arguments.name)
        say(f"[{arguments.name}] was removed from {path_text(path)}")


def _file(file: Path | None) -> Path:
    """Return the key file, by default ``keys.toml`` next to the settings file."""
    if file is not None:
        return expanded(file).resolve()  # a link stays a link
    settings = settings_path()
    if settings is None:
        raise UsageError("there is no folder for settings: name the key file with --keys FILE")
    return (settings.parent / "keys.toml").resolve()


def add(path: Path, name: str, limits: dict[str, object]) -> str:
    """Add a new key to a file, and return the key.

    Args:
        path: the key file, which is created if it is missing.
        name: the new section.
        limits: other entries of the section; empty values are omitted.
    """
    import tomlkit

    from localllm.server.keys import check_name, new_key

    check_name(name, path_text(path))
    key, digest = new_key()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{path_text(path.parent)} cannot be created ({error.strerror}): name another file"
        ) from None
    with NewFile(path, 0, is_private=True) as file:  # locked, so that changes at once are not lost
        document = _document(path)
        if name in document:
            raise UsageError(f"{path_text(path)} has a key {name} already: choose another name, or revoke it first")
        table = tomlkit.table()
        table.update({"hash": digest, **{field: value for field, value in limits.items() if value}})
        if len(document):
            document.add(tomlkit.nl())
        document[name] = table
        _put(file, document)
    return key


def revoke(path: Path, name: str) -> None:
    """Remove a key from a file."""
    if not path.exists():
        raise UsageError(f"there is no key file {path_text(path)}: name it with --keys FILE")
    with NewFile(path, 0, is_private=True) as file:
        document = _document(path)
        if name not in document:
            raise UsageError(f"{path_text(path)} has no key {name!r:.80}: localllm keys list shows the names")
        del document[name]
        _put(file, document)


def _document(path: Path) -> TOMLDocument:
    """Return the content of a key file with its comments; empty if the file is missing.  Raises UsageError."""
    import tomlkit

    from localllm.server.keys import read_keys

    if not path.exists():
        return tomlkit.document()
    read_keys(path)
    return tomlkit.parse(path.read_text("utf-8"))


def _put(file: NewFile, document: TOMLDocument) -> None:
    import tomlkit

    from localllm.server.keys import parse_keys

    data = f"{tomlkit.dumps(document).strip()}\n".encode()
    parse_keys(data, path_text(file.path))  # the server must be able to read it
    file.put(data)
    file.keep_access()


def _list(path: Path, *, as_json: bool) -> None:
    from localllm.server.keys import read_keys

    keys = read_keys(path) if path.exists() else []
    if as_json:
        print(json.dumps({"file": str(path), "keys": [_json(key) for key in keys]}))
        return
    table = [("name", "role", "models", "requests/min", "tokens/min")]
    for key in keys:
        models = "all" if key.entry.models is None else ", ".join(key.entry.models) or "none"
        amounts = (key.entry.requests_per_minute, key.entry.tokens_per_minute)
        requests, tokens = ("" if amount is None else f"{amount:,}" for amount in amounts)
        table.append((key.name, key.entry.role, visible_line(models), requests, tokens))
    if keys:
        print_columns(table)
    print(f"{visible_line(path_text(path))}: {len(keys)} key{'s' * (len(keys) != 1)}")


def _json(key: ClientKey) -> dict[str, object]:
    fields = ("role", "models", "requests_per_minute", "tokens_per_minute")
    return {"name": key.name} | {name: getattr(key.entry, name) for name in fields}


COMMAND = Command(
    "add NAME [options] | list | revoke NAME",
    "manage the keys of serve --keys",
    [
        flag("action add|list|revoke", "what to do"),
        flag("name NAME", "who has the key: up to 64 letters, digits and _-.@", nargs="?"),
        flag("--keys FILE", "the key file (default: keys.toml in the settings folder)", Path, dest="file"),
        JSON,
        "for a new key",
        flag(
            "--role client|metrics|admin",
            "client: use models; metrics: read /metrics; admin: also load and unload models, change adapters, and "
            "save or clear the cache (default: client)",
        ),
        several("--model PATTERN", "let the key use only these models, such as 'qwen*'", dest="models"),
        flag("--requests-per-minute N", "maximum number of requests per minute, without GET requests", whole(1)),
        flag(
            "--tokens-per-minute N",
            "maximum number of tokens per minute: evaluated prompt tokens and generated tokens",
            whole(1),
        ),
    ],
    run,
    """\
The file contains a hash of each key, and the key is printed only once.  A running server reads the file again after a
change, without a restart.
""",
)
