"""Ragged batches for attention backends, with an oracle: head by head, key by key, in float64."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.forward import ForwardInputs, LayerKV

# (tokens cached, tokens new): decode, whole prompts, chunks behind a prefix, page edges of 16 and 64.
RAGGED = ((0, 5), (16, 1), (15, 1), (0, 33), (40, 7), (63, 2), (100, 1), (0, 1))


class Case:
    """A ragged batch whose pool holds NaN in every slot that no row owns."""

    def __init__(
        self,
        lengths: tuple[tuple[int, int], ...],
        *,
        page_size: int = 16,
        group: int = 2,
        head_dim: int = 64,
        adjacent: bool = True,
        dtype: torch.dtype = torch.float32,
        num_kv_heads: int = 2,
    ) -> None:
        generator = torch.Generator().manual_seed(page_size * 1000 + group * 100 + head_dim + adjacent)
        ends = [cached + new for cached, new in lengths]
        counts = [math.ceil(end / page_size) for end in ends]
        pages = torch.arange(1, sum(counts) + 1)
        if not adjacent:
            pages = pages[torch.randperm(len(pages), generator=generator)]
        self.tables = list(pages.split(counts))
        table = torch.zeros((len(ends), max(counts)), dtype=torch.int32)
        num_slots = (sum(counts) + 1) * page_size
        shape = (num_slots, num_kv_heads, head_dim)
        self.kv = LayerKV(k=torch.full(shape, torch.nan, dtype=dtype), v=torch.full(shape, torch.nan, dtype=dtype))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        new_k, new_v, slots, positions, rows = [], [], [], [], []
        for row, ((cached, new), own) in enumerate(zip(lengths, self.tables, strict=True)):
            table[row, : len(own)] = own
            place = torch.arange(cached + new)
            slot = own[place // page_size] * page_size + place % page_size
            k, v = (torch.randn((cached + new, *shape[1:]), generator=generator, dtype=dtype) for _ in range(2))
            self.kv.k[slot], self.kv.v[slot] = k, v
            self.keys.append(k)
            self.values.append(v)
            new_k.append(k[cached:])
            new_v.append(v[cached:])
            slots.append(slot[cached:])
            positions.append(place[cached:])
            rows.append(torch.full((new,), row))
        self.k, self.v = torch.cat(new_k), torch.cat(new_v)
        self.q = torch.randn((len(self.k), num_kv_heads * group, head_dim), generator=generator, dtype=dtype)
        news = torch.tensor([new for _, new in lengths])
        self.inputs = ForwardInputs(
            input_ids=torch.zeros(len(self.k), dtype=torch.int32),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            token_rows=torch.cat(rows),
            qo_indptr=torch.cat((torch.zeros(1, dtype=torch.int64), news.cumsum(0))).to(torch.int32),
            kv_lens=torch.tensor(ends),
            page_table=table,
            logits_rows=torch.zeros(0, dtype=torch.int64),
            q_lens=news.numpy().astype(np.int32),
            kv_bounds=np.array(ends, dtype=np.int32),
            max_kv_len=max(ends),
        )

    def run(self, backend: Attention) -> Tensor:
        with torch.inference_mode():
            backend.plan(self.inputs)
            return backend.forward(self.q, self.k, self.v, self.kv, 0)

    def oracle(self) -> Tensor:
        """One softmax per token and head."""
        out = torch.zeros_like(self.q, dtype=torch.float64)
        group = self.q.shape[1] // self.k.shape[1]
        for token, (row, position) in enumerate(
            zip(self.inputs.token_rows.tolist(), self.inputs.positions.tolist(), strict=True)
        ):
            keys, values = self.keys[row][: position + 1].double(), self.values[row][: position + 1].double()
            for head in range(self.q.shape[1]):
                scores = keys[:, head // group] @ self.q[token, head].double() / math.sqrt(self.q.shape[2])
                out[token, head] = torch.softmax(scores, 0) @ values[:, head // group]
        return out
