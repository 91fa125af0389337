"""Parts of a forward pass, on every backend: what `localllm.kernels.split` puts together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm.errors import KernelError
from localllm.kernels.ops import Backend, HostHidden
from tests.helpers.run_model import make_batch
from tests.helpers.weights import NO_CACHE, f32, random


@pytest.mark.parametrize("width", [1, 5, 32, 100])
def test_a_part_goes_from_hidden_states_to_hidden_states(ops: Backend, width: int) -> None:
    """Two parts together give the bits of the whole, for fewer tokens than before too."""
    x, weight = random(7, width), ops.load_linear(f32(random(width, width, seed=1)))
    table, norm = ops.load_embedding(f32(x)), ops.load_vector(f32(random(width, seed=2)))

    def second(y: Any) -> Any:
        return ops.linear(ops.rms_norm(y, norm, 1e-5), weight, residual=y)

    kept = ops.new_cache(NO_CACHE, 1)
    most = {"max_tokens": 8, "max_outputs": 8}
    first = ops.compile_part(lambda: ops.embed(table), kept, **most)
    between = ops.compile_part(lambda: second(ops.hidden(width)), kept, **most)
    last = ops.compile_part(lambda: ops.outputs(second(ops.hidden(width))), kept, **most)
    whole = ops.compile(lambda: ops.outputs(second(second(ops.embed(table)))), kept, **most)
    for ids, wanted in ((range(7), [6, 0]), ([4, 4], [1]), ([3], [])):
        batch = make_batch([(ids, 0, [0])], outputs=wanted)
        hidden = first(batch, None)
        np.testing.assert_array_equal(hidden.host(), x[list(ids)])
        hidden = between(batch, hidden)
        assert hidden.host().shape == (len(ids), width)
        np.testing.assert_array_equal(last(batch, hidden).host(), whole(batch))


def test_hidden_states_that_do_not_fit_are_refused(ops: Backend) -> None:
    part = ops.compile_part(lambda: ops.hidden(5), ops.new_cache(NO_CACHE, 1), max_tokens=4, max_outputs=4)
    batch = make_batch([(range(3), 0, [0])])
    with pytest.raises(KernelError, match="hidden states of 5, but was given none"):
        part(batch, None)
    for wrong in (random(2, 5), random(3, 6), random(3, 5).astype(np.float64)):
        with pytest.raises(KernelError, match=r"needs \[3, 5\] in float32"):
            part(batch, HostHidden(wrong))
    np.testing.assert_array_equal(part(batch, HostHidden(random(3, 5))).host(), random(3, 5))


def test_all_places_of_a_backend_lie_side_by_side(ops: Backend) -> None:
    assert ops.at("embedding") is ops.at(3) is ops.at("output") is ops


def test_the_largest_logits(ops: Backend) -> None:
    """Of equals the lowest id, and NaN before all numbers."""
    logits = random(4, 3000)
    logits[1] = np.round(logits[1])
    logits[2, [700, 30]], logits[2, 5] = np.nan, np.inf
    logits[3], logits[3, 9] = -np.inf, -0.0
    table = ops.load_embedding(f32(logits))
    cache = ops.new_cache(NO_CACHE, 1)
    step = ops.compile(lambda: ops.outputs(ops.embed(table)), cache, max_tokens=4, max_outputs=4)
    for rows, k in (([0, 1, 2, 3], 1), ([3, 0], 7), ([1, 2, 1], 100), ([], 3)):
        ids, found = step.best(make_batch([(range(4), 0, [0])], outputs=rows), k)
        assert ids.shape == found.shape == (len(rows), k)
        assert (ids.dtype, found.dtype) == (np.int32, np.float32)
        for row, some, values in zip(rows, ids.tolist(), found, strict=True):
            x = logits[row].tolist()
            assert some == sorted(range(3000), key=lambda i, x=x: (x[i] == x[i], -x[i], i))[:k]
            np.testing.assert_array_equal(values, logits[row, some])
