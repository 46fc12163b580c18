"""Random workloads through planner and index, against an executor that stores token ids."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.core.request import FinishReason, SamplingParams
from hiserve.messages.types import Admit
from tests.helpers.echo import oracle
from tests.helpers.engines import echo_engine

EOS = (0, 1, 2)


def expected(prompt: np.ndarray, max_tokens: int, max_len: int) -> tuple[list[int], FinishReason]:
    room = min(max_tokens, max_len - prompt.size)
    out = oracle(prompt, room)
    for i, token in enumerate(out):
        if token in EOS:
            return out[: i + 1], FinishReason.STOP
    return out, FinishReason.LENGTH


def make_prompts(rng: np.random.Generator, page_size: int, max_len: int) -> list[np.ndarray]:
    """Prompts that repeat, share prefixes and end on page boundaries."""
    stems = [rng.integers(3, 200, size=int(rng.integers(0, 5)) * page_size) for _ in range(3)]
    prompts: list[np.ndarray] = []
    for _ in range(24):
        if prompts and rng.random() < 0.3:
            prompts.append(prompts[int(rng.integers(len(prompts)))])
            continue
        stem = stems[int(rng.integers(len(stems)))]
        tail = int(rng.choice([0, 1, page_size - 1, page_size, 2 * page_size + 1, 9]))
        prompt = np.concatenate((stem, rng.integers(3, 200, size=tail)))[: max_len - 1]
        prompts.append(prompt.astype(np.int32) if prompt.size else np.array([5], dtype=np.int32))
    return prompts


class Run:
    """Feeds a workload in random bursts, checks pages after each step and collects what is reported."""

    def __init__(self, seed: int, *, depth: int, max_draft: int, num_pages: int, page_size: int, faults: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.page_size = page_size
        self.max_len = 80
        self.engine, self.planner, self.executor, self.cache = echo_engine(
            num_pages=num_pages,
            page_size=page_size,
            max_len=self.max_len,
            depth=depth,
            max_draft=max_draft,
            budget=int(self.rng.choice([3, 7, 16, 64])),
            seed=seed,
        )
        self.faults = faults
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, list[FinishReason]] = {}
        self.cached: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.failed: set[int] = set()

    def go(self) -> Run:
        prompts = make_prompts(self.rng, self.page_size, self.max_len)
        limits = self.rng.integers(1, 30, size=len(prompts)).tolist()
        pending = list(range(len(prompts)))
        steps = 0
        while pending or self.engine.has_work:
            steps += 1
            assert steps < 20_000, "the workload does not end"
            while pending and self.rng.random() < 0.4:
                uid = pending.pop(0)
                sampling = SamplingParams(seed=1, max_tokens=limits[uid])
                self.engine.add(Admit(uid, prompts[uid].size, sampling, b"", 0), prompts[uid])
            if self.rng.random() < 0.03:
                uid = int(self.rng.integers(len(prompts)))
                self.aborted.add(uid)
                self.engine.abort([uid])
            if self.faults and self.rng.random() < 0.2:
                self.executor.stale_rows.add(int(self.rng.integers(1, 7)))
            self.take(self.engine.step())
            self.check_pages()
        self.check_end(prompts, limits)
        return self

    def take(self, report) -> None:
        if report is None:
            return
        at = 0
        for uid, count, finish, cached in zip(report.uids, report.counts, report.finishes, report.cached, strict=True):
            assert uid not in self.ends, f"request {uid} speaks after its end"
            self.outputs.setdefault(uid, []).extend(report.tokens[at : at + count].tolist())
            at += count
            if cached >= 0:
                assert uid not in self.cached
                self.cached[uid] = cached
            if finish:
                self.ends.setdefault(uid, []).append(FinishReason(finish))
        assert at == report.tokens.size
        for uid, _, _ in report.failed:
            assert uid not in self.ends
            self.failed.add(uid)
            self.ends.setdefault(uid, []).append(FinishReason.ABORT)

    def check_pages(self) -> None:
        """Free, tree and rows partition the pool (INV-17, INV-19)."""
        rows = self.planner._rows
        private = [rows.page_table[r, rows.num_published[r] : rows.num_pages[r]] for r in rows.active.tolist()]
        tree = [node.pages for node in self.cache.tree.nodes()]
        free = self.cache.pages.free_pages()
        everything = np.concatenate([free, *private, *tree])
        assert np.array_equal(np.sort(everything), np.arange(1, self.cache.pages.num_pages))
        unlocked = sum(node.pages.size for node in self.cache.tree.nodes() if node.num_locks == 0)
        assert unlocked == self.cache.num_evictable
        assert free.size == self.cache.pages.num_free

    def check_end(self, prompts: list[np.ndarray], limits: list[int]) -> None:
        assert self.planner._rows.active.size == 0
        assert all(node.num_locks == 0 for node in self.cache.tree.nodes())
        for uid, prompt in enumerate(prompts):
            out, reason = expected(prompt, limits[uid], self.max_len)
            ends = self.ends.get(uid, [])
            if uid in self.aborted and uid not in self.ends:
                continue  # aborted before it was sent
            assert len(ends) == 1, f"request {uid} ended {len(ends)} times"
            got = self.outputs.get(uid, [])
            if ends[0] is FinishReason.ABORT:
                assert uid in self.aborted or uid in self.failed
                assert got == out[: len(got)]
            else:
                assert (got, ends[0]) == (out, reason), f"request {uid}"


@pytest.mark.parametrize("max_draft", [0, 1, 3])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_workloads_match_the_oracle(depth: int, max_draft: int) -> None:
    preempted = cached = accepted = 0
    for seed in range(12):
        print("seed", seed)
        page_size = [1, 4, 16][seed % 3]
        num_pages = 1 + 80 // page_size + int(seed % 4) * (8 // page_size + 1)
        run = Run(seed, depth=depth, max_draft=max_draft, num_pages=num_pages, page_size=page_size, faults=False).go()
        preempted += run.engine.stats().preemptions
        cached += run.engine.stats().cached_tokens
        accepted += run.executor.num_accepted
        assert not run.failed
    assert preempted >= 1
    assert cached > 0
    assert (accepted > 0) == (max_draft > 0)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stale_row_is_recomputed_once_and_then_fails_alone(depth: int) -> None:
    stale = failed = 0
    for seed in range(100, 112):
        print("seed", seed)
        run = Run(seed, depth=depth, max_draft=1, num_pages=60, page_size=4, faults=True).go()
        stale += run.engine.stats().stale_rows
        failed += len(run.failed)
    assert stale > failed > 0
