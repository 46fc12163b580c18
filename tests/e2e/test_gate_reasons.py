"""Every reason of the gate comes about in a whole engine: there is none that only a test of the gate can produce.

The engines run on the CPU and their graphs are recorded. Deferred steps are in ``test_recorded_loads.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.engine import runner_factory
from hiserve.runners.gate import Reason
from tests.helpers import recorded
from tests.helpers.recorded import RecordedCapture, RecordedGraph
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.small_model import small_model
from tests.helpers.tiered import engine_of

SEED, NUM_NEW = 73, 8
PROMPTS = [np.random.default_rng([SEED, size]).integers(7, 4096, size).tolist() for size in (40, 9, 60)]
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "model": small_model(),
    "in_process": True,
    "dtype": "float64",
    "max_model_len": 96,
    "kv_pages": 40,
    "max_running_requests": 4,
    "max_batched_tokens": 64,
    "cpu_threads": 1,
    "log_level": "error",
    "spec": "off",
    "host_cache_gib": 0,
    "graphs": "all",
}
Patch = pytest.MonkeyPatch


def few_rows(patch: Patch) -> None:
    patch.setattr(runner_factory, "row_buckets", lambda most: (1, 2))


def few_tokens(patch: Patch) -> None:
    for name in ("mixed_buckets", "token_buckets"):
        patch.setattr(runner_factory, name, lambda most: (16,))


def failing_captures(patch: Patch) -> None:
    def refuse(self: RecordedCapture, work: Callable[[], None]) -> RecordedGraph:
        raise RuntimeError("operation not permitted when stream is capturing")

    patch.setattr(recorded.RecordedCapture, "record", refuse)


CASES: dict[Reason, tuple[dict[str, Any], Callable[[Patch], None] | None]] = {
    Reason.DECODE: ({}, None),
    Reason.VERIFY: ({"spec": "ngram", "spec_steps": 2}, None),
    Reason.MIXED: ({}, None),
    Reason.PIECEWISE: ({"max_running_requests": 8}, None),
    Reason.GRAPHS_OFF: ({"graphs": "off"}, None),
    Reason.WIDTH: ({"graphs": "decode"}, None),
    Reason.ROWS: ({"graphs": "decode"}, few_rows),
    Reason.TOKENS: ({}, few_tokens),
    Reason.CONTEXT: ({"graphs": "decode", "graph_max_len": 64}, None),
    Reason.CAPTURE_FAILED: ({"graphs": "decode"}, failing_captures),
}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    print(f"seed {SEED}")
    with LLM(**SETTINGS | {"graphs": "off", "disable_prefix_cache": True}) as llm:
        return tokens_of(llm)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("reason", CASES, ids=lambda reason: reason.value)
def test_a_whole_engine_comes_to_this_reason_with_the_same_tokens(
    reason: Reason, expected: list[list[int]], monkeypatch: Patch
) -> None:
    settings, change = CASES[reason]
    allow_recording(monkeypatch)
    if change is not None:
        change(monkeypatch)
    with LLM(**SETTINGS | settings) as llm:
        assert tokens_of(llm) == expected
        counts = engine_of(llm).stats().graph_gate
    assert sum(reasons.get(reason.value, 0) for reasons in counts.values()) > 0, counts


@pytest.mark.parametrize(("asked", "most"), [("auto", 96), (64, 64), (128, 96)])
def test_graphs_hold_rows_as_long_as_was_asked_for_and_no_longer_than_any_can_be(
    asked: Any, most: int, monkeypatch: Patch
) -> None:
    allow_recording(monkeypatch)
    with LLM(**SETTINGS | {"graph_max_len": asked}) as llm:
        coverage = engine_of(llm)._executor._runners.coverage  # type: ignore[attr-defined]
        assert {graphs.max_len for graphs in coverage.full.values()} == {most}
        assert coverage.mixed is None or coverage.mixed.max_len == most


def test_a_step_whose_replay_fails_for_memory_runs_eagerly_in_the_end(
    expected: list[list[int]], monkeypatch: Patch
) -> None:
    allow_recording(monkeypatch)
    with LLM(**SETTINGS) as llm:

        def run_out(self: RecordedGraph) -> None:
            raise MemoryError("cannot allocate memory")

        monkeypatch.setattr(RecordedGraph, "replay", run_out)
        tokens = llm.generate([PROMPTS[1]], GREEDY)[0].outputs[0].token_ids
        assert tokens == expected[1]
        assert engine_of(llm).stats().graph_gate["eager"][Reason.STEP_FAILED.value] > 0


def test_there_is_no_other_reason() -> None:
    elsewhere = {
        Reason.STEP_FAILED: "above",
        Reason.LOAD_FAILED: "test_recorded_loads.py",
        Reason.STRICT_LOAD: "test_recorded_loads.py",
        Reason.STRICT_RELOCATION: "test_relocations.py",
    }
    assert {*CASES, *elsewhere} == set(Reason)
