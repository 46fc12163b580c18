"""Attention in plain torch, by a padded gather through the page table: the oracle of every backend."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.forward import ForwardInputs, LayerKV


class ReferenceAttention:
    """Runs on any device, eagerly, without a host sync; slow and plain on purpose.

    Args:
        page_size: Tokens per page.
    """

    needs_host_lengths = False

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def captured(self, num_rows: int, width: int) -> Attention:
        """Returns itself."""
        return self

    def plan(self, inputs: ForwardInputs) -> None:
        """Lays out the padded batch: queries ``[B, Q]`` and keys ``[B, N]``."""
        device = inputs.kv_lens.device
        tokens = torch.arange(inputs.input_ids.shape[0], device=device)
        starts = inputs.qo_indptr.long()
        self._shape = (inputs.kv_lens.shape[0], inputs.max_q_len)
        self._token_rows = inputs.token_rows
        self._offsets = tokens - starts[inputs.token_rows]
        keys = torch.arange(inputs.max_kv_len, device=device)
        pages = inputs.page_table[:, keys // self._page_size].long()
        self._unread = keys >= inputs.kv_lens[:, None]
        self._slots = (pages * self._page_size + keys % self._page_size).masked_fill_(self._unread, 0)
        first = inputs.kv_lens - starts.diff()
        queries = first[:, None] + torch.arange(inputs.max_q_len, device=device)
        self._hidden = (keys > queries[:, :, None]) | self._unread[:, None]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int) -> Tensor:
        """Attends in float32 or wider."""
        wide = torch.promote_types(q.dtype, torch.float32)
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        padded = q.new_zeros((*self._shape, heads, head_dim), dtype=wide)
        padded[self._token_rows, self._offsets] = q.to(wide)
        grouped = padded.view(*self._shape, kv_heads, heads // kv_heads, head_dim)
        keys = kv.k[self._slots].to(wide)
        # Slots nobody owns may hold NaN, and 0 * NaN is NaN: their scores are overwritten, their values blanked.
        values = kv.v[self._slots].to(wide).masked_fill_(self._unread[:, :, None, None], 0)
        scores = torch.einsum("bqhgd,bnhd->bhgqn", grouped, keys) * head_dim**-0.5
        scores.masked_fill_(self._hidden[:, None, None], -torch.inf)
        out = torch.einsum("bhgqn,bnhd->bqhgd", scores.softmax(-1), values)
        return out.flatten(2, 3)[self._token_rows, self._offsets].to(q.dtype)
