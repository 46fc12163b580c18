"""Engines whose number of drafts goes through all that there are, whatever pays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hiserve.config.settings import Settings
from hiserve.core.startup_measurements import StepCosts
from hiserve.engine import build
from hiserve.spec.adaptive import DraftController

TURNS = (15, 3, 0, 7, 5, 15, 1, 7, 2)  # trees after chains, chains after trees, and none


def choose_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets controllers of engines opened from now on choose chains and trees in turn; nothing is measured."""
    turns = itertools.cycle(TURNS)

    def choose(_controller: DraftController, allowed: np.ndarray, _mean_context: float) -> int:
        return min(next(turns), int(allowed.max(initial=0)))

    def costs(settings: Settings, *_others: Any) -> StepCosts:
        tiers, depths = list(settings.spec.tiers), [tree.depth for tree in settings.spec.trees]
        ones = [1.0] * len(tiers)
        return StepCosts([1], tiers, [ones], [ones], [1.0], tree_depths=depths, grow=[[1.0] * len(depths)])

    monkeypatch.setattr(DraftController, "choose", choose)
    monkeypatch.setattr(build, "measure_drafts", costs)
