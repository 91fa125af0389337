"""Base classes of image and audio encoders: their keys and layers, and the conversion of pixels to rows of a graph.

An image is prepared as one or several frames. The patches of a frame are a sequence with attention in both
directions. The input of the graph is one row per patch: its pixels and, if positions are learnt, its position
embedding. The output is the rows for the text model [N, width]. Patches that are joined to one output row are
adjacent in the sequence. The frames of audio are pieces of the audio, and the patches are parts of the spectrogram.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError, quoted
from localllm.kernels import operations as ops
from localllm.kernels.graph import Graph, HeadNorm, KVCache, Matrix, Rope, Rows, Tensor, Weight
from localllm.models.blocks import Layer, layer_norm, norm, query_key_value
from localllm.models.config import Heads, ModelMetadata
from localllm.models.encoders.images import MAX_PIXELS, block_order, normalised, open_image, patches
from localllm.models.encoders.views import RowsScaled
from localllm.models.hf_convert import GELU_TANH, Array, implied
from localllm.models.weights import Reshaped, Weights, floats

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.float32]

#: Minimum and maximum of each integer ``clip.{section}.{key}``, in all families.
BOUNDS: dict[str, tuple[int, int]] = {
    "attention.head_count": (0, 1024),
    "attention.head_count_kv": (0, 1024),
    "block_count": (0, 512),
    "chunk_size": (1, 1024),
    "conv_kernel_size": (1, 64),
    "embedding_length": (1, 1 << 16),
    "expert_used_count": (1, 1 << 10),
    "feed_forward_length": (0, 1 << 18),
    "image_max_pixels": (1, 1 << 26),
    "image_min_pixels": (0, 1 << 25),
    "image_size": (1, 8192),
    "max_pos_emb": (1, 1 << 16),
    "n_wa_pattern": (0, 512),
    "num_mel_bins": (1, 4096),
    "patch_size": (1, 256),
    "preproc_image_size": (1, 8192),
    "preproc_max_tiles": (1, 256),
    "preproc_min_tiles": (1, 256),
    "projection_dim": (0, 1 << 16),  # 0 if only the projector's tensors contain the width
    "projector.downsample_rate": (1, 256),
    "projector.head_count": (1, 1024),
    "projector.query_side": (1, 256),
    "projector.scale_factor": (1, 16),
    "projector.stack_factor": (1, 64),
    "projector.window_side": (1, 256),
    "projector.window_size": (1, 256),
    "rope.dimension_count": (2, 1 << 16),
    "sam.block_count": (1, 512),
    "sam.embedding_length": (1, 1 << 16),
    "sam.head_count": (1, 1024),
    "spatial_merge_size": (1, 16),
    "subsampling_factor": (8, 8),
    "window_size": (1, 256),
}
#: Minimum and maximum of the colours' means, and of their standard deviations.
_MEANS, _DEVIATIONS = (-1e3, 1e3), (1e-3, 1e3)


@dataclass(frozen=True)
class Prepared:
    """An image or audio in the form of the model's processor."""

    # Images: the resized image, or its tiles, [height, width, 3] each. Audio: float32, such as [time, frequencies].
    frames: tuple[NDArray[Any], ...]
    segments: tuple[str | int, ...]  # contents of the prompt: strings, and numbers of rows
    grid: tuple[int, int]  # rows and columns of the first frame's tokens; 0 for audio
    kind: str = field(default="image", kw_only=True)  # or "audio"

    @property
    def n_tokens(self) -> int:
        """Number of rows in the prompt."""
        return sum(segment for segment in self.segments if isinstance(segment, int))


@dataclass(frozen=True)
class FrameRows:
    """The graph's input for a frame: T rows, which produce N output rows."""

    inputs: Pixels  # [T, pixels of a patch + width of positions]
    axes: NDArray[np.int32]  # [3, T]: 0, row and column of each patch
    outputs: NDArray[np.int32]  # [N], the first row of each output
    spans: NDArray[np.int32]  # [2, T]: first and end row of each patch's window; [2, 0] without windows
    stage: int = 0  # number of the frame's first stage, of `EncoderModel.n_alternatives`

    @classmethod
    def in_order(cls, inputs: Pixels, first: int = 0, step: int = 1) -> FrameRows:
        """Return rows [T, n] without positions and windows. Every ``step``-th row from ``first`` on has an output."""
        axes, spans = np.zeros((3, len(inputs)), np.int32), np.zeros((2, 0), np.int32)
        return cls(inputs, axes, np.arange(first, len(inputs), step, dtype=np.int32), spans)


@dataclass(frozen=True)
class EncoderStage:
    """A graph of an encoder. A second stage uses each output row of the first stage as a patch."""

    graph: Graph
    n_joined: int  # patches per output row


def _activation(meta: ModelMetadata) -> str:
    """Return the activation from llama.cpp's keys: its GELU is the tanh form. Without a key, it is CLIP's."""
    is_gelu, is_silu = (meta.read(key, bool, False) for key in ("use_gelu", "use_silu"))
    return "silu" if is_silu else "gelu" if is_gelu else "gelu_quick"


class EncoderModel:
    """An encoder and its projector. A family's subclass adds its keys, tensors and blocks. Raises ModelError."""

    #: Type of the encoded message parts, section of the keys, and prefix of the tensors' names.
    kind: ClassVar[str] = "image"
    section: ClassVar[str] = "vision"
    stem: ClassVar[str] = "v."
    #: String at the place of an image in the output of a chat template or processor. `Prepared.segments` replace it.
    marker: ClassVar[str]
    #: Strings before and after the marker if the template does not write them.
    around: ClassVar[tuple[str, str]] = ("", "")
    #: Whether an image's tokens are rotated by row and column in the text model (M-RoPE).
    has_grid: ClassVar[bool] = False
    #: Whether an image's tokens are also rotated by the image's number (`localllm.engine.media.PreparedMedia`).
    is_numbered: ClassVar[bool] = False
    #: Rows of a large input. The plan reserves memory for it.
    max_rows: int = 4096
    #: String before the n-th image of a prompt, counted from 0, with {} for n.
    numbered: str = ""
    #: Layers whose patches only see their window.
    windowed: Collection[int] = ()
    #: Second stage, after `graph`, for encoders whose last layers have fewer rows.
    behind: EncoderStage | None = None
    #: Activation function of MLPs.
    activation: str = "gelu_erf"
    #: Whether norms are RMSNorms.
    rms: bool = False

    def __init__(self, meta: ModelMetadata, weights: Weights) -> None:
        self.meta, self.weights = meta, weights
        v = self.number
        self.n_embd, self.n_ff, self.n_layers = v("embedding_length"), v("feed_forward_length"), v("block_count")
        self.n_heads, self.width = v("attention.head_count"), v("projection_dim")
        self.n_kv = v("attention.head_count_kv", self.n_heads)
        self.eps = meta.read(f"{self.section}.attention.layer_norm_epsilon", float, low=0.0, high=1.0)
        if self.n_layers and (self.n_heads < 1 or self.n_embd % self.n_heads):
            raise ModelError(
                f"clip.{self.section}.embedding_length is {self.n_embd}, which is not a multiple of "
                f"clip.{self.section}.attention.head_count, {self.n_heads}: the file is broken"
            )
        if self.n_layers and (self.n_kv < 1 or self.n_heads % self.n_kv):
            raise ModelError(
                f"clip.{self.section}.attention.head_count is {self.n_heads}, which is not a multiple of "
                f"clip.{self.section}.attention.head_count_kv, {self.n_kv}: the file is broken"
            )
        self.head_dim = self.n_embd // max(self.n_heads, 1)
        #: Tensors with additional rows for each token, which layers of the text model add.
        self.further: list[Tensor] = []
        self.read()
        self.graph = Graph(rounds_floats=True)
        self.record()
        (self.graph if self.behind is None else self.behind.graph).watched.update(self.further)

    def number(self, key: str, default: Any = None) -> int:
        """Return the integer ``clip.{section}.{key}``. Raises ModelError if it is outside its `BOUNDS`."""
        options: dict[str, Any] = {} if default is None else {"default": default}
        low, high = BOUNDS[key]
        return int(self.meta.read(f"{self.section}.{key}", int, low=low, high=high, **options))

    # -- Methods of families ---------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the family's additional keys."""

    def record(self) -> None:
        """Record the graph."""
        raise NotImplementedError

    @property
    def n_joined(self) -> int:
        """Number of patches per output row."""
        return 1

    @property
    def stages(self) -> list[EncoderStage]:
        """Stages in the order of computation."""
        first = EncoderStage(self.graph, self.n_joined)
        return [first] if self.behind is None else [first, self.behind]

    @staticmethod
    def open(source: Any, label: str) -> Any:
        """Convert a source, such as a path or bytes, to the argument of `prepare`. ``label`` names it in errors."""
        raise NotImplementedError

    @property
    def example(self) -> Any:
        """Input of a common size."""
        raise NotImplementedError

    def prepare(self, source: Any, max_tokens: int | None = None) -> Prepared:
        """Prepare an image or audio in the same way as the model's processor.

        With ``max_tokens``, an image gets at most this number of tokens.
        """
        raise NotImplementedError

    @property
    def n_alternatives(self) -> int:
        """Number of first stages. A frame goes through one first stage, and through all further stages."""
        return 1

    def rows(self, frame: NDArray[Any]) -> FrameRows:
        """A prepared frame as the graph takes it."""
        raise NotImplementedError

    def rows_in_pieces(self, frame: NDArray[Any]) -> Generator[None, None, FrameRows]:
        """Return the same result as `rows`, but yield after each piece if the computation is long."""
        yield from ()
        return self.rows(frame)

    def following(self, rows: Pixels, frame: FrameRows) -> FrameRows:
        """Convert the output rows of a frame to the input of the second stage, `behind`."""
        return FrameRows.in_order(rows, step=1 if self.behind is None else self.behind.n_joined)

    def following_in_pieces(self, rows: Pixels, frame: FrameRows) -> Generator[None, None, FrameRows]:
        """Return the same result as `following`, but yield after each piece if the computation is long."""
        yield from ()
        return self.following(rows, frame)

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        """Return the rows of an image or audio in the order of its tokens, from the rows of its frames.

        Both have the shape [n, n_embeddings, width]. The result may have more rows.
        """
        return rows

    # -- Rows of a frame -------------------------------------------------------------------------------------------

    def table(self, name: str, *shape: int) -> Pixels:
        """Return a table of the file as float32."""
        return floats(self.weights.require(name, *shape))

    # -- Blocks ----------------------------------------------------------------------------------------------------

    def at(self, weights: Weights | None = None, eps: float | None = None) -> Layer:
        """Return a `Layer` for blocks outside the layers."""
        weights = self.weights if weights is None else weights
        return Layer(-1, self.graph, weights, self.n_embd, self.eps if eps is None else eps, Tensor(Rows.TOKENS, 0))

    def layers(self, x: Tensor, rope: Rope | None = None, numbers: range | None = None) -> Tensor:
        """Record all layers, or the layers in ``numbers``: norm, attention in both directions, norm and MLP."""
        cache: KVCache | None = None
        for i in range(self.n_layers) if numbers is None else numbers:
            self.graph.layer = i
            at = self.at(self.weights.layer(i, self.stem))
            cache = cache or self.cache()  # all layers share a cache, because only the current layer reads it
            x = self.layer(at, x, cache, rope)
            self.behind_layer(i, x)
        self.graph.layer = "output"
        return x

    def cache(self) -> KVCache:
        return self.graph.kv_cache(self.n_kv, self.head_dim)

    def behind_layer(self, number: int, x: Tensor) -> None:
        """Record blocks between layers. Called with each layer's number and output."""

    def layer(self, at: Layer, x: Tensor, cache: KVCache, rope: Rope | None) -> Tensor:
        """Record one layer, by default with LayerNorms and an MLP, or with RMSNorms and a gate if ``rms`` is True."""
        y = self.norm(at, "ln1", x)
        x = self.attention(at, y, cache, rope, residual=x)
        y = self.norm(at, "ln2", x)
        return self.mlp(at, y, residual=x)

    def norm(self, at: Layer, name: str, x: Tensor) -> Tensor:
        return norm(at, name, x) if self.rms else layer_norm(at, name, x)

    def mlp(self, at: Layer, x: Tensor, residual: Tensor | None) -> Tensor:
        up, down = "ffn_up", "ffn_down"
        if at.weights.n_rows("ffn_up.weight") == self.n_embd != self.n_ff:  # llama.cpp's converters of 2023 swap them
            up, down = down, up
        names = ("ffn_gate", up) if "ffn_gate.weight" in at.weights else (up,)
        y, *gate = at.add(ops.Linears(x, tuple(at.weights.matrix(name, self.n_embd, self.n_ff) for name in names)))
        y = self.gated(at, y, gate[0]) if gate else at.add(ops.Activation(y, self.activation))
        return self.project(at, y, down, "ls2", residual)

    def gated(self, at: Layer, gate: Tensor, up: Tensor) -> Tensor:
        return at.add(ops.Gated(gate, up, self.activation))

    def project(self, at: Layer, x: Tensor, name: str, scale: str, residual: Tensor | None) -> Tensor:
        """Return residual + x times a matrix, with a factor per output value if the file contains factors."""
        matrix = at.weights.matrix(name, x.width, self.n_embd)
        if (factors := at.weights.find(f"{scale}.weight", self.n_embd)) is not None:
            bias = None if matrix.bias is None else RowsScaled(matrix.bias, factors)
            matrix = Matrix(RowsScaled(matrix.weight, factors), bias)
        return at.add(ops.Linear(x, matrix, residual=residual))

    def attention(
        self, at: Layer, x: Tensor, cache: KVCache, rope: Rope | None, *, residual: Tensor | None
    ) -> Tensor:
        q, k, v = self.query_key_value(at, x)
        q_norm = k_norm = None
        if at.weights.shape("attn_q_norm.weight") == (self.n_embd,):
            q, k = norm(at, "attn_q_norm", q), norm(at, "attn_k_norm", k)
        elif "attn_q_norm.weight" in at.weights:
            q_norm, k_norm = (
                HeadNorm(at.norm_eps, at.weights.vector(f"attn_{name}_norm", self.head_dim)) for name in "qk"
            )
        q = at.add(ops.RopeAppend(q, k, v, cache, rope, q_norm, k_norm))
        is_windowed = self.graph.layer in self.windowed
        y = at.add(ops.Attention(q, cache, self.head_dim**-0.5, causal=False, has_spans=is_windowed))
        return self.project(at, y, "attn_out", "ls1", residual)

    def query_key_value(self, at: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = Heads(self.n_heads, self.n_kv, self.head_dim, self.head_dim)
        return query_key_value(at, x, heads)[:3]

    def joined(self, x: Tensor) -> Tensor:
        """Concatenate the patches of each output row."""
        return self.graph.add(ops.Outputs(x, self.n_joined))

    def vector_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """Return the LayerNorm of x with the tensors ``{name}.weight`` and ``{name}.bias``."""
        bias = self.weights.find(f"{name}.bias", x.width)
        return self.graph.add(ops.LayerNorm(x, self.weights.vector(name, x.width), bias, eps))

    def two_linears(self, x: Tensor, first: str, second: str) -> Tensor:
        """Return second(gelu_erf(first(x))), in the width of the text model."""
        at = self.at()
        n = self.weights.n_rows(f"{first}.weight")
        y = at.add(ops.Activation(at.linear(x, first, n), "gelu_erf"))
        return at.linear(y, second, self.width)


class VisionModel(EncoderModel):
    #: An output row is computed from merge * merge patches.
    merge: int = 1
    #: Side of a window in patches.
    window: int = 0
    #: Position embeddings in the file, [n, n_embd], or None.
    position_table: Any = None
    #: Rows before the patches, such as the row of a class token.
    n_before: int = 0
    #: Whether the size of images in the file is used.
    has_size: ClassVar[bool] = True
    #: Whether the key for the tanh form of GELU means exact GELU.
    exact_gelu: ClassVar[bool] = False

    def __init__(self, meta: ModelMetadata, weights: Weights) -> None:
        self.meta = meta
        self.image_size = self.number("image_size") if self.has_size else 0
        self.patch_size = self.number("patch_size")
        self.mean = self._colours("vision.image_mean", *_MEANS)
        self.std = self._colours("vision.image_std", *_DEVIATIONS)
        self.activation = _activation(meta)
        if self.exact_gelu and self.activation == "gelu":
            self.activation = "gelu_erf"
        super().__init__(meta, weights)

    def _colours(self, key: str, low: float, high: float) -> tuple[float, ...]:
        values = self.meta.find(key)
        if not isinstance(values, list | tuple) or len(values) != 3 or not all(isinstance(x, float) for x in values):
            raise ModelError(f"clip.{key} must be three numbers: the file is broken")
        if not all(low <= x <= high for x in values):  # also rejects NaN
            raise ModelError(f"clip.{key} must be numbers between {low:g} and {high:g}: the file is broken")
        return tuple(values)

    def check_tiles(self, n_tiles: int, side: int) -> None:
        """Raise ModelError unless a tile is large enough for a token and all tiles of an image fit into memory."""
        if side < self.patch_size * self.merge:
            raise ModelError(
                f"the tiles of an image are {side} pixels wide, but a token needs {self.patch_size * self.merge}: "
                "the file is broken"
            )
        if n_tiles * side**2 > MAX_PIXELS:
            raise ModelError(
                f"an image becomes {n_tiles:,} tiles of {side} × {side} pixels, more than {MAX_PIXELS:,} pixels: "
                "the file is broken"
            )

    @property
    def n_joined(self) -> int:
        return self.merge**2

    @staticmethod
    def open(source: Any, label: str) -> Image:
        return open_image(source, label)

    @property
    def example(self) -> Image:
        """An image of 1,024 × 768 pixels."""
        return self.open(np.zeros((768, 1024, 3), np.uint8), "the image")

    def positions(self, rows: int, columns: int) -> Pixels | None:
        """Return position embeddings of a grid of patches, by rows, [rows * columns, n_embd], or None if unused."""
        table: Pixels | None = self.position_table
        return table

    def normalised(self, frame: NDArray[np.uint8]) -> Pixels:
        """Return the normalised values of pixels, [height, width, 3]."""
        return normalised(frame, self.mean, self.std)

    def rows(self, frame: NDArray[np.uint8]) -> FrameRows:
        size, merge, n = self.patch_size, self.merge, self.n_before
        rows, columns = frame.shape[0] // size, frame.shape[1] // size
        order, spans = block_order(rows, columns, merge), np.zeros((2, 0), np.int32)
        if (side := self.window) != 0:  # group patches by window
            windows = order // columns // side * columns + order % columns // side
            order, windows = order[np.argsort(windows, kind="stable")], np.sort(windows)
            spans = np.stack([np.searchsorted(windows, windows, end) for end in ("left", "right")]).astype(np.int32)
        inputs = [patches(self.normalised(frame), size)[order]]
        if (added := self.positions(rows, columns)) is not None:
            inputs.append(added[: len(added) - len(order)])
            inputs[1] = np.concatenate([inputs[1], added[len(added) - len(order) :][order]])
        if n:
            inputs[0] = np.pad(inputs[0], ((n, 0), (0, 0)))
        axes = np.stack([order * 0, order // columns, order % columns])
        axes = np.pad(axes, ((0, 0), (n, 0))).astype(np.int32)
        blocks = order[:: merge * merge]  # first patch of each block
        outputs = n + merge * merge * np.argsort(blocks).astype(np.int32)
        return FrameRows(np.ascontiguousarray(np.concatenate(inputs, axis=1)), axes, outputs, spans)

    def embedded(self, patch: Weight, *, has_positions: bool, bias: str = "v.patch_embd.bias") -> Tensor:
        """Return the patches' pixels times a matrix [n_embd, pixels], plus positions."""
        n = patch.shape[1]
        total = n + (self.n_embd if has_positions else 0)
        x = self.graph.add(ops.Input(Tensor(Rows.TOKENS, n), 0, total))
        positions = self.graph.add(ops.Input(Tensor(Rows.TOKENS, self.n_embd), n, total)) if has_positions else None
        return self.graph.add(ops.Linear(x, Matrix(patch, self.weights.find(bias, self.n_embd)), residual=positions))

    def patch_matrix(self) -> Weight:
        """Return the kernel of a convolution over patches as a matrix [n_embd, pixels]."""
        weight = self.weights.require("v.patch_embd.weight", self.n_embd, 3, self.patch_size, self.patch_size)
        return Reshaped(weight, (self.n_embd, 3 * self.patch_size**2))

    def rope(self, theta: float, *, interleaved: bool = False, axes: tuple[int, int] = (1, 2)) -> Rope:
        """Return a rotation by the row in the first half of the pairs and by the column in the second half."""
        dim = self.head_dim // 2
        half = theta ** -(np.arange(0, dim, 2) / dim)
        turned = (axes[0],) * len(half) + (axes[1],) * len(half)
        return Rope(np.concatenate([half, half]).astype(np.float32), interleaved, axes=turned)


# -- Checkpoints ---------------------------------------------------------------------------------------------------


#: Settings of encoders, processors and fused models without a key in GGUF files, and the values that a file implies.
#: An empty tuple accepts any value. A family's ``HF_MEANT`` replaces single settings.
MEANT: dict[str, tuple[Any, ...]] = {
    "hidden_act": GELU_TANH,
    "projector_hidden_act": ("gelu",),
    "num_channels": (3,),
    "in_channels": (3,),
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_center_crop": (False,),
    "rescale_factor": (1 / 255,),
    "resample": (3,),  # Pillow's BICUBIC
    "rope_type": ("default", "axial"),
    "rope_theta": (10_000.0,),
} | implied(
    # derived from tensors and other settings, only for training and videos, or of processors
    """
    add_cross_attention architecture default_output_length drop_path_rate head_dim hidden_size image_seq_length
    img_max_token_num in_chans initializer_factor intermediate_size is_decoder layer_norm_eps layer_scale_init_value
    logit_scale_init_value max_position_embeddings max_vit_seq_len min_image_size mlp_ratio multi_modal_projector_bias
    multimodal_projector_bias norm_type num_key_value_heads num_patches out_hidden_size output_dim pos_emb_time
    pos_emb_width position_embedding_size projection_dim projector_input_dim projector_output_dim qk_normalization
    rms_norm_eps spatial_merge_size spatial_patch_size standardize temporal_patch_size text_hidden_size
    tokens_per_second use_absolute_position_embeddings use_clipped_linears use_mask_token use_mean_pooling use_qk_norm
    vision_output_dim vision_use_head window_kernel_size
    crop_size do_pad max_pixels merge_size min_pixels patch_size size
    """
)


@dataclass(frozen=True)
class EncoderCheckpoint:
    """A checkpoint's configuration for conversions, as objects of `localllm.convert.settings`."""

    values: Any  # config.json
    vision: Any  # section of config.json for the encoder
    processor: Any  # preprocessor_config.json
    text: Any = None  # configuration of the text model
    read: Callable[[str], Array] = lambda name: np.zeros(0)  # returns a tensor of the checkpoint, in float32


def require(c: EncoderCheckpoint, name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Raise ModelError for a setting without a key in the family's files, unless its value is in ``known``."""
    if value not in known:
        raise ModelError(
            f"the checkpoint has {name} = {quoted(value)}, but an mmproj file of {c.values['model_type']} means "
            f"{' or '.join(map(str, known))}"
        )


def require_same(c: EncoderCheckpoint, **values: Any) -> None:
    """Raise ModelError for a setting of the processor that differs from the encoder's. ``values``: the encoder's."""
    for name, value in values.items():
        require(c, name, c.processor.get(name, value), (value,))


def split_qkv(name: str, array: Array, stem: str) -> dict[str, Array]:
    """Split the joint ``{stem}.weight`` or ``.bias`` of queries, keys and values into three tensors."""
    suffix = name.rpartition(".")[2]
    return {f"{stem}attn_{k}.{suffix}": part for k, part in zip("qkv", np.split(array, 3), strict=True)}
