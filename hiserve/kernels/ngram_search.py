"""N-gram search of a row's last tokens among its earlier ones, and in its continuation, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.plan import MAX_FOLLOWING
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.step_ops import RowTensors

_BLOCK = 4096
_NUM_WARPS = 8


def draft_ngrams(
    rows: Tensor,
    state: RowTensors,
    continuations: Tensor,
    *,
    num_draft: int,
    min_ngram: int,
    max_ngram: int,
    max_known: int,
) -> None:
    row_len, num_following = state.tokens.shape[1], continuations.shape[1] - 2
    assert num_following <= MAX_FOLLOWING, f"continuations of {num_following} tokens; the most is {MAX_FOLLOWING}"
    assert max_known > 0 and max_ngram * row_len < 2**31, f"{max_ngram} of {row_len} tokens have no 32-bit score"
    _draft_ngrams[(rows.shape[0],)](
        rows, state.known_len, state.tokens, continuations, row_len, num_draft, num_following,
        MIN_NGRAM=min_ngram, MAX_NGRAM=max_ngram, BLOCK=_BLOCK, DRAFT_BLOCK=triton.next_power_of_2(num_draft),
        FOLLOW_BLOCK=MAX_FOLLOWING, num_warps=_NUM_WARPS, **early_launch(rows.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "continuations", "num_draft", "num_following"])
def _draft_ngrams(  # type: ignore[no-untyped-def]
    rows, known_len, tokens, continuations, row_len, num_draft, num_following,
    MIN_NGRAM: tl.constexpr, MAX_NGRAM: tl.constexpr, BLOCK: tl.constexpr, DRAFT_BLOCK: tl.constexpr,
    FOLLOW_BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program reads one row's known tokens once and copies what follows the best match, or its continuation's rest."""
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
    num_agree = tl.where(score < 0, 0, score // row_len)
    distance = tl.where(score < 0, 1, known - 1 - score % row_len)
    # The continuation is followed where the tokens since it began are its first ones.
    continuation = continuations + tl.program_id(0) * (2 + num_following)
    begin, agreed = tl.load(continuation), tl.load(continuation + 1)
    following, num_since = continuation + 2, known - begin
    num_left = tl.where((agreed > 0) & (num_since >= 0), num_following - num_since, 0)
    since = tl.arange(0, FOLLOW_BLOCK)
    is_since = since < tl.where(num_left > 0, num_since, 0)
    got = tl.load(text + begin + since, mask=is_since, other=0)
    wanted = tl.load(following + since, mask=is_since, other=0)
    num_left = tl.where(tl.max((got != wanted).to(tl.int32), 0) == 0, num_left, 0)
    num_left = tl.where(agreed + num_since > num_agree, num_left, 0)
    index = tl.arange(0, DRAFT_BLOCK)
    num_placed = tl.where(known > 0, tl.minimum(num_draft, row_len - known), 0)
    is_placed, is_following = index < num_placed, index < tl.minimum(num_left, num_placed)
    draft = tl.load(text + known - distance + index % distance, mask=is_placed, other=0)
    draft = tl.where(is_following, tl.load(following + num_since + index, mask=is_following, other=0), draft)
    tl.store(text + known + index, draft, mask=is_placed)
