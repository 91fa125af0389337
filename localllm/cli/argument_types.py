"""Parsers of command-line values.  They raise `argparse.ArgumentTypeError`."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localllm.errors import UsageError
from localllm.nesting import parse_json
from localllm.options.declared import CheckedOptions, Option, declared


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


def whole(least: int, words: str = "", *, below: float = math.inf) -> Callable[[str], int]:
    """Return a parser of whole numbers of at least ``least``.  ``words`` describes them in errors."""
    range_ = f"of at least {least}" if below == math.inf else f"from {least} to {below - 1}"
    words = words or f"a whole number {range_}"

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= (value := int(text)) < below:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {words}")

    return read


def on_or_off(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"


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


def numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 128,512") from None


def logit_bias(text: str) -> tuple[int, float]:
    """Parse a token id and its bias: ``15043+1``."""
    for sign in "+-":
        id_, separator, bias = text.partition(sign)
        if separator:
            with contextlib.suppress(ValueError):
                if not math.isnan(value := float(sign + bias)) and value < math.inf:
                    return int(id_), value
    raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number, such as 15043+1 or 15043-inf")


def share(text: str) -> tuple[Path, float]:
    """Parse the path of an adapter and its scale: PATH[=X]."""
    path, equals, number = text.rpartition("=")
    if not equals:
        return Path(text), 1.0
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(number)):
            return Path(path), value
    raise argparse.ArgumentTypeError(f"{text!r} is not ADAPTER[=X], such as style.gguf=0.8")


def scaled_vector(text: str) -> tuple[Path, float]:
    """Parse the path of a control vector and its scale, in llama.cpp's form: PATH:X."""
    path, _, number = text.rpartition(":")
    with contextlib.suppress(ValueError):
        if path and math.isfinite(value := float(number)):
            return Path(path), value
    raise argparse.ArgumentTypeError(f"{text!r} is not FILE:X, such as happy.gguf:0.8")


def size(text: str) -> int:
    """Parse a number of bytes with the unit B, KB, MB or GB."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([KMG]?)B?", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 4.2GB or 700MB")
    return int(float(match[1]) * 1000 ** " KMG".index(match[2] or " "))


def divergence(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a divergence in nats, such as 0.02")


def override(text: str) -> tuple[str, str]:
    pattern, equals, type = text.rpartition("=")
    if not equals or not pattern or not type:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=TYPE, such as ffn_down=Q6_K")
    return pattern, type
