"""Windows in pages of their own on CUDA: freed while rows run, with graphs, drafts, steps planned ahead, and tails on the host.

Tokens are those of an engine in float64 on the CPU that keeps all pages; window pages that nobody holds are NaN.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.cache.storage import cuda_transfer, page_streams
from hiserve.cache.storage.cuda_transfer import CudaTransfers
from hiserve.core.transfers import CopyKind, PageCopy
from hiserve.engine.host_loads import LoadCostModel
from hiserve.llm.outputs import RequestOutput
from hiserve.models.model_config import NANO, find_model
from tests.helpers.cuda import decisions, wait_for_stream
from tests.helpers.jitter import jitter
from tests.helpers.models import save_family
from tests.helpers.tiered import cache_of, check_whole, counts_of, engine_of, host_of, leave_device, rest, transfers_of
from tests.helpers.transfers import hold_copies
from tests.helpers.window_models import SETTINGS, VOCAB, WindowPool

pytestmark = pytest.mark.gpu

PAGE, WINDOW, NUM_NEW = 16, 40, 3 * 40 + 2 * 16 + 1  # a row crosses its window three times
SHORT = 2_000_000  # cycles: 1 ms
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=NUM_NEW, ignore_eos=True)
SIZES: dict[str, Any] = SETTINGS | {
    "page_size": PAGE,
    "max_model_len": 320,
    "kv_pages": 400,
    "window_pages": 300,
    "max_running_requests": 8,
    "max_batched_tokens": 64,
}
ON_GPU: dict[str, Any] = SIZES | {"device": "cuda", "dtype": "float32", "attention_backend": "triton"}
ALL = {"graphs": "all", "overlap": 1}
FAMILIES = ("gpt_oss", "gemma3_text")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


def save(family: str, folder: Path, **sizes: Any) -> Path:
    save_family(family, folder, **{"vocab_size": VOCAB, "sliding_window": WINDOW, "head_dim": 64} | sizes)
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    return folder


def prompts_of(seed: int = 0) -> list[list[int]]:
    """Prompts that share beginnings of any length and repeat themselves; some are longer than a step."""
    rng = np.random.default_rng(seed)
    base = rng.integers(7, VOCAB, 100).tolist()
    return [
        base[: int(rng.integers(0, 100))] + rng.integers(7, VOCAB, int(rng.integers(1, 9))).tolist() * 3
        for _ in range(8)
    ]


def told(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def converse(
    llm: LLM, sampling: SamplingParams, between: Callable[[LLM], None] = lambda llm: None
) -> tuple[list[list[int]], int]:
    """First turns; then each again, and its next turn. Returns all tokens, and how many the cache had of the later ones.

    Args:
        llm: Of any settings.
        sampling: Of all.
        between: Called after the first turns, and again before the next.
    """
    first = llm.generate(prompts_of(), sampling)
    between(llm)
    again = llm.generate(prompts_of(), sampling)
    between(llm)
    turns = [[*prompt, *reply[:40], 8, 9] for prompt, reply in zip(prompts_of(), told(first), strict=True)]
    later = [*again, *llm.generate(turns, sampling)]
    return told(first) + told(later), sum(output.cached.num_tokens for output in later)


@lru_cache
def expected(folder: Path, sampling: SamplingParams) -> list[list[int]]:
    with LLM(model=str(folder), **SIZES | {"window_pages": 0, "disable_prefix_cache": True}) as llm:
        return converse(llm, sampling)[0]


CASES: dict[str, dict[str, Any]] = {
    "eager": {"graphs": "off"},
    "graphs": {"graphs": "all"},
    "graphs, overlap": ALL,
    "graphs, overlap, drafts": ALL | {"spec": "ngram", "spec_steps": 3},
    "pages longer than the window": ALL | {"page_size": 64, "kv_pages": 100, "window_pages": 80},
    "few tails": ALL | {"window_pages": 60},
    "preemption": {"graphs": "all", "kv_pages": 60},
    "drafts, preemption, few tails": ALL | {"spec": "ngram", "spec_steps": 3, "kv_pages": 60, "window_pages": 68},
    "reference attention": {"attention_backend": "reference"},
}


@pytest.mark.parametrize(
    ("case", "sampling"),
    [*((case, GREEDY) for case in CASES), ("eager", DRAWN), ("graphs, overlap, drafts", DRAWN)],
    ids=[*CASES, "eager, drawn", "graphs, overlap, drafts, drawn"],
)
def test_tokens_depend_neither_on_freed_pages_nor_on_hits(
    case: str, sampling: SamplingParams, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H1, H2, H5, H12 on the device."""
    wanted, pools = expected(folder, sampling), WindowPool(monkeypatch)
    with LLM(model=str(folder), **ON_GPU | CASES[case]) as llm:
        engine = pools.watch(llm)
        tokens, num_cached = converse(llm, sampling)
        assert tokens == wanted
        stats, windows = engine.stats(), engine._planner._cache.windows
        assert windows is not None and num_cached > 0
        assert stats.stale_rows == 0 and (stats.preemptions > 0) == ("preemption" in case)
        counts = decisions(engine._executor)
        print(counts)
        if CASES[case].get("graphs") == "all":
            assert sum(count for name, count in counts.items() if name.startswith("replay/")) > 50
            assert "eager/capture_failed" not in counts
        engine.flush()
        assert windows.num_tails == 0 and windows.num_free == windows.num_pages - 1


@pytest.mark.parametrize("spec", ["off", "ngram"])
def test_one_graph_crosses_every_boundary_and_equals_eager_steps(
    spec: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H13: prompts of each length up to three pages, decoded over three windows."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(7, VOCAB, length).tolist() for length in range(1, 3 * PAGE + 1)]
    with LLM(model=str(folder), **ON_GPU | {"graphs": "off", "window_pages": 0}) as llm:
        wanted = told(llm.generate(prompts, GREEDY))
    pools = WindowPool(monkeypatch)
    with LLM(model=str(folder), **ON_GPU | {"graphs": "all", "spec": spec, "spec_steps": 3}) as llm:
        engine = pools.watch(llm)
        assert told(llm.generate(prompts, GREEDY)) == wanted
        counts = decisions(engine._executor)
    print(counts)
    if spec == "off":
        assert counts["replay/decode"] > NUM_NEW * len(prompts) // 8 // 2
        assert "eager/context" not in counts


@pytest.mark.parametrize("backend", ["flashinfer", "auto"])
def test_flashinfer_starts_at_the_first_live_page(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels round in bfloat16: most first tokens are the same as with all pages kept. With a NaN none is."""
    folder = save("gemma3_text", tmp_path, head_dim=128)
    settings = ON_GPU | ALL | {"dtype": "bfloat16", "attention_backend": backend}
    with LLM(model=str(folder), **settings | {"window_pages": 0}) as llm:
        wanted, _ = converse(llm, GREEDY)
    pools = WindowPool(monkeypatch)
    with LLM(model=str(folder), **settings) as llm:
        engine = pools.watch(llm)
        tokens, num_cached = converse(llm, GREEDY)
        assert engine._planner._cache.windows is not None and num_cached > 0
    same = [ours[0] == theirs[0] for ours, theirs in zip(tokens[:16], wanted[:16], strict=True)]
    print(sum(same), [sum(a == b for a, b in zip(*both, strict=True)) for both in zip(tokens, wanted, strict=True)])
    assert sum(same) >= 12
    assert len({token for reply in tokens for token in reply}) > 50


HOST = ON_GPU | {"host_cache_gib": 0.2}
STAGED: dict[str, Any] = {
    "max_direct_page_bytes": 0,
    "staging_bytes": 1 << 20,
}  # as for large pages: several pieces a tail
# Options of the engine, and of its transfer engine.
HOST_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eager, slow copies": ({"graphs": "off"}, {}),
    "graphs, overlap": (ALL, {}),
    "graphs, overlap, staged, slow copies": (ALL, STAGED),
    "strict gate, slow copies": (ALL | {"graph_gate": "strict"}, {}),
    "graphs, overlap, drafts, slow copies": (ALL | {"spec": "ngram", "spec_steps": 3}, {}),
    "pages longer than the window, staged": (ALL | {"page_size": 64, "kv_pages": 100, "window_pages": 80}, STAGED),
    "preemption, few tails, slow copies": ({"graphs": "all", "kv_pages": 60, "window_pages": 68}, {}),
}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is loaded, however fast the model is."""
    monkeypatch.setattr(LoadCostModel, "is_worth_loading", lambda *measures: True)


def slow_copies(patch: pytest.MonkeyPatch) -> None:
    """Gathers and scatters begin late on the device: what does not wait for them is early."""
    move = page_streams._move

    def late(*arguments: Any) -> None:
        torch.cuda._sleep(SHORT)
        move(*arguments)

    patch.setattr(page_streams, "_move", late)


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("case", HOST_CASES)
def test_tokens_do_not_depend_on_tails_that_come_from_the_host(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H1, H2, H5, H10 on the device: all that is cached comes from the host, frames from pinned memory."""
    options, transfers = HOST_CASES[case]
    wanted, pools = expected(folder, GREEDY), WindowPool(monkeypatch)
    monkeypatch.setattr(cuda_transfer, "CudaTransfers", partial(CudaTransfers, **transfers))
    if "slow" in case:
        slow_copies(monkeypatch)
    with LLM(model=str(folder), **HOST | options) as llm:
        engine = pools.watch(llm)
        tokens, num_cached = converse(llm, GREEDY, leave_device)
        assert tokens == wanted and num_cached > 0
        rest(llm)
        counts, stats = counts_of(llm), engine.stats()
        assert counts.loads.num_fulfilled == counts.loads.num_wanted > 0
        assert stats.stale_rows == 0 and (stats.preemptions > 0) == ("preemption" in case)
        print(decisions(engine._executor))
        tails = [tail for node in cache_of(llm).tree.nodes() for tail in (node.tails or {}).values()]
        frames = [frame for tail in tails if tail.frames is not None for frame in tail.frames.tolist()]
        assert frames and all(host_of(llm).page(frame).is_pinned() for frame in frames)
        check_whole(llm)


@pytest.mark.usefixtures("loads")
def test_delays_on_any_stream_do_not_change_what_tails_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, pools = expected(folder, DRAWN), WindowPool(monkeypatch)
    with LLM(model=str(folder), **HOST | ALL) as llm:
        pools.watch(llm)
        with jitter(random.randrange(2**32)) as delays:
            tokens, num_cached = converse(llm, DRAWN, leave_device)
            wait_for_stream()
        print(delays.counts)
        assert tokens == wanted and num_cached > 0
        assert counts_of(llm).loads.num_fulfilled > 0


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("kind", [CopyKind.LOAD, CopyKind.OFFLOAD])
def test_a_copy_of_a_tail_that_fails_costs_time_and_nothing_else(
    kind: CopyKind, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third: its row starts over, or the host has no such tail."""
    wanted, pools, num_tails = expected(folder, GREEDY), WindowPool(monkeypatch), 0

    def fail_some(copy: PageCopy) -> str | None:
        nonlocal num_tails
        is_tail = copy.kind is kind and copy.image is not None
        num_tails += is_tail
        return "broken" if is_tail and num_tails % 3 == 1 else None

    with LLM(model=str(folder), **HOST | ALL) as llm:
        pools.watch(llm)
        hold_copies(transfers_of(llm), fail_some)
        tokens, _ = converse(llm, GREEDY, leave_device)
        assert tokens == wanted and num_tails > 3
        counts = counts_of(llm)
        copies = counts.loads if kind is CopyKind.LOAD else counts.offloads
        assert copies.unfulfilled["broken"] > 0 and counts.loads.num_fulfilled > 0
        hold_copies(transfers_of(llm), None)
        check_whole(llm)


def test_auto_gives_windows_pages_of_their_own(folder: Path) -> None:
    sizes = {name: size for name, size in ON_GPU.items() if name not in ("kv_pages", "window_pages")}
    for host_gib in (0, 0.05):
        with LLM(model=str(folder), **sizes | {"host_cache_gib": host_gib}) as llm:
            windows = engine_of(llm)._planner._cache.windows
            assert windows is not None and windows.num_pages > 1
            assert told(llm.generate(prompts_of()[:2], GREEDY)) == expected(folder, GREEDY)[:2]
