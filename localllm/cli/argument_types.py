"""Parsers of command-line values.  They raise `argparse.ArgumentTypeError`."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from localllm.errors import UsageError
from localllm.nesting import parse_json
from localllm.options.declared import CheckedOptions, Option, declared

_T = TypeVar("_T")


def model_file(text: str) -> str:
    """Parse a model's name: a path, ORG/REPO[:…], or a URL of the hub."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: name a GGUF file")
    if re.match(r"\w+://|www\.", text) and not os.path.exists(text):
        from localllm.catalog.hub_names import HubName  # imported here: most names are paths

        if HubName.parse(text) is not None:
            return text
        raise argparse.ArgumentTypeError(
            f"{text} is not an address on the hub: download the file and name its path, or name a hub model as "
            "ORG/REPO[:QUANT]"
        )
    return text


def text_file(path: str) -> str:
    from localllm.files import read_text  # imported here because few command lines name a file

    try:
        return read_text(path)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _checked(parse: Callable[[str], _T | None], words: str) -> Callable[[str], _T]:
    """Return a parser of values.  ``parse`` returns None or raises ValueError for others, which are ``words``."""

    def read(text: str) -> _T:
        with contextlib.suppress(ValueError):
            if (value := parse(text)) is not None:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is {words}")

    return read


def whole(least: int, words: str = "", *, below: float = math.inf) -> Callable[[str], int]:
    """Return a parser of whole numbers of at least ``least``.  ``words`` describes them in errors."""
    range_ = f"of at least {least}" if below == math.inf else f"from {least} to {below - 1}"
    words = words or f"a whole number {range_}"
    return _checked(lambda text: value if least <= (value := int(text)) < below else None, f"not {words}")


on_or_off = _checked({"on": True, "off": False}.get, "neither on nor off")


def reader(option: Option) -> Callable[[str], Any]:
    """Return a parser of an option's values.  -1, llama.cpp's "unset", is accepted if the option has a default."""
    leave_out = f"; remove the flag for the default: {option.none}" if option.none else ""

    def read(text: str) -> Any:
        if text == "-1" and option.none:
            return None
        try:
            if option.kind.read(value := option.kind.parse(text)) is not None:
                return value
        except UsageError as error:  # its message is more precise
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {option.kind.words}{leave_out}")

    return read


def draft_count(text: str) -> Any:
    return text if text == "always" else reader(declared(CheckedOptions)["draft_max"])(text)


def token_limit(text: str) -> int | None:
    """Parse a number of tokens; -1 and -2 are llama.cpp's "no limit" and "until the context is full"."""
    return None if text in ("-1", "-2") else whole(0, "a whole number of at least 0, or -1 for no limit")(text)


def layers(text: str) -> int | None:
    """Parse a number of layers.  -1 and "auto" mean the largest number that fits, "all" means every layer."""
    if text in ("auto", "-1"):
        return None
    return 1 << 20 if text == "all" else whole(0, "one whole number of at least 0, 'auto' or 'all'")(text)


def json_object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(value := parse_json(text), dict):
            return value
    raise argparse.ArgumentTypeError(f'{text!r:.80} is not a JSON object, such as {{"enable_thinking": false}}')


def _logit_bias(text: str) -> tuple[int, float] | None:
    for sign in "+-":
        id_, separator, bias = text.partition(sign)
        with contextlib.suppress(ValueError):
            if separator and not math.isnan(value := float(sign + bias)) and value < math.inf:
                return int(id_), value
    return None


def _share(text: str) -> tuple[Path, float] | None:
    path, equals, number = text.rpartition("=")
    if not equals:
        return Path(text), 1.0
    return (Path(path), value) if math.isfinite(value := float(number)) else None


def _scaled_vector(text: str) -> tuple[Path, float] | None:
    path, _, number = text.rpartition(":")
    return (Path(path), value) if path and math.isfinite(value := float(number)) else None


def _size(text: str) -> int | None:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([KMG]?)B?", text.upper())
    return None if match is None else int(float(match[1]) * 1000 ** " KMG".index(match[2] or " "))


def _override(text: str) -> tuple[str, str] | None:
    pattern, _, type = text.rpartition("=")
    return (pattern, type) if pattern and type else None


numbers = _checked(lambda text: list(map(int, text.split(","))), "not a list of whole numbers, such as 128,512")
#: A token id and its bias: ``15043+1``.
logit_bias = _checked(_logit_bias, "not a token id and a number, such as 15043+1 or 15043-inf")
#: The path of an adapter and its scale: PATH[=X].
share = _checked(_share, "not ADAPTER[=X], such as style.gguf=0.8")
#: The path of a control vector and its scale, in llama.cpp's form: PATH:X.
scaled_vector = _checked(_scaled_vector, "not FILE:X, such as happy.gguf:0.8")
#: A number of bytes with the unit B, KB, MB or GB.
size = _checked(_size, "not a size, such as 4.2GB or 700MB")
divergence = _checked(
    lambda text: value if 0 < (value := float(text)) < math.inf else None, "not a divergence in nats, such as 0.02"
)
override = _checked(_override, "not REGEX=TYPE, such as ffn_down=Q6_K")
