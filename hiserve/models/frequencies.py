"""The rotary frequencies of every kind of scaling.

All arithmetic is float32 in the order that checkpoints were trained with: another order changes the last
digits, which become a visible angle at positions of some thousands.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hiserve.models.rope import RopeConfig


def rotary_frequencies(rope: RopeConfig, head_dim: int, max_len: int) -> Tensor:
    """Returns the angle per position of each pair of elements, float32 ``[head_dim / 2]``, on the CPU.

    ``max_len`` is the tokens of the longest request; it selects longrope's list.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = rope.theta**exponents  # over 2 pi
    if rope.kind == "linear":  # Chen et al., Position Interpolation, 2023
        return 1.0 / wavelengths / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / wavelengths)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths, head_dim)
    if rope.kind == "longrope":
        divisors = torch.tensor(rope.fixed(max_len).short_factor, dtype=torch.float32)
        return 1.0 / (divisors * wavelengths)
    return 1.0 / wavelengths


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones are unchanged, those between are blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / plain
    longest, shortest = (rope.original_context / bound for bound in (rope.low_freq_factor, rope.high_freq_factor))
    stretched = torch.where(wavelengths > longest, plain / rope.factor, plain)
    turns = rope.original_context / wavelengths
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share) * stretched / rope.factor + share * stretched
    is_between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(is_between, blended, stretched)


def _yarn(rope: RopeConfig, wavelengths: Tensor, head_dim: int) -> Tensor:
    """Blends by the turns of a pair within the original context (Peng et al., YaRN, 2023)."""
    low, high = (_dimension(rope, beta, head_dim) for beta in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _dimension(rope: RopeConfig, num_turns: float, head_dim: int) -> float:
    """Returns the (fractional) pair that turns this often within the original context."""
    return head_dim * math.log(rope.original_context / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))
