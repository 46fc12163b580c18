"""Costs of steps from arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from hiserve.core.startup_measurements import StepCosts


def step_costs(rows: Any, tiers: Any, verify: Any, follow: Any, draft: Any, **others: Any) -> StepCosts:
    """Returns costs as ``StepCosts`` describes them, of arrays or lists."""
    return StepCosts(*(np.asarray(each).tolist() for each in (rows, tiers, verify, follow, draft)), **others)
