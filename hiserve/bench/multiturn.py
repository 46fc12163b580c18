"""Chats in a closed loop: what is sent, and what each round shows."""

from __future__ import annotations

import msgspec

from hiserve.bench.datasets.synthetic import conversations
from hiserve.bench.options import MultiturnOptions
from hiserve.bench.summary import Spread, cached_tokens, spread, ttft_s, values_of
from hiserve.bench.workload import Run, Sample, Workload


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The n-th request of all chats."""

    number: int  # n, from 1
    num_ok: int  # requests that ended well; the rest is about these
    ttft_ms: Spread
    num_prompt: int  # prompt tokens
    num_cached: int | None  # of these, from the prefix cache, or None if the server does not tell
    num_known: int  # of these, whole pages that were sent or generated in earlier rounds: what a perfect cache holds

    @property
    def hit_rate(self) -> float | None:
        return None if self.num_cached is None else self.num_cached / max(1, self.num_prompt)

    @property
    def best_hit_rate(self) -> float:
        """What it would be with a perfect cache."""
        return self.num_known / max(1, self.num_prompt)


def chat_rounds(rounds: MultiturnOptions, *, vocab_size: int, seed: int) -> Workload:
    """Returns one session for each client; every prompt is the chat so far and new random tokens."""
    sessions = conversations(
        count=rounds.num_clients,
        lengths=[rounds.request_length] * rounds.num_rounds,
        output_length=rounds.output_length,
        think_s=rounds.think_time,
        vocab_size=vocab_size,
        seed=seed,
    )
    return Workload(name="multiturn", sessions=sessions)


def by_round(run: Run, rounds: MultiturnOptions, page_size: int) -> list[Round]:
    """Summarises the samples of each round; the server's cache finds whole pages, and never a prompt's last token."""
    found = []
    for turn in range(rounds.num_rounds):
        fine = [sample for sample in run.samples if sample.turn == turn and not sample.error]
        num_prompt = sum(max(0, sample.num_prompt) for sample in fine)
        found.append(
            Round(
                number=turn + 1,
                num_ok=len(fine),
                ttft_ms=spread(values_of(ttft_s, fine)),
                num_prompt=num_prompt,
                num_cached=cached_tokens(fine),
                num_known=sum(_known(sample, rounds.request_length, page_size) for sample in fine),
            )
        )
    return found


def _known(sample: Sample, request_length: int, page_size: int) -> int:
    """Returns the tokens in whole pages of what came before a request, of which at least one token is new."""
    return max(0, sample.num_prompt - request_length) // page_size * page_size


def num_without_ids(run: Run) -> int:
    """Counts replies without token ids: they are missing from the chats' later prompts."""
    return sum(not sample.error and sample.num_output > 0 and not sample.output_ids for sample in run.samples)
