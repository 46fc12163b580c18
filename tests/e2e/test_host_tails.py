"""Tails on the host: written through behind their history, loaded and adopted whole, and the same tokens as if all were computed.

Exact, in float64, against an engine that keeps all pages of all layers and reuses none.
"""

from __future__ import annotations

import gc
import random
from functools import lru_cache, partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.cache.storage import cuda_transfer
from hiserve.cache.storage.cuda_transfer import CudaTransfers
from hiserve.cache.storage.host import HostPool
from hiserve.core.transfers import CopyKind
from hiserve.engine import tier_transfers
from hiserve.engine.host_loads import LoadCostModel
from hiserve.llm.outputs import RequestOutput
from tests.helpers.fake_cuda import FakeCuda, install
from tests.helpers.segment_name import segment_name
from tests.helpers.tiered import (
    cache_of,
    check_whole,
    counts_of,
    garble_host,
    host_of,
    leave_device,
    rest,
    seal,
    transfers_of,
)
from tests.helpers.widening import some
from tests.helpers.window_models import SETTINGS, VOCAB, WINDOW, WindowPool, save_with_heads

NUM_NEW = 10
PAGE = int(SETTINGS["page_size"])
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=NUM_NEW, ignore_eos=True)
HOST = SETTINGS | {"host_cache_gib": 0.01, "window_pages": 160}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_with_heads(tmp_path_factory.mktemp("windows"))


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is loaded, however slow the machine is now."""
    monkeypatch.setattr(LoadCostModel, "is_worth_loading", lambda *measures: True)


def prompts_of(seed: int = 3) -> list[list[int]]:
    """Prompts that share beginnings of any length, some on a boundary of a page."""
    rng = np.random.default_rng(seed)
    base = rng.integers(7, VOCAB, 64).tolist()
    return [base[:length] + rng.integers(7, VOCAB, 1 + index).tolist() for index, length in enumerate(range(0, 64, 9))]


def told(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@lru_cache
def expected(folder: Path, sampling: SamplingParams) -> tuple[list[list[int]], list[list[int]]]:
    """First turns and next turns."""
    with LLM(model=str(folder), **SETTINGS | {"window_pages": 0, "disable_prefix_cache": True}) as llm:
        first = told(llm.generate(prompts_of(), sampling))
        return first, told(llm.generate(next_turns(first), sampling))


def next_turns(first: list[list[int]]) -> list[list[int]]:
    return [[*prompt, *reply, 8, 9] for prompt, reply in zip(prompts_of(), first, strict=True)]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages of one token": {"page_size": 1, "kv_pages": 600, "window_pages": 400},
    "pages longer than the window": {"page_size": 16},
    "chunks of a few tokens": {"max_batched_tokens": 5},
    "overlap": {"overlap": 1},
    "drafts, overlap": {"spec": "ngram", "spec_steps": 3, "overlap": 1},
    "drafts of an EAGLE-3 head": {"spec": "eagle3", "spec_steps": 3},
    "few window pages": {"window_pages": 48},
    "as few window pages as auto takes": {"window_pages": "auto", "kv_pages": 60, "max_model_len": 128},
    "preemption": {"kv_pages": 45, "max_model_len": 128},
    "pages that more than one request used": {"host_admission": "write_through_selective"},
}
HOW = {"greedy": GREEDY, "drawn": DRAWN}
TURNS = some(product(CASES, HOW), *(turn for turn in zip(CASES, cycle(HOW)) if turn[0] not in ("plain", "overlap")))


@pytest.mark.parametrize(("case", "how"), TURNS)
def test_tokens_do_not_depend_on_the_tier_of_a_resume_point(
    case: str, how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5 with tiers; H1 and H2 after each step."""
    sampling = HOW[how]
    first, later = expected(folder, sampling)
    pools = WindowPool(monkeypatch)
    with LLM(model=str(folder), **HOST | CASES[case]) as llm:
        engine = pools.watch(llm)
        assert told(llm.generate(prompts_of(), sampling)) == first
        if "more than one" in case:
            assert told(llm.generate(prompts_of(), sampling)) == first
        leave_device(llm)
        again = llm.generate(prompts_of(), sampling)
        leave_device(llm)
        turns = llm.generate(next_turns(first), sampling)
        assert told(again) == first and told(turns) == later
        assert sum(output.cached.host for output in (*again, *turns)) > 0
        assert (engine.stats().preemptions > 0) == ("preemption" in case)
        rest(llm)
        assert counts_of(llm).loads.num_fulfilled == counts_of(llm).loads.num_wanted > 0
        engine.flush()
        windows = cache_of(llm).windows
        assert windows is not None and windows.num_tails == 0 and windows.num_free == windows.num_pages - 1
        host = cache_of(llm).host
        assert host.pages.num_free == host.pages.num_ready - 1 and host.num_evictable == 0


def on_streams(patch: pytest.MonkeyPatch, seed: int, *, direct: bool) -> None:
    """Engines made from now on copy through streams, as on CUDA: each forward runs behind what it waits for, and no more."""
    device = FakeCuda(seed)
    install(patch, device)
    patch.setattr(device.default, "wait_event", device.run_until)
    sizes = {"max_direct_page_bytes": 1 << 30 if direct else 0, "staging_bytes": 1 << 15}
    patch.setattr(cuda_transfer, "CudaTransfers", partial(cuda_transfer.CudaTransfers, **sizes))
    patch.setitem(tier_transfers._ENGINES, "cpu", tier_transfers._ENGINES["cuda"])


@pytest.mark.parametrize(
    ("case", "direct"),
    some(
        [("plain", False), ("pages longer than the window", True), ("drafts, overlap", True), ("preemption", False)],
        ("drafts, overlap", True),
        ("preemption", False),
    ),
)
def test_tokens_do_not_depend_on_streams_that_carry_tails(
    case: str, direct: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5 with the transfer engine of CUDA, whose streams run in any order that their events allow."""
    first, later = expected(folder, DRAWN)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    on_streams(monkeypatch, seed, direct=direct)
    pools = WindowPool(monkeypatch)
    with LLM(model=str(folder), **HOST | CASES[case]) as llm:
        pools.watch(llm)
        assert isinstance(transfers_of(llm), CudaTransfers)
        assert told(llm.generate(prompts_of(), DRAWN)) == first
        leave_device(llm)
        again = llm.generate(prompts_of(), DRAWN)
        leave_device(llm)
        turns = llm.generate(next_turns(first), DRAWN)
        assert told(again) == first and told(turns) == later
        assert sum(output.cached.host for output in (*again, *turns)) > 0
        rest(llm)
        assert counts_of(llm).loads.num_fulfilled == counts_of(llm).loads.num_wanted > 0


def test_a_resume_point_is_one_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H10: history and tail are one order, which either arrives or does not."""
    loaded: list[int] = []
    is_intact = HostPool.is_intact

    def seen(pool: HostPool, pages: np.ndarray) -> bool:
        loaded.append(pages.size)
        return is_intact(pool, pages)

    monkeypatch.setattr(HostPool, "is_intact", seen)
    prompt = prompts_of()[-1]
    boundary = (len(prompt) - 1) // PAGE * PAGE
    with LLM(model=str(folder), **HOST) as llm:
        (first,) = llm.generate([prompt], GREEDY)
        leave_device(llm)
        (again,) = llm.generate([prompt], GREEDY)
        assert told([again]) == told([first]) and again.cached.host == boundary
        num_windows = -(-(WINDOW - 1) // PAGE)
        assert loaded == [boundary // PAGE + host_of(llm).frames_per_page * num_windows]


@pytest.mark.parametrize("of_device", ["history", "nothing"])
def test_a_load_that_fails_is_computed_again(of_device: str, folder: Path) -> None:
    """A tail that does not arrive is no tail: its row starts over, and leaves no tail of what it has not read."""
    prompts = prompts_of()
    with LLM(model=str(folder), **HOST | {"cache_verify": "all"}) as llm:
        first = told(llm.generate(prompts, GREEDY))
        seal(llm)
        if of_device == "nothing":
            leave_device(llm)
        else:
            leave_window_pages(llm)
        garble_host(llm)
        assert told(llm.generate(prompts, GREEDY)) == first
        seal(llm)
        assert counts_of(llm).loads.unfulfilled.get("checksum", 0) > 0
        assert told(llm.generate(prompts, GREEDY)) == first
        check_whole(llm)


def leave_window_pages(llm: LLM) -> None:
    """Evicts all tails from the device, whose history stays."""
    rest(llm)
    for node in cache_of(llm).tree.nodes():
        for tail in (node.tails or {}).values():
            tail.leave_device()


def test_a_tail_is_loaded_without_history_that_the_device_has(folder: Path) -> None:
    prompts = prompts_of()
    with LLM(model=str(folder), **HOST) as llm:
        first = told(llm.generate(prompts, GREEDY))
        leave_window_pages(llm)
        again = llm.generate(prompts, GREEDY)
        assert told(again) == first
        cache = cache_of(llm)
        rest(llm)
        assert cache.transfers.num_arrived[CopyKind.LOAD] == counts_of(llm).loads.num_fulfilled > 0
        assert [each.cached.host for each in again[:1]] == [0] and sum(each.cached.host for each in again) > 100
        check_whole(llm)


@pytest.mark.parametrize("how", some(HOW, "drawn"))
def test_resume_points_outlive_a_worker(how: str, folder: Path) -> None:
    """H5 and H10 across a death: the next worker adopts history and whole tails from the segment."""
    sampling = HOW[how]
    first, later = expected(folder, sampling)
    with segment_name() as name:
        named = HOST | {"host_cache_name": name}
        assert told(generate(folder, prompts_of(), sampling, named)) == first
        again = generate(folder, [*next_turns(first), *prompts_of()], sampling, named)
        assert told(again) == later + first
        assert again[0].cached.host == (len(next_turns(first)[0]) - 3) // PAGE * PAGE
        assert all(each.cached.host > 0 for each in again[:8])


def generate(
    folder: Path, prompts: list[list[int]], sampling: SamplingParams, options: dict[str, Any]
) -> list[RequestOutput]:
    """Has an engine of its own, of which the segment alone is left."""
    with LLM(model=str(folder), **options) as llm:
        outputs: list[RequestOutput] = llm.generate(prompts, sampling)
        seal(llm)
    del llm
    gc.collect()
    return outputs
