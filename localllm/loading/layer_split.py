"""Which device has which layers of a model: a pure function from bytes to ranges of layers.

As in llama.cpp the last layers go to the GPUs, in the order in which these were named, and with the very last one the
norm and the output matrix; the first layers, and the embedding before them, stay with the host.  So hidden states
cross from one device to the next once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import floor, frexp, ldexp
from typing import NamedTuple

from localllm.errors import Argument, NotEnoughMemoryError, Notice, UsageError


class LayerRange(NamedTuple):
    """The layers that a device has; with the first goes the embedding, with the last norm and output matrix."""

    device: str
    layers: range


#: Bytes that a range of layers takes on a device.
Bytes = Callable[[str, range], int]

#: Why there are no GPUs, if nothing else is known.
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
    """Which device has which layers; devices without any are left out.

    Args:
        host: what has the layers that no GPU has.  Whether they fit there is not looked at.
        gpus: the bytes that can be had on each, in the order of their layers.
        n_bytes: what layers take.
        n_gpu_layers: how many of the last layers go to GPUs; by default as many as fit.
        tensor_split: in what proportion, a number for each GPU; by default in that of their free memory, and where
            this does not fit, any other that does.
        without_gpus: why there are no GPUs, where there are none.
    """
    if not gpus and (n_gpu_layers or tensor_split is not None):
        asked = ("n_gpu_layers", n_gpu_layers) if n_gpu_layers else ("tensor_split", repr(_numbers(tensor_split)))
        raise UsageError(Argument(asked[0]), f" is {asked[1]}, but ", *without_gpus.args)
    if tensor_split is not None and len(tensor_split) != len(gpus):
        there = "is 1" if len(gpus) == 1 else f"are {len(gpus)}"
        needs = (
            f" is {_numbers(tensor_split)!r}, but needs a number for each GPU, of which there {there}: give as many"
        )
        raise UsageError(Argument("tensor_split"), needs, ", or leave it out")

    def counts(n: int) -> list[list[int]]:
        """Ways to share the last ``n`` layers out, as the number for each GPU; the best first."""
        if tensor_split is not None:
            return [in_proportion(n, tensor_split)]
        free = [max(0, n_free) for n_free in gpus.values()]
        return [in_proportion(n, free), _filled(gpus, n_layers, n, n_bytes)]

    def ranges(on_gpus: Sequence[int]) -> list[LayerRange]:
        bounds = accumulate([n_layers - sum(on_gpus), *on_gpus], initial=0)
        devices = zip((host, *gpus), pairwise(bounds), strict=True)
        return [LayerRange(device, range(*ends)) for device, ends in devices if ends[0] < ends[1]]

    def placed(n: int) -> list[LayerRange] | None:
        """With ``n`` layers on GPUs; None if these do not fit."""
        for found in map(ranges, counts(n) if gpus else [[]]):
            if all(each.device == host or n_bytes(*each) <= gpus[each.device] for each in found):
                return found
        return None

    if n_gpu_layers is None:
        most = n_layers if gpus else 0
        return next(found for n in range(most, -1, -1) if (found := placed(n)) is not None)
    n = min(n_gpu_layers, n_layers)
    if (asked_for := placed(n)) is not None:
        return asked_for
    fitting = next(fewer for fewer in range(n - 1, -1, -1) if placed(fewer) is not None)
    needs = ", ".join(
        f"{n_bytes(*each) / 1e9:.2f} GB on {each.device}, which has {gpus[each.device] / 1e9:.2f} GB free"
        for each in ranges(counts(n)[0])
        if each.device != host
    )
    fits = (Argument("n_gpu_layers", fitting), " fits") if fitting else ("not one of them fits: leave the GPU out",)
    other = () if tensor_split is None else (", or leave ", Argument("tensor_split"), " out")
    smaller = ", or choose a smaller context or a smaller quantisation of the model"
    raise NotEnoughMemoryError(f"{n} layers on GPUs need {needs}: ", *fits, *other, smaller)


def in_proportion(n: int, weights: Sequence[float]) -> list[int]:
    """``n`` layers, as whole numbers in the proportion of the weights, each off by less than one."""
    exponent = frexp(max(weights, default=0))[1]  # without it sums of the largest would be infinite
    ends = list(accumulate(ldexp(weight, -exponent) for weight in weights))
    if not any(ends):
        return [n if i == len(ends) - 1 else 0 for i in range(len(ends))]
    rounded = [0, *(floor(n * end / ends[-1] + 0.5) for end in ends)]
    return [stop - start for start, stop in pairwise(rounded)]


def _filled(gpus: Mapping[str, int], n_layers: int, n: int, n_bytes: Bytes) -> list[int]:
    """``n`` layers, of which the last GPU has as many as fit there, then the one before it, and so on."""
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
