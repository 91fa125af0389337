"""Placement of layers on devices: invariants of every plan, and optimality, for random sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, strategies as st

from localllm.errors import NotEnoughMemoryError, UsageError
from localllm.loading.layer_split import LayerRange, in_proportion, plan_layers


class Room(NamedTuple):
    """A device: its memory, and the bytes that parts of a model need there."""

    name: str
    free: int
    layers: Sequence[int]
    cache: int
    embedding: int
    output: int
    scratch: int
    logits: int


sizes = st.integers(0, 50)
N_LAYERS = st.integers(1, 9)


@st.composite
def rooms(draw: st.DrawFn, n_gpus: st.SearchStrategy[int] | None = None) -> tuple[Room, list[Room]]:
    """A host and some GPUs, with different layer sizes per device."""
    n_layers = draw(N_LAYERS)

    def room(name: str) -> Room:
        layers = draw(st.lists(sizes, min_size=n_layers, max_size=n_layers))
        free, cache, embedding, output, scratch, logits = draw(st.tuples(st.integers(-10, 500), *[sizes] * 5))
        return Room(name, free, layers, cache, embedding, output, scratch, logits)

    n = draw(st.integers(0, 3) if n_gpus is None else n_gpus)
    return room("cpu"), [room(f"cuda:{i}") for i in range(n)]


def plan(host: Room, gpus: Sequence[Room] = (), *, tied: bool = False, **options: Any) -> list[LayerRange]:
    rooms, n_layers = {room.name: room for room in (host, *gpus)}, len(host.layers)
    free = {gpu.name: gpu.free for gpu in gpus}

    def n_bytes(device: str, layers: range) -> int:
        return needed(rooms[device], layers, n_layers, tied=tied)

    return plan_layers(n_layers, host.name, free, n_bytes, **options)


def counts_of(ranges: Sequence[LayerRange], devices: Sequence[Room]) -> list[int]:
    return [sum(len(each.layers) for each in ranges if each.device == device.name) for device in devices]


def check(ranges: Sequence[LayerRange], host: Room, gpus: Sequence[Room], *, tied: bool = False) -> None:
    """Check that contiguous ranges in device order contain every layer once, within the memory of each GPU."""
    n_layers = len(host.layers)
    assert [i for each in ranges for i in each.layers] == list(range(n_layers))
    rooms = {room.name: room for room in (host, *gpus)}
    order = [list(rooms).index(each.device) for each in ranges]
    assert order == sorted({*order})
    for device, layers in ranges:
        assert layers
        assert device == host.name or needed(rooms[device], layers, n_layers, tied=tied) <= rooms[device].free


def needed(room: Room, layers: range, n_layers: int, *, tied: bool) -> int:
    """Return the bytes of a range of layers on a device, including embedding or output at the ends."""
    total = room.scratch + sum(room.layers[i] + room.cache for i in layers)
    if layers.stop == n_layers:
        total += room.output + room.logits
    if layers.start == 0 and not (tied and layers.stop == n_layers):
        total += room.embedding
    return total


def fits_somehow(gpus: Sequence[Room], n_layers: int, n: int, *, tied: bool) -> bool:
    """Return whether the last ``n`` layers can be divided into ranges that fit on the GPUs."""
    for cuts in combinations_with_replacement(range(n_layers - n, n_layers + 1), len(gpus) - 1):
        ends = (n_layers - n, *cuts, n_layers)
        ranges = [range(*ends_) for ends_ in pairwise(ends)]
        if all(
            not layers or needed(gpu, layers, n_layers, tied=tied) <= gpu.free
            for gpu, layers in zip(gpus, ranges, strict=True)
        ):
            return True
    return False


@given(given_rooms=rooms(), tied=st.booleans())
def test_every_plan_satisfies_the_invariants(given_rooms: tuple[Room, list[Room]], tied: bool) -> None:
    host, gpus = given_rooms
    check(plan(host, gpus, tied=tied), host, gpus, tied=tied)


@given(given_rooms=rooms(st.integers(1, 3)), tied=st.booleans())
def test_as_many_layers_go_to_gpus_as_fit(given_rooms: tuple[Room, list[Room]], tied: bool) -> None:
    host, gpus = given_rooms
    n_layers = len(host.layers)
    n = sum(counts_of(plan(host, gpus, tied=tied), gpus))
    assert not any(fits_somehow(gpus, n_layers, more, tied=tied) for more in range(n + 1, n_layers + 1))


@given(given_rooms=rooms(st.integers(1, 3)), n=st.integers(0, 12), tied=st.booleans())
def test_a_number_of_layers_is_kept_or_refused(given_rooms: tuple[Room, list[Room]], n: int, tied: bool) -> None:
    host, gpus = given_rooms
    n_layers = len(host.layers)
    wanted = min(n, n_layers)
    most = sum(counts_of(plan(host, gpus, tied=tied), gpus))
    if not fits_somehow(gpus, n_layers, wanted, tied=tied):
        with pytest.raises(NotEnoughMemoryError, match=f"n_gpu_layers={most} fits" if most else "not one of them"):
            plan(host, gpus, tied=tied, n_gpu_layers=n)
        return
    shares = plan(host, gpus, tied=tied, n_gpu_layers=n)
    check(shares, host, gpus, tied=tied)
    assert sum(counts_of(shares, gpus)) == wanted


@given(given_rooms=rooms(st.integers(1, 3)), data=st.data())
def test_the_proportion_is_kept_within_a_layer(given_rooms: tuple[Room, list[Room]], data: st.DataObject) -> None:
    host, gpus = given_rooms
    weight = st.one_of(st.integers(0, 5), st.floats(0.01, 100))
    weights = data.draw(st.lists(weight, min_size=len(gpus), max_size=len(gpus)).filter(any))
    shares = plan(host, gpus, tensor_split=weights)
    check(shares, host, gpus)
    counts = counts_of(shares, gpus)
    for count, x in zip(counts, weights, strict=True):
        assert abs(count - sum(counts) * x / sum(weights)) < 1 + 1e-9
    assert counts == in_proportion(sum(counts), weights)


def test_proportions() -> None:
    assert in_proportion(20, [3, 1]) == [15, 5]
    assert in_proportion(22, [1, 1, 1]) == [7, 8, 7]
    assert in_proportion(3, [0, 1, 0]) == [0, 3, 0]
    assert in_proportion(3, [0, 0]) == [0, 3]
    assert in_proportion(4, [1e308, 1e308]) == [2, 2]
    assert in_proportion(4, [5e-324, 1e308, 0]) == [0, 4, 0]
    assert in_proportion(0, [1, 2]) == [0, 0]
    assert in_proportion(5, []) == []


def room(name: str, free: int, n_layers: int = 10) -> Room:
    """Layers of 1 GB with 0.1 GB of cache, 2 GB of embedding and of output, 0.5 GB of scratch and of logits."""
    gb = 10**9
    return Room(name, free * gb, [gb] * n_layers, gb // 10, 2 * gb, 2 * gb, gb // 2, gb // 2)


def test_gpus_share_in_proportion_to_their_memory_where_that_fits() -> None:
    shares = plan(room("cpu", 0), [room("cuda:0", 60), room("cuda:1", 20)])
    assert shares == [("cuda:0", range(8)), ("cuda:1", range(8, 10))]
    # The second GPU also has the output; otherwise each would get half of the 9 layers that fit.
    shares = plan(room("cpu", 0), [room("cuda:0", 7), room("cuda:1", 7)])
    assert [(s.device, len(s.layers)) for s in shares] == [("cpu", 2), ("cuda:0", 5), ("cuda:1", 3)]


def test_an_explicit_number_that_does_not_fit_is_refused_with_the_numbers() -> None:
    gpus = [room("cuda:0", 7), room("cuda:1", 7)]
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(room("cpu", 0), gpus, n_gpu_layers=9)
    message = str(caught.value)
    assert "9 layers on GPUs need 6.00 GB on cuda:0, which has 7.00 GB free, 7.40 GB on cuda:1, which" in message
    assert "n_gpu_layers=8 fits" in message
    assert len(plan(room("cpu", 0), gpus, n_gpu_layers=8)) == 3
    with pytest.raises(NotEnoughMemoryError, match=r"leave tensor_split out"):
        plan(room("cpu", 0), gpus, n_gpu_layers=8, tensor_split=[1, 9])
    with pytest.raises(NotEnoughMemoryError, match=r"not one of them fits: leave the GPU out"):
        plan(room("cpu", 0), [room("cuda:0", 1)], n_gpu_layers=1)


def test_requests_for_missing_gpus() -> None:
    with pytest.raises(UsageError, match="n_gpu_layers is 3, but no GPU was chosen"):
        plan(room("cpu", 0), n_gpu_layers=3)
    [share] = plan(room("cpu", 0), n_gpu_layers=0)
    assert share.layers == range(10)
    with pytest.raises(UsageError, match="tensor_split is '3,1', but needs one number for each GPU, and there is 1"):
        plan(room("cpu", 0), [room("cuda:0", 50)], tensor_split=[3, 1])
    with pytest.raises(UsageError, match="tensor_split is '1', but no GPU was chosen"):
        plan(room("cpu", 0), tensor_split=[1.0])
