"""Puts sampling parameters into rows and gathers them again, as a step does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from hiserve.core.plan import RowAdmit
from hiserve.core.request import SamplingParams
from hiserve.kernels.step_ops import TokenMasks
from hiserve.sampling.params import SamplingRows
from hiserve.sampling.sampler import SamplingBatch

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


def wanted_logits(
    logits: Sequence[float],
    params: SamplingParams,
    tokens: Sequence[int] = (),
    num_prompt: int = 0,
    ends: Sequence[int] = (),
) -> list[float]:
    """What one row's logits become before the noise, token by token, in plain Python; -inf where filtered out.

    Args:
        logits: The model's.
        params: What was asked for.
        tokens: All known tokens.
        num_prompt: How many of them are the prompt.
        ends: The model's end tokens.
    """
    values = list(logits)
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    output = list(tokens[num_prompt:])
    for token in set(tokens):
        values[token] *= params.repetition_penalty if values[token] <= 0 else 1 / params.repetition_penalty
    for token in set(output):
        values[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if len(output) < params.min_tokens:
        for token in {*params.stop_token_ids, *(() if params.ignore_eos else ends)}:
            values[token] = -math.inf
    if params.temperature == 0:
        return values
    best = max(values)
    values = [(value - best) / params.temperature for value in values]
    kept = sorted(range(len(values)), key=lambda token: -values[token])
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, mass, nucleus = sum(math.exp(values[token]) for token in kept), 0.0, []
    for token in kept:
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        nucleus.append(token)
        mass += math.exp(values[token])
    kept = [token for token in nucleus if math.exp(values[token]) >= params.min_p]
    return [value if token in kept else -math.inf for token, value in enumerate(values)]


def random_logits(generator: torch.Generator, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(num_rows, size, generator=generator) * 4
    logits[torch.rand(num_rows, size, generator=generator) < 0.1] = -torch.inf
    return logits.to(dtype)


def keys(generator: torch.Generator, num_rows: int) -> tuple[torch.Tensor, ...]:
    """Temperatures, seeds, choices and positions; some as large as they can be."""
    temperature = torch.rand(num_rows, generator=generator, dtype=torch.float64) * 2 + 1e-6
    seed = torch.randint(0, 2**63 - 1, (num_rows,), generator=generator)
    choice, position = torch.randint(0, 2**32, (2, num_rows), generator=generator)
    if num_rows > 1:
        seed[1], choice[1], position[1] = 2**63 - 1, 2**32 - 1, 2**32 - 1
    return temperature, seed, choice, position


def random_masks(generator: torch.Generator, num_rows: int, size: int) -> TokenMasks:
    """Masks of rows of logits: every third row is free, others share masks; each allows a token."""
    words = torch.randint(-(2**31), 2**31, (2, -(-size // 32)), generator=generator, dtype=torch.int64)
    words[:, 0] |= 2
    entries = torch.arange(num_rows) % 3 - 1
    return TokenMasks(entries.to(torch.int32), words.to(torch.int32))
