"""Sampling parameters of every permanent row: values on the device, flags of their use on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiserve.core.plan import Int32Array, RowAdmit
from hiserve.core.request import MAX_BIASES, MAX_STOP_TOKENS, SamplingParams
from hiserve.core.upload import upload
from hiserve.sampling.sampler import MAX_FEW, Biases, Draws, Penalties, SamplingBatch, Subset

# Features that a row uses, as bits.
_BIAS, _PENALTY, _FREE, _FEW, _FILTERED, _MIN_P = (1 << bit for bit in range(6))
_T = TypeVar("_T")


class _Floats(NamedTuple, Generic[_T]):
    """The columns of type float64: the values of one row, or tensors of several."""

    temperature: _T
    top_p: _T
    log_min_p: _T
    repetition: _T
    presence: _T
    frequency: _T


class _Ints(NamedTuple, Generic[_T]):
    """The columns of type int64; an end token may stand from position ``first_end`` on."""

    top_k: _T
    seed: _T
    choice: _T
    num_prompt: _T
    first_end: _T


# Read in each step: no views of the other columns are made.
_TEMPERATURE = _Floats._fields.index("temperature")
_SEED, _CHOICE = map(_Ints._fields.index, ("seed", "choice"))


class Drawing(Enum):
    """The simplest correct method to draw the tokens of some rows."""

    GREEDY = "greedy"  # the likeliest token of unchanged logits
    FREE = "free"  # that, or a draw from all tokens
    ANY = "any"  # as ``gather`` says


class SamplingRows:
    """Parameters of every permanent row; ``num_rows`` includes the padding row.

    A row's biases are read only while its flag is set, so they need no clearing.
    """

    def __init__(self, num_rows: int, device: torch.device, eos_token_ids: Sequence[int] = ()) -> None:
        self._device = device
        self._eos_token_ids = tuple(eos_token_ids)
        self._floats = torch.zeros((num_rows, len(_Floats._fields)), dtype=torch.float64, device=device)
        self._ints = torch.zeros((num_rows, len(_Ints._fields)), dtype=torch.int64, device=device)
        # Biases first, then end tokens.
        width = MAX_BIASES + MAX_STOP_TOKENS + len(self._eos_token_ids)
        self._bias_tokens = torch.zeros((num_rows, width), dtype=torch.int64, device=device)
        self._bias_values = torch.zeros((num_rows, width), dtype=torch.float64, device=device)
        self._needs = np.zeros(num_rows, dtype=np.uint8)
        self._num_top = np.full(num_rows, -1, dtype=np.int8)  # -1: no scores
        self._num_prompt_top = np.full(num_rows, -1, dtype=np.int8)

    def write(self, admit: Sequence[RowAdmit]) -> None:
        """Sets the parameters of newly admitted rows, whose seeds were drawn at admission."""
        rows = np.array([each.row for each in admit], dtype=np.int64)
        params = [each.sampling for each in admit]
        early_ends = [self._early_ends(each) for each in params]
        self._needs[rows] = [_needs(each, ends) for each, ends in zip(params, early_ends, strict=True)]
        self._num_top[rows] = [_or_none(each.logprobs) for each in params]
        self._num_prompt_top[rows] = [_or_none(each.prompt_logprobs) for each in params]
        floats = np.array([_floats(each) for each in params], dtype=np.float64)
        ints = np.array([_ints(each) for each in admit], dtype=np.int64)
        on_device, new_floats, new_ints = upload((rows, floats, ints), self._device)
        self._floats.index_copy_(0, on_device, new_floats)
        self._ints.index_copy_(0, on_device, new_ints)
        biased = np.flatnonzero(self._needs[rows] & _BIAS)
        if biased.size:
            self._write_biases(rows[biased], [params[i] for i in biased], [early_ends[i] for i in biased])

    def _early_ends(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokens that may not be chosen before ``min_tokens``."""
        if params.min_tokens == 0 or params.grammar is not None:
            return ()
        return params.stop_token_ids + (() if params.ignore_eos else self._eos_token_ids)

    def _write_biases(
        self, rows: NDArray[np.int64], params: Sequence[SamplingParams], early_ends: Sequence[tuple[int, ...]]
    ) -> None:
        tokens = np.zeros((rows.size, self._bias_tokens.shape[1]), dtype=np.int64)
        values = np.zeros(tokens.shape, dtype=np.float64)
        for index, (each, ends) in enumerate(zip(params, early_ends, strict=True)):
            bias = each.logit_bias or {}
            tokens[index, : len(bias)] = list(bias)
            values[index, : len(bias)] = list(bias.values())
            tokens[index, MAX_BIASES : MAX_BIASES + len(ends)] = ends
            values[index, MAX_BIASES : MAX_BIASES + len(ends)] = -np.inf
        on_device, new_tokens, new_values = upload((rows, tokens, values), self._device)
        self._bias_tokens.index_copy_(0, on_device, new_tokens)
        self._bias_values.index_copy_(0, on_device, new_values)

    def drawing(self, host_rows: Int32Array) -> Drawing:
        """Returns the method for these rows."""
        needs = int(np.bitwise_or.reduce(self._needs[host_rows], initial=0))
        if not needs:
            return Drawing.GREEDY
        return Drawing.FREE if needs == _FREE else Drawing.ANY

    def free_draws(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns temperature (float64, 0 for the likeliest token), seed and choice (int64) of some rows, each ``[S]``."""
        ints, temperature = self._ints.index_select(0, rows), self._floats[:, _TEMPERATURE].index_select(0, rows)
        return temperature, ints[:, _SEED].contiguous(), ints[:, _CHOICE].contiguous()

    def num_top(self, host_rows: Int32Array) -> int | None:
        """Returns the most likeliest tokens that any of the rows reports per sampled token; None if none does."""
        return _most(self._num_top[host_rows])

    def num_prompt_top(self, host_rows: Int32Array) -> int | None:
        """Returns the most likeliest tokens that any of the rows reports per prompt token; None if none does."""
        return _most(self._num_prompt_top[host_rows])

    def gather(
        self,
        host_rows: Int32Array,
        rows: Tensor,
        position: Tensor,
        tokens: Tensor,
        ahead: tuple[Tensor, Tensor] | None = None,
    ) -> SamplingBatch:
        """Returns the sampling inputs of the S entries of a batch.

        Args:
            host_rows: int32 ``[S]``, on the host. A row may occur several times, at several positions.
            rows: The same rows on the device, int64.
            position: int64 ``[S]``. Absolute position of the token that each entry draws.
            tokens: int32 ``[R, L]``. Tokens of all permanent rows, valid up to each ``position``.
            ahead: Positions int64 ``[S, n]`` and tokens int32 ``[S, n]`` that replace those of ``tokens`` for each entry.
        """
        needs = self._needs[host_rows]
        floats, ints = self._floats.index_select(0, rows), self._ints.index_select(0, rows)
        has_min_p = bool((needs & _MIN_P).any())
        biased, penalised, *drawing = _subsets(needs, (_BIAS, _PENALTY, _FREE, _FEW, _FILTERED), self._device)
        free, few, filtered = (_draws(subset, floats, ints, position, has_min_p) for subset in drawing)
        return SamplingBatch(
            biases=None if biased is None else self._biases(biased, ints, rows, position),
            penalties=None if penalised is None else _penalties(penalised, floats, ints, rows, position, tokens, ahead),
            free=free,
            few=few,
            filtered=filtered,
        )

    def _biases(self, subset: Subset, ints: Tensor, rows: Tensor, position: Tensor) -> Biases:
        mine = subset.take(rows)
        values = self._bias_values.index_select(0, mine)
        may_end = subset.take(position) >= _Ints(*subset.take(ints).unbind(1)).first_end
        values[:, MAX_BIASES:].masked_fill_(may_end[:, None], 0)
        return Biases(subset, self._bias_tokens.index_select(0, mine), values)


def _draws(subset: Subset | None, floats: Tensor, ints: Tensor, position: Tensor, has_min_p: bool) -> Draws | None:
    if subset is None:
        return None
    of_floats, of_ints = _Floats(*subset.take(floats).unbind(1)), _Ints(*subset.take(ints).unbind(1))
    return Draws(
        subset=subset,
        temperature=of_floats.temperature,
        top_k=of_ints.top_k,
        top_p=of_floats.top_p,
        log_min_p=of_floats.log_min_p if has_min_p else None,
        seed=of_ints.seed,
        choice=of_ints.choice,
        position=subset.take(position),
    )


def _penalties(
    subset: Subset,
    floats: Tensor,
    ints: Tensor,
    rows: Tensor,
    position: Tensor,
    tokens: Tensor,
    ahead: tuple[Tensor, Tensor] | None,
) -> Penalties:
    of_floats = _Floats(*subset.take(floats).unbind(1))
    known = tokens.index_select(0, subset.take(rows)).long()
    if ahead is not None:
        places, drafts = map(subset.take, ahead)
        known.scatter_(1, places, drafts.long())
    return Penalties(
        subset=subset,
        repetition=of_floats.repetition,
        presence=of_floats.presence,
        frequency=of_floats.frequency,
        tokens=known,
        num_prompt=_Ints(*subset.take(ints).unbind(1)).num_prompt,
        position=subset.take(position),
    )


def _subsets(needs: NDArray[np.uint8], bits: Sequence[int], device: torch.device) -> list[Subset | None]:
    """Returns the rows of each bit, None where there are none.

    ``needs`` is uint8 ``[S]``. Only an index of some but not all rows is uploaded, all indices in one copy.
    """
    of_any, of_all = int(np.bitwise_or.reduce(needs)), int(np.bitwise_and.reduce(needs))
    indices = [np.flatnonzero(needs & bit) for bit in bits if of_any & ~of_all & bit]
    uploaded = iter(upload(indices, device) if indices else ())
    return [Subset(None if of_all & bit else next(uploaded)) if of_any & bit else None for bit in bits]


def _needs(params: SamplingParams, early_ends: tuple[int, ...]) -> int:
    needs = 0
    if params.temperature > 0:
        is_few, is_filtered = 0 < params.top_k <= MAX_FEW, params.top_k > 0 or params.top_p < 1
        needs = (_FEW if is_few else _FILTERED if is_filtered else _FREE) | (_MIN_P if params.min_p > 0 else 0)
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        needs |= _PENALTY
    return needs | (_BIAS if params.logit_bias or early_ends else 0)


def _floats(params: SamplingParams) -> _Floats[float]:
    return _Floats(
        temperature=params.temperature,
        top_p=params.top_p,
        log_min_p=math.log(params.min_p) if params.min_p > 0 else -math.inf,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )


def _ints(admit: RowAdmit) -> _Ints[int]:
    params = admit.sampling
    assert params.seed is not None, f"row {admit.row} was admitted without a seed"
    return _Ints(
        top_k=max(0, params.top_k),
        seed=params.seed,
        choice=admit.choice,
        num_prompt=admit.num_prompt,
        first_end=admit.num_prompt + params.min_tokens,
    )


def _or_none(num_top: int | None) -> int:
    return -1 if num_top is None else num_top


def _most(num_top: NDArray[np.int8]) -> int | None:
    most = int(num_top.max(initial=-1))
    return None if most < 0 else most
