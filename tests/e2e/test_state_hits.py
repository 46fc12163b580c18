"""Requests that resume from snapshots of recurrent states: the same tokens as if all were computed, on every tier.

Exact, in float64, against an engine that reuses nothing.
"""

from __future__ import annotations

import gc
import random
import shutil
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.cache.index.prefix_cache import TailPool
from hiserve.cache.storage import cuda_transfer
from hiserve.cache.storage.device import DevicePool
from hiserve.engine import executing_half, tier_transfers
from hiserve.engine.host_loads import LoadCostModel
from hiserve.engine.loop import Engine
from hiserve.errors import ConfigError
from hiserve.llm.outputs import RequestOutput
from hiserve.models.model_config import NANO, find_model
from tests.helpers.compressed_models import save_compressed
from tests.helpers.cuda import wait_for_stream
from tests.helpers.fake_cuda import FakeCuda, install
from tests.helpers.models import save_family
from tests.helpers.segment_name import segment_name
from tests.helpers.tiered import cache_of, check_whole, counts_of, engine_of, garble_host, leave_device, rest, seal
from tests.helpers.widening import some

NUM_NEW, VOCAB, PAGE, ALL = 14, 4096, 4, slice(None)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=NUM_NEW, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "max_model_len": 160,
    "page_size": PAGE,
    "kv_pages": 400,
    "max_running_requests": 4,
    "max_batched_tokens": 24,
    "cpu_threads": 1,
    "host_cache_gib": 0,
    "spec": "off",
    "in_process": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = save_family("qwen3_5_text", tmp_path_factory.mktemp("states"), vocab_size=VOCAB)
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    return folder


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is loaded, however slow the machine is now."""
    monkeypatch.setattr(LoadCostModel, "is_worth_loading", lambda *measures: True)


class Poisoned:
    """The pools that engines make while a test runs; after each step, what no row, tail or transfer holds becomes NaN."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[DevicePool] = []

        def kept(*args: Any, **options: Any) -> DevicePool:
            self.made.append(DevicePool(*args, **options))
            return self.made[-1]

        patch.setattr(executing_half, "DevicePool", kept)

    def watch(self, llm: LLM) -> Engine:
        engine, carried = engine_of(llm), self.made[-1].carried
        step, state = engine.step, engine._planner._rows
        snapshots = snapshots_of(llm)

        def watched() -> Any:
            updates = step()
            snapshots.check()
            state.check()
            wait_for_stream()
            free = torch.from_numpy(np.flatnonzero(snapshots.num_refs == 0)[1:])
            idle = torch.from_numpy(np.flatnonzero(state.generation == 0)[1:])
            for memory in carried.values():
                memory.snapshots[:, free] = torch.nan
                if not engine._planner._in_flight:
                    memory.rows[:, idle] = torch.nan
            return updates

        engine.step = watched  # type: ignore[method-assign]
        return engine


def snapshots_of(llm: LLM) -> TailPool:
    snapshots = cache_of(llm).snapshots
    assert snapshots is not None
    return snapshots


def prompts_of(seed: int = 3) -> list[list[int]]:
    """Prompts that share beginnings of any length, some on a boundary of a page."""
    rng = np.random.default_rng(seed)
    base = rng.integers(7, VOCAB, 64).tolist()
    return [base[:length] + rng.integers(7, VOCAB, 1 + index).tolist() for index, length in enumerate(range(0, 64, 9))]


def told(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def next_turns(first: list[list[int]], which: slice = ALL) -> list[list[int]]:
    return [[*prompt, *reply, 8, 9] for prompt, reply in zip(prompts_of()[which], first, strict=True)]


@lru_cache
def expected(folder: Path, sampling: SamplingParams) -> tuple[list[list[int]], list[list[int]]]:
    """First turns and next turns."""
    with LLM(model=str(folder), **SETTINGS | {"disable_prefix_cache": True}) as llm:
        first = told(llm.generate(prompts_of(), sampling))
        return first, told(llm.generate(next_turns(first), sampling))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages of one token": {"page_size": 1, "kv_pages": 800},
    "long pages": {"page_size": 16},
    "chunks of a few tokens": {"max_batched_tokens": 5},
    "overlap": {"overlap": 1},
    "drafts": {"spec": "ngram", "spec_steps": 3},
    "drafts, overlap": {"spec": "ngram", "spec_steps": 3, "overlap": 1},
    "few slots": {"tail_share": 0.01},
    "tails within prompts": {"tail_every": 8, "max_batched_tokens": 64},
    "preemption": {"kv_pages": 45, "max_model_len": 128},
}
USUAL = "chunks of a few tokens", "drafts, overlap", "tails within prompts", "preemption"


@pytest.mark.parametrize("case", some(CASES, *USUAL))
def test_tokens_do_not_depend_on_the_snapshot_that_a_request_resumes_from(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5 on the device; H1 and H2 after each step."""
    sampling = DRAWN if "drafts" in case else GREEDY
    first, later = expected(folder, sampling)
    pools = Poisoned(monkeypatch)
    with LLM(model=str(folder), **SETTINGS | CASES[case]) as llm:
        engine = pools.watch(llm)
        assert told(llm.generate(prompts_of(), sampling)) == first
        again = llm.generate(prompts_of(), sampling)
        turns = llm.generate(next_turns(first), sampling)
        assert told(again) == first and told(turns) == later
        num_cached = sum(output.cached.num_tokens for output in (*again, *turns))
        assert num_cached > (0 if case in ("few slots", "preemption") else 200), num_cached
        assert (engine.stats().preemptions > 0) == (case == "preemption")
        engine.flush()
        snapshots = snapshots_of(llm)
        assert snapshots.num_tails == 0 and snapshots.num_free == snapshots.num_pages - 1


HOST = SETTINGS | {"host_cache_gib": 0.02}


@pytest.mark.parametrize(
    "case",
    some(
        ["plain", "long pages", "drafts, overlap", "few slots", "preemption"],
        "drafts, overlap",
        "few slots",
    ),
)
def test_tokens_do_not_depend_on_the_tier_of_a_snapshot(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5 with tiers, H10; H1 and H2 after each step."""
    first, later = expected(folder, DRAWN)
    pools = Poisoned(monkeypatch)
    with LLM(model=str(folder), **HOST | CASES[case]) as llm:
        engine = pools.watch(llm)
        check_host(llm, first, later)
        assert (engine.stats().preemptions > 0) == (case == "preemption")
        engine.flush()
        snapshots, host = snapshots_of(llm), cache_of(llm).host
        assert snapshots.num_tails == 0 and snapshots.num_free == snapshots.num_pages - 1
        assert host.pages.num_free == host.pages.num_ready - 1 and host.num_evictable == 0


def check_host(llm: LLM, first: list[list[int]], later: list[list[int]], which: slice = ALL) -> None:
    """Asks for all turns again, with the device empty before each."""
    assert told(llm.generate(prompts_of()[which], DRAWN)) == first
    leave_device(llm)
    again = llm.generate(prompts_of()[which], DRAWN)
    leave_device(llm)
    turns = llm.generate(next_turns(first, which), DRAWN)
    assert told(again) == first and told(turns) == later
    assert sum(output.cached.host for output in (*again, *turns)) > 0
    rest(llm)
    loads = counts_of(llm).loads
    assert 0 < loads.num_fulfilled == loads.num_wanted - loads.unfulfilled.get("not_worth_loading", 0)


@pytest.mark.parametrize(
    ("case", "direct"), some([("plain", False), ("drafts, overlap", True)], ("drafts, overlap", True))
)
def test_tokens_do_not_depend_on_streams_that_carry_snapshots(
    case: str, direct: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5 with the transfer engine of CUDA, whose streams run in any order that their events allow."""
    first, later = expected(folder, DRAWN)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    device = FakeCuda(seed)
    install(monkeypatch, device)
    monkeypatch.setattr(device.default, "wait_event", device.run_until)
    sizes = {"max_direct_page_bytes": 1 << 30 if direct else 0, "staging_bytes": 1 << 15}
    monkeypatch.setattr(cuda_transfer, "CudaTransfers", partial(cuda_transfer.CudaTransfers, **sizes))
    monkeypatch.setitem(tier_transfers._ENGINES, "cpu", tier_transfers._ENGINES["cuda"])
    pools = Poisoned(monkeypatch)
    with LLM(model=str(folder), **HOST | CASES[case]) as llm:
        pools.watch(llm)
        check_host(llm, first, later)


def test_a_snapshot_that_does_not_arrive_is_computed_again(folder: Path) -> None:
    """H10: a resume point whose frames are damaged is none; its row starts over."""
    prompts = prompts_of()
    with LLM(model=str(folder), **HOST | {"cache_verify": "all"}) as llm:
        first = told(llm.generate(prompts, GREEDY))
        seal(llm)
        leave_device(llm)
        garble_host(llm)
        assert told(llm.generate(prompts, GREEDY)) == first
        seal(llm)
        assert counts_of(llm).loads.unfulfilled.get("checksum", 0) > 0
        assert told(llm.generate(prompts, GREEDY)) == first
        check_whole(llm)


def test_the_next_process_resumes_from_snapshots_of_the_last(folder: Path) -> None:
    """H10: they are adopted whole, behind their history."""
    with segment_name() as name:
        settings = HOST | {"host_cache_name": name}
        with LLM(model=str(folder), **settings) as llm:
            first = told(llm.generate(prompts_of(), GREEDY))
            rest(llm)
            seal(llm)
        del llm
        gc.collect()  # the lock of the name goes with the last view of its memory
        with LLM(model=str(folder), **settings) as llm:
            again = llm.generate(prompts_of(), GREEDY)
            assert told(again) == first
            num_reusable = [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts_of()]
            assert [output.cached.num_tokens for output in again] == num_reusable
            assert sum(output.cached.host for output in again) > 0


def test_narrow_states_are_kept_and_loaded_as_they_are_and_a_cache_of_others_is_refused(folder: Path) -> None:
    prompts = prompts_of()[4:]
    with segment_name() as name:
        settings = HOST | {"dtype": "float32", "state_dtype": "bfloat16", "host_cache_name": name}
        with LLM(model=str(folder), **settings) as llm:
            llm.generate(prompts, GREEDY)
            from_device = llm.generate(prompts, GREEDY)
            leave_device(llm)
            from_host = llm.generate(prompts, GREEDY)
            assert told(from_host) == told(from_device), "of the same snapshots"
            assert all(len(set(tokens)) > 5 for tokens in told(from_host)), "of states that are numbers"
            assert (
                min(output.cached.device for output in from_device)
                > 0
                < min(output.cached.host for output in from_host)
            )
        del llm
        gc.collect()  # the lock of the name goes with the last view of its memory
        with pytest.raises(ConfigError, match="another --dtype, --state-dtype"):
            LLM(model=str(folder), **settings | {"state_dtype": "float32"})


WIDE, FEW = HOST | {"page_size": 16, "kv_pages": 120}, slice(1, None, 2)
# Of a model with windows and compressed rows: a tail has window pages, and a snapshot of the rings.
COMPRESSED: dict[str, dict[str, Any]] = {
    "drafts, overlap": {"spec": "ngram", "spec_steps": 3, "overlap": 1, "tail_every": 16},
    "few pages, chunks of a few tokens": {"kv_pages": 10, "max_model_len": 128, "max_batched_tokens": 9},
}


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_compressed(tmp_path_factory.mktemp("compressed"), vocab_size=VOCAB)


@lru_cache
def expected_of(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    with LLM(model=str(folder), **WIDE | {"disable_prefix_cache": True}) as llm:
        first = told(llm.generate(prompts_of()[FEW], DRAWN))
        return first, told(llm.generate(next_turns(first, FEW), DRAWN))


@pytest.mark.parametrize("case", some(COMPRESSED, "drafts, overlap"))
def test_tokens_do_not_depend_on_tails_of_windows_and_rings(
    case: str, compressed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5, with a host tier; H1, H2 and H12 after each step."""
    first, later = expected_of(compressed)
    pools = Poisoned(monkeypatch)
    with LLM(model=str(compressed), **WIDE | COMPRESSED[case]) as llm:
        engine = pools.watch(llm)
        windows = cache_of(llm).windows
        assert windows is not None
        check_host(llm, first, later, FEW)
        windows.check()
        engine.flush()
        assert windows.num_tails == snapshots_of(llm).num_tails == 0
        assert windows.num_free == windows.num_pages - 1
