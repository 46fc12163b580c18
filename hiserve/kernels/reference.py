"""Every kernel in plain torch: vectorised, of fixed shape, without a host sync."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.core.forward import LayerKV

_MASK32 = 0xFFFFFFFF
_PHILOX_M = (0xD2511F53, 0xCD9E8D57)
_PHILOX_W = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10

NO_LAST_LOC = -1
NO_OWNER = -1
SINK_PAGE = 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the last dimension; 16-bit inputs are reduced in float32.

    Args:
        x: ``[..., n]``.
        weight: ``[n]`` or anything that broadcasts to ``x``, in the dtype of ``x``.
        eps: Added to the mean square.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype) * weight


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each head, its first half paired with its second (the Hugging Face layout).

    Args:
        x: ``[T, heads, head_dim]``.
        cos: ``[T, 1, head_dim]``, float32 or wider.
        sin: Like ``cos``, the first half negated: the partner of element i is element
            ``i ± head_dim / 2``, so one roll fetches all partners.
    """
    wide = x.to(cos.dtype)
    return (wide * cos).addcmul_(wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def store_kv(kv: LayerKV, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes keys and values ``[T, num_kv_heads, head_dim]`` into their slots, int64 ``[T]``."""
    kv.k.index_copy_(0, slots, k)
    kv.v.index_copy_(0, slots, v)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 n]``, gate first; returns ``[T, n]``."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10: four random words for each counter.

    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. torch has no
    uint32 arithmetic, so words travel in int64; a 32 x 32 bit product wraps to the right 64 bits.

    Args:
        counter: Four int64 tensors that broadcast together, values in [0, 2**32).
        key: Two more.

    Returns:
        Four int64 tensors, values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        p0, p1 = c0 * _PHILOX_M[0], c2 * _PHILOX_M[1]
        # The high halves are sign-extended and c1, c3 keep high bits: one mask clears both.
        c0, c1 = ((p1 >> 32) ^ (c1 ^ k0)) & _MASK32, p1
        c2, c3 = ((p0 >> 32) ^ (c3 ^ k1)) & _MASK32, p0
        k0, k1 = (k0 + _PHILOX_W[0]) & _MASK32, (k1 + _PHILOX_W[1]) & _MASK32
    return c0, c1 & _MASK32, c2, c3 & _MASK32


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, stream: int, size: int) -> Tensor:
    """Standard Gumbel noise for every vocabulary entry, a function of its arguments alone.

    Args:
        seed: int64 ``[S]``, in [0, 2**63).
        choice: int64 ``[S]``, in [0, 2**32).
        position: int64 ``[S]``, in [0, 2**32). Absolute position of the token to draw.
        stream: Tells apart the uses of random numbers at one position.
        size: Vocabulary entries.

    Returns:
        float64 ``[S, size]``, finite.
    """
    block = torch.arange(-(-size // 4), device=seed.device)[None]  # one counter gives four entries
    counter = (block, position[:, None], choice[:, None], torch.full_like(seed, stream)[:, None])
    words = philox(counter, ((seed & _MASK32)[:, None], (seed >> 32)[:, None]))
    flat = torch.stack(words, -1).flatten(1)[:, :size]
    uniform = (flat.to(torch.float64) + 0.5) * 2.0**-32  # never 0 or 1
    return -torch.log(-torch.log(uniform))


def last_loc(page_table: Tensor, computed_len: Tensor, page_size: int) -> Tensor:
    """Slot of the token at ``computed_len - 1``, or -1 when a row has none.

    Args:
        page_table: int32 ``[B, W]``.
        computed_len: int64 ``[B]``. Beyond ``W * page_size`` the answer means nothing.
        page_size: Tokens per page.
    """
    last = (computed_len - 1).clamp_(0, page_table.shape[1] * page_size - 1)
    page = page_table.gather(1, (last // page_size)[:, None])[:, 0].long()
    return torch.where(computed_len > 0, page * page_size + last % page_size, NO_LAST_LOC)


def is_last_loc_legal(location: Tensor, computed_len: Tensor, page_size: int, num_slots: int) -> Tensor:
    """Whether each ``last_loc`` is -1, or a slot past the sink that agrees with the length.

    Returns:
        bool ``[B]``.
    """
    in_range = (location >= page_size) & (location < num_slots)
    agrees = (location + 1) % page_size == computed_len % page_size
    return (location == NO_LAST_LOC) | (in_range & agrees)


def is_table_owned(
    page_table: Tensor, entry_owner: Tensor, page_owner: Tensor, kv_lens: Tensor, page_size: int
) -> Tensor:
    """Whether every entry a row reads or writes still points at the allocation it was given.

    Args:
        page_table: int32 ``[B, W]``.
        entry_owner: int32 ``[B, W]``. The allocation each entry was written for.
        page_owner: int32 ``[num_pages]``. The allocation each page belongs to now.
        kv_lens: int64 ``[B]``. Entries up to here are in use.
        page_size: Tokens per page.

    Returns:
        bool ``[B]``.
    """
    entries = torch.arange(page_table.shape[1], device=page_table.device)
    unused = entries * page_size >= kv_lens[:, None]
    return ((page_owner[page_table.long()] == entry_owner) | unused).all(1)
