"""N-gram search of a row's last tokens among its earlier ones, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.step_ops import RowTensors

_BLOCK = 4096
_NUM_WARPS = 8


def draft_ngrams(
    rows: Tensor, state: RowTensors, *, num_draft: int, min_ngram: int, max_ngram: int, max_known: int
) -> None:
    row_len = state.tokens.shape[1]
    assert max_known > 0 and max_ngram * row_len < 2**31, f"{max_ngram} of {row_len} tokens have no 32-bit score"
    _draft_ngrams[(rows.shape[0],)](
        rows,
        state.known_len,
        state.tokens,
        row_len,
        num_draft,
        MIN_NGRAM=min_ngram,
        MAX_NGRAM=max_ngram,
        BLOCK=_BLOCK,
        DRAFT_BLOCK=triton.next_power_of_2(num_draft),
        num_warps=_NUM_WARPS,
        **early_launch(rows.device),
    )


@triton.jit(do_not_specialize=["rows", "num_draft"])  # type: ignore[untyped-decorator]
def _draft_ngrams(  # type: ignore[no-untyped-def]
    rows,
    known_len,
    tokens,
    row_len,
    num_draft,
    MIN_NGRAM: tl.constexpr,  # noqa: N803
    MAX_NGRAM: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    DRAFT_BLOCK: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program reads one row's known tokens once and copies the continuation of the best match."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row = tl.load(rows + tl.program_id(0))
    known = tl.load(known_len + row).to(tl.int32)
    text = tokens + row * row_len
    best = tl.full((BLOCK,), -1, tl.int32)
    for start in range(0, known - 1, BLOCK):
        end = start + tl.arange(0, BLOCK)
        agrees = end < known - 1
        num_equal = tl.zeros((BLOCK,), tl.int32)
        for back in tl.static_range(MAX_NGRAM):
            agrees = agrees & (end >= back)
            wanted = tl.load(text + known - 1 - back, mask=known > back, other=0)
            agrees = agrees & (tl.load(text + end - back, mask=agrees, other=0) == wanted)
            num_equal += agrees.to(tl.int32)
        # The longest match wins, and of these the latest.
        best = tl.maximum(best, tl.where(num_equal >= MIN_NGRAM, num_equal * row_len + end, -1))
    score = tl.max(best, 0)
    distance = tl.where(score < 0, 1, known - 1 - score % row_len)
    index = tl.arange(0, DRAFT_BLOCK)
    is_placed = index < tl.where(known > 0, tl.minimum(num_draft, row_len - known), 0)
    draft = tl.load(text + known - distance + index % distance, mask=is_placed, other=0)
    tl.store(text + known + index, draft, mask=is_placed)
