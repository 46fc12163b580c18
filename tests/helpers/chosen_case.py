"""Prompts whose tokens attend to chosen keys among expanded ones, with an oracle: one softmax a token, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiserve.kernels.chosen_bits import BLOCK_KEYS, ExpandedRows, pack_bits


class ChosenCase:
    """Random rows. A token chooses about a third of what it sees, and the first token of a row nothing in its first blocks but itself.

    Args:
        rows: Of each the keys before its tokens, and its tokens. Between the tokens of two rows the step has one of neither.
        num_heads: Heads.
        key_dim: Elements of a query and of a key.
        value_dim: Elements of a value.
        dtype: Of all.
        device: Of all but ``expected``.

    Attributes:
        expected: float64 ``[T, num_heads, value_dim]``, on the CPU; NaN of tokens of no row.
    """

    def __init__(
        self,
        rows: tuple[tuple[int, int], ...],
        *,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        sizes = [-(-(prefix + count) // BLOCK_KEYS) * BLOCK_KEYS for prefix, count in rows]
        num_tokens, num_keys = sum(count for _, count in rows) + len(rows), sum(sizes)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        q, keys, values = (
            draw(num_tokens, num_heads, key_dim),
            draw(num_keys, num_heads, key_dim),
            draw(num_keys, num_heads, value_dim),
        )
        self.scale = key_dim**-0.5
        self.expected = torch.full((num_tokens, num_heads, value_dim), torch.nan, dtype=torch.float64)
        columns, chosen = [], []
        token = bit = key = 0
        for (prefix, count), size in zip(rows, sizes, strict=True):
            token += 1
            columns.append([token, count, bit, key, prefix])
            is_chosen = (torch.rand(count, max(sizes), generator=generator) < 0.3).tril_(prefix)
            is_chosen[0] = False
            own = torch.arange(count)
            is_chosen[own, prefix + own] = True
            scores = torch.einsum("nhd,mhd->nhm", q[token : token + count].double(), keys[key : key + size].double())
            scores.mul_(self.scale).masked_fill_(~is_chosen[:, None, :size], -torch.inf)
            own_values = values[key : key + size].double()
            self.expected[token : token + count] = torch.einsum("nhm,mhv->nhv", scores.softmax(-1), own_values)
            chosen.append(is_chosen)
            token, bit, key = token + count, bit + count, key + size
        self.q, self.keys, self.values = (each.to(device) for each in (q, keys, values))
        self.bits = pack_bits(torch.cat(chosen)).to(device)
        where = np.array(columns, dtype=np.int32)
        self.rows = ExpandedRows(where, torch.from_numpy(where).to(device))

    def attend(self, ops: Any, **options: Any) -> Tensor:
        """Attends by the operations of a module; tokens that it does not write stay NaN."""
        out = torch.full(self.expected.shape, torch.nan, dtype=self.q.dtype, device=self.q.device)
        ops.attend_expanded(self.q, self.keys, self.values, self.bits, self.rows, self.scale, out, **options)
        return out
