"""A clean stop leaves what was computed to the next server, however small the host was; and takes no longer than it may."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.cache.storage.inventory import store_in
from hiserve.core.machine import GIB
from hiserve.engine import store_prefetch, tier_transfers
from hiserve.models.model_config import NANO
from tests.e2e.live import Live
from tests.faults.harness import serving
from tests.helpers.sim_store import Fault, SimStore, Step
from tests.helpers.tiered import PAGE, SMALL, cache_of, engine_of
from tests.helpers.waiting import PATIENCE_S
from tests.helpers.widening import some

SEED = 23
NUM_PROMPTS, NUM_TOKENS = 12, 161  # ten whole pages each, twice the device and eight times the host
PAGE_BYTES = 1 << 18
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1, ignore_eos=True)
TINY: dict[str, Any] = SMALL | {"model": NANO, "host_cache_gib": 0.004, "spec": "off"}  # 15 pages


def prompts(count: int = NUM_PROMPTS) -> list[list[int]]:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED).integers(7, 4096, (count, NUM_TOKENS)).tolist()


def found_by_the_next(directory: Path, count: int = NUM_PROMPTS) -> int:
    """Pages that a new server gets from the store."""
    options = TINY | {"store": f"file:{directory}", "store_prefetch": "wait", "host_cache_gib": 0.2}
    with LLM(**options) as llm:
        return sum(result.cached.store // PAGE for result in llm.generate(prompts(count), GREEDY))


def test_the_next_server_finds_what_was_computed_however_small_the_host_was(tmp_path: Path) -> None:
    with LLM(**TINY, store=f"file:{tmp_path}") as llm:
        assert cache_of(llm).host.pages.num_pages < 20
        for prompt in prompts():  # several pass at once where the host is full
            llm.generate([prompt], GREEDY)
    assert found_by_the_next(tmp_path) >= 0.99 * NUM_PROMPTS * (NUM_TOKENS // PAGE)


def test_a_host_of_a_single_page_lets_all_others_pass(tmp_path: Path) -> None:
    with LLM(**TINY | {"host_cache_gib": 2.5 * PAGE_BYTES / GIB}, store=f"file:{tmp_path}") as llm:
        assert llm.settings.identity is not None and llm.settings.identity.page_bytes == PAGE_BYTES
        assert cache_of(llm).host.pages.num_pages == 2
        llm.generate(prompts(2), GREEDY)
    assert found_by_the_next(tmp_path, 2) == 2 * (NUM_TOKENS // PAGE)


def test_what_fails_while_the_last_pages_are_copied_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(**TINY, store=f"file:{tmp_path}")
    monkeypatch.setattr(engine_of(llm), "finish_copies", lambda _: pytest.fail("the store's thread failed"))
    with pytest.raises(pytest.fail.Exception, match="the store's thread failed"):
        llm.close()
    assert not store_in(tmp_path).is_used, "it was not closed"


def test_what_waits_when_an_engine_is_closed_is_uploaded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody steps between the last token and the end."""
    monkeypatch.setattr(store_prefetch.StorePrefetcher, "has_work", property(lambda self: False))
    with LLM(**TINY, store=f"file:{tmp_path}") as llm:
        llm.generate(prompts(4), GREEDY)
        assert cache_of(llm).uploads.num_waiting + sum(cache_of(llm).ops.num_in_flight.values()) > 0
    assert found_by_the_next(tmp_path, 4) == 4 * (NUM_TOKENS // PAGE)


def test_without_time_for_it_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_prefetch.StorePrefetcher, "has_work", property(lambda self: False))
    with LLM(**TINY, store=f"file:{tmp_path}", drain_timeout_s=0.0) as llm:
        llm.generate(prompts(4), GREEDY)
        engine = engine_of(llm)
        assert engine.is_copying
    assert found_by_the_next(tmp_path, 4) < 4 * (NUM_TOKENS // PAGE)


def test_a_store_that_answers_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimStore(Step(Fault.HANG) for _ in range(1000))
    monkeypatch.setattr(tier_transfers, "open_store", lambda _: made)
    monkeypatch.setattr(store_prefetch, "STALL_S", 0.3)
    with LLM(**TINY, store=f"file:{tmp_path}", store_prefetch="best_effort", drain_timeout_s=3600.0) as llm:
        llm.generate(prompts(2), GREEDY)


def ask(live: Live, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    response = httpx.post(
        f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False
    ).raise_for_status()
    return dict(response.json()["usage"]["prompt_tokens_details"]["cached_tokens_details"])


def test_sigterm_lets_pages_reach_a_slow_store(tmp_path: Path) -> None:
    """Each file takes 50 ms: when the signal comes, most pages wait."""
    store = ("--store", f"file:{tmp_path}/store", "--spec", "off", "--kv-pages", "80")
    patient = ("--drain-timeout-s", "3600")
    slow = "tests.faults.worker stall_s=0.05"
    small = ("--host-cache-gib", "0.01", "--store-prefetch", "best_effort")
    with serving(tmp_path, *store, *small, *patient, worker=slow) as live:
        for prompt in prompts(6):
            ask(live, prompt)
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(PATIENCE_S) == 0
    (tmp_path / "tmp").rmdir()
    with serving(tmp_path, *store, "--host-cache-gib", "0.2", "--store-prefetch", "wait") as live:
        found = sum(ask(live, prompt)["store"] for prompt in prompts(6))
    assert found >= 0.99 * 6 * (NUM_TOKENS // PAGE * PAGE)


@pytest.mark.parametrize(
    "is_hurried", some([False, True], True), ids=["until the time is over", "until a second signal"]
)
def test_the_end_waits_for_pages_as_long_as_it_may_and_nobody_hurries_it(tmp_path: Path, is_hurried: bool) -> None:
    """The store is a worker's whose calls take longer than this test waits for the end."""
    store = ("--store", f"file:{tmp_path}/store", "--store-prefetch", "best_effort", "--host-cache-gib", "0.01")
    limit = ("--drain-timeout-s", "3600" if is_hurried else "4")
    with serving(tmp_path, *store, *limit, worker="tests.faults.worker stall_s=200") as live:
        for prompt in prompts(4):
            ask(live, prompt)
        live.process.send_signal(signal.SIGTERM)
        if is_hurried:
            with contextlib.suppress(Exception):
                live.process.wait(2)
            assert live.process.poll() is None
            live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(PATIENCE_S) == 0
    assert os.path.isdir(tmp_path / "store")
