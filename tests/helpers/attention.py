"""Ragged batches for attention backends, with an oracle: one dense softmax a token, in float64."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.core.row_shapes import scale_words
from hiserve.kernels.row_codecs import store_heads

# (tokens cached, tokens new): decode, whole prompts, chunks behind a prefix, page edges of 16 and 64.
RAGGED = ((0, 5), (16, 1), (15, 1), (0, 33), (40, 7), (63, 2), (100, 1), (0, 1))
NO_PAGE = 2**31 - 1  # in table entries that nobody may read


class Case:
    """A ragged batch whose pool holds NaN in every slot that no row owns.

    Args:
        lengths: Tokens cached and new, of each row.
        adjacent: The pages of a row are.
        window: Of the first of two layers; the other has none.
        frees_windows: The first layer has pages of its own, by a table whose entries below the window are no pages.
        sinks: The first layer has sinks.
        hides_first: Nobody sees position 0, and its slot holds NaN.
        score_scalar: As of ``AttentionShape``.
        trees: New tokens are the nodes of random trees, of any number in a row.
        packs: Keys and values are packed; the oracle takes them as they are read.
    """

    def __init__(
        self,
        lengths: tuple[tuple[int, int], ...],
        *,
        page_size: int = 16,
        group: int = 2,
        head_dim: int = 64,
        adjacent: bool = True,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        num_kv_heads: int = 2,
        window: int | None = None,
        frees_windows: bool = False,
        sinks: bool = False,
        hides_first: bool = False,
        score_scalar: float | None = None,
        trees: bool = False,
        packs: bool = False,
    ) -> None:
        self.lengths, self._device = lengths, torch.device(device)
        seed = page_size * 1000 + group * 100 + head_dim + adjacent + 7 * len(lengths)
        self._generator = torch.Generator().manual_seed(seed)
        self.num_heads = num_kv_heads * group
        self.tables = self._pages(page_size, adjacent)
        self.shape = AttentionShape(
            num_layers=2,
            num_heads=self.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            windows=() if window is None else (window, None),
            sinks=(self._draw(self.num_heads).to(self._device), None) if sinks else (),
            hides_first=hides_first,
            score_scalar=score_scalar,
            packs_rows=packs,
        )
        tokens = [(row, place) for row, (cached, new) in enumerate(lengths) for place in range(cached, cached + new)]
        # Of several rows with trees the last has none, and none of many tokens has one: prompts beside rows that verify drafts.
        self._has_tree = [
            trees and new < 64 and (row == 0 or row + 1 < len(lengths)) for row, (_, new) in enumerate(lengths)
        ]
        self.masks = [self._mask(new, has_tree) for (_, new), has_tree in zip(lengths, self._has_tree, strict=True)]
        self._fill()
        self._frees_windows = frees_windows
        self.inputs = self._inputs(tokens, trees)

    def _pages(self, page_size: int, adjacent: bool) -> list[Tensor]:
        counts = [math.ceil((cached + new) / page_size) for cached, new in self.lengths]
        pages = torch.arange(1, sum(counts) + 1)
        if not adjacent:
            pages = pages[torch.randperm(len(pages), generator=self._generator)]
        return list(pages.split(counts))

    def _draw(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, dtype=torch.float64).float()

    def _mask(self, num_new: int, trees: bool) -> Tensor:
        """Which new tokens each new token sees, itself among them: bool ``[num_new, num_new]``."""
        seen = torch.eye(num_new, dtype=torch.bool)
        for token in range(1, num_new):
            parent = int(torch.randint(token + 1, (1,), generator=self._generator)) - 1 if trees else token - 1
            if parent >= 0:
                seen[token] |= seen[parent]
        return seen

    def _slots(self, row: int) -> Tensor:
        place, page_size = torch.arange(sum(self.lengths[row])), self.shape.page_size
        return self.tables[row][place // page_size] * page_size + place % page_size

    def _fill(self) -> None:
        """Draws queries, keys and values; the new ones are views of one tensor, as a model's are."""
        shape, num_kv_heads = self.shape, self.shape.num_kv_heads
        num_slots = (1 + sum(map(len, self.tables))) * shape.page_size
        pool = torch.full((2, num_slots, num_kv_heads, shape.head_dim), torch.nan, dtype=shape.dtype)
        scales = None
        if shape.packs_rows:  # bytes of -1 are NaN, and their scales infinite
            pool = torch.full(pool.shape, 255, dtype=torch.uint8)
            scales = torch.full((num_slots, scale_words(num_kv_heads)), -1, dtype=torch.int32)
        self.keys, self.values, new = [], [], []
        for row, (cached, num_new) in enumerate(self.lengths):
            kv = self._draw(2, cached + num_new, num_kv_heads, shape.head_dim).to(shape.dtype)
            if shape.packs_rows:  # heads and tokens of every magnitude
                kv *= 2.0 ** torch.randint(-6, 6, (*kv.shape[:3], 1), generator=self._generator)
            if shape.hides_first:
                kv[:, 0] = torch.nan
            if shape.packs_rows:
                kv = torch.stack(store_heads(LayerKV(pool[0], pool[1], scales=scales), self._slots(row), kv[0], kv[1]))
            else:
                pool[:, self._slots(row)] = kv
            self.keys.append(kv[0])
            self.values.append(kv[1])
            q = self._draw(num_new, self.num_heads, shape.head_dim).to(shape.dtype)
            new.append(torch.cat((q, kv[0, cached:], kv[1, cached:]), 1))
        qkv = torch.cat(new).to(self._device)
        self.q, self.k, self.v = qkv.split_with_sizes((self.num_heads, num_kv_heads, num_kv_heads), 1)
        pool = pool.to(self._device)
        self.kv = LayerKV(k=pool[0], v=pool[1], scales=None if scales is None else scales.to(self._device))

    def _inputs(self, tokens: list[tuple[int, int]], trees: bool) -> ForwardInputs:
        ends = [cached + new for cached, new in self.lengths]
        news = [new for _, new in self.lengths]
        table = torch.full((len(ends), max(map(len, self.tables))), NO_PAGE, dtype=torch.int32)
        for row, own in enumerate(self.tables):
            table[row, : len(own)] = own
        depths = [int(seen.sum()) - 1 for mask in self.masks for seen in mask]
        bits = [
            sum(1 << int(other) for other in seen.nonzero()) * has_tree
            for mask, has_tree in zip(self.masks, self._has_tree, strict=True)
            for seen in mask
        ]
        slots = [self._slots(row)[place] for row, place in tokens]
        rows = torch.tensor([row for row, _ in tokens])
        inputs = ForwardInputs(
            input_ids=torch.zeros(len(tokens), dtype=torch.int32),
            positions=torch.tensor([self.lengths[row][0] for row, _ in tokens]) + torch.tensor(depths),
            slots=torch.stack(slots),
            token_rows=rows,
            qo_indptr=torch.tensor([0, *news]).cumsum(0).to(torch.int32),
            kv_lens=torch.tensor(ends),
            page_table=table,
            logits_rows=torch.zeros(0, dtype=torch.int64),
            q_lens=np.array(news, dtype=np.int32),
            kv_bounds=np.array(ends, dtype=np.int32),
            max_kv_len=max(ends),
            num_decode=max((row + 1 for row, new in enumerate(news) if new == 1), default=0),
            tree_mask=torch.tensor(bits) if trees else None,
        )
        values = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        moved = {name: value.to(self._device) for name, value in values.items() if isinstance(value, Tensor)}
        return dataclasses.replace(inputs, **moved)

    def inputs_of(self, layer: int) -> ForwardInputs:
        """Returns the inputs for one layer: if both have pages of their own, the other's are the padding page, of NaN."""
        inputs, window = self.inputs, self.shape.window(layer)
        if not self._frees_windows:
            return inputs
        others = torch.zeros_like(inputs.page_table)
        if window is None:
            return dataclasses.replace(inputs, window_table=others)
        table = inputs.page_table.clone()
        for row, (cached, _) in enumerate(self.lengths):
            table[row, : max(0, cached - window + 1) // self.shape.page_size] = NO_PAGE
        return dataclasses.replace(inputs, page_table=others, window_table=table)

    def run(self, backend: Attention, layer: int = 0) -> Tensor:
        with torch.inference_mode():
            backend.plan(self.inputs_of(layer))
            return backend.forward(self.q, self.k, self.v, self.kv, layer)

    def visible(self, row: int, token: int, layer: int = 0) -> Tensor:
        """Which keys of its row a new token sees: bool ``[kv_len]``."""
        cached, _ = self.lengths[row]
        mask = self.masks[row][token]
        seen = torch.cat((torch.ones(cached, dtype=torch.bool), mask))
        if self.shape.windows and (window := self.shape.windows[layer]) is not None:
            seen &= torch.arange(len(seen)) > cached + int(mask.sum()) - 1 - window
        if self.shape.hides_first:
            seen[0] = False
        return seen

    def oracle(self, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Returns outputs ``[T, num_heads, head_dim]`` and logarithms ``[T, num_heads]``, float64, on the CPU."""
        outs, logs = [], []
        group = self.num_heads // self.shape.num_kv_heads
        queries = iter(self.q.cpu().double())
        sinks = self.shape.sinks[layer] if self.shape.sinks else None
        for row, (_, new) in enumerate(self.lengths):
            for token in range(new):
                seen = self.visible(row, token, layer)
                keys = self.keys[row][seen].double().repeat_interleave(group, 1)
                values = self.values[row][seen].double().repeat_interleave(group, 1)
                scores = torch.einsum("nhd,hd->nh", keys, next(queries)) / math.sqrt(
                    self.shape.score_scalar or self.shape.head_dim
                )
                with_sinks = scores if sinks is None else torch.cat((scores, sinks.cpu().double()[None]))
                shares = torch.softmax(with_sinks, 0)[: len(keys)]
                outs.append(torch.einsum("nh,nhd->hd", shares, values))
                logs.append(torch.logsumexp(with_sinks, 0))
        return torch.stack(outs), torch.stack(logs)
