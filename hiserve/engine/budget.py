"""The one scheduling rule: how many tokens each row computes in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import MAX_SCORED_TOKENS, BoolArray, Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """The part of each row in a step, in columns."""

    num_new: Int32Array  # ``[B]``: tokens to compute, drafts included
    num_draft: Int32Array  # ``[B]``: of these, drafts
    samples: BoolArray  # ``[B]``: whether the row reaches the end of its known tokens
    num_scored: Int32Array  # ``[B]``: of the new tokens, the first that many are scored

    def pick(self, which: NDArray[np.int64]) -> Allocation:
        """Returns some rows: ``which`` is int64 ``[n]``, indices into B."""
        return Allocation(self.num_new[which], self.num_draft[which], self.samples[which], self.num_scored[which])

    def cut(self, num_new: Int32Array) -> Allocation:
        """Returns the same rows with fewer tokens of some prompts (int32 ``[B]``), which then end before their last token."""
        is_same = num_new == self.num_new
        return Allocation(
            num_new, np.where(is_same, self.num_draft, 0), self.samples & is_same, np.minimum(self.num_scored, num_new)
        )

    def join(self, other: Allocation) -> Allocation:
        """Returns these rows, then the other's."""
        return Allocation(
            np.concatenate((self.num_new, other.num_new)),
            np.concatenate((self.num_draft, other.num_draft)),
            np.concatenate((self.samples, other.samples)),
            np.concatenate((self.num_scored, other.num_scored)),
        )


def allocate_tokens(
    *,
    known: Int32Array,
    pending: Int32Array,
    computed: Int32Array,
    limit: Int32Array,
    to_score: Int32Array,
    drafted: Int32Array | None,
    max_len: int,
    budget: int,
) -> Allocation:
    """Splits the token budget over running rows.

    ``num_new = known + pending + num_draft - computed``, cut by the budget: chunked prefill,
    decode and verify are this one line. Rows that lack one token (decode, verify) come before rows with a prompt to
    compute, so that a long prompt delays no other row's next token.

    Args:
        known: int32 ``[B]``. Tokens the planner has seen.
        pending: int32 ``[B]``. Tokens that steps in flight may still append, at most.
        computed: int32 ``[B]``. Tokens whose KV is computed once the steps in flight end, at most.
        limit: int32 ``[B]``. Longest the row may get; a row that may have reached it in flight waits.
        to_score: int32 ``[B]``. The first that many tokens to compute are scored: of all rows, a step scores
            ``MAX_SCORED_TOKENS``.
        drafted: int32 ``[B]``. Drafts after the known tokens of each row, to be verified; None for none at all.
            They may pass the row's limit: rows of one width are one graph, and tokens beyond the limit are cut.
        max_len: Longest that any row may get.
        budget: Tokens of the whole step.

    Returns:
        The allocation of each row; ``num_new`` is 0 for a row that does nothing.
    """
    ahead = known + pending
    left = limit - ahead
    lacking = np.where(left > 0, ahead - computed, 0)
    # A row drafts once it has caught up: until then it has no last token to draft from.
    draft = np.zeros(lacking.size, dtype=np.int32)
    if drafted is not None:
        draft = np.where(lacking == 1, np.minimum(drafted, max_len - 1 - ahead), 0)
    need = lacking + draft
    scored = np.minimum(to_score, lacking)
    scores_fit = scored.sum() <= MAX_SCORED_TOKENS
    if scores_fit and need.sum() <= budget:
        return Allocation(need, draft, lacking > 0, scored)
    most = need
    if not scores_fit:
        room = np.maximum(MAX_SCORED_TOKENS - (np.cumsum(scored) - scored), 0)
        most = np.where(scored > room, room, need)
    order = np.argsort(lacking > 1, kind="stable")
    before = np.cumsum(most[order]) - most[order]
    num_new = np.zeros_like(need)
    num_new[order] = np.clip(budget - before, 0, most[order])
    samples = (num_new >= lacking) & (lacking > 0)
    return Allocation(num_new, np.where(samples, num_new - lacking, 0), samples, np.minimum(to_score, num_new))


def decode_first(rows: NDArray[np.int64], allocation: Allocation) -> tuple[NDArray[np.int64], Allocation]:
    """Returns the rows that do something, those with one token before their drafts first, otherwise in order."""
    is_long = allocation.num_new - allocation.num_draft > 1
    if is_long.any() or not allocation.num_new.all():
        order = np.argsort(is_long, kind="stable")
        busy = order[allocation.num_new[order] > 0]
        rows, allocation = rows[busy], allocation.pick(busy)
    return rows, allocation


def allocation_of_chunks(chunks: list[tuple[int, int, bool, int]]) -> tuple[NDArray[np.int64], Allocation]:
    """Returns rows int64 ``[n]`` that start with a chunk of their prompt, and their allocation.

    Args:
        chunks: Row, tokens of the chunk, whether it is the prompt's last, and how many of its tokens are scored.
    """
    rows = np.array([row for row, _, _, _ in chunks], dtype=np.int64)
    num_new = np.array([num_new for _, num_new, _, _ in chunks], dtype=np.int32)
    samples = np.array([is_last for _, _, is_last, _ in chunks], dtype=np.bool_)
    num_scored = np.array([num_scored for _, _, _, num_scored in chunks], dtype=np.int32)
    return rows, Allocation(num_new, np.zeros_like(num_new), samples, num_scored)
