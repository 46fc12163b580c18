"""A storm of dialogues over a small pool, with drafts: what it must give, compared with engines that have room for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hiserve import LLM, SamplingParams
from hiserve.core.usage import DraftUse
from hiserve.llm.outputs import RequestOutput
from tests.helpers.dialogues import conversations
from tests.helpers.storm import PAGE, Load, Requests

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
