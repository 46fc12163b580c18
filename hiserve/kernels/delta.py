"""Gated delta rule over the states of rows (arXiv:2412.06464), in plain torch: vectorised, of fixed shape, without a host sync.

The stored state of a row lags behind its drafts. A step replays the tokens from there on from the ring of their inputs, then
computes its own, and stores the state behind its certain tokens alone: a rejection undoes nothing (the idea of ReplaySSM, Dao
AI Lab 2026). Each token has the same operations in the same order, whatever the chunks: the results are the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.core.forward import ForwardInputs, StateRows

MAX_STEP_TOKENS = 16
"""Most tokens of a row that decodes or verifies; rows from the first longer one on are prompts."""

NORM_EPS = 1e-6  # added to the sum of squares of a query or key
_LANES = 32  # elements; torch rounds those that do not fill a vector otherwise


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads of a layer; each key head serves ``num_value_heads // num_key_heads`` adjacent value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_channels(self) -> int:
        """Elements of queries, keys and values of a token."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """Weights of a layer.

    Attributes:
        conv: ``[C, K]``. Taps of each channel, the last for the token itself. Kernels are faster where those of a tap lie together.
        a_log: ``[num_value_heads]``. Logarithm of the rate of decay.
        dt_bias: ``[num_value_heads]``. Added to the gate of decay.
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeltaPools:
    """States of R rows and S snapshots in one layer; row 0 and slot 0 take what padding writes.

    An input is a token's channels, then its gates: ``[C + 2 * num_value_heads]``, the activations' type. States have one of their own.
    Memory without an owner may hold anything, NaN included.

    Attributes:
        ring: ``[R, ring, C + 2 * num_value_heads]``. The input of position p lies at ``p % ring``; at least ``q + K - 2`` of
            them where a step has q tokens of which all but the first may be rejected.
        state: ``[R, num_value_heads, key_dim, value_dim]``.
        snap_ring: ``[S, K - 1, C + 2 * num_value_heads]``. The last inputs before the boundary, oldest first; zeros for
            positions below 0.
        snap_state: ``[S, num_value_heads, key_dim, value_dim]``.
    """

    ring: Tensor
    state: Tensor
    snap_ring: Tensor
    snap_state: Tensor

    @property
    def wide(self) -> torch.dtype:
        """The type of sums: that of the states, float32 at least; states are rounded where they are stored alone."""
        return torch.promote_types(self.state.dtype, torch.float32)


def delta(
    mixed: Tensor, gates: Tensor, weights: DeltaWeights, pools: DeltaPools, inputs: ForwardInputs, shape: DeltaShape
) -> Tensor:
    """Convolves queries, keys and values, advances the state of each row over its tokens, and reads it for each.

    Args:
        mixed: ``[T, C]``: queries, keys and values before the depthwise causal convolution.
        gates: ``[T, 2 * num_value_heads]``: the gate of the writes of each value head, then that of its decay. Of the type of
            ``mixed``.
        weights: The layer's weights.
        pools: Changed. The ring holds the newest inputs, the state covers ``state_ends`` tokens, and where that passes
            ``snap_at`` the snapshot is stored. Rows that are not in the batch are unchanged.
        inputs: Of which ``state``, ``qo_indptr`` and ``q_lens`` are read; the latter are bounds. Rows may have no tokens, and
            tokens no row.
        shape: The layer's heads.

    Returns:
        ``[T, num_value_heads, value_dim]``, the type of ``mixed``; zeros for tokens without a row.
    """
    assert inputs.state is not None, "a batch without states"
    entries = torch.cat((mixed, gates), 1)
    out = mixed.new_zeros((mixed.shape[0] + 1, shape.num_value_heads, shape.value_dim))  # the last belongs to no token
    for group in row_groups(inputs):
        singles = [
            (row, row + 1) for row in range(group.first, group.end)
        ]  # prompts; one may be far shorter than another
        for first, end in singles if group.is_long else [(group.first, group.end)]:
            span = inputs.qo_indptr[first : end + 1].long()
            _advance(entries, span, group.width, weights, pools, inputs.state.cut(first, end), shape, out)
    return out[:-1]


class RowGroup(NamedTuple):
    """Adjacent rows that are computed alike.

    Attributes:
        first: The first of them.
        end: The row after the last.
        width: Most tokens of one.
        is_long: Whether one of them has more than ``MAX_STEP_TOKENS``.
    """

    first: int
    end: int
    width: int
    is_long: bool


def row_groups(inputs: ForwardInputs) -> list[RowGroup]:
    """Returns the rows before the first long one, and those from there on, without groups that have no token.

    ``q_lens`` bounds the tokens of the longest row of each group; of a graph it is no bound of each row.
    """
    is_long, num_rows = inputs.q_lens > MAX_STEP_TOKENS, inputs.q_lens.shape[0]
    cut = int(is_long.argmax()) if is_long.any() else num_rows
    groups = [(first, end) for first, end in ((0, cut), (cut, num_rows)) if first < end]
    widths = [int(inputs.q_lens[first:end].max()) for first, end in groups]
    return [RowGroup(*group, width, group[0] == cut) for group, width in zip(groups, widths, strict=True) if width > 0]


def _advance(
    entries: Tensor,
    span: Tensor,
    width: int,
    weights: DeltaWeights,
    pools: DeltaPools,
    rows: StateRows,
    shape: DeltaShape,
    out: Tensor,
) -> None:
    """Advances some rows, of ``width`` tokens at most; columns are tokens, from the earliest that may be replayed on."""
    taps, ring = weights.conv.shape[1], pools.ring.shape[1]
    reach = ring - taps + 1  # most tokens to replay
    assert reach >= 0 and pools.snap_ring.shape[1] == taps - 1, f"{taps} taps, rings of {pools.ring.shape}"
    past = reach + taps - 1  # columns before the step's first token
    q_lens = (span[1:] - span[:-1])[:, None]
    offset = torch.arange(-past, width, device=entries.device)
    position = rows.starts[:, None] + offset
    is_new = (offset >= 0) & (offset < q_lens)
    token = torch.where(is_new, span[:-1, None] + offset, entries.shape[0])
    is_old = (offset < 0) & (position >= 0) & (position > rows.state_lens[:, None] - taps)
    kept = pools.ring[rows.rows[:, None], position % ring]
    source = torch.where(is_new[..., None], entries[token.clamp(max=entries.shape[0] - 1)], kept)
    source = torch.where((is_new | is_old)[..., None], source, 0.0)
    made = _Made.of(source, weights, shape, pools.wide)
    is_folded = (rows.state_lens > 0)[:, None, None, None]
    state = stored = kept_state = torch.where(is_folded, pools.state[rows.rows], 0.0).to(pools.wide)
    reads = []
    for column in range(reach + width):
        at = position[:, column + taps - 1]
        is_live = (at >= rows.state_lens) & (offset[column + taps - 1] < q_lens[:, 0])
        after, read = made.step(state, column)
        state = torch.where(is_live[:, None, None, None], after, state)
        stored = torch.where((at < rows.state_ends)[:, None, None, None], state, stored)
        kept_state = torch.where((at < rows.snap_at)[:, None, None, None], state, kept_state)
        if column >= reach:
            reads.append(read)
    out.view(out.shape[0], -1).index_copy_(
        0, token[:, past:].flatten(), torch.stack(reads, 1).flatten(0, 1).flatten(1).to(out.dtype)
    )
    is_used = q_lens[:, 0] > 0
    own = torch.where(is_used, rows.rows, 0)
    pools.state.index_copy_(0, own, stored.to(pools.state.dtype))
    takes = is_used & (rows.state_lens < rows.snap_at) & (rows.snap_at <= rows.state_ends)
    slots = torch.where(takes, rows.snap_slots, 0)
    pools.snap_state.index_copy_(0, slots, kept_state.to(pools.state.dtype))
    first = (rows.snap_at - rows.starts + reach).clamp(0, reach + width)
    lasts = first[:, None] + torch.arange(taps - 1, device=entries.device)
    pools.snap_ring.index_copy_(0, slots, source[torch.arange(len(slots), device=slots.device)[:, None], lasts])
    is_kept = is_new & (offset >= q_lens - ring)
    places = torch.where(is_kept, own[:, None] * ring + position % ring, 0)
    pools.ring.view(-1, source.shape[2]).index_copy_(0, places.flatten(), source.flatten(0, 1))


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """What the recurrence reads of N tokens of B rows, in the type of sums.

    Attributes:
        q: ``[B, N, num_value_heads, key_dim, 1]``.
        k: Likewise.
        v: ``[B, N, num_value_heads, value_dim]``.
        keep: ``[B, N, num_value_heads, 1, 1]``. Factor of the state.
        write: ``[B, N, num_value_heads, 1]``. Factor of what is written.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor
    write: Tensor

    @classmethod
    def of(cls, source: Tensor, weights: DeltaWeights, shape: DeltaShape, dtype: torch.dtype) -> _Made:
        """Computes them from inputs ``[B, K - 1 + N, C + 2 * num_value_heads]``."""
        channels, taps = weights.conv.shape
        num_tokens = source.shape[1] - taps + 1
        wide, conv = source[..., :channels].to(dtype), weights.conv.to(dtype)
        total = wide[:, :num_tokens] * conv[:, 0]
        for tap in range(1, taps):
            total = (
                total + wide[:, tap : tap + num_tokens] * conv[:, tap]
            )  # no fused product, which is for whole vectors alone
        keys = shape.num_key_heads * shape.key_dim
        q, k, v = F.silu(total).split_with_sizes((keys, keys, channels - 2 * keys), -1)
        q, k = (_normed(_by_head(each, shape.num_key_heads)) for each in (q, k))
        q = q * shape.key_dim**-0.5
        group = shape.num_value_heads // shape.num_key_heads
        q, k = (each.repeat_interleave(group, 2).unsqueeze(-1) for each in (q, k))
        padding = -shape.num_value_heads % _LANES
        gates = _by_head(source[:, taps - 1 :, channels:].to(dtype), 2)
        write, decay = F.pad(gates, (0, padding)).unbind(2)
        a_log, dt_bias = (F.pad(each.to(dtype), (0, padding)) for each in (weights.a_log, weights.dt_bias))
        keep = (-a_log.exp() * F.softplus(decay + dt_bias)).exp()[..., : shape.num_value_heads]
        write = write.sigmoid()[..., : shape.num_value_heads]
        return cls(q, k, _by_head(v, shape.num_value_heads), keep[..., None, None], write[..., None])

    def step(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """Returns the state ``[B, num_value_heads, key_dim, value_dim]`` after a token of each row, and what it reads there."""
        k, state = self.k[:, token], state * self.keep[:, token]
        change = (self.v[:, token] - (state * k).sum(2)) * self.write[:, token]
        state = state + k * change.unsqueeze(2)
        return state, (state * self.q[:, token]).sum(2)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    return x.view(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)
