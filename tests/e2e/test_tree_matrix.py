"""The same tokens, ends and scores with trees of drafts, whatever became of a prompt's pages meanwhile.

Exact: float64 on the CPU, against an engine that guesses nothing and reuses nothing. The canary moves with accepted nodes: a
token in another slot than its own is found when its page is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path

import pytest

from hiserve import SamplingParams
from tests.helpers.cache_paths import (
    Case,
    Work,
    answer,
    chunks,
    device_hits,
    host_hits,
    pairwise,
    preemption,
    store_hits,
    storm,
)
from tests.helpers.chosen_drafts import choose_in_turn
from tests.helpers.dialogues import held_out_prompts, trained
from tests.helpers.small_model import small_model

NUM_NEW = 16
PATHS: tuple[Callable[..., None], ...] = (chunks, preemption, device_hits, host_hits, store_hits, storm)
PROPOSERS, TREES, PAGES, DEPTHS, IS_GREEDY = (
    ("eagle3", "mtp", "draft_model"),
    ("3x4:12", "2x3:7", "1x5:6", "auto"),
    (16, 1, 64),
    (0, 1),
    (True, False),
)
ALL: list[Case] = list(product(PATHS, PROPOSERS, TREES, PAGES, DEPTHS, IS_GREEDY))


@lru_cache
def work_of(is_greedy: bool) -> Work:
    """Text; rows with penalties see the path to each node."""
    texts = [text for text in held_out_prompts("services") if len(text) > 100]
    prompts = [text[: 66 + 9 * index] for index, text in enumerate(texts[:4])]
    options = (
        {"temperature": 0.0}
        if is_greedy
        else {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.9, "repetition_penalty": 1.2}
    )
    sampling = [
        SamplingParams(seed=i, max_tokens=NUM_NEW - i, ignore_eos=bool(i % 2), logprobs=2, **options) for i in range(4)
    ]
    return answer(prompts, sampling, model=small_model())


def named(case: Case) -> str:
    path, proposer, tree, page_size, depth, is_greedy = case
    return f"{path.__name__}-{proposer}-{tree}-page_{page_size}-depth_{depth}-{'greedy' if is_greedy else 'drawn'}"


CASES = list(pairwise(ALL))
BRANCHED = [case for case in CASES if case[2] not in ("1x5:6", "auto") and case[3] == 16]
USUAL = [next(case for case in BRANCHED if case[0] is path) for path in (device_hits, preemption, host_hits)]
USUAL.append((preemption, "eagle3", "auto", 16, 1, False))
CASES += [case for case in USUAL if case not in CASES]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in USUAL else pytest.mark.wide) for case in CASES], ids=named
)
def test_trees_change_nothing(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, proposer, tree, page_size, depth, is_greedy = case
    if tree == "auto":  # chains and trees in turn
        choose_in_turn(monkeypatch)
    settings = {"spec": trained(proposer, small_model()), "spec_tree": tree, "spec_steps": "auto", "overlap": depth}
    path(work_of(is_greedy), tmp_path, page_size, model=small_model(), kv_canary=True, **settings)
