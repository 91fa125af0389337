"""Split the layers of a model between devices: a pure function from bytes to ranges of layers.

As in llama.cpp, the last layers go to the GPUs, in the user's order. The norm and the output
matrix follow the last layer. The first layers and the embedding stay on the host. Thus hidden states move from one
device to the next only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import floor, frexp, ldexp
from typing import NamedTuple

from localllm.errors import Argument, NotEnoughMemoryError, Notice, UsageError


class LayerRange(NamedTuple):
    """Layers on a device. The embedding follows the first layer; the norm and the output matrix follow the last."""

    device: str
    layers: range


#: Returns the bytes that a range of layers takes on a device.
Bytes = Callable[[str, range], int]

#: Default reason why there are no GPUs.
NO_GPU = Notice("no GPU was chosen: leave it out, or choose ", Argument("device", "cuda"))


def plan_layers(
    n_layers: int,
    host: str,
    gpus: Mapping[str, int],
    n_bytes: Bytes,
    *,
    n_gpu_layers: int | None = None,
    tensor_split: Sequence[float] | None = None,
    without_gpus: Notice = NO_GPU,
) -> list[LayerRange]:
    """Return the layers of each device; devices without layers are omitted.

    Args:
        host: device of the remaining layers. Its memory is not checked.
        gpus: bytes available on each GPU, in the order of their layers.
        n_bytes: bytes that a range of layers takes on a device.
        n_gpu_layers: number of last layers on GPUs. Defaults to the largest number that fits.
        tensor_split: proportions of the layers, one number per GPU. Defaults to the proportions of free memory, or
            to another split if that does not fit.
        without_gpus: reason why there are no GPUs, for the error.

    Raises:
        UsageError: options for GPUs without GPUs, or ``tensor_split`` with the wrong length.
        NotEnoughMemoryError: ``n_gpu_layers`` layers do not fit.
    """
    if not gpus and (n_gpu_layers or tensor_split is not None):
        option = ("n_gpu_layers", n_gpu_layers) if n_gpu_layers else ("tensor_split", repr(_numbers(tensor_split)))
        raise UsageError(Argument(option[0]), f" is {option[1]}, but ", *without_gpus.args)
    if tensor_split is not None and len(tensor_split) != len(gpus):
        n_gpus = "is 1" if len(gpus) == 1 else f"are {len(gpus)}"
        needs = f" is {_numbers(tensor_split)!r}, but needs one number for each GPU, and there {n_gpus}: give as many"
        raise UsageError(Argument("tensor_split"), needs, ", or leave it out")

    def counts(n: int) -> list[list[int]]:
        """Return possible splits of the last ``n`` layers as the number on each GPU, best first."""
        if tensor_split is not None:
            return [in_proportion(n, tensor_split)]
        free = [max(0, n_free) for n_free in gpus.values()]
        return [in_proportion(n, free), _filled(gpus, n_layers, n, n_bytes)]

    def ranges(on_gpus: Sequence[int]) -> list[LayerRange]:
        bounds = accumulate([n_layers - sum(on_gpus), *on_gpus], initial=0)
        devices = zip((host, *gpus), pairwise(bounds), strict=True)
        return [LayerRange(device, range(*ends)) for device, ends in devices if ends[0] < ends[1]]

    def placed(n: int) -> list[LayerRange] | None:
        """Return the ranges with ``n`` layers on GPUs; None if they do not fit."""
        for layer_ranges in map(ranges, counts(n) if gpus else [[]]):
            if all(r.device == host or n_bytes(*r) <= gpus[r.device] for r in layer_ranges):
                return layer_ranges
        return None

    if n_gpu_layers is None:
        most = n_layers if gpus else 0
        return next(layer_ranges for n in range(most, -1, -1) if (layer_ranges := placed(n)) is not None)
    n = min(n_gpu_layers, n_layers)
    if (asked_for := placed(n)) is not None:
        return asked_for
    fitting = next(fewer for fewer in range(n - 1, -1, -1) if placed(fewer) is not None)
    needs = ", ".join(
        f"{n_bytes(*r) / 1e9:.2f} GB on {r.device}, which has {gpus[r.device] / 1e9:.2f} GB free"
        for r in ranges(counts(n)[0])
        if r.device != host
    )
    fits = (Argument("n_gpu_layers", fitting), " fits") if fitting else ("not one of them fits: leave the GPU out",)
    alternative = () if tensor_split is None else (", or leave ", Argument("tensor_split"), " out")
    smaller = ", or choose a smaller context or a smaller quantisation of the model"
    raise NotEnoughMemoryError(f"{n} layers on GPUs need {needs}: ", *fits, *alternative, smaller)


def in_proportion(n: int, weights: Sequence[float]) -> list[int]:
    """Return ``n`` layers split in proportion to the weights; each number is off by less than one."""
    exponent = frexp(max(weights, default=0))[1]  # scaled because sums of very large numbers are infinite
    ends = list(accumulate(ldexp(weight, -exponent) for weight in weights))
    if not any(ends):
        return [n if i == len(ends) - 1 else 0 for i in range(len(ends))]
    rounded = [0, *(floor(n * end / ends[-1] + 0.5) for end in ends)]
    return [stop - start for start, stop in pairwise(rounded)]


def _filled(gpus: Mapping[str, int], n_layers: int, n: int, n_bytes: Bytes) -> list[int]:
    """Return a split of ``n`` layers that fills the last GPU first, then the GPU before it."""
    counts: list[int] = []
    start = n_layers
    for device, free in reversed(list(gpus.items())):
        stop = start
        while start > n_layers - n and n_bytes(device, range(start - 1, stop)) <= free:
            start -= 1
        counts.insert(0, stop - start)
    counts[0] += n - sum(counts)
    return counts


def _numbers(weights: Sequence[float] | None) -> str:
    return ",".join(f"{weight:g}" for weight in weights or ())
