"""A device, and packed matrices on it, for tests of kernels of matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.cuda import matmul
from localllm.kernels.cuda.driver import DeviceMemory, Driver, Launch
from localllm.kernels.cuda.matmul import PackedFormat, Product, ProductLimits
from localllm.kernels.cuda.module import kernel_arguments
from localllm.quant.lut import KernelType

Floats = NDArray[np.float32]
NULL = np.uint64(0)


class Device:
    """Device 0 of a driver, and a stream.

    Args:
        tile_rows: numbers of rows per tile of matmul; g++ compiles large tiles slowly for emulated devices.
    """

    def __init__(self, driver: Driver, tile_rows: Sequence[int] = matmul.TILE_ROWS) -> None:
        self.driver = driver
        self.stream = driver.stream(0)
        properties = driver.properties(0)
        self.capability, self.shared_bytes = properties.capability, properties.shared_bytes
        self.limits = ProductLimits(self.capability, self.shared_bytes, tuple(tile_rows))

    def upload(self, array: NDArray[Any]) -> DeviceMemory:
        memory, contiguous = self.empty(array.nbytes), np.ascontiguousarray(array)
        self.driver.upload(memory, contiguous, self.stream)
        self.driver.synchronize(self.stream)  # the array must live until the copy ends
        return memory

    def empty(self, n_bytes: int) -> DeviceMemory:
        return self.driver.allocate(0, n_bytes)

    def download(self, memory: DeviceMemory, dtype: Any, *shape: int) -> NDArray[Any]:
        array = np.zeros(shape, dtype)
        self.driver.download(array, memory.at(0, array.nbytes), self.stream)
        self.driver.synchronize(self.stream)
        return array

    def run(self, launch: Launch, **arguments: Any) -> None:
        module = self.driver.load_module(0, launch.module, launch.defines)
        values = kernel_arguments(launch.module, launch.kernel, **arguments)
        self.driver.launch(module, launch.kernel, launch.grid, launch.block, values, self.stream, launch.shared_bytes)
        self.driver.synchronize(self.stream)  # the arguments must live until the kernel ends

    def count(self, n: int) -> DeviceMemory:
        return self.upload(np.array([n], np.int32))


@dataclass
class Weights:
    format: PackedFormat
    n_out: int
    n_in: int
    memory: DeviceMemory


def load(device: Device, rows: NDArray[np.uint8], type: KernelType, n_in: int) -> Weights:
    """Pack rows of blocks."""
    format = matmul.packed_format(type, device.capability)
    packed = device.empty(format.packed_bytes(len(rows), n_in))
    sizes = {"n_rows": len(rows), "row_bytes": rows.shape[1], "n_in": n_in, "n_tiles": format.n_tiles(n_in)}
    device.run(matmul.pack_launch(format, len(rows), n_in), rows=device.upload(rows), packed=packed, **sizes)
    return Weights(format, len(rows), n_in, packed)


def padded(x: Floats) -> Floats:
    """Pad rows with NaN to a multiple of 4 columns."""
    wide = np.full((len(x), -(-x.shape[1] // 4) * 4), np.nan, np.float32)
    wide[:, : x.shape[1]] = x
    return wide


def quantise(
    device: Device, x: Floats, format: PackedFormat, n_rows: int = 0
) -> tuple[DeviceMemory, DeviceMemory, int]:
    """Return units and scales of activations, and the number of rows of their layout."""
    n_rows = n_rows or format.input_rows(len(x))
    wide = padded(x)
    units = device.empty(format.unit_bytes(x.shape[1], n_rows))
    scales = device.empty(format.input_scale_bytes(x.shape[1], n_rows))
    device.run(
        matmul.quantise_launch(format, x.shape[1], n_rows),
        x=device.upload(wide), x_stride=wide.shape[1], n_in=x.shape[1], n_there=device.count(len(x)), rows=None,
        head_stride=0, units=units, scales=scales, n_rows=n_rows,
    )  # fmt: skip
    return units, scales, n_rows


def multiply(
    device: Device,
    x: Floats,
    weights: Sequence[Weights],
    bias: Floats | None = None,
    residual: Floats | None = None,
    n_rows: int = 0,
) -> list[Floats]:
    """Compute x @ W.T (+ bias) (+ residual) of several matrices in one launch."""
    format, n_in = weights[0].format, x.shape[1]
    units, scales, n_rows = quantise(device, x, format, n_rows)
    launch = matmul.product_launch(
        format,
        [w.n_out for w in weights],
        n_in,
        n_rows,
        device.limits,
    )
    products = [
        Product(
            w.memory,
            device.empty(4 * len(x) * w.n_out) if residual is None else device.upload(residual),
            w.n_out,
            w.n_out,
            None if bias is None else device.upload(bias),
        )
        for w in weights
    ]
    if residual is not None:  # in place
        products = [Product(p.weights, p.y, p.n_out, p.stride, p.bias, p.y) for p in products]
    inputs = {"units": units, "scales": scales, "n_rows": n_rows, "n_tokens": device.count(len(x))}
    sizes = matmul.size_arguments(launch.kernel, format, n_in)
    device.run(launch, **inputs, **sizes, **matmul.matrix_arguments(products))
    return [device.download(p.y, np.float32, len(x), p.n_out) for p in products]
