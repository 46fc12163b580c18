"""An engine in this process whose drafts are noted, behind every step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hiserve import LLM
from hiserve.models.model_config import NANO, find_model
from tests.helpers.cache_paths import SETTINGS
from tests.helpers.tiered import engine_of
from tools.nano.head_files import export_head, load_target
from tools.nano.heads import HEADS
from tools.nano.model import Nano


@dataclass(frozen=True)
class Draft:
    """What was proposed behind a row.

    Attributes:
        known: Tokens that the row knew.
        tokens: The drafts.
    """

    known: list[int]
    tokens: list[int]


def nano() -> Nano:
    return load_target(find_model(NANO), torch.device("cpu"))


def save_heads(folder: Path, seed: int) -> dict[str, Path]:
    """Saves a head of each kind, of drawn weights, for hiserve-nano; returns their folders."""
    target = nano()
    torch.manual_seed(seed)
    for kind, head in HEADS.items():
        export_head(head(target), target.config, folder / kind)
    return {kind: folder / kind for kind in HEADS}


class Drafted:
    """Notes what stands behind the rows that sampled.

    Attributes:
        llm: The engine.
        executor: Its own.
        planner: Its own.
        drafts: Of each step, by row.
        num_replayed: Steps whose drafts were replayed.

    Args:
        **settings: Beside those of ``cache_paths``; ``spec_steps`` is a number.
    """

    def __init__(self, **settings: Any) -> None:
        self.llm = LLM(**SETTINGS | settings)
        self.executor: Any = engine_of(self.llm)._executor
        self.planner: Any = engine_of(self.llm)._planner
        self.drafts: list[dict[int, Draft]] = []
        self.num_replayed = 0
        self._steps: int = settings["spec_steps"]
        self._propose = self.executor._runners.propose
        self.executor._runners.propose = self._watch

    def _watch(self, plan: Any, ran: Any) -> None:
        self._propose(plan, ran)
        self.num_replayed += ran.drafts is not None
        rows, step = self.executor._rows, {}
        for row in plan.rows[plan.samples].tolist():
            known = int(rows.known_len[row])
            tokens = rows.tokens[row, : known + self._steps].tolist()
            step[row] = Draft(tokens[:known], tokens[known:])
        self.drafts.append(step)
