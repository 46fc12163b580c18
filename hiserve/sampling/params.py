"""Sampling parameters on the device, one entry a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiserve.core.request import SamplingParams
from hiserve.core.upload import upload


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """What one sampling call needs beside the logits of its S rows.

    Attributes:
        temperature: float64 ``[S]``; 0 is greedy.
        top_k: int64 ``[S]``; 0 keeps all.
        top_p: float64 ``[S]``, in (0, 1].
        seed: int64 ``[S]``.
        choice: int64 ``[S]``.
        position: int64 ``[S]``. Absolute position of the token to draw.
        has_noise: Some row is not greedy.
        has_filter: Some row that is not greedy has a top-k or top-p.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor
    has_noise: bool
    has_filter: bool


class SamplingRows:
    """Parameters of every permanent row; the host knows which rows need noise or a filter.

    Args:
        num_rows: Rows, the padding row included.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._device = device
        self._floats = torch.zeros((num_rows, 2), dtype=torch.float64, device=device)  # temperature, top-p
        self._ints = torch.zeros((num_rows, 3), dtype=torch.int64, device=device)  # top-k, seed, choice
        self._has_noise = np.zeros(num_rows, dtype=np.bool_)
        self._has_filter = np.zeros(num_rows, dtype=np.bool_)

    def write(self, rows: NDArray[np.int64], params: Sequence[SamplingParams], choices: Sequence[int]) -> None:
        """Sets the parameters of newly admitted rows, whose seeds were drawn at admission."""
        floats = np.array([(each.temperature, each.top_p) for each in params], dtype=np.float64)
        ints = np.array(
            [(max(0, each.top_k), each.seed, choice) for each, choice in zip(params, choices, strict=True)],
            dtype=np.int64,
        )
        self._has_noise[rows] = floats[:, 0] > 0
        self._has_filter[rows] = (floats[:, 0] > 0) & ((ints[:, 0] > 0) | (floats[:, 1] < 1))
        on_device, new_floats, new_ints = upload((rows, floats, ints), self._device)
        self._floats.index_copy_(0, on_device, new_floats)
        self._ints.index_copy_(0, on_device, new_ints)

    def gather(self, host_rows: NDArray[np.int32], rows: Tensor, position: Tensor) -> SamplingBatch:
        """Returns the parameters of the rows that sample in this step.

        Args:
            host_rows: int32 ``[S]``, on the host.
            rows: The same rows on the device, int64.
            position: int64 ``[S]``. Absolute position of each row's next token.
        """
        temperature, top_p = self._floats.index_select(0, rows).unbind(1)
        top_k, seed, choice = self._ints.index_select(0, rows).unbind(1)
        return SamplingBatch(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            choice=choice,
            position=position,
            has_noise=bool(self._has_noise[host_rows].any()),
            has_filter=bool(self._has_filter[host_rows].any()),
        )
