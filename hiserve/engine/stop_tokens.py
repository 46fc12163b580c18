"""The tokens that end the reply of each row."""

from __future__ import annotations

import numpy as np

from hiserve.core.plan import BoolArray, Int32Array, Int64Array
from hiserve.core.request import MAX_STOP_TOKENS, SamplingParams

NO_TOKEN = -1


class StopTokens:
    """The stop tokens of each row, and those of the model.

    Args:
        num_rows: Rows, the padding row included.
        eos_token_ids: Tokens that end every reply, unless its request ignores them.
    """

    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self._ignores_eos = np.zeros(num_rows, dtype=np.bool_)
        self._stops = np.full((num_rows, MAX_STOP_TOKENS), NO_TOKEN, dtype=np.int32)
        self._num_stops = np.zeros(num_rows, dtype=np.int32)
        self._max_stops = 0  # of any row

    def set(self, row: int, sampling: SamplingParams) -> None:
        """Sets the tokens that end the reply; ``min_tokens`` is the sampler's part, which draws none of them before."""
        stops = sampling.stop_token_ids
        self._ignores_eos[row] = sampling.ignore_eos and sampling.grammar is None
        self._stops[row] = NO_TOKEN
        self._stops[row, : len(stops)] = stops
        self._num_stops[row] = len(stops)
        self._max_stops = int(self._num_stops.max())

    def forget(self, row: int) -> None:
        """Forgets the stop tokens of a row that lost its request."""
        if self._num_stops[row]:
            self._num_stops[row] = 0
            self._max_stops = int(self._num_stops.max())

    def cut(self, rows: Int64Array, counts: Int32Array, tokens: Int32Array) -> tuple[Int32Array, BoolArray]:
        """Returns how many new tokens of each row to keep, int32 ``[S]``, and which rows end with a stop, bool ``[S]``.

        Args:
            rows: int64 ``[S]``.
            counts: int32 ``[S]``. New tokens of each.
            tokens: int32 ``[S, n]``.
        """
        is_end = np.zeros(tokens.shape, dtype=np.bool_)
        for token in self._eos:
            is_end |= tokens == token
        is_end &= ~self._ignores_eos[rows][:, None]
        if self._max_stops:
            is_end |= (tokens[:, :, None] == self._stops[rows, : self._max_stops][:, None, :]).any(axis=2)
        is_end &= np.arange(tokens.shape[1]) < counts[:, None]
        ends: BoolArray = np.logical_or.reduce(is_end, axis=1)
        if ends.any():
            counts = counts.copy()
            counts[ends] = is_end[ends].argmax(axis=1) + 1
        return counts, ends
