"""The exchanges of a step in a group of ranks, known before it begins: what a rank that ran out of memory still owes the others."""

from __future__ import annotations

from hiserve.core.plan import BatchPlan
from hiserve.distributed.exchange import Exchange, Exchanged
from hiserve.models.draft_heads import DraftHead
from hiserve.models.loading import AnyDecoder
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.gate import Action, Decision


class StepExchanges:
    """Lists the exchanges of each step, and issues those that are left of one that failed here.

    A graph is launched with all that it holds or not at all, so that what is left of a replay is known too.

    Args:
        exchange: This rank's.
        model: Its share.
        head: That of the draft head or model; None without.
        runners: Of both.
    """

    def __init__(self, exchange: Exchange, model: AnyDecoder, head: DraftHead | None, runners: Dispatch) -> None:
        self._exchange = exchange
        self._model = model
        self._head = head
        self._runners = runners
        self._owes_drafts = False  # of the step that runs
        self._replays_drafts, self._bucket = False, 0

    def begin(self, plan: BatchPlan, decision: Decision) -> None:
        """Begins the forward of a step that is not deferred."""
        self._owes_drafts = True
        self._replays_drafts, self._bucket = self._runners.replays_drafts(plan, decision), decision.bucket
        width, num_padded = 1 + int(plan.num_draft.max()), 0
        num_tokens, num_logits = plan.num_tokens, int(plan.samples.sum()) * width + int(plan.num_scored.sum())
        if decision.is_whole:
            num_tokens = num_logits = decision.bucket * width
        elif decision.action is Action.REPLAY:
            num_padded, num_logits = decision.bucket, self._runners.num_logits(num_logits)
        wants_hidden_states = not plan.is_cold
        self._exchange.expect(
            self._model.exchanges(
                num_tokens, num_logits, wants_hidden_states=wants_hidden_states, num_padded=num_padded
            )
        )

    def begin_drafts(self, plan: BatchPlan) -> None:
        """Begins the drafts after a step."""
        self._owes_drafts = False
        self._exchange.expect(self._of_drafts(plan))

    def abandon(self, plan: BatchPlan, *, owes_drafts: bool = True) -> None:
        """Issues what is left of a step that failed here, so that nobody waits for it.

        Args:
            plan: Of the step.
            owes_drafts: Also those of its drafts; not if the others will be told to draft by a later order.
        """
        self._exchange.finish()
        if owes_drafts and self._owes_drafts:
            self.begin_drafts(plan)
            self._exchange.finish()

    def _of_drafts(self, plan: BatchPlan) -> list[Exchanged]:
        if self._head is None or plan.is_cold:
            return []
        # The head computes the tokens of each row and the next one, and then draft after draft of the rows that sample.
        num_tokens, num_sampling = plan.num_tokens + plan.rows.size, int(plan.samples.sum())
        if self._replays_drafts:
            num_tokens, num_sampling = self._bucket * (1 + int(plan.num_new[0])), self._bucket
        if not plan.num_propose or not num_sampling:
            return self._head.exchanges(num_tokens, 0)
        later = self._head.exchanges(num_sampling, num_sampling) * (plan.num_propose - 1)
        return self._head.exchanges(num_tokens, num_sampling) + later
