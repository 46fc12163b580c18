"""Attention in plain torch, by a padded gather through the page table: the reference of every backend's tests."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.attention.base import AttentionShape
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.kernels.row_codecs import load_heads


class ReferenceAttention:
    """Runs on any device, eagerly, without a host sync; not optimized."""

    needs_host_lengths = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def captured(self, num_rows: int, width: int) -> None:
        """Returns None."""

    def ragged(self) -> None:
        """Returns None."""

    def plan(self, inputs: ForwardInputs) -> None:
        """Lays out the padded batch: queries ``[B, Q]`` and keys ``[B, N]``."""
        device = inputs.kv_lens.device
        tokens = torch.arange(inputs.input_ids.shape[0], device=device)
        starts = inputs.qo_indptr.long()
        self._padded = (inputs.kv_lens.shape[0], inputs.max_q_len)
        self._places = (inputs.token_rows, tokens - starts[inputs.token_rows])
        self._keys = torch.arange(inputs.max_kv_len, device=device)
        page_size = self._shape.page_size
        first = (inputs.kv_lens - starts.diff())[:, None] - inputs.num_nodes_before  # token that masks count
        unread = self._keys >= inputs.kv_lens[:, None]
        self._slots = {}
        for window in self._shape.distinct_windows:
            table, unseen = inputs.page_table, unread
            if window is not None and inputs.window_table is not None:
                # Entries below the window may be anything, no pages even.
                table, unseen = inputs.window_table, unread | (self._keys <= first - window)
            pages = table[:, self._keys // page_size].long()
            self._slots[window] = (pages * page_size + self._keys % page_size).masked_fill_(unseen, 0)
        self._positions = self._pad(inputs.positions)
        new = (self._keys - first)[:, None]
        hidden = new > torch.arange(inputs.max_q_len, device=device)[:, None]
        if inputs.tree_mask is not None:
            seen = self._pad(inputs.tree_mask)[:, :, None]
            hidden = torch.where(seen == 0, hidden, (new >= 0) & (seen >> new.clamp(0, 62) & 1 == 0))
        self._hidden = hidden | unread[:, None]
        if self._shape.hides_first:
            self._hidden |= self._keys == 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends in float32 or wider."""
        attended = self.attend(q, kv, layer)[0]
        return attended if out is None else out.copy_(attended)

    def attend(self, q: Tensor, kv: LayerKV, layer: int) -> tuple[Tensor, Tensor]:
        """Like ``forward``, with the logarithm of the sum of exponentials.

        Returns:
            ``[T, num_heads, head_dim]``, and float32 or wider ``[T, num_heads]``: the sink included, -inf where a token
            sees no key.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        kv_heads = kv.k.shape[1]
        hidden = self._hidden_from(layer)
        grouped = self._pad(q.to(wide)).view(*self._padded, kv_heads, -1, q.shape[2])
        # Hidden slots may hold NaN, and 0 * NaN is NaN: their scores are overwritten, their values zeroed.
        slots = self._slots[self._shape.window(layer)]
        keys, values = load_heads(kv, slots, wide)
        values = values.masked_fill(hidden.all(1)[:, :, None, None], 0)
        scores = torch.einsum("bqhgd,bnhd->bhgqn", grouped, keys) * self._shape.scale
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
        lse = scores.logsumexp(-1)
        if self._shape.sinks and (sinks := self._shape.sinks[layer]) is not None:
            lse = torch.logaddexp(lse, sinks.to(wide).view(kv_heads, -1, 1))
        shares = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp_()
        out = torch.einsum("bhgqn,bnhd->bqhgd", shares, values).flatten(2, 3)
        return out[self._places].to(q.dtype), lse.permute(0, 3, 1, 2).flatten(2)[self._places]

    def _hidden_from(self, layer: int) -> Tensor:
        """The keys that each query does not see: bool ``[B, Q, N]``; padding sees none."""
        hidden = self._hidden
        if (window := self._shape.window(layer)) is not None:
            hidden = hidden | (self._keys <= self._positions[:, :, None] - window)
        return hidden | ~self._pad(torch.ones_like(self._places[0], dtype=torch.bool))[:, :, None]

    def _pad(self, x: Tensor) -> Tensor:
        """``[T, ...]`` as ``[B, Q, ...]``, zeros where there is no token."""
        padded = x.new_zeros((*self._padded, *x.shape[1:]))
        padded[self._places] = x
        return padded
