"""Operations with a memory: what a token adds to the recurrent state of its sequence, and reads of it.

A unit of work is a part of one sequence's state that no other part depends on: a thread walks over the sequence's
tokens with it in registers or in its nearest cache.  So a state is read and written once a step, however many tokens
the step has, and what a token computes has the same bits wherever its sequence was cut.

A sequence's state lies in the slot that the batch names, and is zero before position 0, whatever lies there.
"""

from __future__ import annotations

import numpy as np

from localllm.kernels.cpu.compiler import kernel
from localllm.kernels.cpu.elementwise import sigmoid
from localllm.kernels.cpu.simd import (
    fma,
    load_f32x16,
    load_i32,
    load_i64,
    store_f32x16,
    zero_f32x16,
)
from localllm.kernels.cpu.templates import static_range


@kernel
def causal_conv(
    begin,
    end,
    batch,
    starts,
    positions,
    slots,
    states,
    state_bytes,
    x,
    stride,
    weight,
    bias,
    y,
    state_stride,
):
    """y[t] = sum over j of weight[j] * x[t - KERNEL + 1 + j], in each of the columns of x; y may be x.

    Unit u is the 16 columns u // n of sequence u % n.
    batch: the address of n, the number of sequences.  starts: int32 [n + 1], their rows.  positions: int32 [T].
    slots: int32 [n].  states: float32 [n_slots, KERNEL - 1, columns], the inputs before the batch.
    weight: float32 [KERNEL, columns], with ``stride`` bytes from row to row, as x and y.  bias: float32 [columns].
    """
    n_sequences = load_i64(batch)
    for unit in range(begin, end):
        sequence, column = unit % n_sequences, unit // n_sequences * 64
        start = np.int64(load_i32(starts + 4 * sequence))
        stop = np.int64(load_i32(starts + 4 * sequence + 4))
        state = states + np.int64(load_i32(slots + 4 * sequence)) * state_bytes + column
        for j in static_range(KERNEL):
            w[j] = load_f32x16(weight + stride * j + column)
            inputs[j] = zero_f32x16()
        if load_i32(positions + 4 * start) > 0:
            for j in static_range(KERNEL - 1):
                inputs[j] = load_f32x16(state + state_stride * j)
        for token in range(start, stop):
            place = token * stride + column
            inputs[KERNEL - 1] = load_f32x16(x + place)
            total = zero_f32x16()
            if BIAS:
                total = load_f32x16(bias + column)
            for j in static_range(KERNEL):
                total = fma(inputs[j], w[j], total)
            if SILU:
                total = total * sigmoid(total)
            store_f32x16(y + place, total)
            for j in static_range(KERNEL - 1):
                inputs[j] = inputs[j + 1]
        for j in static_range(KERNEL - 1):
            store_f32x16(state + state_stride * j, inputs[j])
