"""The latest replies of each tenant, searched for what followed the last tokens of a row.

The idea of drafts from the replies of other requests is SuffixDecoding's (Oliaro et al. 2024), which keeps suffix trees: agents
repeat files, JSON and code. A hash table of n-grams of four lengths finds nearly as many drafts, in arrays of fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hiserve.core.plan import MAX_FOLLOWING, Int32Array

LONGEST = 16  # tokens that are compared
MAX_TENANTS = 32  # whose replies are kept; the one whose last reply is oldest makes room
_SIZES = (2, 4, 8, LONGEST)  # of the n-grams
_SPARSITY = 2  # entries of a tenant's table for each n-gram, at least
_SEED = 0  # tenants have separate tables: collisions are of no use to anybody


class ReplyHistory:
    """A ring of tokens for each tenant, and the places in it that follow n-grams, by their hash.

    An entry of the table is the latest place of its n-gram. No entry is removed: a search compares the tokens themselves, so
    that fewer agree where they were overwritten, or where the entry is another n-gram's. A token takes 4 bytes, and 32 to 64 in
    the table; memory that no tenant has used is not allocated.

    Args:
        num_tokens: Tokens kept of each tenant, at least 1; the oldest are overwritten.
        max_tenants: At least 1.
    """

    def __init__(self, num_tokens: int, max_tenants: int = MAX_TENANTS) -> None:
        self._num_tokens = num_tokens
        self._num_bits = (num_tokens * len(_SIZES) * _SPARSITY - 1).bit_length()
        self._factors, self._shift = _factors(), np.uint64(64 - self._num_bits)
        self._regions: dict[
            bytes, int
        ] = {}  # of tenants, the latest reply last; region 0 belongs to no tenant, and stays empty
        self._num_added = [0] * (1 + max_tenants)
        self._table = np.zeros((1 + max_tenants) << self._num_bits, dtype=np.int32)
        # Rings lie so far apart that no window over one of them reaches another. A place is the number of the windows that
        # end before it and begin there; 0, of entries never set, belongs to no tenant.
        self._stride = LONGEST + 1 + num_tokens + MAX_FOLLOWING
        self._text = np.zeros((1 + max_tenants) * self._stride, dtype=np.int32)
        self._before = sliding_window_view(self._text, LONGEST + 1)[:, ::-1]  # the latest token first
        self._after = sliding_window_view(self._text[LONGEST + 1 :], MAX_FOLLOWING)

    @property
    def is_empty(self) -> bool:
        """Whether no reply is kept."""
        return not self._regions

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept, of all tenants."""
        return sum(min(added, self._num_tokens) for added in self._num_added)

    def clear(self) -> None:
        """Forgets all replies."""
        while self._regions:
            self._forget_oldest()

    def add(self, tenant: bytes, tokens: Int32Array, num_prompt: int) -> None:
        """Keeps a reply.

        Args:
            tenant: Whose later rows may repeat it.
            tokens: int32 ``[n]``. Prompt and reply; the last tokens of the prompt lead to the beginning of the reply.
            num_prompt: Leading tokens that are the prompt.
        """
        if tokens.size <= num_prompt:
            return
        region = self._region_of(tenant)
        kept = tokens[max(0, num_prompt - LONGEST) :][-self._num_tokens :]
        places = (self._num_added[region] + np.arange(kept.size)) % self._num_tokens
        places += region * self._stride
        self._text[places + (LONGEST + 1)] = kept
        self._num_added[region] += kept.size
        if kept.size > LONGEST:
            before = sliding_window_view(kept, LONGEST)[:-1, ::-1]  # each token from the one after so many
            entries = self._hash(before) + (region << self._num_bits)
            self._table[entries] = places[LONGEST:, None]  # of equal n-grams the last one is kept

    def follow(
        self, tenants: Sequence[bytes], last: Int32Array, num_following: int
    ) -> tuple[NDArray[np.int64], Int32Array]:
        """Finds where most of the last tokens of rows agree with a reply of their tenants, and of equals the latest place.

        Args:
            tenants: Of S rows.
            last: int32 ``[S, LONGEST + 1]``. The last tokens of each row, the last one first; then -1, which nothing equals.
            num_following: N, at most ``MAX_FOLLOWING``.

        Returns:
            int64 ``[S]``, how many tokens agree; and int32 ``[S, N]``, the tokens that follow there. Nothing of other tenants.
        """
        tables = np.array([[self._regions.get(tenant, 0) << self._num_bits] for tenant in tenants])
        places = self._table.take(self._hash(last[:, :LONGEST]) + tables)
        agreed = (self._before[places] != last[:, None]).argmax(axis=2)  # up to the first that differs
        best = agreed.argmax(axis=1)  # the first of equals: the latest place of a shorter n-gram is the latest of all
        rows = np.arange(best.size)
        return agreed[rows, best], self._after[places[rows, best]][:, :num_following]

    def _hash(self, last: Int32Array) -> NDArray[np.int64]:
        """Returns the entries of a table for n-grams of each size, int64 ``[n, 4]``; int32 ``[n, LONGEST]`` as for ``follow``.

        Multiply-shift hashing of vectors (Dietzfelbinger 1996): the upper bits of a sum of products with odd numbers.
        """
        sums = last.astype(np.uint64) @ self._factors
        sums >>= self._shift
        return sums.view(np.int64)

    def _region_of(self, tenant: bytes) -> int:
        """Returns the tenant's region, now the one used last; nothing is left of the tenant that it may have been taken from."""
        region = self._regions.pop(tenant, 0)
        if not region:
            if len(self._regions) == len(self._num_added) - 1:
                self._forget_oldest()
            region = min(set(range(1, len(self._num_added))).difference(self._regions.values()))
        self._regions[tenant] = region
        return region

    def _forget_oldest(self) -> None:
        region = self._regions.pop(next(iter(self._regions)))
        self._text[region * self._stride : (region + 1) * self._stride] = 0
        self._table[region << self._num_bits : (region + 1) << self._num_bits] = 0
        self._num_added[region] = 0


def _factors() -> NDArray[np.uint64]:
    """Returns odd numbers, uint64 ``[LONGEST, 4]``, for the tokens of an n-gram of each size; 0 for those before it."""
    drawn = np.random.default_rng(_SEED).integers(2**64, size=(LONGEST, len(_SIZES)), dtype=np.uint64) | np.uint64(1)
    return np.where(np.arange(LONGEST)[:, None] < _SIZES, drawn, np.uint64(0))
