"""The exchanges of a step in a group of ranks, known before it begins: what a rank that ran out of memory still owes the others."""

from __future__ import annotations

from hiserve.core.plan import BatchPlan
from hiserve.distributed.exchange import Exchange, Exchanged
from hiserve.errors import EngineError
from hiserve.models.draft_heads import DraftHead
from hiserve.models.loading import AnyDecoder
from hiserve.runners.gate import Action, Decision


class StepExchanges:
    """Lists the exchanges of each step, and issues those that are left of one that failed here.

    Those of a replayed graph are not listed: memory that runs out at its launch ends the rank, and with it the group.

    Args:
        exchange: This rank's.
        model: Its share.
        head: That of the draft head or model; None without.
    """

    def __init__(self, exchange: Exchange, model: AnyDecoder, head: DraftHead | None) -> None:
        self._exchange = exchange
        self._model = model
        self._head = head
        self._owes_drafts = False  # of the step that runs
        self._is_listed = False

    def begin(self, plan: BatchPlan, decision: Decision) -> None:
        """Begins the forward of a step that is not deferred."""
        self._is_listed = decision.action is Action.EAGER
        self._owes_drafts = True
        if self._is_listed:
            width, num_sampling = 1 + int(plan.num_draft.max()), int(plan.samples.sum())
            num_logits = num_sampling * width + int(plan.num_scored.sum())
            self._exchange.expect(
                self._model.exchanges(plan.num_tokens, num_logits, wants_hidden_states=not plan.is_cold)
            )
        else:
            self._exchange.expect(None)

    def begin_drafts(self, plan: BatchPlan) -> None:
        """Begins the drafts after a step."""
        self._owes_drafts = False
        self._exchange.expect(self._of_drafts(plan) if self._is_listed else None)

    def abandon(self, plan: BatchPlan, *, owes_drafts: bool = True) -> None:
        """Issues what is left of a step that failed here, so that nobody waits for it.

        Args:
            plan: Of the step.
            owes_drafts: Also those of its drafts; not if the others will be told to draft by a later order.

        Raises:
            EngineError: What is left is not known.
        """
        if not self._is_listed:
            raise EngineError(f"memory ran out while step {plan.step_id} was replayed by a group of ranks.")
        self._exchange.finish()
        if owes_drafts and self._owes_drafts:
            self.begin_drafts(plan)
            self._exchange.finish()

    def _of_drafts(self, plan: BatchPlan) -> list[Exchanged]:
        if self._head is None or plan.is_cold:
            return []
        # The head computes the tokens of each row and the next one, and then draft after draft of the rows that sample.
        num_tokens, num_sampling = plan.num_tokens + plan.rows.size, int(plan.samples.sum())
        if not plan.num_propose or not num_sampling:
            return self._head.exchanges(num_tokens, 0)
        later = self._head.exchanges(num_sampling, num_sampling) * (plan.num_propose - 1)
        return self._head.exchanges(num_tokens, num_sampling) + later
