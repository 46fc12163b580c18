"""The draft heads in training form, EAGLE-3 and MTP, and the training-time test that unrolls them.

A *row* t of a head looks at the target's states of token t and at the embedding of token t + 1, has rotary position t,
and predicts token t + 2. In step i of an unrolled chain the row has position t + i, embeds token t + 1 + i, and takes
the head's own state of step i - 1 in place of the target's. Parameters carry the names of the published checkpoints:
EAGLE-3 (Li et al., arXiv:2503.01840) as it is, MTP (DeepSeek-V3, arXiv:2412.19437) below ``model.layers.N.``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.nano.model import MLP, Nano, NanoConfig, RMSNorm, rope_tables, rotate

# Layers, counted from 0, whose outputs EAGLE-3 sees; the last one's are what the target's own choice is made from.
AUX_LAYERS = (1, 4, 7)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the heads see of the target's pass.

    Attributes:
        aux: ``[B, T, 3 · hidden]``. The residual stream after each of the layers that EAGLE-3 sees, side by side.
        last: ``[B, T, hidden]``. The states after the final norm, which the output layer reads.
    """

    aux: Tensor
    last: Tensor


@torch.no_grad()
def observe(target: Nano, ids: Tensor, aux_layers: tuple[int, ...] = AUX_LAYERS) -> Seen:
    """Runs the target over ``[B, T]`` int64 token ids and keeps what the heads need."""
    x = target.embed_tokens(ids)
    cos, sin = target.cos[: ids.shape[1]], target.sin[: ids.shape[1]]
    aux = []
    for number, layer in enumerate(target.layers):
        x = layer(x, cos, sin)
        if number in aux_layers:
            aux.append(x)
    return Seen(aux=torch.cat(aux, dim=-1), last=target.norm(x))


def split_heads(projected: Tensor, num_heads: int) -> Tensor:
    """``[B, T, heads · head_dim]`` to ``[B, heads, T, head_dim]``."""
    return projected.view(*projected.shape[:-1], num_heads, -1).transpose(1, 2)


class DraftAttention(nn.Module):
    """Grouped-query attention of a head; its input may be wider than the residual stream."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: NanoConfig, input_size: int) -> None:
        """Creates the four projections."""
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(input_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def queries(self, x: Tensor, first: int) -> Tensor:
        """``[B, T, input]`` at positions ``first``, ``first + 1``, … to ``[B, heads, T, head_dim]``."""
        return self._rotated(self.q_proj(x), self.num_heads, first)

    def keys_values(self, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Keys, rotated as in ``queries``, and values of the same rows, both ``[B, kv_heads, T, head_dim]``."""
        keys = self._rotated(self.k_proj(x), self.num_kv_heads, first)
        return keys, split_heads(self.v_proj(x), self.num_kv_heads)

    def _rotated(self, projected: Tensor, num_heads: int, first: int) -> Tensor:
        last = first + projected.shape[1]
        return rotate(split_heads(projected, num_heads), self.cos[first:last], self.sin[first:last])

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, own: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attends to the rows of step 0 and, in each row, to that row's own keys of the later steps.

        The own keys stand on the diagonal: a chain that starts at row t never meets those of another start. This
        is the "training-time test" of EAGLE-3.

        Args:
            queries: ``[B, heads, W, head_dim]``.
            keys: ``[B, kv_heads, R, head_dim]``. Of step 0.
            values: Likewise.
            hidden: bool ``[W, R]``. True where a row may not look.
            own: Keys and values ``[B, kv_heads, W, head_dim]`` of the steps 1 up to this one.

        Returns:
            ``[B, W, hidden]``, after the output projection.
        """
        batch, _, rows, dim = queries.shape
        grouped = queries.reshape(batch, self.num_kv_heads, -1, rows, dim)
        scores = (grouped.flatten(2, 3) @ keys.transpose(-1, -2)).view(*grouped.shape[:-1], -1)
        scores = scores.masked_fill(hidden, float("-inf"))
        diagonals = [(grouped * key[:, :, None]).sum(-1, keepdim=True).to(scores.dtype) for key, _ in own]
        weights = torch.softmax(torch.cat([scores, *diagonals], dim=-1) * dim**-0.5, -1, torch.float32)
        num_shared = keys.shape[2]
        mixed = (weights[..., :num_shared].flatten(2, 3).to(values.dtype) @ values).view(grouped.shape)
        for number, (_, value) in enumerate(own, start=num_shared):
            mixed = mixed + weights[..., number, None] * value[:, :, None]
        projected: Tensor = self.o_proj(mixed.permute(0, 3, 1, 2, 4).reshape(batch, rows, -1))
        return projected


class DraftLayer(nn.Module):
    """A head's decoder layer; ``hidden_norm`` is there when the attention reads embedding and state side by side."""

    def __init__(self, config: NanoConfig, reads_both: bool) -> None:
        """Creates the layer's parts."""
        super().__init__()
        size = config.hidden_size
        self.hidden_norm = RMSNorm(size, config.norm_eps) if reads_both else nn.Identity()
        self.input_layernorm = RMSNorm(size, config.norm_eps)
        self.self_attn = DraftAttention(config, 2 * size if reads_both else size)
        self.post_attention_layernorm = RMSNorm(size, config.norm_eps)
        self.mlp = MLP(config)

    def close(self, attended: Tensor, residual: Tensor) -> Tensor:
        """What follows attention: ``[B, W, hidden]`` and the stream before it to the stream after the layer."""
        stream = residual + attended
        closed: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return closed


class Eagle3Head(nn.Module):
    """EAGLE-3 over the full vocabulary: three of the target's layers, one wide layer, an output layer of its own.

    The state carried to the next step is the stream before ``norm``.
    """

    def __init__(self, target: Nano, aux_layers: tuple[int, ...] = AUX_LAYERS) -> None:
        """Draws random weights; what the output layer reads starts as the state of the last layer seen, as the target would."""
        super().__init__()
        self.aux_layers = aux_layers
        config = target.config
        size = config.hidden_size
        self.fc = nn.Linear(len(aux_layers) * size, size, bias=False)
        self.midlayer = DraftLayer(config, reads_both=True)
        self.norm = RMSNorm(size, config.norm_eps)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        initialise(self)
        self.fc.weight.data[:, -size:] = torch.eye(size)
        self.norm.load_state_dict(target.norm.state_dict())
        self.lm_head.weight.data.copy_(target.embed_tokens.weight)

    @property
    def layer(self) -> DraftLayer:
        """The decoder layer."""
        return self.midlayer

    def first(self, seen: Seen) -> Tensor:
        """The states that step 0 takes, ``[B, T, hidden]``."""
        fused: Tensor = self.fc(seen.aux)
        return fused

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input ``[B, T, 2 · hidden]`` and the residual stream ``[B, T, hidden]``."""
        normed = (self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(state))
        return torch.cat(normed, dim=-1), state

    def leave(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """The state carried to the next step, and what the output layer reads."""
        return stream, self.norm(stream)

    def output_weight(self, _embedding: Tensor) -> Tensor:
        """The output layer's matrix ``[vocab, hidden]``."""
        return self.lm_head.weight


class MTPHead(nn.Module):
    """A multi-token-prediction layer over a dense decoder layer; embedding and output layer are the target's.

    The state carried to the next step is the one after ``shared_head.norm``, as the first is one after the target's
    final norm.
    """

    def __init__(self, target: Nano) -> None:
        """Draws random weights; the norm before the output layer starts as the target's."""
        super().__init__()
        config = target.config
        size = config.hidden_size
        self.enorm = RMSNorm(size, config.norm_eps)
        self.hnorm = RMSNorm(size, config.norm_eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = DraftLayer(config, reads_both=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(size, config.norm_eps)})
        initialise(self)
        self.shared_head["norm"].load_state_dict(target.norm.state_dict())

    def first(self, seen: Seen) -> Tensor:
        """The states that step 0 takes, ``[B, T, hidden]``."""
        return seen.last

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input and the residual stream, both ``[B, T, hidden]``."""
        stream = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(state)), dim=-1))
        return self.layer.input_layernorm(stream), stream

    def leave(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """The state carried to the next step, and what the output layer reads: here the same."""
        normed = self.shared_head["norm"](stream)
        return normed, normed

    def output_weight(self, embedding: Tensor) -> Tensor:
        """The output layer's matrix ``[vocab, hidden]``."""
        return embedding


Head = Eagle3Head | MTPHead
HEADS: dict[str, type[Eagle3Head] | type[MTPHead]] = {"eagle3": Eagle3Head, "mtp": MTPHead}


def initialise(head: nn.Module) -> None:
    """Draws matrices from N(0, 1 / inputs), projections into the residual stream narrower by √2."""
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            narrow = 2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            nn.init.normal_(parameter, std=(parameter.shape[1] * narrow) ** -0.5)


def unroll(
    head: Head, embedding: Tensor, ids: Tensor, seen: Seen, num_steps: int, start: int = 0, num_rows: int | None = None
) -> Iterator[Tensor]:
    """Drafts ``num_steps`` tokens from every row of a window, each step fed with the text's own tokens.

    Args:
        head: The head.
        embedding: ``[vocab, hidden]``. The target's, frozen.
        ids: int64 ``[B, T]``.
        seen: The target's pass over ``ids``.
        num_steps: At least 1. The last ``num_steps`` tokens start no chain.
        start: First row of the window. Rows before it are only looked at.
        num_rows: Rows of the window; None is all up to ``T - num_steps``.

    Yields:
        For each step i ``[B, num_rows, hidden]``, normed for the output layer. Its row r belongs to row
        ``t = start + r`` and predicts token ``t + 2 + i``.
    """
    last = ids.shape[1] - num_steps
    end = last if num_rows is None else start + num_rows
    assert 0 <= start < end <= last, (start, end, last)
    embedded, attention = F.embedding(ids, embedding), head.layer.self_attn
    x, stream = head.enter(embedded[:, 1 : last + 1], head.first(seen)[:, :last])
    keys, values = attention.keys_values(x, 0)
    hidden = torch.arange(last, device=ids.device) > torch.arange(start, end, device=ids.device)[:, None]
    x, stream = x[:, start:end], stream[:, start:end]
    own: list[tuple[Tensor, Tensor]] = []
    for first in range(start, start + num_steps):
        attended = attention(attention.queries(x, first), keys, values, hidden, own)
        state, normed = head.leave(head.layer.close(attended, stream))
        yield normed
        if len(own) + 1 < num_steps:
            x, stream = head.enter(embedded[:, first + 2 : first + 2 + end - start], state)
            own.append(attention.keys_values(x, first + 1))
