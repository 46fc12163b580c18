"""More traffic than the device's pages hold: prefixes that many share leave for the host and come back all the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hiserve import LLM, SamplingParams
from hiserve.core.usage import DraftUse
from hiserve.ipc.messages import WorkerStats
from hiserve.kernels.noise import gumbel
from hiserve.kernels.step_reference import SAMPLE_STREAM
from hiserve.llm.outputs import RequestOutput
from hiserve.models.model_config import NANO, find_model
from tests.helpers import cuda
from tests.helpers.dialogues import conversations
from tests.helpers.margin import MAX_SHARE, as_tensor, margin, shape_difference, teacher_forced
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.tiered import engine_of

PAGE, MAX_LEN = 16, 320
Requests = tuple[list[list[int]], list[SamplingParams]]


@dataclass(frozen=True)
class Load:
    """How much traffic.

    Attributes:
        num_requests: In all.
        num_running: At once.
        num_forewords: Prefixes that requests share; of six pages, in the mean.
        kv_pages: Of the device: much less than forewords and replies take.
    """

    num_requests: int
    num_running: int
    num_forewords: int
    kv_pages: int


def settings(load: Load, **options: Any) -> dict[str, Any]:
    return {
        "in_process": True,
        "spec": "off",
        "device": cuda.DEVICE,
        "dtype": "float32",
        "page_size": PAGE,
        "max_model_len": MAX_LEN,
        "max_running_requests": load.num_running,
        "max_batched_tokens": 2048,
        "cpu_threads": 1,
        "log_level": "warning",
    } | options


def load_whatever_it_costs(llm: LLM) -> None:
    """What the host has is loaded, also where computing it would be faster."""
    engine_of(llm)._planner._costs.is_worth_loading = lambda *_: True  # type: ignore[method-assign]


def tokens_of(llm: LLM, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(list(prompts), list(sampling))]


def check_margins(requests: Requests, tokens: list[list[int]], expected: list[list[int]]) -> None:
    """Tokens that another shape of batch rounded the other way: each must be as good as the best, and few may be."""
    num_requests = len(tokens)
    differing = [
        (prompt, params, got)
        for prompt, params, got, wanted in zip(*requests, tokens, expected, strict=True)
        if got != wanted
    ]
    print(f"{len(differing)} of {num_requests} replies differ")
    assert len(differing) <= MAX_SHARE * num_requests, f"{len(differing)} replies differ: {differing[:2]}"
    if not differing:
        return
    forced = {row: teacher_forced(prompt, tokens) for row, (prompt, _, tokens) in enumerate(differing, start=1)}
    sizes = {"num_pages": 21 * len(forced) + 1, "max_rows": len(forced), "max_len": MAX_LEN}
    scores = [
        Engine(find_model(NANO), device=cuda.DEVICE, attention="reference", **sizes).logits(
            HandPlanner(PAGE, sizes["num_pages"]), forced, chunk
        )
        for chunk in (64, 7)
    ]
    difference = shape_difference(scores[0], scores[1])
    for row, (prompt, sampling, tokens) in enumerate(differing, start=1):
        reference = scores[0][row][len(prompt) - 1 :].cpu().double()
        verdict = margin(reference + noise(prompt, sampling, tokens), as_tensor(tokens), difference)
        print(verdict)
        assert verdict.worst <= verdict.epsilon, (prompt, tokens, verdict)


def noise(prompt: list[int], sampling: SamplingParams, tokens: list[int]) -> torch.Tensor:
    """What drawing adds to the scores: the token is the best of the sum."""
    assert sampling.seed is not None
    places = torch.arange(len(prompt), len(prompt) + len(tokens))
    seeds = torch.full_like(places, sampling.seed)
    return sampling.temperature * gumbel(seeds, torch.zeros_like(places), places, SAMPLE_STREAM, 4096)


def share_of_replays(stats: WorkerStats) -> float:
    counts = stats.graph_gate
    num_steps = sum(sum(reasons.values()) for reasons in counts.values())
    share = sum(counts["replay"].values()) / num_steps
    print(f"{share:.4f} of {num_steps} steps replayed: {counts}")
    return share


MAX_DIFFERENCE = 0.02  # of accept lengths


@dataclass(frozen=True)
class Outcome:
    """What requests were answered.

    Attributes:
        tokens: Of each.
        drafts: Of each; None without speculation.
        cached: Tokens of its prompt that came from a cache.
        num_host: Of all of them, tokens that came from the host.
    """

    tokens: list[list[int]]
    drafts: list[DraftUse | None]
    cached: list[int]
    num_host: int


def dialogues(llm: LLM, load: Load, seed: int) -> Requests:
    """Prompts of a few exchanges, whose beginnings many share; greedy or drawn.

    The last tenth is the first one again, in another order: what was accepted then should be accepted now.
    """
    print(f"dialogues seed {seed}")
    rng = np.random.default_rng(seed)
    exchanges = conversations(llm)

    def talk(count: int) -> list[int]:
        return [token for index in rng.integers(len(exchanges), size=count) for token in exchanges[index]]

    forewords = [talk(int(rng.integers(1, 3))) for _ in range(load.num_forewords)]
    tenth = load.num_requests // 10
    order = [*range(load.num_requests - tenth), *rng.permutation(tenth).tolist()]
    drawn = [
        (
            [*forewords[rng.integers(load.num_forewords)], *talk(1)[-int(rng.integers(8, 40)) :]],
            SamplingParams(
                temperature=0.7 * (index % 3 == 0), seed=index, max_tokens=int(rng.integers(8, 25)), ignore_eos=True
            ),
        )
        for index in range(load.num_requests - tenth)
    ]
    return [drawn[index][0] for index in order], [drawn[index][1] for index in order]


def weather(llm: LLM, requests: Requests, load: Load, seed: int) -> Outcome:
    """Sends them in waves of any size, each when the one before has ended: batches grow and shrink."""
    rng = np.random.default_rng(seed)
    results: list[RequestOutput] = []
    prompts, sampling = requests
    while len(results) < len(prompts):
        wave = slice(len(results), len(results) + int(rng.integers(1, 3 * load.num_running)))
        results += llm.generate(prompts[wave], sampling[wave])
    return Outcome(
        tokens=[result.outputs[0].token_ids for result in results],
        drafts=[result.outputs[0].drafts for result in results],
        cached=[result.cached.num_tokens for result in results],
        num_host=sum(result.cached.host for result in results),
    )


@dataclass(frozen=True)
class Measured:
    """A mean over steps that verified drafts, and its standard error, were each step drawn for itself."""

    mean: float
    error: float

    def differs_from(self, other: Measured) -> float:
        """As a share."""
        return abs(self.mean / other.mean - 1)


def accept_length(drafts: list[DraftUse | None], *, is_auto: bool) -> Measured:
    """Returns tokens that a step appended; where the number of drafts is chosen, as if there was one: that is no choice."""
    used = [each for each in drafts if each is not None]
    assert len(used) == len(drafts)
    use = sum(used, DraftUse())
    # The share of steps that accepted as many drafts, or more.
    shares = np.array(use.accepted_per_position[: 1 if is_auto else None]) / use.verify_steps
    mean = shares.sum()
    variance = (shares * (2 * np.arange(len(shares)) + 1)).sum() - mean**2
    return Measured(1 + mean, float(np.sqrt(variance / use.verify_steps)))


def check_acceptance(storm: Outcome, calm: Outcome, *, is_auto: bool) -> None:
    """As good as where nothing is ever evicted, and in the last tenth as good as in the first.

    Prompts, seeds and tokens are the same in what is compared. What differs is where a row's steps begin, for it was
    preempted, and, where it is chosen, at which of them there were drafts. Such steps are few of all: one standard error
    is for them, which is small where there are many requests; and three in the tenths, which are small themselves.
    """
    tenth = len(storm.drafts) // 10
    parts = (storm.drafts, calm.drafts, storm.drafts[:tenth], storm.drafts[-tenth:])
    whole, untouched, first, last = (accept_length(part, is_auto=is_auto) for part in parts)
    print(f"accept length: storm {whole}, never evicted {untouched}, first tenth {first}, last tenth {last}")
    assert whole.mean > 1.4, "hardly anything is accepted: this proves nothing"
    assert whole.differs_from(untouched) <= MAX_DIFFERENCE + np.hypot(whole.error, untouched.error) / untouched.mean
    assert first.differs_from(last) <= 3 * np.hypot(first.error, last.error) / last.mean


def check_hits(storm: Outcome, plain: Outcome) -> None:
    """Drafts cost no hits, but for a page each."""
    print(f"cached: {sum(storm.cached)} with drafts, {sum(plain.cached)} without, {storm.num_host} from the host")
    assert sum(storm.cached) >= sum(plain.cached) - PAGE * len(plain.cached)
    assert storm.num_host > 0
