"""Attention for graphs of ragged batches: planned once, it attends for whatever rows its places hold later.

Runs on a machine with a GPU under ``-m gpu``; ``tests/unit/attention/test_interpreted.py`` runs it by Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

from hiserve.runners.mixed import StaticInputs
from tests.contract.attention_subject import TOLERANCE, Subject

NUM_TOKENS, MAX_DECODE, MAX_WIDTH, MAX_PROMPTS, MAX_LEN = 64, 6, 4, 2, 320
# Rows that decode, with drafts and without, then prompts; less of either than there are places, all, and none.
STEPS = (
    ((40, 1), (63, 1), (300, 1), (0, 1), (15, 2), (16, 4), (0, 33), (63, 18)),
    ((5, 1), (0, 40)),
    ((0, 5),),
    ((31, 3), (100, 1)),
    ((200, 60),),
    ((0, 1), (16, 17), (0, 21)),
)


def _subjects() -> list[Any]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return [pytest.param(Subject("triton", "cpu", torch.float32), id="triton-cpu")]
    return [
        pytest.param(Subject("triton", "cuda", dtype), marks=pytest.mark.gpu, id=f"triton-{str(dtype)[6:]}")
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # by numpy, in Triton's interpreter
@pytest.mark.parametrize("subject", _subjects())
@pytest.mark.parametrize(
    "options",
    [{}, {"group": 4, "window": 33, "sinks": True, "hides_first": True}, {"window": 33, "frees_windows": True}],
    ids=["plain", "all", "freed"],
)
def test_rows_of_any_number_in_places_of_a_fixed_number(subject: Subject, options: dict[str, Any]) -> None:
    """The pool holds NaN wherever no row has anything, the sink included; tables name no page behind a row's own."""
    cases = [subject.case(lengths, page_size=16, adjacent=False, **options) for lengths in STEPS]
    for case in cases:
        case.shape = cases[0].shape  # sinks are drawn
    attention = subject.open(cases[0].shape).ragged()
    assert attention is not None
    has_windows = "frees_windows" in options
    static = StaticInputs(
        NUM_TOKENS, MAX_DECODE, MAX_PROMPTS, MAX_LEN // 16, cases[0].q.device, has_windows=has_windows
    )
    shape = cases[0].shape
    qkv = [
        torch.zeros((NUM_TOKENS, heads, shape.head_dim), dtype=shape.dtype, device=cases[0].q.device)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    ]
    for layer in (0, 1):
        attention.plan(static.bounded(NUM_TOKENS, MAX_WIDTH, MAX_LEN))
        for case in cases:
            num_tokens = case.q.shape[0]
            num_decode = sum(new <= MAX_WIDTH for _, new in case.lengths)
            static.fill(dataclasses.replace(case.inputs_of(layer), num_decode=num_decode), NUM_TOKENS)
            for buffer, made in zip(qkv, (case.q, case.k, case.v), strict=True):
                buffer.fill_(torch.nan)[:num_tokens].copy_(made)
            for before in range(layer + 1):  # the first layer splits rows for those behind it
                out = attention.forward(*qkv, case.kv, before)
            expected, tolerance = case.oracle(layer)[0], TOLERANCE[subject.dtype]
            torch.testing.assert_close(out[:num_tokens].cpu().double(), expected, atol=tolerance, rtol=tolerance)
