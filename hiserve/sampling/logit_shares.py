"""Logits of which each rank of a group has the columns of its tokens: the best of all ranks, or all columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hiserve.distributed.exchange import Exchange, Exchanged
from hiserve.kernels.step_ops import ENTRY_WORDS, FreeDraws, StepOps, TokenMasks


class DrawOps(Protocol):
    """The part of ``StepOps`` that chooses tokens, from logits of whatever tokens it was made for."""

    def greedy(self, logits: Tensor, masks: TokenMasks | None = None) -> Tensor: ...

    def draw_free(
        self,
        logits: Tensor,
        temperature: Tensor,
        seed: Tensor,
        choice: Tensor,
        position: Tensor,
        is_drawn: Tensor | None,
        masks: TokenMasks | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class LogitShares:
    """Draws like ``StepOps`` from the logits of a rank's tokens, ``[S, n]``: its best entry of each row is joined with those of the others.

    Noise is a function of the token, so that the shares draw what the whole would; where two scores of one share differ by
    rounding alone, they may round in the other order. All ranks join the same bits.

    Attributes:
        ops: Of the device.
        exchange: Of this rank.
        vocab_size: Tokens of all ranks.
        first: The token of the first column.
    """

    ops: StepOps
    exchange: Exchange
    vocab_size: int
    first: int

    @classmethod
    def of(cls, ops: StepOps, exchange: Exchange, vocab_size: int) -> LogitShares:
        """Returns those of a model's output head."""
        return cls(ops, exchange, vocab_size, exchange.shard.tokens(vocab_size)[0])

    def whole(self, logits: Tensor) -> Tensor:
        """Returns the logits of all tokens, ``[S, vocab_size]``: for scores, penalties and filters."""
        return self.exchange.gather_columns(logits, self.vocab_size)

    def greedy(self, logits: Tensor, masks: TokenMasks | None = None) -> Tensor:
        """As ``StepOps``; masks are those of all tokens."""
        return self._join(logits, None, masks)

    def draw_free(
        self,
        logits: Tensor,
        temperature: Tensor,
        seed: Tensor,
        choice: Tensor,
        position: Tensor,
        is_drawn: Tensor | None,
        masks: TokenMasks | None = None,
    ) -> Tensor:
        """As ``StepOps``; masks are those of all tokens."""
        return self._join(logits, FreeDraws(temperature, seed, choice, position, is_drawn), masks)

    def exchanged(self, num_rows: int, dtype: torch.dtype, *, is_whole: bool) -> Exchanged:
        """Returns what ``whole`` exchanges for so many rows of logits of a type, or else ``greedy`` and ``draw_free``."""
        if is_whole:
            return Exchanged("gather", num_rows, self.exchange.shard.token_share(self.vocab_size), dtype)
        return Exchanged("gather", num_rows, ENTRY_WORDS, dtype if dtype == torch.float64 else torch.float32)

    def _join(self, logits: Tensor, draws: FreeDraws | None, masks: TokenMasks | None) -> Tensor:
        entries = self.exchange.gather(self.ops.best_entries(logits, self.first, draws, masks))
        return self.ops.join_entries(entries, draws)
