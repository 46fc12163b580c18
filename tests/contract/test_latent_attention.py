"""Every backend of latent attention against one plain oracle, at the sizes of DeepSeek-V3 and GLM-4.7-Flash."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from hiserve.attention.backends import open_attention
from hiserve.attention.base import Attention, AttentionShape, LatentShape
from hiserve.attention.latent import LatentAttention
from hiserve.attention.paired import PairedAttention
from tests.contract.attention_subject import TOLERANCE
from tests.helpers.latent_case import LatentCase

LATENT = LatentShape(rank=512, rope_dim=64, nope_dim=128, value_dim=128, scale=192**-0.5)
# (tokens cached, tokens new), rows that decode first: page edges, chunks, a prompt that is expanded on a GPU.
ROWS = (
    (40, 1),
    (0, 1),
    (63, 1),
    (700, 1),
    (16, 3),
    (0, 9),
    (121, 8),
    (63, 65),
    (70, 100),
    (1, 2),
    (300, 140),
    (0, 128),
)
NUM_DECODE = 4
SUBJECTS: list[Any] = [
    pytest.param("reference", "cpu", torch.float64, 2, False, id="reference"),
    pytest.param("cpu", "cpu", torch.float32, 2, False, id="cpu"),
    *(
        pytest.param(name, "cuda", torch.bfloat16, heads, packs, marks=pytest.mark.gpu, id=f"{name}-{heads}-{packs}")
        for name, heads, packs in (
            ("triton", 20, False),
            ("triton", 128, False),
            ("flashinfer", 128, False),
            ("flashinfer", 16, False),
            ("auto", 128, False),
            ("auto", 20, False),
            ("auto", 128, True),
            ("auto", 20, True),
        )
    ),
]
pytestmark = pytest.mark.parametrize(("name", "device", "dtype", "heads", "packs"), SUBJECTS)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def opened(
    name: str, device: str, dtype: torch.dtype, heads: int, packs: bool, page_size: int = 16
) -> tuple[AttentionShape, Attention]:
    width = LATENT.rank + LATENT.rope_dim
    shape = AttentionShape(1, heads, 1, width, page_size, dtype, latent=LATENT, packs_rows=packs)
    attention = open_attention(name, shape, torch.device(device))
    assert isinstance(attention, LatentAttention)
    assert isinstance(attention._absorbed, PairedAttention) == (name == "auto" and heads == 128 and not packs)
    return shape, attention


def check(case: LatentCase, attention: Attention, dtype: torch.dtype) -> None:
    out = case.run(attention)
    assert out.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.cpu().double(), case.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_rows_see_what_is_theirs(
    name: str, device: str, dtype: torch.dtype, heads: int, packs: bool, page_size: int
) -> None:
    shape, attention = opened(name, device, dtype, heads, packs, page_size)
    check(LatentCase(shape, ROWS, num_decode=NUM_DECODE, device=device, packs=shape.packs_rows), attention, dtype)


def test_prompts_that_begin_see_no_other_prompt(
    name: str, device: str, dtype: torch.dtype, heads: int, packs: bool
) -> None:
    """One launch computes them on a GPU."""
    shape, attention = opened(name, device, dtype, heads, packs)
    rows = ((40, 1), (5, 7), (0, 130), (0, 200), (0, 3), (0, 128))
    check(LatentCase(shape, rows, num_decode=1, device=device, packs=shape.packs_rows), attention, dtype)


def test_each_plan_stands_until_the_next(name: str, device: str, dtype: torch.dtype, heads: int, packs: bool) -> None:
    """Steps follow each other without anybody waiting for the device."""
    shape, attention = opened(name, device, dtype, heads, packs)
    batches = (ROWS, ROWS[:NUM_DECODE], ROWS[4:6], ((0, 100), (5, 7)))
    cases = [LatentCase(shape, rows, num_decode=NUM_DECODE, device=device, packs=shape.packs_rows) for rows in batches]
    outs = [case.run(attention) for _ in range(3 if device == "cuda" else 1) for case in cases]
    tolerance = TOLERANCE[dtype]
    for index, out in enumerate(outs):
        expected = cases[index % len(cases)].expected
        torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def test_bounds_larger_than_the_lengths_change_nothing(
    name: str, device: str, dtype: torch.dtype, heads: int, packs: bool
) -> None:
    """Of rows that decode; where a backend needs lengths from the host they are exact."""
    shape, attention = opened(name, device, dtype, heads, packs)
    case = LatentCase(shape, ROWS, num_decode=NUM_DECODE, device=device, packs=shape.packs_rows)
    slack = np.where(np.arange(len(ROWS)) < NUM_DECODE, 0 if attention.needs_host_lengths else 9, 0)
    table = torch.nn.functional.pad(case.inputs.page_table, (0, 3), value=1)
    bounds = case.inputs.kv_bounds + slack.astype(np.int32)
    case.inputs = dataclasses.replace(case.inputs, kv_bounds=bounds, page_table=table, max_kv_len=16 * table.shape[1])
    check(case, attention, dtype)
