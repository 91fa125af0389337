"""Dataclasses whose methods are made when a class is first used.

A start defines some hundred and fifty of them.  For each `dataclasses` writes and compiles five functions, half a
millisecond, a seventh of the time to the first token.  Here only ``__init__`` is compiled, for the first object;
`dataclasses` still collects the fields.
"""

from __future__ import annotations

import os
import threading
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """As `dataclasses.dataclass`, with the options ``frozen``, ``eq`` and ``kw_only``; no ``InitVar``."""
        if cls is None:
            return lambda cls: dataclass(cls, **options)
        _Methods(cls, **options)
        return cls


#: Once for all classes: to complete one may complete those that it derives from.
_lock = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class _Methods:
    """What a class gets: at first, of some, stand-ins."""

    def __init__(self, cls: type, *, frozen: bool = False, eq: bool = True, kw_only: bool = False) -> None:
        self.cls, self.frozen, self.kw_only = cls, frozen, kw_only
        names = (
            ["__init__", "__eq__", "__hash__"] if eq and frozen else ["__init__", "__eq__"] if eq else ["__init__"]
        )
        self.made = [name for name in names if vars(cls).get(name) is None]
        self.is_complete = False
        given = {"__repr__": _repr, **(_refusing(cls) if frozen else {})}
        given |= {name: _StandIn(self, name) for name in (*self.made, "__dataclass_fields__")}
        if eq and not frozen:
            given["__hash__"] = None
        for name, value in given.items():
            if vars(cls).get(name) is None:
                setattr(cls, name, value)

    def complete(self) -> None:
        """Replaces the stand-ins."""
        with _lock:
            if self.is_complete:
                return
            import dataclasses

            cls = self.cls
            cls.__doc__ = cls.__doc__ or cls.__name__  # else dataclasses makes one, of the parameters
            bases: list[Any] = [
                base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)
            ]  # which completes them
            frozen = [base.__dataclass_params__ for base in bases if base.__dataclass_params__.frozen]
            for parameters in frozen:  # else dataclasses would make another two methods
                parameters.frozen = False
            dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=self.kw_only)(cls)
            for parameters in (*frozen, *([vars(cls)["__dataclass_params__"]] if self.frozen else [])):
                parameters.frozen = True
            fields = dataclasses.fields(cls)
            compared = _getter([f.name for f in fields if f.compare])
            hashed = _getter([f.name for f in fields if (f.compare if f.hash is None else f.hash)])
            made = {"__init__": _init(cls, fields, self.frozen), "__eq__": _eq(compared), "__hash__": _hash(hashed)}
            for name in self.made:
                setattr(cls, name, made[name])
            self.is_complete = True


class _StandIn:
    """Whoever looks it up gets what it stands for."""

    def __init__(self, methods: _Methods, name: str) -> None:
        self._methods, self._name = methods, name

    def __get__(self, instance: object, owner: type) -> Any:
        self._methods.complete()
        found = vars(self._methods.cls)[self._name]
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found


def _init(cls: type, fields: Any, frozen: bool) -> Any:
    """A class's ``__init__``."""
    from dataclasses import MISSING

    scope: dict[str, Any] = {"_MISSING": MISSING, "_set": object.__setattr__}
    places, by_name, body = list[str](), list[str](), list[str]()
    for f in fields:
        name = f.name
        has_factory, has_default = f.default_factory is not MISSING, f.default is not MISSING
        scope |= {f"_factory_{name}": f.default_factory} if has_factory else {f"_default_{name}": f.default}
        if f.init:
            default = "=_MISSING" if has_factory else f"=_default_{name}" if has_default else ""
            (by_name if f.kw_only else places).append(name + default)
        elif not has_factory:
            continue
        value = name if not has_factory else f"_factory_{name}()"
        if has_factory and f.init:
            value += f" if {name} is _MISSING else {name}"
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    body += ["self.__post_init__()"] if hasattr(cls, "__post_init__") else []
    parameters = ", ".join(["self", *places, *(["*", *by_name] if by_name else [])])
    exec(f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"]), scope)
    made = scope["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    made.__annotations__ = {f.name: f.type for f in fields if f.init} | {"return": None}
    return made


def _getter(names: list[str]) -> Any:
    return attrgetter(*names) if names else lambda this: ()


def _eq(key: Any) -> Any:
    def __eq__(this: Any, other: Any) -> Any:
        return key(this) == key(other) if this.__class__ is other.__class__ else NotImplemented

    return __eq__


def _hash(key: Any) -> Any:
    def __hash__(this: Any) -> int:
        return hash(key(this))

    return __hash__


@recursive_repr()
def _repr(this: Any) -> str:
    from dataclasses import fields

    values = (f"{f.name}={getattr(this, f.name)!r}" for f in fields(this) if f.repr)
    return f"{this.__class__.__qualname__}({', '.join(values)})"


def _refusing(cls: type) -> dict[str, Any]:
    """What makes objects of a class frozen."""

    def refuse(this: Any, name: str, verb: str) -> None:
        if type(this) is cls or name in cls.__dataclass_fields__:  # type: ignore[attr-defined]
            from dataclasses import FrozenInstanceError

            raise FrozenInstanceError(f"cannot {verb} field {name!r}")

    def __setattr__(this: Any, name: str, value: Any) -> None:
        refuse(this, name, "assign to")
        object.__setattr__(this, name, value)

    def __delattr__(this: Any, name: str) -> None:
        refuse(this, name, "delete")
        object.__delattr__(this, name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}
