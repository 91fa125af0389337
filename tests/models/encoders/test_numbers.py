"""Numbers of encoders' files that are out of range: a typed error, or an encoder of bounded memory."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from localllm.errors import ModelError, UsageError
from localllm.gguf import GGUFFile
from localllm.kernels.reference import ReferenceBackend
from localllm.loading.media_encoder import MediaEncoder, _Encoder
from localllm.models.encoders.registry import projectors_of, read_encoder
from tests.models.encoders import families, test_hearing

T = TypeVar("T")

#: Bytes that preparing an image of 1,024 × 768 pixels, or a second of audio, may use.
MAX_BYTES = 2 << 30
#: Bytes that an encoder's steps may use.
MAX_STEP_BYTES = 16 << 30

INTEGERS = (0, -1, 1, 65_535, 1 << 31, 1 << 63)
FLOATS = (0.0, -1.0, 1.0, 65_535.0, 1e30, 1e-30, math.nan, math.inf, -math.inf)


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("family")
        if name in families.FAMILIES:
            families.make(name, folder)
        else:
            test_hearing.made(name, folder)
        return next(folder.rglob("mmproj.gguf"))

    return make


def mutations(metadata: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return keys with changed values: in a list, one element changes."""
    for key, value in metadata.items():
        first = value[0] if isinstance(value, list) and value else value
        if not key.startswith("clip.") or isinstance(first, bool | str) or not isinstance(first, int | float):
            continue
        for number in INTEGERS if isinstance(first, int) else FLOATS:
            yield key, [number, *value[1:]] if isinstance(value, list) else number


def result_of(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def check(metadata: dict[str, Any], file: GGUFFile) -> None:
    """Prepare an example and lower the steps.  Raises ModelError or UsageError."""
    encoders = {}
    for kind, family in projectors_of(metadata).items():
        model = read_encoder(SimpleNamespace(metadata=metadata, tensors=file.tensors), kind)
        prepared = model.prepare(model.example if kind == "image" else model.example[:16_000])
        assert 0 < prepared.n_tokens < 1 << 20
        for frame in prepared.frames:
            assert np.isfinite(result_of(model.rows_in_pieces(frame)).inputs).all()
        encoders[kind] = _Encoder(family, model)
    encoder = MediaEncoder(file.path, encoders, file, ReferenceBackend())
    assert encoder.info.n_bytes < MAX_STEP_BYTES


@pytest.mark.parametrize("name", [*families.FAMILIES, *test_hearing.FAMILIES])
def test_numbers_out_of_range_are_refused_or_bounded(name: str, file_of: Callable[[str], Path]) -> None:
    n_refused = 0
    with GGUFFile.open(file_of(name)) as file:
        metadata = {
            key: getattr(value, "tolist", lambda value=value: value)() for key, value in file.metadata.items()
        }
        check(metadata, file)
        tracemalloc.start()
        try:
            for key, value in mutations(metadata):
                tracemalloc.reset_peak()
                try:
                    check(metadata | {key: value}, file)
                except (ModelError, UsageError):
                    n_refused += 1
                except Exception as error:
                    raise AssertionError(f"{key} = {value}: {error!r}") from error
                assert tracemalloc.get_traced_memory()[1] < MAX_BYTES, (key, value)
        finally:
            tracemalloc.stop()
    assert n_refused
