"""Load and run model files with flipped, cut, inserted and overwritten bytes: a typed error or a result.

``LOCALLLM_FUZZ_CASES`` sets the number of files per format and device, and ``LOCALLLM_FUZZ_SEED`` the first seed, for
longer searches.
"""

from __future__ import annotations

import os
import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm.errors import LocalLLMError
from localllm.gguf import GGUFFile
from localllm.quant.types import GGMLType
from tests.helpers.tiny_models import config, random_weights, write_gguf

CASES = int(os.environ.get("LOCALLLM_FUZZ_CASES", "60"))
SEED = int(os.environ.get("LOCALLLM_FUZZ_SEED", "0"))

TYPES = (GGMLType.F32, GGMLType.Q8_0, GGMLType.Q4_K)
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"

#: Values near common limits.
ODD_NUMBERS = [
    *(struct.pack("<Q", n) for n in (0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)),
    *(struct.pack("<I", n) for n in (0, 1, 2, 3, 7, 8, 12, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)),
    *(struct.pack("<f", x) for x in (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-30, 1e30, 3e38, np.inf, -np.inf, np.nan)),
    *(struct.pack("<e", x) for x in (65504.0, np.inf, np.nan)),
    *(bytes([n]) for n in (0, 1, 0x7F, 0x80, 0xFF)),
]


class Damage:
    """Creates damaged files from a valid one.

    Attributes:
        places: byte ranges that are changed equally often, because most of the file is weights and tokens.
    """

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        with GGUFFile.open(path) as file:
            weights = min(tensor.offset for tensor in file.tensors.values())
            names = [self.data.rindex(name.encode(), 0, weights) for name in file.tensors]
        keys = self.data.index(b"tokenizer.ggml.model")
        after_tokens = self.data.index(b"tokenizer.ggml.token_type")
        table = min(names) - 8
        self.places = [
            range(keys),
            range(keys, after_tokens),
            range(after_tokens, table),
            range(table, weights),
            range(weights, len(self.data)),
        ]

    def make(self, rng: random.Random) -> bytes:
        data = bytearray(self.data)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            # An index may be past the end after an earlier cut: slices then change nothing, or append.
            at = rng.choice(rng.choice(self.places))
            rng.choices(STEPS, weights=(6, 8, 1, 1, 1, 2))[0](data, at, rng)
        return bytes(data)


def flip_bit(data: bytearray, at: int, rng: random.Random) -> None:
    if at < len(data):
        data[at] ^= 1 << rng.randrange(8)


def put_odd_number(data: bytearray, at: int, rng: random.Random) -> None:
    number = rng.choice(ODD_NUMBERS)
    data[at : at + len(number)] = number


def cut_off(data: bytearray, at: int, rng: random.Random) -> None:
    del data[at:]


def take_out(data: bytearray, at: int, rng: random.Random) -> None:
    del data[at : at + rng.choice((1, 4, 8, 32, 100))]


def put_in(data: bytearray, at: int, rng: random.Random) -> None:
    data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 32, 100)))


def copy_over(data: bytearray, at: int, rng: random.Random) -> None:
    n, source = rng.choice((4, 8, 16, 64)), rng.randrange(max(1, len(data)))
    data[at : at + n] = data[source : source + n]


STEPS: list[Callable[[bytearray, int, random.Random], None]] = [
    flip_bit,
    put_odd_number,
    cut_off,
    take_out,
    put_in,
    copy_over,
]


@pytest.fixture(scope="module", params=TYPES, ids=lambda type: type.name)
def damage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Damage:
    """Return a model of one layer, in Q4_K with matrices of whole blocks."""
    wide = {"hidden_size": 256, "intermediate_size": 256} if request.param is GGMLType.Q4_K else {"hidden_size": 32}
    settings = config(**({"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 280} | wide))
    keys = {"tokenizer.chat_template": TEMPLATE}
    path = tmp_path_factory.mktemp("damaged") / "whole.gguf"
    return Damage(write_gguf(path, settings, random_weights(settings), type=request.param, metadata=keys))


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_damaged_models_give_our_errors_or_a_result(damage: Damage, device: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    loaded = 0
    for seed in range(SEED, SEED + CASES):
        rng = random.Random(seed)
        path.write_bytes(damage.make(rng))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                loaded += run(path, device, rng)
            except Exception as error:
                raise AssertionError(f"seed {seed}") from error
        foreign = [warning for warning in warned if not issubclass(warning.category, UserWarning)]
        assert not foreign, f"seed {seed}: {foreign[0].message}"
    assert 0 < loaded < CASES or CASES < 50


def run(path: Path, device: str, rng: random.Random) -> bool:
    """Load a file and generate; return whether it loaded."""
    try:
        llm = localllm.load(path, device=device, threads=1, context=32)
    except LocalLLMError:
        return False
    with llm:
        temperature = rng.choice((0, 1))
        try:
            ids = llm.generate("an", max_tokens=2, temperature=temperature, overflow="truncate").ids
            assert len(ids) <= 2
            assert all(0 <= id_ < llm.info.n_vocab for id_ in ids)
            llm.chat([{"role": "user", "content": "a"}], max_tokens=1, seed=1, overflow="truncate")
        except LocalLLMError:
            pass
    return True
