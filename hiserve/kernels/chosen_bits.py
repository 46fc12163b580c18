"""Which keys the tokens of prompts have chosen, as bits, and where the keys and tokens of their rows lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.core.plan import Int32Array

WORD_KEYS = 64
"""Keys of a word; the first is its lowest bit."""

BLOCK_KEYS = 128
"""Keys of a row, and those that its bits stand for, are padded to a multiple: kernels read blocks."""

MAX_SPAN = 4
"""Most keys that the bits of a token stand for, in tokens that it may choose: so many scores one program keeps in registers."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpandedRows:
    """Rows whose keys and values are expanded.

    Attributes:
        host: int32 ``[n, 5]``: the first token of a row, how many tokens it has, the first of its rows of bits, its first key, and how many
            keys it has before its first token. Keys up to the next multiple of ``BLOCK_KEYS`` are there, and finite.
        columns: The same on the device.
    """

    host: Int32Array
    columns: Tensor

    @property
    def max_new(self) -> int:
        """Most tokens of a row."""
        return int(self.host[:, 1].max())


def num_words(num_keys: int) -> int:
    """Returns the words of a token that sees up to so many keys."""
    return -(-num_keys // BLOCK_KEYS) * (BLOCK_KEYS // WORD_KEYS)


def pack_bits(is_chosen: Tensor) -> Tensor:
    """Packs bool ``[T, num_keys]`` into int64 ``[T, num_words(num_keys)]``."""
    num_tokens, num_keys = is_chosen.shape
    words = torch.nn.functional.pad(is_chosen.long(), (0, num_words(num_keys) * WORD_KEYS - num_keys))
    return (words.view(num_tokens, -1, WORD_KEYS) << torch.arange(WORD_KEYS, device=words.device)).sum(-1)


def unpack_bits(bits: Tensor, num_keys: int) -> Tensor:
    """Returns the first ``num_keys`` bits of each token, bool ``[T, num_keys]``."""
    places = torch.arange(WORD_KEYS, device=bits.device)
    return ((bits[..., None] >> places) & 1).bool().flatten(1)[:, :num_keys]
