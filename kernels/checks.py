"""What operations make sure of, whatever the backend.

Kernels believe every address and every number: what does not fit must be found while a forward pass is recorded.  All
checks raise a KernelError.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from localllm.errors import KernelError
from localllm.kernels.ops import CacheShape, Experts, Linear, Rope

#: What a soft-cap may be.  Beyond, float32 could not hold scores divided by it, or would not tell it from none.
LEAST_SOFTCAP, MOST_SOFTCAP = 1e-6, 1e6


def check_tensors(
    tensors: Sequence[Any], kind: type[Any], recording: object, counts: Mapping[int, str], slot: int | None = None
) -> None:
    """Tensors must belong to this forward pass and have the same rows, those that ``slot`` counts.

    Args:
        kind: of tensors: has ``recording`` and ``slot``.
        counts: what each slot has rows for, in words.
        slot: by default that of the first tensor.
    """
    for x in tensors:
        if not isinstance(x, kind) or x.recording is not recording:
            raise KernelError("an operation was given something else than a tensor of its own forward pass")
    wanted = tensors[0].slot if slot is None else slot
    for x in tensors:
        if x.slot != wanted:
            raise KernelError(f"a tensor has a row for {counts[x.slot]} where one for {counts[wanted]} is needed")


def check_norm(n_weights: int, width: int) -> None:
    """A norm must have a weight for each value of a row."""
    if n_weights != width:
        raise KernelError(f"a norm of {n_weights} weights cannot be taken of {width} values")


def check_product(weight: Linear, n_in: int, n_out: int) -> None:
    """A matrix must turn rows of so many values into rows of so many."""
    if (weight.n_in, weight.n_out) != (n_in, n_out):
        raise KernelError(f"a matrix [{weight.n_out}, {weight.n_in}] cannot turn {n_in} values into {n_out}")


def check_residual(width: int, n_out: int) -> None:
    """A residual must be as wide as what it is added to."""
    if width != n_out:
        raise KernelError(f"{width} values cannot be added to the {n_out} of a product")


def check_gate(gate: int, up: int, activation: str, known: Collection[str]) -> None:
    """Gates must be as wide as what they are multiplied with, and their activation known."""
    if activation not in known:
        raise KernelError(f"there is no activation {activation!r}; choose one of {', '.join(known)}")
    if gate != up:
        raise KernelError(f"a gate of {gate} values does not fit {up} values")


# -- Attention -----------------------------------------------------------------------------------------------------


def check_queries(width: int, layer: int, shape: CacheShape) -> None:
    """Queries must be whole heads, as many to each key/value head, of a layer that the cache has."""
    if not 0 <= layer < shape.n_layers:
        raise KernelError(f"there is no layer {layer} in a cache of {shape.n_layers} layers")
    if width == 0 or width % (shape.n_kv_heads * shape.head_dim):
        raise KernelError(
            f"{width} values of queries are no multiple of {shape.n_kv_heads} heads of {shape.head_dim}"
        )


def check_append(keys: int, values: int, rope: Rope | None, head_norms: Iterable[int], shape: CacheShape) -> None:
    """Keys and values must be the cache's heads, which rotation and norms must fit.

    Args:
        head_norms: of each norm of heads, how many weights it has.
    """
    for what, width in (("keys", keys), ("values", values)):
        if width != shape.n_kv_heads * shape.head_dim:
            raise KernelError(
                f"{width} values of {what} do not fit a cache of {shape.n_kv_heads} heads of {shape.head_dim}"
            )
    if rope is not None and 2 * len(rope.frequencies) > shape.head_dim:
        raise KernelError(f"{len(rope.frequencies)} pairs of values cannot be turned in heads of {shape.head_dim}")
    for n_weights in head_norms:
        if n_weights != shape.head_dim:
            raise KernelError(f"a norm of {n_weights} weights cannot be taken of heads of {shape.head_dim}")


def check_softcap(softcap: float | None) -> None:
    """Scores must be capped so that float32 can hold it."""
    if softcap is not None and not LEAST_SOFTCAP <= softcap <= MOST_SOFTCAP:
        raise KernelError(
            f"a soft-cap is {softcap}, but must lie between {LEAST_SOFTCAP:g} and {MOST_SOFTCAP:g}; without one, "
            "nothing is capped"
        )


def check_sinks(n_sinks: int, n_heads: int) -> None:
    """Every query head must have one sink."""
    if n_sinks != n_heads:
        raise KernelError(f"{n_sinks} sinks do not fit {n_heads} query heads: each has one")


# -- Experts -------------------------------------------------------------------------------------------------------


def check_choice(k: int, n_experts: int) -> None:
    """So many experts must be there to be chosen."""
    if not 1 <= k <= n_experts:
        raise KernelError(f"{k} of {n_experts} experts cannot be chosen: 1 to {n_experts} can")


def check_routing(routing: object, kind: type[Any], recording: object) -> None:
    """A routing must belong to this forward pass; ``kind`` is what the backend's are."""
    if not isinstance(routing, kind) or getattr(routing, "recording", None) is not recording:
        raise KernelError("an operation was given something else than a routing of its own forward pass")


def check_experts(weight: Experts, n_in: int, n_experts: int) -> None:
    """Matrices must be those of so many experts, for rows of so many values."""
    if (weight.n_in, weight.n_experts) != (n_in, n_experts):
        raise KernelError(
            f"matrices [{weight.n_experts}, {weight.n_out}, {weight.n_in}] do not fit rows of {n_in} values that "
            f"go to {n_experts} experts"
        )
