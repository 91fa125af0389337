"""Operations that the forward pass of a model consists of. `localllm.kernels.graph` records them."""

from localllm.kernels.operations.attention import Attention, RopeAppend
from localllm.kernels.operations.compressed import Compress, IndexSelect
from localllm.kernels.operations.dense import (
    XIELU,
    AboveDeviation,
    Activation,
    AdapterWeights,
    Add,
    AddRows,
    Clamp,
    Columns,
    Embed,
    Gated,
    HeadGate,
    HeadLinear,
    HostEdit,
    Input,
    LayerNorm,
    Linear,
    Linears,
    NgramEmbed,
    Outputs,
    RMSNorm,
    RootMeanSquare,
    Scale,
    SideBySide,
    Softcap,
)
from localllm.kernels.operations.experts import ExpertLinears, ExpertOutput, Route
from localllm.kernels.operations.recurrent import WKV, BlockConv, CausalConv, ChannelScan, GatedDelta, Scan
from localllm.kernels.operations.streams import HyperWeights, MixStreams, StreamGate
