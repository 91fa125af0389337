"""MobileVLM (arXiv:2312.16886) and MobileVLM V2 (arXiv:2402.03766): CLIP's encoder, and projectors that halve the
sides of an image, with convolutions of 3 × 3 tokens within each channel.

Only files of llama.cpp's converter are supported, because the checkpoints lack the encoder.
"""

from __future__ import annotations

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Tensor
from localllm.kernels.operations import Activation, Outputs
from localllm.models.encoders.clip import Llava
from localllm.models.encoders.encoder import Pixels, Prepared
from localllm.models.weights import floats

#: Epsilon of the norms in the projector.
_EPS = 1e-5


class MobileVLM(Llava):
    """Two blocks: a convolution, factors per channel that depend on the channels' means, and a matrix."""

    last = "mm.model.mlp.3"

    def read(self) -> None:
        super().read()
        n = self.width
        self.blocks = []
        for i in (1, 2):
            stem = f"mm.model.mb_block.{i}.block"
            n_hidden = self.weights.n_rows(f"{stem}.1.fc1.weight")
            shapes = {"0.1": (), "1.fc1": (n_hidden, n), "1.fc2": (n, n_hidden), "2.0": (n, n), "2.1": ()}
            block = {"0.0": self.kernel(f"{stem}.0.0.weight")}
            for name, shape in shapes.items():
                block[name] = self.table(f"{stem}.{name}.weight", *(shape or (n,)))
                if name != "2.0":
                    block[f"{name}.bias"] = self.table(f"{stem}.{name}.bias", *(shape[:1] or (n,)))
            self.blocks.append(block)

    def kernel(self, name: str) -> Pixels:
        """Return the kernel of a convolution, [width, 3, 3]."""
        values = floats(self.weights.require(name, *self.weights.shape(name)))
        if values.size != 9 * self.width:
            raise ModelError(f"{name} has {values.size} values instead of {9 * self.width}: the file is broken")
        return values.reshape(-1, 3, 3)

    def record_projector(self, x: Tensor) -> None:
        self.two_linears(self.joined(x), "mm.model.mlp.1", self.last)

    def prepare(self, image: object, max_tokens: int | None = None) -> Prepared:
        prepared, side = super().prepare(image), -(-self.side // 2)
        return Prepared(prepared.frames, (side * side,), (side, side))

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        x = rows.reshape(self.side, self.side, -1)
        x = x + block_output(self.blocks[0], x, stride=1)
        return block_output(self.blocks[1], x, stride=2).reshape(-1, *rows.shape[1:])


class MobileVLMV2(MobileVLM):
    """Means of 2 × 2 tokens, and a convolution of their positions."""

    last = "mm.model.mlp.2"
    merge = 2

    def read(self) -> None:
        Llava.read(self)
        if self.side % 2:
            raise ModelError(f"an image has {self.side} × {self.side} patches, an odd number: the file is broken")
        self.peg, self.bias = self.kernel("mm.model.peg.0.weight"), self.table("mm.model.peg.0.bias", self.width)

    def record_projector(self, x: Tensor) -> None:
        at = self.at()
        x = at.linear(x, "mm.model.mlp.0", self.weights.n_rows("mm.model.mlp.0.weight"))
        x = at.add(Outputs(at.add(Activation(x, "gelu_erf")), self.n_joined, is_mean=True))
        at.linear(x, self.last, self.width)

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        x = rows.reshape(*prepared.grid, -1)
        return (x + convolved(x, self.peg, 1) + self.bias).reshape(rows.shape)


def block_output(block: dict[str, Pixels], x: Pixels, stride: int) -> Pixels:
    """Return the output of a block of MobileNet V3 (arXiv:1905.02244), without a residual."""
    x = hard_swish(layer_norm(convolved(x, block["0.0"], stride), block["0.1"], block["0.1.bias"]))
    means = x.mean((0, 1))
    hidden = np.maximum(block["1.fc1"] @ means + block["1.fc1.bias"], 0)
    x = x * hard_sigmoid(block["1.fc2"] @ hidden + block["1.fc2.bias"])
    return layer_norm(x @ block["2.0"].T, block["2.1"], block["2.1.bias"])


def convolved(x: Pixels, kernel: Pixels, stride: int) -> Pixels:
    """Return a convolution of 3 × 3 rows within each channel, with zeros around x [rows, columns, channels]."""
    rows, columns = x.shape[:2]
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    total = np.zeros((), np.float32)
    for i in range(3):
        for j in range(3):
            total = total + padded[i : i + rows : stride, j : j + columns : stride] * kernel[:, i, j]
    return total


def layer_norm(x: Pixels, weight: Pixels, bias: Pixels) -> Pixels:
    centred = x - x.mean(-1, keepdims=True)
    scaled: Pixels = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + np.float32(_EPS))
    return scaled * weight + bias


def hard_sigmoid(x: Pixels) -> Pixels:
    return np.clip(x + 3, 0, 6) / np.float32(6)


def hard_swish(x: Pixels) -> Pixels:
    return x * hard_sigmoid(x)
