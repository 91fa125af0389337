"""Checks of arguments.  A `UsageError` reports an argument of the wrong type or out of range."""

from __future__ import annotations

import contextlib
import difflib
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING

from localllm.errors import Argument, UsageError, shown

# numpy is imported at its use, because the command line's help should not wait for it.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def as_int(value: object) -> int | None:
    """Convert an int or a numpy integer to an int; None for anything else, including booleans."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # numpy arrays have __index__, but most raise
        return None


def whole_number(name: str, value: object, low: int) -> int:
    number = as_int(value)
    if number is None or number < low:
        raise UsageError.of(name, value, f"a whole number of at least {low}")
    return number


def seconds(name: str, value: object) -> float:
    if not isinstance(value, bool) and isinstance(value, Real):
        with contextlib.suppress(OverflowError):  # the int exceeds the range of floats
            number = float(value)
            if 0 < number < math.inf:
                return number
    raise UsageError.of(name, value, "a number of seconds above 0")


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError.of(name, value, "True or False")
    return value


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError.of(name, value, "text (str)")
    return value


def floats(value: object) -> NDArray[np.float32]:
    """Return a new float32 array. Numbers outside the range become infinite.

    Raises TypeError if the value is not an array of real numbers.
    """
    import numpy as np

    try:
        array = np.asarray(value)
        if array.dtype.kind in "cUSmM":
            raise TypeError("complex numbers, text or dates")
        with np.errstate(over="ignore"):
            return array.astype(np.float32)
    except (ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: tensors of other libraries
        raise TypeError(str(error)) from error


def mappings(name: str, value: object) -> Sequence[Mapping[str, object]]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise UsageError.of(name, value, "a list of mappings")
    for i, item in enumerate(value):
        if not isinstance(item, Mapping):
            must = f" must be a list of mappings, but item {i} is {shown(item)}"
            raise UsageError(Argument(name), must)
    return value


def token_ids(ids: object, n_vocab: int, name: str = "tokens", rule: str = "a list of whole numbers") -> list[int]:
    """Return token ids as a list of ints.

    ``n_vocab`` is the size of the vocabulary.  ``rule`` describes valid values, for the error message.
    """
    if hasattr(ids, "tolist"):  # a numpy array
        ids = ids.tolist()
    if isinstance(ids, str | bytes | bytearray | memoryview) or not isinstance(ids, Sequence):
        raise UsageError(Argument(name), f" must be {rule}, not {type(ids).__name__}")
    checked: list[int] = []
    for i, id_ in enumerate(ids):
        number = as_int(id_)
        if number is None or not 0 <= number < n_vocab:
            raise UsageError(f"token {i} is {id_!r:.80}, but must be a whole number from 0 to {n_vocab - 1}")
        checked.append(number)
    return checked


def in_vocabulary(ids: Sequence[int] | NDArray[np.integer], n_vocab: int, name: str | None = None) -> None:
    """Raises UsageError if an id is outside the vocabulary.  ``name`` is the name of the argument."""
    # Not with NumPy, which is many times slower for a single id, the usual case.
    outside = next((id_ for id_ in ids if not 0 <= id_ < n_vocab), None)
    if outside is not None:
        location = () if name is None else (" in ", Argument(name))
        raise UsageError(f"token {outside}", *location, f" is outside the vocabulary of {n_vocab:,} tokens")


def check_keywords(names: Collection[str], keywords: Collection[str], theirs: Mapping[str, str]) -> None:
    """Raises TypeError for an unknown keyword, and suggests a replacement.

    ``theirs``: advice for keywords of other libraries.
    """
    for name in names:
        if name not in keywords:
            near = difflib.get_close_matches(name, [*keywords, *theirs], n=1, cutoff=0.75)
            if not near:
                hint = f"the keywords are {', '.join(keywords)}"
            else:
                hint = f"did you mean {near[0]!r}?" if near[0] in keywords else theirs[near[0]]
            raise TypeError(f"unexpected keyword argument {name!r:.80}: {hint}")
