"""Classes of `localllm.lazy_dataclass` beside the same ones of `dataclasses`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from localllm import lazy_dataclass

#: Both decorators: a test states what holds for each.
BOTH = pytest.mark.parametrize("decorate", [lazy_dataclass.dataclass, dataclasses.dataclass])
Decorator = Callable[..., Any]


def point(decorate: Decorator, **options: bool) -> Any:
    class Point:
        """A place."""

        kind: ClassVar[str] = "point"
        x: int
        y: int = 2
        seen: list[int] = field(default_factory=list, compare=False, repr=False)
        name: str = field(default="", kw_only=True)

    return decorate(**options)(Point)


@BOTH
def test_objects(decorate: Decorator) -> None:
    cls = point(decorate)
    one, other = cls(1, name="a"), cls(1, 2, [3], name="a")
    assert one == other != cls(2, name="a")
    assert one != (1, 2, "a")
    assert (one.x, one.y, one.seen, one.name, cls.kind) == (1, 2, [], "a", "point")
    assert one.seen is not cls(1).seen
    assert repr(one) == f"{cls.__qualname__}(x=1, y=2, name='a')"
    one.x = 5
    assert dataclasses.replace(one, y=7) == cls(5, 7, name="a")
    assert dataclasses.asdict(one) == {"x": 5, "y": 2, "seen": [], "name": "a"}
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required positional argument: 'x'"):
        cls()
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        cls(1, z=1)
    match other:
        case cls(x, 2):  # by `__match_args__`
            assert x == 1
        case _:
            raise AssertionError


@BOTH
def test_frozen_objects(decorate: Decorator) -> None:
    cls = point(decorate, frozen=True)
    one = cls(1)
    assert hash(one) == hash(cls(1, seen=[1]))
    assert len({one, cls(1), cls(2)}) == 2
    for change in (lambda: setattr(one, "x", 2), lambda: setattr(one, "new", 2), lambda: delattr(one, "x")):
        with pytest.raises(dataclasses.FrozenInstanceError, match=r"cannot (assign to|delete) field '(x|new)'"):
            change()
    assert copy.deepcopy(one) == copy.copy(one) == one


@BOTH
def test_classes_that_nobody_made_an_object_of(decorate: Decorator) -> None:
    cls = point(decorate)
    assert dataclasses.is_dataclass(cls)
    assert [f.name for f in dataclasses.fields(point(decorate))] == ["x", "y", "seen", "name"]
    parameters = inspect.signature(point(decorate)).parameters.values()
    assert [(p.name, p.kind.name, p.annotation) for p in parameters] == [
        ("x", "POSITIONAL_OR_KEYWORD", "int"),
        ("y", "POSITIONAL_OR_KEYWORD", "int"),
        ("seen", "POSITIONAL_OR_KEYWORD", "list[int]"),
        ("name", "KEYWORD_ONLY", "str"),
    ]
    assert cls.__doc__ == "A place."


@BOTH
def test_subclasses(decorate: Decorator) -> None:
    base = point(decorate, frozen=True)

    @decorate(frozen=True, eq=False)
    class Circle(base):  # type: ignore[misc]
        radius: float = 1.0

        def __post_init__(self) -> None:
            if self.radius < 0:
                raise ValueError("a radius is negative")

    circle = Circle(1, 2, [], 3.0)
    assert (circle.x, circle.radius, circle.name) == (1, 3.0, "")
    assert repr(circle).endswith("Circle(x=1, y=2, name='', radius=3.0)")
    assert circle != base(1)
    with pytest.raises(ValueError, match="negative"):
        Circle(1, radius=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        circle.radius = 2

    @dataclasses.dataclass(frozen=True)
    class Ring(Circle):  # type: ignore[misc, valid-type]
        inner: float = 0.5

    ring = Ring(1, radius=2)
    assert (ring.x, ring.radius, ring.inner) == (1, 2, 0.5)
    assert ring == Ring(1, radius=2) != Ring(1)
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclasses.dataclass(type("Thawed", (Circle,), {}))

    class Named(Circle):  # type: ignore[misc, valid-type]
        """No dataclass itself."""

    assert Named(4).x == 4


@BOTH
def test_methods_of_its_own_stay(decorate: Decorator) -> None:
    @decorate
    class Own:
        x: int

        def __init__(self) -> None:
            self.x = 3

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

        def __hash__(self) -> int:
            return 1

    assert Own().x == 3
    assert Own() == 5
    assert (repr(Own()), hash(Own())) == ("own", 1)


@lazy_dataclass.dataclass(frozen=True)
class Sent:
    """One that another process gets."""

    x: int


def test_an_object_may_come_from_another_process() -> None:
    """Then its class has objects, but was never called."""
    program = (
        "import pickle, sys; from tests.localllm.test_lazy_dataclass import Sent;"
        "one = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "print(repr(one), one == pickle.loads(bytes.fromhex(sys.argv[1])), hash(one) == hash(Sent(3)))"
    )
    command = [sys.executable, "-c", program, pickle.dumps(Sent(3)).hex()]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "Sent(x=3) True True\n"


def test_threads_may_use_a_class_first_at_once() -> None:
    for _ in range(50):
        cls, barrier, made = point(lazy_dataclass.dataclass, frozen=True), threading.Barrier(4), list[Any]()

        def work(cls: Any = cls, barrier: threading.Barrier = barrier, made: list[Any] = made) -> None:
            barrier.wait()
            made.append(cls(1))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == [cls(1)] * 4
