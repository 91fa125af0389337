"""Initialise a wider network with a narrower one, so that it computes nearly the same before training."""

import torch
from torch import Tensor

from tests.demo_model.model import DemoModel

KEPT_LAYERS = (
    0,
    1,
    3,
    4,
    5,
)  # of six; the feed-forward weights of the dropped layer are added to the layer before it


@torch.no_grad()
def widen(model: DemoModel, old: dict[str, Tensor], old_heads: int = 6) -> None:
    """Copy the old weights into the wider model.

    New columns of the residual stream stay zero until they are trained, because no weight writes to them.  New heads
    and neurons read inputs, and their output weights are zero.
    """
    config, width = model.config, old["output_norm.weight"].shape[0]
    groups, old_groups = config.n_heads // config.n_kv_heads, old_heads // config.n_kv_heads
    heads = torch.tensor([head // old_groups * groups + head % old_groups for head in range(old_heads)])
    rows = (
        heads[:, None] * config.head_dim + torch.arange(config.head_dim)
    ).flatten()  # rows of Q, columns of output
    # RMSNorm divides by the mean over all columns, including the new zeros.
    shrink = (width / config.hidden_size) ** 0.5
    new = dict(model.named_parameters())
    for name, parameter in new.items():
        _, layer, part = name.split(".")[:3] if name.startswith("blk.") else ("", "0", name.split(".")[0])
        source = old[name.replace(f"blk.{layer}.", f"blk.{KEPT_LAYERS[int(layer)]}.")]
        if parameter.ndim == 1:
            parameter.fill_(source.mean() * shrink)
            parameter[:width] = source * shrink
        elif part == "attn_q":
            parameter[rows, :width] = source
        elif part == "attn_output":
            parameter.zero_()
            parameter[:width, rows] = source
        else:
            if part in ("token_embd", "ffn_down"):
                parameter.zero_()
            parameter[: source.shape[0], : source.shape[1]] = source
    for dropped in set(range(6)) - set(KEPT_LAYERS):
        layer, size = KEPT_LAYERS.index(dropped - 1), old[f"blk.{dropped}.ffn_gate.weight"].shape[0]
        scale = old[f"blk.{dropped}.ffn_norm.weight"] / old[f"blk.{dropped - 1}.ffn_norm.weight"]
        for part in ("ffn_gate", "ffn_up"):
            new[f"blk.{layer}.{part}.weight"][size : 2 * size, :width] = old[f"blk.{dropped}.{part}.weight"] * scale
        new[f"blk.{layer}.ffn_down.weight"][:width, size : 2 * size] = old[f"blk.{dropped}.ffn_down.weight"]
