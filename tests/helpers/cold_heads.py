"""A controller that lets a head go cold when a test says so, and a count of what the head computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hiserve import LLM
from hiserve.core.plan import BatchPlan, Int32Array
from hiserve.models.draft_heads import DraftHead
from hiserve.spec.head import HeadProposer
from tests.helpers.tiered import engine_of


class Scripted:
    """As ``DraftController``: the same number of drafts in every step but those of the cold.

    Args:
        num_draft: Of warm steps.
        is_cold_at: Whether the head is cold in a step, by its number.
    """

    times_own_drafts = False

    def __init__(self, num_draft: int, is_cold_at: Callable[[int], bool]) -> None:
        self._num_draft = num_draft
        self._is_cold_at = is_cold_at
        self.num_steps = 0

    @property
    def is_cold(self) -> bool:
        return self._is_cold_at(self.num_steps)

    def stays_cold(self, allowed: Int32Array) -> bool:
        self.num_steps += 1
        return self.is_cold

    def choose(self, allowed: Int32Array, mean_context: float) -> int:
        return self._num_draft

    def record(self, *_: Any) -> None:
        """Learns nothing."""


class Counted:
    """A head that counts its forwards."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self.num_forwards = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def forward(self, *args: Any) -> Any:
        self.num_forwards += 1
        return self._head.forward(*args)

    def fuse(self, aux_states: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return self._head.fuse(aux_states)


def script(llm: LLM, controller: Any) -> None:
    """Puts a controller in the place of an engine's."""
    engine_of(llm)._planner._drafting._controller = controller


def counted(llm: LLM) -> Counted:
    """Counts what the head of an engine computes from now on."""
    proposer = proposer_of(llm)
    proposer._head = head = Counted(proposer._head)  # type: ignore[assignment]
    return head


def proposer_of(llm: LLM) -> HeadProposer:
    proposer = engine_of(llm)._executor._runners._proposer  # type: ignore[attr-defined]
    assert isinstance(proposer, HeadProposer)
    return proposer


def forwards_in_the_cold(llm: LLM, head: Counted) -> list[int]:
    """Returns a list that gets the head's forwards behind each cold step; on a CPU without overlap, where a step is over at once."""
    found: list[int] = []
    executor: Any = engine_of(llm)._executor
    submit = executor.submit

    def watch(plan: BatchPlan) -> Any:
        before = head.num_forwards
        done = submit(plan)
        if plan.is_cold:
            found.append(head.num_forwards - before)
        return done

    executor.submit = watch
    return found


def shown_to(llm: LLM) -> set[tuple[bool, bool]]:
    """Returns a set that gets, of each step, whether it is cold and whether the model shows hidden states of it."""
    found: set[tuple[bool, bool]] = set()
    runners: Any = engine_of(llm)._executor._runners  # type: ignore[attr-defined]
    propose = runners.propose

    def watch(plan: BatchPlan, ran: Any) -> None:
        found.add((plan.is_cold, ran.hidden_states is not None))
        propose(plan, ran)

    runners.propose = watch
    return found
