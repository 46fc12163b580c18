"""The kernels of compressed rows against their twin, run by Triton's interpreter."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

HEADER = """
import torch
from torch.testing import assert_close
from hiserve.kernels import compress as fused, compress_reference as reference
from tests.helpers.compressed_cases import Compressed, random_compression

torch.set_num_threads(1)
WIDTH = 8

def pair(ratio, num_series, dtype=torch.float32, **how):
    # Twice the same request, in strided activations.
    torch.manual_seed(ratio)
    weights = random_compression(WIDTH, ratio, num_series, torch.float32)
    values, scores = torch.randn(2, 70, num_series * WIDTH + 3).to(dtype)[..., 3:]
    turns = torch.randn(70, 2)
    made = []
    for _ in range(2):
        torch.manual_seed(ratio)
        made.append(Compressed(weights, values, scores, turns, **how))
    return made

def check(ours, theirs, *step, **more):
    ours.step(fused.compress, *step, **more)
    theirs.step(reference.compress, *step, **more)
    owned = slice(ours.page_rows, None)  # what is nobody's, the twin alone writes
    close = dict(rtol=2e-5, atol=2e-5) if ours.values.dtype == torch.float32 else dict(rtol=2e-3, atol=2e-3)
    assert_close(ours.pool[owned], theirs.pool[owned], equal_nan=True, **close)
    assert_close(ours.carried.rows[1:], theirs.carried.rows[1:], equal_nan=True)
    assert_close(ours.carried.snapshots[1:], theirs.carried.snapshots[1:], equal_nan=True)
"""
CHUNKS = """
for ratio, num_series, dtype in ((4, 2, torch.float32), (20, 1, torch.float16), (1, 1, torch.float32)):
    ours, theirs = pair(ratio, num_series, dtype, ring=num_series * ratio + 6)
    for start, end in ((0, 21), (21, 22), (22, 25), (25, 40)) if ratio > 1 else ((0, 3), (3, 4)):
        check(ours, theirs, start, end)
    assert not ours.rows(end).isnan().any()
    # Refused drafts are written over.
    check(ours, theirs, 40, 43, num_draft=2)
    check(ours, theirs, 41, 44, num_draft=2)
"""
SNAPSHOTS = """
for steps in (((0, 10), (10, 26), (26, 27)), ((0, 6), (6, 7), (7, 8), (8, 9)), ((0, 3), (3, 5), (5, 10))):
    ours, theirs = pair(4, 2, ring=14, num_kept=4)
    for start, end in steps:
        check(ours, theirs, start, end, num_draft=int(start > 0 and end > start + 1), snap_at=8, state_len=max(0, start - 1))
    assert not ours.carried.snapshots[1].isnan().any()
"""


def test_rows_and_rings_are_those_of_the_twin_whatever_the_chunks() -> None:
    run_interpreted(HEADER + CHUNKS)


def test_snapshots_are_those_of_the_twin() -> None:
    run_interpreted(HEADER + SNAPSHOTS)
