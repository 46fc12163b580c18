"""What a rank that failed still issues: of a half of a step only what the others issue before the next order."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hiserve.core.request import SamplingParams
from hiserve.distributed.exchange import Exchanged
from hiserve.engine.startup import plan_without_pages
from hiserve.engine.step_exchanges import StepExchanges
from hiserve.runners.gate import Action, Decision, Reason
from hiserve.sampling.logit_shares import LogitShares

FORWARD = Exchanged("sum", 3, 8, torch.float32)
ENTRIES, WHOLE = Exchanged("gather", 2, 4, torch.float32), Exchanged("gather", 2, 64, torch.float32)


class Noted:
    """An exchange that notes what is expected, all of which is left."""

    def __init__(self) -> None:
        self.shard = SimpleNamespace(token_share=lambda size: size // 2)
        self.issued: list[list[Exchanged]] = []
        self.expect, self._left = self._note, [FORWARD][:0]

    def _note(self, exchanges: list[Exchanged]) -> None:
        self._left = exchanges

    def finish(self) -> None:
        if self._left:
            self.issued.append(self._left)
        self._left = []


@pytest.mark.parametrize(("sampling", "draw"), [("greedy", ENTRIES), ("free", ENTRIES), ("any", WHOLE)])
def test_a_failed_half_owes_its_own_part_first(sampling: str, draw: Exchanged) -> None:
    exchange, two = Noted(), np.array([1, 2], dtype=np.int32)
    model: Any = SimpleNamespace(embedding=SimpleNamespace(weight=torch.empty(1)), exchanges=lambda *_, **__: [FORWARD])
    subject = StepExchanges(LogitShares(None, exchange, 128, 0), model, None, SimpleNamespace())  # type: ignore[arg-type]
    plan = plan_without_pages(two, np.zeros_like(two), two, 0, SamplingParams(seed=0))
    decision = Decision(Action.EAGER, Reason.GRAPHS_OFF, sampling=sampling)
    subject.begin(plan, decision)
    subject.abandon()
    assert exchange.issued == [[FORWARD, draw]]
    exchange.issued.clear()
    subject.begin(dataclasses.replace(plan, awaits_masks=True), decision)
    subject.abandon(is_half=True)
    assert exchange.issued == [[FORWARD]]
    subject.abandon()
    assert exchange.issued == [[FORWARD], [draw]]
