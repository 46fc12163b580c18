"""Ragged batches of latent attention, with an oracle: one dense softmax a token over expanded keys, in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.core.forward import ForwardInputs, LatentKV
from hiserve.core.row_shapes import PackedPages, packed_latent
from hiserve.kernels.row_codecs import load_packed, store_packed
from tests.helpers.attention import NO_PAGE


def pack_latents(pool: Tensor, rank: int, page_rows: int) -> tuple[Tensor, PackedPages]:
    """Returns a pool ``[slots, 1, n]`` in 8 bits, and how it is; the bytes of rows with NaN are no numbers."""
    shape = packed_latent(rank, pool.shape[2] - rank)
    assert shape is not None, (rank, pool.shape)
    pages, there = PackedPages(shape, page_rows), (~pool.isnan().any(-1)).nonzero()[:, 0]
    packed = torch.full((len(pool), 1, shape.row_bytes), 255, dtype=torch.uint8)
    store_packed(packed[:, 0], there, pool[there, 0], pages)
    return packed, pages


class LatentCase:
    """A ragged batch whose pool holds NaN in every slot that no row owns.

    Args:
        shape: Of the attention, with ``latent``.
        rows: Tokens cached and new, of each row.
        num_decode: Leading rows that decode.
        device: Of all tensors but ``expected``.
        packs: The pool is in 8 bits, and new rows are rounded likewise.

    Attributes:
        expected: float64 ``[T, num_heads, value_dim]``, on the CPU.
    """

    def __init__(
        self,
        shape: AttentionShape,
        rows: tuple[tuple[int, int], ...],
        *,
        num_decode: int,
        device: str = "cpu",
        packs: bool = False,
    ) -> None:
        assert shape.latent is not None
        self._shape, self._latent = shape, shape.latent
        self._generator = torch.Generator().manual_seed(11)
        rank, num_heads = self._latent.rank, shape.num_heads
        self._to_keys = self._draw(num_heads, self._latent.nope_dim, rank).div_(rank**0.5).to(shape.dtype)
        self._to_values = self._draw(num_heads, self._latent.value_dim, rank).div_(rank**0.5).to(shape.dtype)
        lengths = [cached + new for cached, new in rows]
        num_pages = [-(-length // shape.page_size) for length in lengths]
        order = torch.randperm(sum(num_pages), generator=self._generator).add_(1).split(num_pages)
        table = torch.full((len(rows), max(num_pages)), NO_PAGE, dtype=torch.int32)
        num_slots = (sum(num_pages) + 1) * shape.page_size
        self._pool = torch.full((num_slots, 1, shape.head_dim), torch.nan, dtype=shape.dtype)
        bits, packed = pack_latents(self._pool, rank, shape.page_size) if packs else (self._pool, None)
        queries, slots, expected, fresh = [], [], [], []
        for row, ((cached, new), pages) in enumerate(zip(rows, order, strict=True)):
            table[row, : len(pages)] = pages
            positions = torch.arange(cached + new)
            places = pages[positions // shape.page_size] * shape.page_size + positions % shape.page_size
            held = self._draw(cached + new, 1, shape.head_dim).to(shape.dtype)
            if packed is not None:
                store_packed(bits[:, 0], places, held[:, 0], packed)
                held = load_packed(bits[:, 0], places, packed).to(shape.dtype)[:, None]
            self._pool[places] = held
            q = self._draw(new, num_heads, self._latent.nope_dim + self._latent.rope_dim).to(shape.dtype)
            expected.append(self._oracle(q, places))
            if shape.hides_first:
                bits[places[0]] = 255 if packs else torch.nan
            queries.append(q)
            slots.append(places[cached:])
            fresh.append(self._pool[places[cached:]])
        self.expected = torch.cat(expected)
        self.q, self.k = torch.cat(queries).to(device), torch.cat(fresh).to(device)
        pool, matrices = bits.to(device), (self._to_keys.to(device), self._to_values.to(device))
        self.kv = LatentKV(k=pool, v=pool[..., :rank], to_keys=matrices[0], to_values=matrices[1], packed=packed)
        q_lens = np.array([new for _, new in rows], dtype=np.int32)
        token_rows = torch.repeat_interleave(torch.arange(len(rows)), torch.from_numpy(q_lens).long())
        self.inputs = ForwardInputs(
            input_ids=torch.zeros(int(q_lens.sum()), dtype=torch.int32, device=device),
            positions=torch.cat([torch.arange(cached, cached + new) for cached, new in rows]).to(device),
            slots=torch.cat(slots).to(device),
            token_rows=token_rows.to(device),
            qo_indptr=torch.from_numpy(np.concatenate(([0], q_lens.cumsum())).astype(np.int32)).to(device),
            kv_lens=torch.tensor(lengths, device=device),
            page_table=table.to(device),
            logits_rows=torch.zeros(0, dtype=torch.int64, device=device),
            q_lens=q_lens,
            kv_bounds=np.array(lengths, dtype=np.int32),
            max_kv_len=max(lengths),
            num_decode=min(num_decode, len(rows)),
        )

    def _draw(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, dtype=torch.float64)

    def _oracle(self, q: Tensor, places: Tensor) -> Tensor:
        """Returns the outputs of the last tokens of a row; the slots of all its tokens are ``places``."""
        rank, to_keys, to_values = self._latent.rank, self._to_keys.double(), self._to_values.double()
        held, first = self._pool[places, 0].double(), int(self._shape.hides_first)
        keys = torch.einsum("mr,hnr->hmn", held[:, :rank], to_keys)
        keys = torch.cat((keys, held[:, rank:].expand(keys.shape[0], -1, -1)), -1)
        values = torch.einsum("mr,hvr->hmv", held[:, :rank], to_values)
        outs = []
        for token, query in enumerate(q.double()):
            seen = slice(first, len(places) - len(q) + token + 1)
            shares = (torch.einsum("hd,hmd->hm", query, keys[:, seen]) * self._latent.scale).softmax(-1)
            outs.append(torch.einsum("hm,hmv->hv", shares, values[:, seen]))
        return torch.stack(outs)

    def run(self, attention: Attention) -> Tensor:
        """Plans and attends."""
        attention.plan(self.inputs)
        return self.attend(attention)

    def attend(self, attention: Attention, out: Tensor | None = None) -> Tensor:
        with torch.inference_mode():
            return attention.forward(self.q, self.k, self.k[..., : self._latent.rank], self.kv, 0, out)
