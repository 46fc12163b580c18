"""The exchanges of a step in a group of ranks, known before it begins: what a rank that ran out of memory still owes the others."""

from __future__ import annotations

from collections import deque

from hiserve.core.plan import BatchPlan
from hiserve.distributed.exchange import Exchanged
from hiserve.models.draft_heads import DraftHead
from hiserve.models.loading import AnyDecoder
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.gate import Action, Decision
from hiserve.sampling.logit_shares import LogitShares
from hiserve.sampling.params import Drawing


class StepExchanges:
    """Lists the exchanges of each step, and issues those that are left of one that failed here.

    A step has two or three parts: its forward and its draw, apart if it awaits masks, and its drafts.
    A graph is launched with all that it holds or not at all, so that what is left of a replay is known too.

    Args:
        shares: Of the logits of this rank.
        model: Its share.
        head: That of the draft head or model; None without.
        runners: Of both.
    """

    def __init__(self, shares: LogitShares, model: AnyDecoder, head: DraftHead | None, runners: Dispatch) -> None:
        self._shares = shares
        self._dtype = model.embedding.weight.dtype
        self._model = model
        self._head = head
        self._runners = runners
        self._parts: deque[list[Exchanged]] = deque()  # of the step that runs, which have not begun

    def begin(self, plan: BatchPlan, decision: Decision) -> None:
        """Begins the first part of a step that is not deferred."""
        forward, draw = self._of_forward(plan, decision), self._of_draw(plan, decision)
        drafts = self._of_drafts(plan, decision)
        self._parts.extend((forward, [draw], drafts) if plan.awaits_masks else ([*forward, draw], drafts))
        self.begin_next()

    def begin_next(self) -> None:
        """Begins the next part."""
        self._shares.exchange.expect(self._parts.popleft())

    def abandon(self, *, is_half: bool = False) -> None:
        """Issues what is left of a step that failed here, so that nobody waits for it.

        Args:
            is_half: Only of the part that has begun: the others begin the next one with a later order.
        """
        self._shares.exchange.finish()
        while self._parts and not is_half:
            self.begin_next()
            self._shares.exchange.finish()

    def _of_forward(self, plan: BatchPlan, decision: Decision) -> list[Exchanged]:
        num_tokens, num_logits, num_padded = plan.num_tokens, _num_logits(plan), 0
        if decision.is_whole:
            num_tokens = num_logits = decision.bucket * _width(plan)
        elif decision.action is Action.REPLAY:
            num_padded, num_logits = decision.bucket, self._runners.num_logits(num_logits)
        return self._model.exchanges(
            num_tokens, num_logits, wants_hidden_states=not plan.is_cold, num_padded=num_padded
        )

    def _of_draw(self, plan: BatchPlan, decision: Decision) -> Exchanged:
        is_whole = decision.sampling == Drawing.ANY.value or bool(plan.num_scored.any())
        num_logits = decision.bucket * _width(plan) if decision.is_whole and not is_whole else _num_logits(plan)
        return self._shares.exchanged(num_logits, self._dtype, is_whole=is_whole)

    def _of_drafts(self, plan: BatchPlan, decision: Decision) -> list[Exchanged]:
        if self._head is None or plan.is_cold:
            return []
        # The head computes the tokens of each row and the next one, and then draft after draft of the rows that sample.
        num_tokens, num_sampling = plan.num_tokens + plan.rows.size, int(plan.samples.sum())
        if self._runners.replays_drafts(plan, decision):
            num_tokens, num_sampling = decision.bucket * (1 + int(plan.num_new[0])), decision.bucket
        if not plan.num_propose or not num_sampling:
            return self._head.exchanges(num_tokens, 0)
        draw = self._shares.exchanged(num_sampling, self._dtype, is_whole=False)
        later = [*self._head.exchanges(num_sampling, num_sampling), draw] * (plan.num_propose - 1)
        return [*self._head.exchanges(num_tokens, num_sampling), draw, *later]


def _width(plan: BatchPlan) -> int:
    """Returns the most tokens that a row may emit."""
    return 1 + int(plan.num_draft.max())


def _num_logits(plan: BatchPlan) -> int:
    """Returns the rows of logits that a step wants."""
    return int(plan.samples.sum()) * _width(plan) + int(plan.num_scored.sum())
