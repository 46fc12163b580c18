"""Random numbers that are functions of seed, choice and position alone, in plain torch: of fixed shape, without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_PHILOX_M = (0xD2511F53, 0xCD9E8D57)
_PHILOX_W = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox-4x32-10: four random words for each counter.

    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. torch has no uint32
    arithmetic, so words are int64: a 32 x 32 bit product wraps to the correct 64 bits.

    Args:
        counter: int64 ``[4, ...]``, values in [0, 2**32).
        key: int64 ``[2, ...]``, values in [0, 2**32); broadcasts to ``counter[:2]``.

    Returns:
        int64 ``[4, ...]``, values in [0, 2**32).
    """
    multipliers, weyl = _pair(*_PHILOX_M, like=counter), _pair(*_PHILOX_W, like=counter)
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_PHILOX_ROUNDS):
        products = (even * multipliers).flip(0)
        # High halves are sign-extended, odd words and keys exceed 32 bits: one mask clears them all.
        even = (products >> 32).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(_MASK32)
        odd = products
        key = key + weyl
    return torch.stack((even, odd & _MASK32), 1).flatten(0, 1)


def _pair(first: int, second: int, like: Tensor) -> Tensor:
    """Two constants along the first dimension, computed on the device: a copy from the host would block."""
    pair = first + torch.arange(2, device=like.device) * (second - first)
    return pair.view(2, *[1] * (like.dim() - 1))


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, stream: int, size: int, first: int = 0) -> Tensor:
    """Standard Gumbel noise for vocabulary entries ``first`` to ``first + size``, a function of its arguments alone.

    Args:
        seed: int64 ``[S]``, in [0, 2**63).
        choice: int64 ``[S]``, in [0, 2**32).
        position: int64 ``[S]``, in [0, 2**32). Absolute position of the token to draw.
        stream: Separates the uses of random numbers at one position.
        size: Vocabulary entries.
        first: A multiple of 4.

    Returns:
        float64 ``[S, size]``, finite.
    """
    assert first % 4 == 0, f"noise from entry {first} on"
    blocks = torch.arange(first // 4, -(-(first + size) // 4), device=seed.device)  # one counter gives four entries
    words = _words(seed, choice, position, stream, blocks.expand(seed.shape[0], -1))
    return _gumbel(words.permute(1, 2, 0).flatten(1)[:, :size])


def gumbel_at(seed: Tensor, choice: Tensor, position: Tensor, stream: int, entries: Tensor) -> Tensor:
    """The noise of ``gumbel`` for some vocabulary entries, int64 ``[S, n]``; returns float64 ``[S, n]``."""
    words = _words(seed, choice, position, stream, entries // 4)
    return _gumbel(words.gather(0, (entries % 4)[None])[0])


def _words(seed: Tensor, choice: Tensor, position: Tensor, stream: int, blocks: Tensor) -> Tensor:
    """Four random words for each block ``[S, n]`` of four vocabulary entries: int64 ``[4, S, n]``."""
    counter = blocks.new_empty((4, *blocks.shape))
    counter[0] = blocks
    counter[1] = position[:, None]
    counter[2] = choice[:, None]
    counter[3] = stream
    return philox(counter, torch.stack((seed & _MASK32, seed >> 32)).unsqueeze(-1))


def _gumbel(words: Tensor) -> Tensor:
    uniform = words.to(torch.float64).add_(0.5).mul_(2.0**-32)  # never 0 or 1
    return uniform.log_().neg_().log_().neg_()
