"""Prefixes survive their server in a store: the same tokens, and a store that misbehaves costs hits alone."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.config.options import make_options
from hiserve.engine import store_prefetch, tier_transfers
from hiserve.ipc.messages import Admit, WorkerStats
from hiserve.models.builtin_shapes import read_model
from hiserve.models.model_config import NANO
from tests.helpers.forks import forked_engines
from tests.helpers.sim_store import Fault, SimStore, Step
from tests.helpers.tiered import PAGE, SMALL, cache_of, check_whole, engine_of, rest
from tests.helpers.widening import some

SEED = 17
LENGTHS = (160, 161, 175)  # on, one after and one before the end of a page


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(7, 4096, size).tolist() for size in LENGTHS]
    greedy = SamplingParams(temperature=0.0, seed=0, max_tokens=10, ignore_eos=True)
    drawn = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=10, ignore_eos=True)
    return prompts, [greedy, drawn, greedy]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(*workload())]


def stats_of(llm: LLM) -> WorkerStats:
    return engine_of(llm).stats()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(disable_prefix_cache=True, spec="off", **SMALL) as llm:
        return tokens_of(llm)


@pytest.mark.parametrize(
    ("depth", "policy"),
    some([(0, "wait"), (1, "wait"), (0, "timeout"), (1, "best_effort")], (1, "wait"), (0, "timeout")),
)
def test_a_server_finds_what_the_one_before_it_stored(
    tmp_path: Path, expected: list[list[int]], depth: int, policy: str
) -> None:
    options = SMALL | {"store": f"file:{tmp_path}", "store_prefetch": policy, "overlap": depth}
    with LLM(**options) as llm:
        assert tokens_of(llm) == expected
        assert stats_of(llm).cache.uploads.num_fulfilled >= 10 + 10 + 10
    with LLM(**options) as llm:
        results = llm.generate(*workload())
        assert [result.outputs[0].token_ids for result in results] == expected
        for result in results if policy != "best_effort" else ():
            assert result.cached.store == (len(result.prompt_token_ids) - 1) // PAGE * PAGE
            assert result.cached.num_tokens == result.cached.store
        check_whole(llm)


def test_processes_find_what_was_stored_before_them(tmp_path: Path, expected: list[list[int]]) -> None:
    options = SMALL | {"store": f"file:{tmp_path}", "store_prefetch": "wait"}
    with LLM(**options) as llm:
        assert tokens_of(llm) == expected
    with forked_engines(), LLM(**options | {"in_process": False}) as llm:
        results = llm.generate(*workload())
    assert [result.outputs[0].token_ids for result in results] == expected
    assert sum(result.cached.store for result in results) == sum((size - 1) // PAGE * PAGE for size in LENGTHS)


class Weather:
    """How the calls of a store go from now on."""

    def __init__(self) -> None:
        self.step = Step()

    def __iter__(self) -> Iterator[Step]:
        while True:
            yield self.step


@pytest.fixture
def weather() -> Weather:
    return Weather()


@pytest.fixture
def store(weather: Weather, monkeypatch: pytest.MonkeyPatch) -> SimStore:
    made = SimStore(weather)
    monkeypatch.setattr(store_prefetch, "POLL_S", 0.2)
    monkeypatch.setattr(tier_transfers, "open_store", lambda _: made)
    return made


FAULTS = [
    Step(Fault.FAIL, after=3),
    Step(Fault.LIE),
    Step(Fault.LIE, after=3),
    Step(Fault.FULL, after=2),
    Step(delay_s=0.02),
    Step(Fault.HANG),
]


@pytest.mark.parametrize("fault", some(FAULTS, *FAULTS[::2]), ids=lambda step: f"{step.fault.value} after {step.after}")
def test_a_store_that_misbehaves_costs_hits_alone(
    tmp_path: Path, store: SimStore, weather: Weather, expected: list[list[int]], fault: Step
) -> None:
    options = SMALL | {"store": f"file:{tmp_path}", "store_prefetch_timeout_s": 0.3, "overlap": 1}
    with LLM(**options) as llm:
        weather.step = fault
        for _ in range(2):
            assert tokens_of(llm) == expected
            engine_of(llm).flush()
        weather.step = Step()
        store.release()
        check_whole(llm)
        assert tokens_of(llm) == expected
        engine_of(llm).flush()
        assert tokens_of(llm) == expected
        assert stats_of(llm).cache.cached_tokens["store"] > 0
        weather.step = fault
        store._released.clear()
        engine_of(llm).flush()
        assert tokens_of(llm) == expected
        store.release()
        check_whole(llm)


def test_with_a_full_host_nobody_waits_for_the_store_and_the_miss_says_why(
    tmp_path: Path, expected: list[list[int]]
) -> None:
    """Whoever waited here would wait for an hour."""
    options = SMALL | {"store": f"file:{tmp_path}", "store_prefetch_timeout_s": 3600.0}
    with LLM(**options) as llm:
        assert tokens_of(llm) == expected
        engine_of(llm).flush()
        rest(llm)
        tiers = cache_of(llm).tiers
        held = tiers.allocate_host(tiers.host.num_available)
        results = llm.generate(*workload())
        assert [result.outputs[0].token_ids for result in results] == expected
        assert [(result.cached.num_tokens, result.cached.miss) for result in results] == [(0, "not_fetched")] * 3
        prefetches = stats_of(llm).cache.prefetches
        assert prefetches.unfulfilled == {"host_full": sum((size - 1) // PAGE for size in LENGTHS)}
        tiers.free_host(held)
        check_whole(llm)


def test_the_end_waits_for_no_store_that_hangs(tmp_path: Path, store: SimStore, weather: Weather) -> None:
    with LLM(**SMALL, store=f"file:{tmp_path}", store_prefetch_timeout_s=0.1) as llm:
        weather.step = Step(Fault.HANG)
        tokens_of(llm)
        engine_of(llm).flush()
        tokens_of(llm)


def test_requests_that_are_aborted_while_they_wait_for_a_store_leak_nothing(
    tmp_path: Path, store: SimStore, weather: Weather, expected: list[list[int]]
) -> None:
    prompts, sampling = workload()
    rng = np.random.default_rng(SEED)
    with LLM(**SMALL, store=f"file:{tmp_path}", store_prefetch="wait", overlap=1) as llm:
        assert tokens_of(llm) == expected
        engine = engine_of(llm)
        weather.step = Step(delay_s=0.003)
        for uid in range(1000, 1040):
            engine.flush()
            prompt = np.array(prompts[uid % 3], dtype=np.int32)
            engine.add(Admit(uid, prompt.size, sampling[uid % 3], b"", 0), prompt)
            for _ in range(rng.integers(0, 12)):
                engine.step()
                time.sleep(0.001 * rng.integers(0, 2))
            engine.abort([uid])
        while engine.has_work:
            engine.step()
        assert stats_of(llm).cache.prefetches.num_wanted > 0
        check_whole(llm)
        assert tokens_of(llm) == expected


def test_tc_70_tc_71_tc_72_what_is_not_the_same_model_layout_or_tenant_shares_no_page(tmp_path: Path) -> None:
    prompts, sampling = workload()
    folder, _ = read_model(make_options().model)
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3}))
    options = SMALL | {"store": f"file:{tmp_path}/store", "store_prefetch": "wait"}
    with LLM(**options) as llm:
        tokens_of(llm)
        engine = engine_of(llm)
        engine.flush()
        prompt = np.array(prompts[0], dtype=np.int32)
        engine.add(Admit(1000, prompt.size, sampling[0], b"another tenant", 0), prompt)
        while engine.has_work:
            engine.step()
        assert stats_of(llm).cache.prefetches.num_wanted == 0
    others = (
        {"dtype": "float32"},
        {"page_size": 8, "kv_pages": 120},
        {"load_format": "dummy"},
        {"model": str(tmp_path / "model")},
    )
    for other in others:
        with LLM(**options | other) as llm:
            tokens_of(llm)
            assert stats_of(llm).cache.prefetches.num_wanted == 0, other
            assert stats_of(llm).cache.cached_tokens["store"] == 0, other
    with LLM(**options) as llm:
        tokens_of(llm)
        assert stats_of(llm).cache.cached_tokens["store"] > 0


@pytest.mark.parametrize("accident", some(["small", "read-only", "deleted", "replaced"], "small", "replaced"))
def test_a_directory_that_goes_bad_is_no_error_of_a_client(
    tmp_path: Path, expected: list[list[int]], accident: str
) -> None:
    directory = tmp_path / "store"
    size_gib = 0.002 if accident == "small" else 1.0  # eight pages
    options = SMALL | ({"model": NANO} if accident == "small" else {})  # of which the smallest store has few pages
    with LLM(**options, store=f"file:{directory}", store_prefetch="wait", store_gib=size_gib) as llm:
        first = tokens_of(llm)
        assert first == expected or accident == "small"
        if accident == "read-only":
            directory.chmod(0o500)
        elif accident != "small":
            shutil.rmtree(directory)
        if accident == "replaced":
            directory.write_text("not a directory")
        for _ in range(2):
            engine_of(llm).flush()
            assert tokens_of(llm) == first
        check_whole(llm)
        if accident == "small":
            assert stats_of(llm).cache.cached_tokens["store"] < sum(LENGTHS)
