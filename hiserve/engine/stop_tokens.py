"""The tokens that end a reply, by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import BoolArray, Int32Array
from hiserve.core.request import MAX_STOP_TOKENS, SamplingParams

NO_TOKEN = -1


class StopTokens:
    """End tokens of the model, and the stop tokens each request adds.

    ``min_tokens`` is the sampler's part: before that many, no token that ends the reply is drawn.

    Args:
        max_rows: Rows, the padding row not counted.
        eos_token_ids: Tokens that end every reply, unless its request ignores them.
    """

    def __init__(self, max_rows: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self._ignores_eos = np.zeros(max_rows + 1, dtype=np.bool_)
        self._tokens = np.full((max_rows + 1, MAX_STOP_TOKENS), NO_TOKEN, dtype=np.int32)
        self._num_tokens = np.zeros(max_rows + 1, dtype=np.int32)
        self._most = 0  # entries that any row has

    def set(self, row: int, sampling: SamplingParams) -> None:
        """Takes over what ends the reply of the row's new tenant."""
        stops = sampling.stop_token_ids
        self._ignores_eos[row] = sampling.ignore_eos
        self._tokens[row] = NO_TOKEN
        self._tokens[row, : len(stops)] = stops
        self._num_tokens[row] = len(stops)
        self._most = int(self._num_tokens.max())

    def clear(self, row: int) -> None:
        """Forgets what ended the reply of a tenant that has left the row."""
        if self._num_tokens[row]:
            self._num_tokens[row] = 0
            self._most = int(self._num_tokens.max())

    def cut(self, rows: NDArray[np.int64], counts: Int32Array, tokens: Int32Array) -> tuple[Int32Array, BoolArray]:
        """Cuts each row's new tokens after the first that ends its reply.

        Args:
            rows: int64 ``[S]``.
            counts: int32 ``[S]``. New tokens of each row.
            tokens: int32 ``[S, W]``. Row s holds ``counts[s]`` tokens.

        Returns:
            int32 ``[S]`` tokens that are kept, and bool ``[S]`` which rows end.
        """
        is_end = np.zeros(tokens.shape, dtype=np.bool_)
        for token in self._eos:
            is_end |= tokens == token
        is_end &= ~self._ignores_eos[rows][:, None]
        if self._most:
            is_end |= (tokens[:, :, None] == self._tokens[rows, : self._most][:, None, :]).any(axis=2)
        is_end &= np.arange(tokens.shape[1]) < counts[:, None]
        ends: BoolArray = np.any(is_end, axis=1)
        if ends.any():
            counts = counts.copy()
            counts[ends] = is_end[ends].argmax(axis=1) + 1
        return counts, ends
