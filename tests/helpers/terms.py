"""Inputs in two terms of E4M3."""

from __future__ import annotations

from torch import Tensor

from hiserve.kernels.terms import FINE, Terms


def spell(terms: Terms) -> Tensor:
    """Returns the numbers that terms stand for, float64."""
    num_rows, _, depth = terms.codes.shape
    codes = terms.codes.double().view(num_rows, 2, -1, 64, 2).transpose(3, 4).reshape(num_rows, 2, -1, 128)
    return ((codes[:, 0] + codes[:, 1] / FINE) * terms.scales.double()[..., None]).view(num_rows, depth)
