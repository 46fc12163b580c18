"""A storm of dialogues over a small pool, with drafts: what it must give, compared with engines that have room for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hiserve import LLM, SamplingParams
from hiserve.core.draft_use import DraftUse
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
            [*forewords[rng.integers(load.num_forewords)], *talk(1)],
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


def accept_length(drafts: list[DraftUse | None]) -> float:
    used = [each for each in drafts if each is not None]
    assert len(used) == len(drafts)
    return sum(used, DraftUse()).accept_length


def first_drafts(drafts: list[DraftUse | None]) -> float:
    """Returns the share of first drafts that were accepted: it does not depend on how many there are."""
    used = sum((each for each in drafts if each is not None), DraftUse())
    return used.accepted_per_position[0] / used.verify_steps


def check_acceptance(storm: Outcome, calm: Outcome, *, is_auto: bool) -> None:
    """As good as where nothing is ever evicted, and in the last tenth as good as in the first.

    The prompts, seeds and tokens are the same, so that nothing is left to chance but where a row's steps begin: it was
    preempted in one run and not in the other. The tolerance is for that alone.
    """
    measure = first_drafts if is_auto else accept_length
    tenth = len(storm.drafts) // 10
    found = {
        "storm": measure(storm.drafts),
        "calm": measure(calm.drafts),
        "first tenth": measure(storm.drafts[:tenth]),
        "last tenth": measure(storm.drafts[-tenth:]),
    }
    print({name: round(value, 4) for name, value in found.items()})
    for one, other in (("storm", "calm"), ("first tenth", "last tenth")):
        assert abs(found[one] / found[other] - 1) <= MAX_DIFFERENCE, found
    assert found["storm"] > (0.4 if is_auto else 1.5), "hardly anything is accepted: this proves nothing"


def check_hits(storm: Outcome, plain: Outcome) -> None:
    """Drafts cost no hits, but for a page each."""
    print(f"cached: {sum(storm.cached)} with drafts, {sum(plain.cached)} without, {storm.num_host} from the host")
    assert sum(storm.cached) >= sum(plain.cached) - PAGE * len(plain.cached)
    assert storm.num_host > 0
