"""Paths that a prompt's pages take before it comes again, each of which shows that it was taken."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hiserve import LLM, SamplingParams
from hiserve.core.transfers import CopyKind, PageCopy
from hiserve.core.usage import CacheUse
from hiserve.llm.outputs import CompletionOutput
from hiserve.llm.rehearsed import RehearsedLLM
from tests.helpers.segment_name import segment_name
from tests.helpers.small_model import small_model
from tests.helpers.tiered import check_whole, counts_of, engine_of, garble_host, leave_device, rest, seal, transfers_of
from tests.helpers.transfers import hold_copies

PAGE = 16
SETTINGS: dict[str, Any] = {
    "in_process": True,
    "dtype": "float64",
    "max_model_len": 160,
    "max_running_requests": 4,
    "max_batched_tokens": 64,
    "cpu_threads": 1,
    "log_level": "warning",
}
SMALL_MODEL = SETTINGS | {"model": small_model()}  # for tests that want neither sensible text nor trained heads
DRAFTS = {"spec_steps": 2}  # of the model's own head, unless another is named: always so many, so that runs are alike
# Some 1,600 tokens; all pages are kept, so that hits can be counted.
HOST: dict[str, Any] = {"host_cache_gib": 0.025, "kv_canary": True, "window_pages": 0}
NUM_TOKENS, FEW_TOKENS = 1008, 160  # of the device's pages; few are fewer than the prompts of one round take
SMALL_HOST_GIB = 0.0003  # of the small model
MAX_LOGPROB_ERROR = 1e-6
TRAINED = ("eagle3", "mtp")  # the heads that come with hiserve-nano


@dataclass(frozen=True)
class Work:
    """Prompts, how they are answered, and what the answers must be.

    Attributes:
        prompts: Their tokens.
        sampling: Of each.
        expected: The answer to each.
        max_error: Of log-probabilities.
    """

    prompts: list[list[int]]
    sampling: list[SamplingParams]
    expected: list[CompletionOutput]
    max_error: float = MAX_LOGPROB_ERROR

    def num_full(self, page_size: int) -> list[int]:
        """Tokens of each prompt that can come from a cache."""
        return [(len(prompt) - 1) // page_size * page_size for prompt in self.prompts]

    def from_first_page(self, page_size: int) -> Work:
        """Returns the rest of each reply after the first page that ends amid it, and one token more."""
        prompts, sampling, rest_of = [], [], []
        for prompt, how, said in zip(self.prompts, self.sampling, self.expected, strict=True):
            num_said = page_size - len(prompt) % page_size + 1
            if left := said.token_ids[num_said:]:
                prompts.append([*prompt, *said.token_ids[:num_said]])
                sampling.append(msgspec.structs.replace(how, max_tokens=len(left)))
                rest_of.append(replace(said, token_ids=left))
        return Work(prompts, sampling, rest_of, self.max_error)


def answer(prompts: list[list[int]], sampling: list[SamplingParams], **settings: Any) -> Work:
    """Asks an engine that reuses nothing and guesses nothing."""
    with LLM(disable_prefix_cache=True, host_cache_gib=0, **pool(PAGE), **SETTINGS | {"spec": "off"} | settings) as llm:
        results = llm.generate(prompts, sampling)
    expected = [result.outputs[0] for result in results]
    assert len({token for each in expected for token in each.token_ids}) >= 20
    assert all(result.cached.num_tokens == 0 for result in results)
    return Work(prompts, sampling, expected)


def answer_repeating(folder: Path, how: str, seed: int, vocab: int, **settings: Any) -> Work:
    """Asks as ``answer``, four prompts of a model of random weights that repeat themselves and share their beginnings.

    ``how`` tokens are drawn is ``greedy`` or ``drawn``; replies have 16 tokens.
    """
    print(f"seed {seed}")
    rng = np.random.default_rng([seed, how == "drawn"])
    shared = rng.integers(7, vocab, 18).tolist()
    prompts = [shared * 2 + rng.integers(7, vocab, 4 + 11 * index).tolist() + shared[:9] for index in range(4)]
    options = {"temperature": 0.0} if how == "greedy" else {"temperature": 0.9, "top_p": 0.95}
    sampling = [SamplingParams(seed=i, max_tokens=16, ignore_eos=True, **options) for i in range(4)]
    return answer(prompts, sampling, model=str(folder), **settings)


def ask(llm: LLM, work: Work, *, backwards: bool = False) -> list[CacheUse]:
    """Asks everything once and returns what came from where; ``backwards``: what was used last comes first.

    A trained or rehearsed head that drafts for certain has to be right now and then.
    """
    order = -1 if backwards else 1
    results = llm.generate(work.prompts[::order], work.sampling[::order])[::order]
    for result, expected in zip(results, work.expected, strict=True):
        check(result.outputs[0], expected, work.max_error)
    is_right = llm.settings.spec.spec in TRAINED or isinstance(llm, RehearsedLLM)
    if is_right and llm.settings.spec.spec_steps not in (0, "auto"):
        assert sum(result.outputs[0].drafts.accepted for result in results if result.outputs[0].drafts) > 0
    return [result.cached for result in results]


def check(got: CompletionOutput, expected: CompletionOutput, max_error: float = MAX_LOGPROB_ERROR) -> None:
    """The same tokens, end and log-probabilities."""
    assert got.token_ids == expected.token_ids
    assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert (got.logprobs is None) == (expected.logprobs is None)
    for ours, theirs in zip(got.logprobs or (), expected.logprobs or (), strict=True):
        assert abs(ours.logprob - theirs.logprob) <= max_error
        assert ours.top.keys() == theirs.top.keys()


def pool(page_size: int, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """Settings of a device pool of so many tokens, whatever its pages."""
    return {"page_size": page_size, "kv_pages": 1 + -(-num_tokens // page_size)}


def device_hits(work: Work, folder: Path, page_size: int = PAGE, **settings: Any) -> None:
    with LLM(**SETTINGS | DRAFTS | pool(page_size) | {"host_cache_gib": 0, "kv_canary": True} | settings) as llm:
        ask(llm, work)
        again = ask(llm, work)
        assert [use.device for use in again] == work.num_full(page_size)
        check_whole(llm)


def answer_from_host(llm: LLM, work: Work, later: Work, page_size: int) -> None:
    """Answers ``work``, and behind it ``later``, of which all full pages are found and some come from the host."""
    ask(llm, work)
    leave_device(llm)
    again = ask(llm, later)
    assert sum(use.host for use in again) > 0
    assert [use.num_tokens for use in again] == later.num_full(page_size)


def host_hits(work: Work, folder: Path, page_size: int = PAGE, **settings: Any) -> None:
    with LLM(**SETTINGS | DRAFTS | pool(page_size) | HOST | settings) as llm:
        answer_from_host(llm, work, work, page_size)
        assert counts_of(llm).loads.num_fulfilled * page_size >= sum(work.num_full(page_size)) // 2
        check_whole(llm)


def resumed_replies(work: Work, folder: Path, page_size: int = PAGE, **settings: Any) -> None:
    """Each prompt comes again with its reply as far as the first page that ends amid it, and the rest follows from there."""
    rest_of = work.from_first_page(page_size)
    assert len(rest_of.prompts) > 1
    with LLM(**SETTINGS | DRAFTS | pool(page_size) | HOST | settings) as llm:
        answer_from_host(llm, work, rest_of, page_size)
        check_whole(llm)


def store_hits(work: Work, folder: Path, page_size: int = PAGE, **settings: Any) -> None:
    with LLM(
        **SETTINGS | DRAFTS | pool(page_size) | HOST | {"store": f"file:{folder}", "store_prefetch": "wait"} | settings
    ) as llm:
        ask(llm, work)
        rest(llm)
        assert counts_of(llm).uploads.num_fulfilled > 0
        engine_of(llm).flush()
        again = ask(llm, work)
        assert sum(use.store for use in again) > 0
        assert [use.num_tokens for use in again] == work.num_full(page_size)
        assert counts_of(llm).prefetches.num_fulfilled > 0
        check_whole(llm)


def eviction_storm(work: Work, folder: Path, page_size: int = PAGE, **settings: Any) -> None:
    with LLM(
        **SETTINGS | DRAFTS | pool(page_size, FEW_TOKENS) | HOST | {"host_cache_gib": SMALL_HOST_GIB} | settings
    ) as llm:
        ask(llm, work)
        rest(llm)
        for backwards in (True, False):
            ask(llm, work, backwards=backwards)
        counts = counts_of(llm)
        assert counts.device.num_evicted > 0 and counts.host.num_evicted > 0 and counts.loads.num_fulfilled > 0
        check_whole(llm)


def warm_restart(work: Work, folder: Path, page_size: int = PAGE, **settings: Any) -> None:
    with segment_name() as name:
        for life in range(2):
            with LLM(**SETTINGS | DRAFTS | pool(page_size) | HOST | {"host_cache_name": name} | settings) as llm:
                found = ask(llm, work)
                if life:
                    assert [use.num_tokens for use in found] == work.num_full(page_size)
                    assert sum(use.host for use in found) > 0
                    check_whole(llm)
                else:
                    seal(llm)
            del llm
            gc.collect()  # the lock of the name goes with the last view of its memory


def failed_loads(work: Work, folder: Path, page_size: int = PAGE, **settings: Any) -> None:
    with LLM(**SETTINGS | DRAFTS | pool(page_size) | HOST | settings) as llm:
        ask(llm, work)
        leave_device(llm)
        num_loads = 0

        def fail_some(copy: PageCopy) -> str | None:
            nonlocal num_loads
            num_loads += copy.kind is CopyKind.LOAD
            return "broken" if copy.kind is CopyKind.LOAD and num_loads % 2 else None

        hold_copies(transfers_of(llm), fail_some)
        ask(llm, work)
        assert counts_of(llm).loads.unfulfilled["broken"] > 0
        check_whole(llm)


def garbled_pages(work: Work, folder: Path, page_size: int = PAGE, **settings: Any) -> None:
    with LLM(**SETTINGS | DRAFTS | pool(page_size) | HOST | {"cache_verify": "all"} | settings) as llm:
        ask(llm, work)
        leave_device(llm)
        seal(llm)
        garble_host(llm)
        ask(llm, work)
        counts = counts_of(llm)
        assert counts.loads.unfulfilled["checksum"] == counts.loads.num_wanted > 0
        leave_device(llm)
        again = ask(llm, work)  # what was computed again took the place of what was garbled
        assert sum(use.host for use in again) > 0
        check_whole(llm)


Case = tuple[Any, ...]


def pairs_of(case: Case) -> set[tuple[int, Any, int, Any]]:
    return {(i, case[i], j, case[j]) for i in range(len(case)) for j in range(i)}


def pairwise(cases: list[Case]) -> Iterator[Case]:
    """Yields cases until each pair of two factors' values has occurred, those first that bring most new ones."""
    pairs = {case: pairs_of(case) for case in cases}
    missing = set().union(*pairs.values())
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        yield best


def chunks(work: Work, folder: Path, page_size: int, **settings: object) -> None:
    """Prompts are computed in many small steps, beside rows that verify drafts."""
    options = SETTINGS | pool(page_size) | {"max_batched_tokens": 16, "host_cache_gib": 0} | settings
    with LLM(**options) as llm:
        ask(llm, work)
        assert engine_of(llm).stats().steps > sum(map(len, work.prompts)) // 16
        check_whole(llm)


def preemption(work: Work, folder: Path, page_size: int, **settings: object) -> None:
    """Few pages, so that most rows wait; those that run lose theirs now and then, and start over."""
    num_tokens = max(map(len, work.prompts)) + max(sampling.max_tokens or 0 for sampling in work.sampling) + 16
    options = SETTINGS | pool(page_size, 2 * num_tokens) | {"host_cache_gib": 0} | settings
    with LLM(**options) as llm:
        lack_pages(llm)
        ask(llm, work)
        assert engine_of(llm).stats().preemptions > 0
        check_whole(llm)


def lack_pages(llm: LLM) -> None:
    """Takes the latest row's pages before every sixth step of rows."""
    planner: Any = engine_of(llm)._planner
    plan_running, turns = planner._plan_running, count(1)

    def plan() -> Any:
        rows = planner._host_loads.runnable(planner._rows.active)
        if rows.size and next(turns) % 6 == 0:
            planner._ends.preempt(int(rows[-1]))
        return plan_running()

    planner._plan_running = plan


def storm(work: Work, folder: Path, page_size: int, **settings: object) -> None:
    """The device holds one row and a half: pages leave it and come back all the time."""
    with LLM(**SETTINGS | pool(page_size, 192) | HOST | settings) as llm:
        for backwards in (False, True):
            ask(llm, work, backwards=backwards)
            rest(llm)
        counts = counts_of(llm)
        assert counts.device.num_evicted > 0 and counts.loads.num_fulfilled > 0
        check_whole(llm)
