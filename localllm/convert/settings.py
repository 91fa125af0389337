"""JSON objects of a checkpoint: settings with a class's defaults and names, which record the names that were read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from localllm import nesting
from localllm.errors import ModelError, path_text, quoted
from localllm.regular_file import read_regular

#: Maximum bytes of a checkpoint's JSON file; large vocabularies take 35 MB.
_MAX_BYTES = 1 << 28


def read_file(path: Path) -> bytes | None:
    """Return the content of a small file of a checkpoint; None if it does not exist."""
    try:
        return read_regular(path, _MAX_BYTES, folder=path.parent)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(f"{path_text(path)} cannot be read ({reason}): download the checkpoint again") from error


def read_json(path: Path, kind: type = dict) -> Any:
    """Return the object (or list, with another ``kind``) in a checkpoint's JSON file; empty without the file."""
    if (data := read_file(path)) is None:
        return kind()
    try:
        value = _with_special_floats(nesting.parse_json(data.decode()))
    except ValueError as error:
        raise ModelError(f"{path_text(path)} cannot be read as JSON ({error!s:.100}): download it again") from error
    if not isinstance(value, kind):
        name = "object" if kind is dict else "array"
        raise ModelError(f"{path_text(path)} is not a JSON {name}: download it again")
    return value


def _with_special_floats(value: Any) -> Any:
    """Return a value with floats in place of the objects that transformers 5 writes for infinity."""
    if isinstance(value, list):
        return [_with_special_floats(each) for each in value] if any(isinstance(x, dict) for x in value) else value
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {name: _with_special_floats(each) for name, each in value.items()}


class MissingSetting(ModelError, AttributeError):
    """The checkpoint lacks a setting that the conversion needs."""


class CheckpointSettings:
    """A JSON object whose values are read as items or attributes, and which records the names that were read.

    Args:
        values: the object.
        file: the file's name, for messages.
        place: the keys that lead to the object in the file, each followed by a dot.
        defaults: values of names that the object lacks.
        names: groups of names of one setting.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        file: str = "config.json",
        place: str = "",
        defaults: Mapping[str, Any] | None = None,
        names: Iterable[Sequence[str]] = (),
    ) -> None:
        self._values, self._file, self._place = values, file, place
        self.defaults = defaults or {}
        self._names = {name: group for group in names for name in group}
        self._read: set[str] = set()
        self._inner: dict[str, CheckpointSettings] = {}

    def __getitem__(self, name: str) -> Any:
        names = self._names.get(name, (name,))
        self._read.update(names)
        values = {other: self._values[other] for other in names if self._values.get(other) is not None}
        first = next(iter(values), None)
        if first is None:
            defaults = (None if other in self._values else self.defaults.get(other) for other in names)
            value = next((default for default in defaults if default is not None), None)
            if value is None and not any(other in self._values or other in self.defaults for other in names):
                raise MissingSetting(f"{self._file} has no {self._place}{name}, which the model needs")
            return value
        for other, value in values.items():
            if value != values[first]:
                raise ModelError(
                    f"{self._file} has {self._place}{first} = {quoted(values[first])} and {self._place}{other} = "
                    f"{quoted(value)}, two names of one setting: remove the wrong one"
                )
        return self.inner(first) if isinstance(values[first], dict) else values[first]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __repr__(self) -> str:
        return repr(self._values)

    def __eq__(self, other: object) -> bool:
        return self.raw() == (other.raw() if isinstance(other, CheckpointSettings) else other)

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, name: str) -> bool:
        return any(other in self._values for other in self._names.get(name, (name,)))

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except MissingSetting:
            return default

    def inner(self, name: str, **options: Any) -> CheckpointSettings:
        """Return an inner object, empty if missing.  ``options``: arguments of the class."""
        self._read.add(name)
        if name not in self._inner:
            value = self._values.get(name)
            values = value if isinstance(value, dict) else {}
            self._inner[name] = CheckpointSettings(values, file=self._file, place=f"{self._place}{name}.", **options)
        return self._inner[name]

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of the object itself, without defaults."""
        return ((name, self[name]) for name in self._values)

    def peek(self, name: str) -> Any:
        """Return a value that something else has to read; None if it is missing."""
        return self._values.get(name)

    def skip(self, *names: str) -> None:
        """Mark settings as read that change nothing in the converted file."""
        self._read.update(names)

    def skip_all(self) -> None:
        self._read.update(self._values)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the unread settings with a value, with the keys that lead to them."""
        for name, value in self._values.items():
            if value is not None and name not in self._read:
                yield self._place + name, value
        for inner in self._inner.values():
            yield from inner.unread()

    def check_all_read(self, meant: Mapping[str, tuple[Any, ...]], is_irrelevant: Callable[[str], object]) -> None:
        """Raise ModelError for a setting that the converted file would lose.

        Args:
            meant: settings without a key in GGUF files, and the values that a file implies; empty accepts any value.
            is_irrelevant: whether the setting of a name changes nothing in the converted file.
        """
        for name, values in meant.items():
            value = None if self.is_read(name) else self.get(name)
            if value is not None and values and value not in values:
                raise ModelError(
                    f"{self._file} has {self._place}{name} = {quoted(value)}, but a GGUF file of this model means "
                    f"{' or '.join(str(other) for other in values)}"
                )
        for full, value in self.unread():
            names = full.removeprefix(self._place).split(".")
            if not any(name in meant or is_irrelevant(name) for name in names):
                raise ModelError(
                    f"{self._file} has {full} = {quoted(value)}, which localllm convert does not know for this "
                    "model: remove it if it changes nothing, or report the model"
                )

    def raw(self) -> Mapping[str, Any]:
        """Return the object in the file, unchanged."""
        self.skip_all()
        return self._values

    def is_read(self, name: str) -> bool:
        """Return whether a setting was read, by any of its names."""
        return any(other in self._read for other in self._names.get(name, (name,)))
