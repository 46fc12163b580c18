"""Puts sampling parameters into rows and gathers them again, as a step does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hiserve.core.plan import RowAdmit
from hiserve.core.request import SamplingParams
from hiserve.sampling.batch import SamplingBatch
from hiserve.sampling.params import SamplingRows

CPU = torch.device("cpu")


def admit(
    row: int, params: SamplingParams, choice: int = 0, tokens: Sequence[int] = (0,), num_prompt: int | None = None
) -> RowAdmit:
    """A request for a row; all its tokens are prompt, unless ``num_prompt`` says how many are."""
    known = np.array(tokens, dtype=np.int32)
    return RowAdmit(row, known, known.size if num_prompt is None else num_prompt, 0, params, choice)


def gather(
    rows: SamplingRows, numbers: Sequence[int], positions: Sequence[int], tokens: torch.Tensor | None = None
) -> SamplingBatch:
    """What some rows need at some positions; ``tokens`` int32 ``[R, L]`` only matter to penalties."""
    host = np.array(numbers, dtype=np.int64)
    known = torch.zeros((host.max() + 1, 1), dtype=torch.int32) if tokens is None else tokens
    return rows.gather(host.astype(np.int32), torch.from_numpy(host), torch.tensor(list(positions)), known)


def batch(
    params: Sequence[SamplingParams], positions: Sequence[int], choices: Sequence[int] | None = None
) -> SamplingBatch:
    """Gives each of ``params`` a row, from row 1, and gathers them all."""
    rows = SamplingRows(len(params) + 1, CPU)
    rows.write([admit(index + 1, each, choices[index] if choices else 0) for index, each in enumerate(params)])
    return gather(rows, range(1, len(params) + 1), positions)
