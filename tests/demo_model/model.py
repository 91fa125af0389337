"""The network of the demo model in torch: a Llama decoder, for training only.

RoPE rotates adjacent pairs (x[2i], x[2i+1]), as GGUF's `llama` architecture expects of the rows of Q and K.
Checkpoints that rotate halves (Hugging Face's layout) need permuted rows on export; this network does not.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoConfig:
    """Shape of the network.  Rows of matrices are multiples of 256 long, the longest block of a quantised format."""

    vocab_size: int = 2048
    hidden_size: int = 256
    n_layers: int = 5
    n_heads: int = 8
    n_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 768
    context_length: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def rope_angles(config: DemoConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [context, head_dim / 2] of RoPE (Su et al., 2021)."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    inverse_frequency = config.rope_theta ** (-pairs / config.head_dim)
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), inverse_frequency)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs of x [B, H, T, D] by the angles of positions 0..T-1."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Block(nn.Module):
    """One decoder layer: attention with grouped heads, then a SwiGLU feed-forward, each with RMSNorm."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        hidden, kv_size = config.hidden_size, config.n_kv_heads * config.head_dim
        self.attn_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.attn_q = nn.Linear(hidden, config.n_heads * config.head_dim, bias=False)
        self.attn_k = nn.Linear(hidden, kv_size, bias=False)
        self.attn_v = nn.Linear(hidden, kv_size, bias=False)
        self.attn_output = nn.Linear(config.n_heads * config.head_dim, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.ffn_gate = nn.Linear(hidden, config.ffn_size, bias=False)
        self.ffn_up = nn.Linear(hidden, config.ffn_size, bias=False)
        self.ffn_down = nn.Linear(config.ffn_size, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: [B, T, hidden]
        batch, length, _ = x.shape
        config = self.config
        normed = self.attn_norm(x)
        q = self.attn_q(normed).view(batch, length, config.n_heads, config.head_dim).transpose(1, 2)
        k = self.attn_k(normed).view(batch, length, config.n_kv_heads, config.head_dim).transpose(1, 2)
        v = self.attn_v(normed).view(batch, length, config.n_kv_heads, config.head_dim).transpose(1, 2)
        groups = config.n_heads // config.n_kv_heads
        k = rotate(k, cos, sin).repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        x = x + self.attn_output(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.ffn_norm(x)
        gated: Tensor = self.ffn_down(F.silu(self.ffn_gate(normed)) * self.ffn_up(normed))
        return x + gated


class DemoModel(nn.Module):
    """Token embedding (tied to the output), decoder layers, final norm.  ids [B, T] -> hidden states or logits."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blk = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.output_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.cos, self.sin = rope_angles(config)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name == "token_embd.weight":
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(("attn_output.weight", "ffn_down.weight")):
                nn.init.zeros_(parameter)  # each block starts as the identity
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return normalised hidden states [B, T, hidden] of ids [B, T]."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x: Tensor = self.token_embd(ids)
        for block in self.blk:
            x = block(x, cos, sin)
        normed: Tensor = self.output_norm(x)
        return normed

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, vocab] of ids [B, T]."""
        return F.linear(self.hidden(ids), self.token_embd.weight)
