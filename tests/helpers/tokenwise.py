"""Arithmetic that gives each token the same bits whatever batch it is computed in: what then differs had other inputs.

Libraries sum in an order that depends on the shape of a batch, so that float64 differs in its last bits between a
prompt computed at once and in chunks. Here products are computed for one token at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.attention import backends
from hiserve.attention.base import AttentionShape
from hiserve.core.forward import ForwardInputs, LayerKV


class TokenwiseAttention:
    """Attends token by token.

    Args:
        shape: Of the model; without windows and sinks.
    """

    needs_host_lengths = False

    def __init__(self, shape: AttentionShape) -> None:
        assert not any(shape.windows)
        self._shape = shape
        self._slots: list[Tensor] = []

    def captured(self, num_rows: int, width: int) -> None:
        """Returns none."""

    def ragged(self) -> None:
        """Likewise."""

    def plan(self, inputs: ForwardInputs) -> None:
        """Lists the slots that each token sees."""
        page_size, first = self._shape.page_size, int(self._shape.hides_first)
        lens = (inputs.kv_lens - inputs.qo_indptr.long().diff()).tolist()
        self._slots = []
        for row, table in enumerate(inputs.page_table.long()):
            for _ in range(inputs.qo_indptr[row], inputs.qo_indptr[row + 1]):
                lens[row] += 1
                places = torch.arange(first, lens[row])
                self._slots.append(table[places // page_size] * page_size + places % page_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int) -> Tensor:
        """Returns zeros for a token that sees none."""
        out = torch.zeros_like(q)
        for token, slots in enumerate(self._slots):
            if len(slots):
                grouped = q[token].view(kv.k.shape[1], -1, q.shape[2])
                scores = torch.einsum("hgd,nhd->hgn", grouped, kv.k[slots]) * self._shape.scale
                out[token] = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), kv.v[slots]).flatten(0, 1)
        return out


@contextmanager
def tokenwise() -> Iterator[None]:
    """Lets engines that are started within compute token by token, on the CPU."""
    linear = F.linear

    def each(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.cat([linear(one, weight, bias) for one in x.split(1)]) if len(x) else linear(x, weight, bias)

    ours = dataclasses.replace(
        backends._BACKENDS["cpu"], module=__name__, name=TokenwiseAttention.__name__, has_hidden_first=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends._BACKENDS, "cpu", ours)
        patch.setattr(F, "linear", each)
        yield
