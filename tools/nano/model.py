"""The model: a Llama decoder whose parameters carry the names of Hugging Face's ``LlamaModel``.

Draft heads (EAGLE-3, MTP) need the outputs of some layers and the shared embedding: ``Nano.forward`` returns the
normed last state, ``Nano.layers`` and ``Nano.embed_tokens`` are there to build on.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class NanoConfig:
    """Shape of the model."""

    vocab_size: int = 4096  # tokens, special tokens included
    hidden_size: int = 256  # width of the residual stream
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2  # key/value heads; divides ``num_heads``
    head_dim: int = 64
    ffn_size: int = 768  # inner width of the gated MLP
    rope_theta: float = 100_000.0  # base of the rotary frequencies
    max_positions: int = 8192  # longest sequence
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        """Starts with a scale of one."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` to the same shape; computed in float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: NanoConfig) -> None:
        """Creates the four projections."""
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[B, T, hidden]`` with ``[T, head_dim]`` cosines and sines to ``[B, T, hidden]``."""
        batch, length, _ = x.shape
        q = rotate(self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        group = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class MLP(nn.Module):
    """SiLU-gated MLP."""

    def __init__(self, config: NanoConfig) -> None:
        """Creates the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer; dropout acts on what the attention and the MLP add to the residual stream."""

    def __init__(self, config: NanoConfig, dropout: float) -> None:
        """Creates the layer's parts."""
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[B, T, hidden]`` to ``[B, T, hidden]``."""
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), cos, sin), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class Nano(nn.Module):
    """The decoder; its output layer is its embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: NanoConfig, dropout: float = 0.0) -> None:
        """Initialises weights from N(0, 0.02²), projections into the residual stream narrower by √(2·layers)."""
        super().__init__()
        self.config, self.dropout = config, dropout
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                narrow = math.sqrt(2 * config.num_layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(parameter, std=0.02 / narrow)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids ``[B, T]`` int64 to normed last states ``[B, T, hidden]`` float32."""
        x = F.dropout(self.embed_tokens(ids), self.dropout, self.training)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., vocab]``."""
        return F.linear(hidden, self.embed_tokens.weight)


def rope_tables(config: NanoConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[max_positions, head_dim]`` float32, halves repeated as Hugging Face lays them out."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), config.rope_theta**-half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``[B, heads, T, head_dim]`` by its positions; the second half is each pair's other coordinate."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def next_token_losses(weight: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each position, in nats.

    Args:
        weight: ``[vocab, hidden]``. The embedding.
        hidden: ``[B, T, hidden]``. Normed last states.
        targets: ``[B, T]`` int64. The token after each position.

    Returns:
        ``[B, T]`` float32.
    """
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
