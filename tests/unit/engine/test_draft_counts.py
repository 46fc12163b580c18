"""What became of drafts, counted step by step, and by where the prompt came from."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.eviction import LruEviction
from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.core.cache_usage import SOURCES, CacheUse
from hiserve.core.draft_use import DraftStats, DraftUse
from hiserve.core.request import SamplingParams, SpecParams
from hiserve.engine.draft_counts import DraftCounts
from hiserve.engine.loop import Engine
from hiserve.engine.rows import RowState
from hiserve.ipc.messages import Admit
from tests.helpers.echo import oracle
from tests.helpers.engines import echo_engine

PAGE = 4
NUM_DRAFT = 3


def prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 200, length).astype(np.int32)


def run(engine: Engine, uid: int, tokens: np.ndarray, max_tokens: int, **spec: object) -> DraftUse | None:
    """Runs one request to its end, and checks what it says; returns what is told of its drafts at last."""
    asked = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True, spec=SpecParams(**spec) if spec else None)
    engine.add(Admit(uid, tokens.size, asked, b"", 0), tokens)
    said: list[int] = []
    told = None
    while engine.has_work:
        updates = engine.step()
        if updates is not None:
            said += updates.tokens.tolist()
            told = [told, *updates.drafts][-1] or told
    assert said == oracle(tokens, max_tokens)
    return told


def rows_of(max_rows: int) -> RowState:
    cache = PrefixCache(num_pages=20, page_size=PAGE, namespace=b"", eviction=LruEviction())
    return RowState(cache, max_rows, max_len=16, num_ahead=NUM_DRAFT)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_verifying_step_adds_its_drafts_and_what_it_appended_beyond_one_token() -> None:
    state = rows_of(3)
    counts, rows = DraftCounts(state), np.array([1, 3, 2])
    state.source[[1, 2, 3]] = [SOURCES.index(source) for source in ("cold", "host", "cold")]
    counts.verified(rows, ints(3, 2, 0), ints(4, 1, 1))
    assert counts.take(rows) == [DraftUse(1, 3, (1, 1, 1)), DraftUse(1, 2, (0, 0, 0)), None]
    counts.verified(rows, ints(3, 0, 3), ints(2, 1, 3))
    assert counts.take(rows) == [DraftUse(2, 6, (2, 1, 1)), None, DraftUse(1, 3, (1, 1, 0))]
    assert counts.take(rows) == [None, None, None]
    by_source = counts.stats().by_source
    assert by_source["cold"] == DraftUse(3, 8, (2, 1, 1))
    assert by_source["host"] == DraftUse(1, 3, (1, 1, 0))
    assert by_source["device"] == by_source["store"] == DraftUse(0, 0, (0, 0, 0))


def test_steps_count_by_how_many_drafts_follow_them() -> None:
    counts = DraftCounts(rows_of(1))
    for num_draft in (3, 0, 3):
        counts.chose(num_draft)
    assert counts.stats().chosen_steps == {"0": 1, "3": 2}


def test_without_speculation_nothing_is_told() -> None:
    engine, *_ = echo_engine(num_pages=20, page_size=PAGE)
    assert run(engine, 1, prompt(5, 1), 4) is None
    assert engine.stats().drafts == DraftStats()


def test_drafts_count_for_the_tier_that_gave_most_of_the_prompt() -> None:
    engine, planner, *_ = echo_engine(num_pages=12, page_size=PAGE, eos=(), num_draft=NUM_DRAFT, num_host_pages=60)
    told = []
    for uid, source in enumerate(("cold", "device", "host")):
        if source == "host":
            planner.flush(("device",))
        told.append(run(engine, uid, prompt(17, seed=1), 6))
        assert engine.stats().drafts.by_source[source] == told[-1], source
    assert all(use is not None and use.accepted > 0 for use in told)


@pytest.mark.parametrize(
    ("use", "source"),
    [
        (CacheUse(), "cold"),
        (CacheUse(16, 0, 0), "device"),
        (CacheUse(16, 32, 0), "host"),
        (CacheUse(16, 32, 48), "store"),
        (CacheUse(16, 16, 16), "device"),
        (CacheUse(0, 16, 16), "host"),
    ],
)
def test_the_source_of_a_prompt_is_the_tier_that_gave_most_and_the_nearest_of_several(
    use: CacheUse, source: str
) -> None:
    assert use.source == source


def test_a_request_verifies_no_more_drafts_than_it_asks_for() -> None:
    engine, *_ = echo_engine(num_pages=20, page_size=PAGE, eos=(), num_draft=NUM_DRAFT)
    tokens = prompt(9, seed=1)
    whole = run(engine, 1, tokens, 16)
    two = run(engine, 2, tokens, 16, num_steps=2)
    assert whole is not None
    assert two is not None
    assert whole.proposed == NUM_DRAFT * whole.verify_steps
    assert two.proposed == 2 * two.verify_steps > 0
    assert two.accepted_per_position[2] == 0
    chosen = engine.stats().drafts.chosen_steps
    for uid, spec in ((3, {"enabled": False}), (4, {"num_steps": 0}), (5, {"enabled": False, "num_steps": 2})):
        assert run(engine, uid, tokens, 16, **spec) == DraftUse(0, 0, (0, 0, 0))
    now = engine.stats().drafts.chosen_steps
    assert (now["3"], now["0"]) == (chosen["3"], 3 * 16), "steps in which nobody wants drafts propose none"


def test_the_sum_of_two_uses_has_the_positions_of_the_longer() -> None:
    both = DraftUse(2, 4, (2, 1)) + DraftUse(1, 3, (1, 1, 1))
    assert both == DraftUse(3, 7, (3, 2, 1))
    assert both.shown() == {
        "accept_length": 3.0,
        "proposed": 7,
        "accepted": 6,
        "verify_steps": 3,
        "accepted_per_position": (3, 2, 1),
    }
    assert DraftUse().accept_length == 1.0
