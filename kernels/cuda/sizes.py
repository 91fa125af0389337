"""What a compiled step takes of a device's memory, known before anything is there: see `recording.Recording`."""

from __future__ import annotations

from collections.abc import Iterable

from localllm.kernels.cuda.attention import NO_WINDOW, Heads, choose_variant
from localllm.kernels.cuda.batch import BatchLayout
from localllm.kernels.cuda.cache import PAGE
from localllm.kernels.cuda.driver import DeviceProperties
from localllm.kernels.cuda.experts import routing_bytes
from localllm.kernels.cuda.matmul import PACKED_FORMATS, PackedFormat, packed_format
from localllm.kernels.cuda.operations import SORTED
from localllm.kernels.cuda.recording import Mixture, input_kind, part_bytes
from localllm.kernels.cuda.weights import padded
from localllm.kernels.ops import StepSizes
from localllm.quant.repack import repack_target
from localllm.quant.types import GGMLType

#: Logits of which memory for a choice is counted: more are seldom wanted, and have room beside the plan.
_CHOICES = 64


def activation_bytes(sizes: StepSizes, properties: DeviceProperties) -> int:
    """Bytes of the batch, of spans of attention, and of rows: for each width that a layer has, as many as it holds at
    once, for pieces of memory serve rows of about their own size only."""
    heads = Heads(sizes.n_kv_heads, sizes.n_heads // sizes.n_kv_heads, NO_WINDOW)
    variant = choose_variant(sizes.head_dim, sizes.cache_type, properties.shared_bytes)
    q_width, kv_width = sizes.n_heads * sizes.head_dim, sizes.n_kv_heads * sizes.head_dim
    inputs = _InputBytes(sizes.types, properties.capability)
    row = 2 * (_row_bytes(sizes.n_embd) + _row_bytes(q_width) + _row_bytes(kv_width))
    row += inputs.of_row(sizes.n_embd) + inputs.of_row(q_width)
    layout = BatchLayout(sizes.n_tokens, sizes.n_outputs, sizes.n_pages)
    rows = sizes.n_tokens * row + _gate_bytes(sizes, inputs)
    return 4 * layout.n_words + part_bytes([heads], variant, sizes.n_pages * PAGE) + rows


def _gate_bytes(sizes: StepSizes, inputs: _InputBytes) -> int:
    """Bytes of gates, and of what a mixture of experts has beside: the router's rows, rows of tokens brought to their
    experts, and products that are added up."""
    row = 3 * _row_bytes(sizes.n_ff) + inputs.of_row(sizes.n_ff)
    if not sizes.n_experts:
        return sizes.n_tokens * row
    mixture = Mixture(sizes.n_experts, sizes.n_chosen)
    # Routers are float32.
    router_row = _float_input_bytes(sizes.n_embd) + _row_bytes(sizes.n_experts)
    # Inputs of 16 bits; those of float32 have gone when memory is taken for products, which fit there.
    row += min(inputs.of_row(sizes.n_embd), _float_input_bytes(sizes.n_embd) // 2) + _row_bytes(sizes.n_embd)
    n_bytes = sizes.n_tokens * router_row + mixture.most_places(sizes.n_tokens) * row
    return n_bytes + sum(routing_bytes(mixture, sizes.n_tokens))


def logits_bytes(sizes: StepSizes, properties: DeviceProperties) -> int:
    """Bytes of logits, of what they are computed from, and of a choice of the largest."""
    inputs = _InputBytes(sizes.types, properties.capability)
    row = 2 * _row_bytes(sizes.n_embd) + inputs.of_row(sizes.n_embd) + _row_bytes(sizes.n_vocab)
    return sizes.n_outputs * (row + 8 * _CHOICES * (1 + -(-sizes.n_vocab // SORTED)))


def _row_bytes(width: int) -> int:
    return 4 * padded(width)


def _float_input_bytes(width: int) -> int:
    """Of a row as products with float32 weights read it: other formats take less."""
    return _row_input_bytes(PACKED_FORMATS[GGMLType.F32], width)


def _row_input_bytes(format: PackedFormat, width: int) -> int:
    return format.unit_bytes(width, 1) + format.input_scale_bytes(width, 1)


class _InputBytes:
    """Bytes of rows as products read them.

    Args:
        types: of the weights, as the file has them; none: any.
        capability: of the device.
    """

    def __init__(self, types: Iterable[GGMLType], capability: tuple[int, int]) -> None:
        formats = [packed_format(repack_target(type), capability) for type in types]
        self._formats = {input_kind(format): format for format in formats or [PACKED_FORMATS[GGMLType.F32]]}

    def of_row(self, width: int) -> int:
        """Of one row, once for each kind of format: the next products may be of any."""
        return sum(_row_input_bytes(format, width) for format in self._formats.values())
