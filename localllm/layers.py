"""Which device has which layers of a model: a pure function from bytes to ranges of layers.

As in llama.cpp the last layers go to the GPUs, in the order in which these were named, and with the very last one the
norm and the output matrix; the first layers, and the embedding before them, stay with the host.  So hidden states
cross from one device to the next once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import floor, frexp, ldexp

from localllm.errors import NotEnoughMemoryError, UsageError


@dataclass(frozen=True)
class Room:
    """A device: the bytes that it has, and those that each piece of a model would take there.

    Attributes:
        name: "cpu", "cuda:0", …
        free: bytes that can be had.
        layers: weights of each layer.
        cache: keys and values of one layer.
        embedding: the table; 0 if it is the output matrix as well, and that lies there too.
        output: weights of norm and output matrix.
        scratch: activations of a step, where there are layers.
        logits: those of a step, where the output matrix is.
        part_scratch: as ``scratch``, of a device that has only a part of the layers; none: the same.
    """

    name: str
    free: int
    layers: Sequence[int]
    cache: int
    embedding: int
    output: int
    scratch: int
    logits: int
    part_scratch: int | None = None


@dataclass(frozen=True)
class Share:
    """What one device has of a model.

    Attributes:
        embeds: whether the embedding is there.
        outputs: whether norm and output matrix are.
    """

    room: Room
    layers: range
    embeds: bool
    outputs: bool
    tied: bool

    @property
    def embedding(self) -> int:
        """Bytes of the table; none where the output matrix beside it is the same."""
        return self.room.embedding if self.embeds and not (self.tied and self.outputs) else 0

    @property
    def scratch(self) -> int:
        """Bytes of activations."""
        is_whole = self.embeds and self.outputs
        return self.room.scratch if is_whole or self.room.part_scratch is None else self.room.part_scratch

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        room = self.room
        in_layers = sum(room.layers[i] for i in self.layers) + len(self.layers) * room.cache
        at_end = room.output + room.logits if self.outputs else 0
        return self.embedding + in_layers + self.scratch + at_end

    @property
    def fits(self) -> bool:
        return self.total <= self.room.free


#: Why there are no GPUs, if nothing else is known.
NO_GPU = "no GPU was chosen: leave it out, or choose device='cuda'"


def plan_layers(
    host: Room,
    gpus: Sequence[Room] = (),
    *,
    tied: bool = False,
    n_gpu_layers: int | None = None,
    tensor_split: Sequence[float] | None = None,
    without_gpus: str = NO_GPU,
) -> list[Share]:
    """Which device has which layers; devices without any are left out.

    Args:
        host: what has the layers that no GPU has.  Whether they fit there is not looked at.
        gpus: in the order of their layers.
        tied: the embedding is the output matrix too, and is kept once where both lie on one device.
        n_gpu_layers: how many of the last layers go to GPUs; by default as many as fit.
        tensor_split: in what proportion, a number for each GPU; by default in that of their free memory, and where
            this does not fit, any other that does.
        without_gpus: why there are no GPUs, where there are none.

    Raises:
        UsageError: there are no GPUs to put layers on, or not as many as numbers in ``tensor_split``.
        NotEnoughMemoryError: so many layers do not fit there; says how many do.
    """
    n_layers = len(host.layers)
    if not gpus and n_gpu_layers:
        raise UsageError(f"n_gpu_layers is {n_gpu_layers}, but {without_gpus}")
    if not gpus and tensor_split is not None:
        raise UsageError(f"tensor_split is {_numbers(tensor_split)!r}, but {without_gpus}")
    if tensor_split is not None and len(tensor_split) != len(gpus):
        raise UsageError(
            f"tensor_split is {_numbers(tensor_split)!r}, but needs a number for each GPU, of which there "
            f"{'is 1' if len(gpus) == 1 else f'are {len(gpus)}'}: give as many, or leave it out"
        )

    def placed(n: int) -> list[Share] | None:
        """With ``n`` layers on GPUs; None if these do not fit."""
        for counts in _counts(gpus, n_layers, n, tensor_split, tied):
            shares = _shares(host, gpus, [n_layers - n, *counts], tied)
            if all(share.fits for share in shares if share.room is not host):
                return shares
        return None

    if n_gpu_layers is not None and (found := placed(min(n_gpu_layers, n_layers))) is not None:
        return found
    fitting = next((shares for n in range(n_layers, 0, -1) if (shares := placed(n)) is not None), None)
    shares = fitting or _shares(host, gpus, [n_layers, *[0] * len(gpus)], tied)
    if n_gpu_layers is not None:
        on_gpus = sum(len(share.layers) for share in shares if share.room is not host)
        raise NotEnoughMemoryError(_too_many(host, gpus, min(n_gpu_layers, n_layers), on_gpus, tensor_split, tied))
    return shares


def _counts(
    gpus: Sequence[Room], n_layers: int, n: int, tensor_split: Sequence[float] | None, tied: bool
) -> list[list[int]]:
    """Ways to share the last ``n`` layers out, as the number for each GPU; the best first."""
    if tensor_split is not None:
        return [in_proportion(n, tensor_split)]
    return [in_proportion(n, [max(0, gpu.free) for gpu in gpus]), _filled(gpus, n_layers, n, tied)]


def in_proportion(n: int, weights: Sequence[float]) -> list[int]:
    """``n`` layers, as whole numbers in the proportion of the weights, each off by less than one."""
    exponent = frexp(max(weights, default=0))[1]  # without it sums of the largest would be infinite
    ends = list(accumulate(ldexp(weight, -exponent) for weight in weights))
    if not any(ends):
        return [n if i == len(ends) - 1 else 0 for i in range(len(ends))]
    rounded = [0, *(floor(n * end / ends[-1] + 0.5) for end in ends)]
    return [stop - start for start, stop in pairwise(rounded)]


def _filled(gpus: Sequence[Room], n_layers: int, n: int, tied: bool) -> list[int]:
    """``n`` layers, of which the last GPU has as many as fit there, then the one before it, and so on."""
    counts = [0] * len(gpus)
    start = n_layers
    for i in range(len(gpus) - 1, -1, -1):
        stop = start
        while (
            start > n_layers - n
            and Share(gpus[i], range(start - 1, stop), embeds=start == 1, outputs=stop == n_layers, tied=tied).fits
        ):
            start -= 1
        counts[i] = stop - start
    if counts:
        counts[0] += n - sum(counts)
    return counts


def _shares(host: Room, gpus: Sequence[Room], counts: Sequence[int], tied: bool) -> list[Share]:
    """What each device has, given its number of layers."""
    ends = [0, *accumulate(counts)]
    return [
        Share(room, range(start, stop), start == 0, stop == ends[-1], tied)
        for room, (start, stop) in zip((host, *gpus), pairwise(ends), strict=True)
        if start < stop
    ]


def _too_many(
    host: Room,
    gpus: Sequence[Room],
    n: int,
    fitting: int,
    tensor_split: Sequence[float] | None,
    tied: bool,
) -> str:
    """That ``n`` layers do not fit on GPUs, where ``fitting`` do."""
    counts = _counts(gpus, len(host.layers), n, tensor_split, tied)[0]
    needs = ", ".join(
        f"{_gigabytes(share.total)} on {share.room.name}, which has {_gigabytes(share.room.free)} free"
        for share in _shares(host, gpus, [len(host.layers) - n, *counts], tied)
        if share.room is not host
    )
    advice = f"n_gpu_layers={fitting} fits" if fitting else "not one of them fits: leave the GPU out"
    other = "" if tensor_split is None else ", or leave tensor_split out"
    return (
        f"{n} layers on GPUs need {needs}: {advice}{other}, or choose a smaller context or a smaller quantisation of "
        "the model"
    )


def _numbers(weights: Sequence[float]) -> str:
    return ",".join(f"{weight:g}" for weight in weights)


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
