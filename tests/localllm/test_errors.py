"""Errors are data: each front end formats the message with its own names."""

from __future__ import annotations

import pickle

from localllm.errors import (
    Argument,
    ContextLengthError,
    DeviceMemoryError,
    ModelNotFoundError,
    Notice,
    UsageError,
)
from localllm.options.declared import in_flags


def test_an_error_uses_each_front_ends_names() -> None:
    error = UsageError.of("top_k", -3, "a whole number of at least 0")
    assert str(error) == "top_k is -3, but must be a whole number of at least 0"
    assert error.worded(in_flags) == "--top-k is -3, but must be a whole number of at least 0"
    assert error.worded(lambda argument: f"options.{argument.name}").startswith("options.top_k is -3")
    assert error.argument == "top_k"
    assert UsageError("a sentence").argument is None


def test_a_setting_is_named_instead_of_its_flag() -> None:
    error = UsageError(Argument("threads"), " is 0, with ", Argument("device", "cpu"))
    assert in_flags(Argument("threads"), {"threads": "the setting threads"}) == "the setting threads"
    assert error.worded(in_flags) == "-t is 0, with --device cpu"
    assert str(error) == "threads is 0, with device='cpu'"


def test_text_that_is_not_an_argument_is_never_renamed() -> None:
    """Text of the user may resemble a parameter name of the library."""
    error = UsageError("the file 'device is here' cannot be read: context=4096")
    assert error.worded(in_flags) == str(error)


def test_errors_and_warnings_keep_their_parts_when_pickled() -> None:
    for each in (
        UsageError.of("min_p", 7, "less"),
        Notice("with ", Argument("context", 9)),
        ContextLengthError(5000, 4096, "leave out the system's", truncated=True),
        DeviceMemoryError(1, None, 5, 6),
        ModelNotFoundError("a sentence"),
    ):
        again = pickle.loads(pickle.dumps(each))
        assert (type(again), again.args, str(again)) == (type(each), each.args, str(each))
        assert vars(again) == vars(each)
