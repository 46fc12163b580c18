"""Inputs of a sampling call besides the logits of its S rows: parameters of the rows that need them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_FEW = 64  # a top-k up to here needs no sort of the vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class Subset:
    """Some rows of a batch. Only they are computed: a row's arithmetic does not depend on the others' parameters.

    ``index`` is int64 ``[n]``, ascending; None for all rows.
    """

    index: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Returns these rows of ``x``."""
        return x if self.index is None else x.index_select(0, self.index)

    def put(self, x: Tensor, rows: Tensor) -> Tensor:
        """Returns ``x`` with these rows replaced."""
        return rows if self.index is None else x.index_copy(0, self.index, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Biases:
    """Rows with logit biases.

    Attributes:
        subset: n of the batch's rows.
        tokens: int64 ``[n, W]``. Padded with token 0.
        values: float64 ``[n, W]``. Added to their logits: 0 for padding, -inf for tokens that may not be chosen.
    """

    subset: Subset
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Rows with penalties for earlier tokens.

    Attributes:
        subset: n of the batch's rows.
        repetition: float64 ``[n]``; 1 is none.
        presence: float64 ``[n]``; 0 is none.
        frequency: float64 ``[n]``; 0 is none.
        tokens: int64 ``[n, L]``. Each row's tokens; meaningless from ``position`` on.
        num_prompt: int64 ``[n]``. Leading tokens that are the prompt.
        position: int64 ``[n]``. Position of the token to draw; tokens before it are known.
    """

    subset: Subset
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    tokens: Tensor
    num_prompt: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Rows that draw at random by the same operations.

    Attributes:
        subset: n of the batch's rows.
        temperature: float64 ``[n]``, above 0.
        top_k: int64 ``[n]``; 0 keeps all.
        top_p: float64 ``[n]``, in (0, 1].
        log_min_p: float64 ``[n]``, -inf keeps all; None when no row has a min-p.
        seed: int64 ``[n]``.
        choice: int64 ``[n]``.
        position: int64 ``[n]``. Absolute position of the token to draw.
    """

    subset: Subset
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor | None
    seed: Tensor
    choice: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """The subsets of a batch, None where empty. A row that draws is in one of the last three, a greedy one in none.

    Attributes:
        biases: Rows with biases.
        penalties: Rows with penalties.
        free: Draws from all tokens.
        few: Draws with a top-k of at most ``MAX_FEW``.
        filtered: Draws with another top-k or a top-p.
    """

    biases: Biases | None = None
    penalties: Penalties | None = None
    free: Draws | None = None
    few: Draws | None = None
    filtered: Draws | None = None
