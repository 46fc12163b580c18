"""A random workload through planner and index on an executor that stores token ids, checked step by step."""

from __future__ import annotations

from typing import Any

import numpy as np

from hiserve.core.request import FinishReason, SamplingParams
from hiserve.ipc.messages import Admit
from tests.helpers.echo import VOCAB, oracle, oracle_scores
from tests.helpers.engines import echo_engine
from tests.invariants.page_checks import check_pages

EOS = (0, 1, 2)


def expected(prompt: np.ndarray, sampling: SamplingParams, max_len: int) -> tuple[list[int], FinishReason]:
    assert sampling.max_tokens is not None
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(EOS))
    out = oracle(prompt, min(sampling.max_tokens, max_len - prompt.size))
    for i, token in enumerate(out):
        if token in stops:
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


def make_sampling(rng: np.random.Generator, wants_scores: float) -> SamplingParams:
    """What a request asks for beside its tokens; scores with the given probability, of each kind."""
    return SamplingParams(
        seed=1,
        max_tokens=int(rng.integers(1, 30)),
        ignore_eos=bool(rng.random() < 0.3),
        stop_token_ids=tuple(rng.choice(VOCAB, size=int(rng.choice([0, 0, 3, 20])), replace=False).tolist()),
        logprobs=int(rng.integers(0, 4)) if rng.random() < wants_scores else None,
        prompt_logprobs=int(rng.integers(0, 4)) if rng.random() < wants_scores else None,
    )


class Run:
    """Feeds a workload in random bursts, checks pages after each step and collects what is reported."""

    def __init__(
        self,
        seed: int,
        *,
        depth: int,
        num_draft: int,
        num_pages: int,
        page_size: int,
        faults: bool,
        wants_scores: float = 0.2,
        **tiers: Any,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.page_size = page_size
        self.max_len = 80
        self.engine, self.planner, self.executor, self.cache = echo_engine(
            num_pages=num_pages,
            page_size=page_size,
            max_len=self.max_len,
            depth=depth,
            num_draft=num_draft,
            budget=int(self.rng.choice([3, 7, 16, 64])),
            seed=seed,
            **tiers,
        )
        self.faults = faults
        self.wants_scores = wants_scores
        self.scores: dict[int, bytes] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, list[FinishReason]] = {}
        self.cached: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.failed: set[int] = set()

    def go(self) -> Run:
        prompts = make_prompts(self.rng, self.page_size, self.max_len)
        sampling = [make_sampling(self.rng, self.wants_scores) for _ in prompts]
        pending = list(range(len(prompts)))
        steps = 0
        while pending or self.engine.has_work:
            steps += 1
            assert steps < 20_000, "the workload does not end"
            while pending and self.rng.random() < 0.4:
                uid = pending.pop(0)
                self.engine.add(Admit(uid, prompts[uid].size, sampling[uid], b"", 0), prompts[uid])
            if self.rng.random() < 0.03:
                uid = int(self.rng.integers(len(prompts)))
                self.aborted.add(uid)
                self.engine.abort([uid])
            if self.faults and self.rng.random() < 0.2:
                self.executor.stale_rows.add(int(self.rng.integers(1, 7)))
            self.take(self.engine.step())
            check_pages(self.planner, self.cache)
        self.check_end(prompts, sampling)
        return self

    def take(self, report) -> None:
        if report is None:
            return
        assert len(set(report.uids)) == len(report.uids), f"a request speaks twice: {report.uids}"
        at = score_at = 0
        columns = (report.uids, report.counts, report.finishes, report.cached, report.score_words)
        for uid, count, finish, cached, words in zip(*columns, strict=True):
            assert uid not in self.ends, f"request {uid} speaks after its end"
            self.outputs.setdefault(uid, []).extend(report.tokens[at : at + count].tolist())
            at += count
            self.scores[uid] = self.scores.get(uid, b"") + report.scores[score_at : score_at + 4 * words]
            score_at += 4 * words
            if cached is not None:
                assert uid not in self.cached
                self.cached[uid] = cached.num_tokens
            if finish:
                self.ends.setdefault(uid, []).append(FinishReason(finish))
        assert (at, score_at) == (report.tokens.size, len(report.scores))
        for uid, _, _ in report.failed:
            assert uid not in self.ends
            self.failed.add(uid)
            self.ends.setdefault(uid, []).append(FinishReason.ABORT)

    def check_end(self, prompts: list[np.ndarray], sampling: list[SamplingParams]) -> None:
        assert self.planner._rows.active.size == 0
        assert all(node.num_locks == 0 for node in self.cache.tree.nodes())
        for uid, prompt in enumerate(prompts):
            out, reason = expected(prompt, sampling[uid], self.max_len)
            ends = self.ends.get(uid, [])
            if uid in self.aborted and uid not in self.ends:
                continue  # aborted before it was sent
            assert len(ends) == 1, f"request {uid} ended {len(ends)} times"
            got, scores = self.outputs.get(uid, []), self.scores.get(uid, b"")
            wanted = oracle_scores(prompt, got, sampling[uid])
            if ends[0] is FinishReason.ABORT:
                assert uid in self.aborted or uid in self.failed
                assert got == out[: len(got)]
                assert scores == (wanted if got else wanted[: len(scores)]), f"scores of request {uid}"
            else:
                assert (got, ends[0]) == (out, reason), f"request {uid}"
                assert scores == wanted, f"scores of request {uid}"
            if sampling[uid].prompt_logprobs is not None:
                assert self.cached.get(uid, 0) == 0, f"request {uid} skipped scores of its prompt"
