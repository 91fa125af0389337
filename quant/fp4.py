"""4-bit floating-point formats: E2M1 values times a shared scale, which is itself a narrow float.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0). Like GGML, this
module stores E2M1 values doubled, as integers, and halves the scales, so that results are rounded at the same point.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.bits import Bytes, Floats, Ints, bit_planes, join_bit_planes
from localllm.quant.block_format import BlockFormat
from localllm.quant.types import GGMLType

# Code: sign bit, two exponent bits (bias 1), one mantissa bit. GGML's negative zero is positive.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _half_ue4m3() -> Floats:
    """Return half of the unsigned E4M3 number for every byte. The top bit is ignored; GGML's NaN (0x7F) is 0."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    subnormal = np.ldexp(mantissa / 8, -6)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, subnormal, normal)
    value[0x7F] = 0
    return (value / 2).astype(np.float32)


#: Halved scales by their byte: float32 [256].  E8M0 is 2^(e - 127); the specification's NaN (255) is 2^127 in GGML.
HALF_E8M0: Floats = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)
HALF_UE4M3 = _half_ue4m3()


def ue4m3(values: Floats) -> Bytes:
    """Return the nearest unsigned E4M3 bytes, with ties rounded up as in GGML. Values are clipped to 0..448."""
    values = np.clip(values, np.float32(0), np.float32(448)).astype(np.float32)
    # The upper seven bits of float32's exponent and mantissa are E4M3 with another bias. Adding half a step rounds.
    normal = (((values.view(np.int32) + (1 << 19)) >> 20) - (127 - 7 << 3)).clip(0, 0x7E)
    normal[normal >= 0x78] = 0x7E  # GGML writes no scale from 256 to 416
    subnormal = np.minimum((values * np.float32(512) + np.float32(0.5)).astype(np.int32), 7)
    return np.where(values < np.float32(2.0**-6), subnormal, normal).astype(np.uint8)


class MXFP4(BlockFormat):
    """value = 2^(e - 127) · E2M1(code), 32 values per block::

    e   u8       exponent
    qs  u8[16]   codes, 4 bits, 2 planes of 16
    """

    type = GGMLType.MXFP4
    layout = np.dtype([("e", "u1"), ("qs", "u1", 16)])

    def decode(self, blocks: Bytes, out: Floats) -> None:
        block = self.fields(blocks)
        codes = bit_planes(block["qs"], 4).reshape(out.shape)
        np.take(E2M1_DOUBLED, codes, out=out, mode="clip")
        out *= HALF_E8M0[block["e"]][:, None]

    def pack(self, codes: Ints, exponents: Ints) -> Bytes:
        """Return blocks of ``codes``, one per byte, [n_blocks, 32], and stored ``exponents``, [n_blocks]."""
        blocks = np.empty((len(codes), self.block_bytes), np.uint8)
        block = self.fields(blocks)
        block["e"] = exponents
        block["qs"] = join_bit_planes(codes.view(np.uint8).reshape(-1, 2, 16), 4)
        return blocks


class NVFP4(BlockFormat):
    """value = E4M3(d of 16 values) · E2M1(code), 64 values per block::

    d   u8[4]    scales, unsigned E4M3
    qs  u8[32]   codes, 4 bits, 4 runs of 2 planes of 8
    """

    type = GGMLType.NVFP4
    layout = np.dtype([("d", "u1", 4), ("qs", "u1", 32)])

    def decode(self, blocks: Bytes, out: Floats) -> None:
        block = self.fields(blocks)
        values = out.reshape(len(blocks), 4, 16)
        codes = bit_planes(block["qs"].reshape(len(blocks), 4, 8), 4).reshape(values.shape)
        np.take(E2M1_DOUBLED, codes, out=values, mode="clip")
        values *= HALF_UE4M3[block["d"]][:, :, None]

    def pack(self, codes: Ints, scales: Ints) -> Bytes:
        """Return blocks of ``codes``, one per byte, [n_blocks, 64], and stored ``scales``, [n_blocks, 4]."""
        blocks = np.empty((len(codes), self.block_bytes), np.uint8)
        block = self.fields(blocks)
        block["d"] = scales
        block["qs"] = join_bit_planes(codes.view(np.uint8).reshape(-1, 4, 2, 8), 4).reshape(-1, 32)
        return blocks
