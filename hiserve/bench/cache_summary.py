"""The figures of a cache: hit rates by tier against a cache without end, and TTFT by kind of hit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from hiserve.bench.summary import Spread, cached_tokens, spread, ttft_s
from hiserve.bench.workload import Run, Sample
from hiserve.core.plan import Int32Array

TIERS = ("device", "host", "store")
MISS = "miss"
# A prompt of which less came from the cache is a miss: its first token waits for what is computed.
LEAST_HIT = 0.5
KINDS = (*TIERS, MISS)
# The root of a namespace is its name.
_Node: TypeAlias = int | str


class CacheSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a run. Shares are of the prompt tokens of requests that ended well.

    Attributes:
        ttft_ms: Time to first token of all requests, and of those of each kind of hit (see ``kind_of``).
        later_input_tokens_per_s: Prompt tokens of requests that are not their session's first, over the time from the
            first of them to the end; None where no session has a second one.
    """

    num_ok: int  # those requests
    num_prompt: int  # their prompt tokens
    num_cached: dict[str, int] | None  # of these, from each tier; None if the server does not tell
    tells_tiers: bool  # the server said which tier; otherwise all that is cached counts as from the device
    hit_rate: float | None  # share of all tiers together, or None if the server does not tell
    hit_rate_of: dict[str, float]  # the share of each tier; empty if the server does not tell
    most_hit_rate: float  # share that a cache without end could have given at most (see ``endless_cache.Held``)
    least_hit_rate: float  # share that it would have given in any case
    share_of_most: float | None  # cached tokens per token of ``most_hit_rate``; None if either is not there
    num_above_most: int  # requests with more cached tokens than that: the cache was not empty when the run began
    misses: dict[str, int]  # requests by the server's reason for what it did not find
    ttft_ms: dict[str, Spread]
    input_tokens_per_s: float  # prompt tokens over the whole run
    later_input_tokens_per_s: float | None


def tiers_of(sample: Sample) -> dict[str, int]:
    """Returns the cached tokens of a request by tier; tokens without a tier are of the device."""
    found = sample.cached_by_tier or {"device": max(0, sample.num_cached)}
    return {tier: found.get(tier, 0) for tier in TIERS}


def kind_of(sample: Sample) -> str:
    """Returns the slowest tier that tokens of the request came from; ``miss`` when it found less than half."""
    found = tiers_of(sample)
    if sum(found.values()) < LEAST_HIT * sample.num_prompt:
        return MISS
    return next((tier for tier in reversed(TIERS) if found[tier]), MISS)


def summarize_cache(run: Run, held: Sequence[Held]) -> CacheSummary:
    pairs = [(sample, of_it) for sample, of_it in zip(run.samples, held, strict=True) if not sample.error]
    fine = [sample for sample, _ in pairs]
    num_prompt = max(1, sum(max(0, sample.num_prompt) for sample in fine))
    tells_cached = cached_tokens(fine) is not None
    num_cached = {tier: sum(tiers_of(sample)[tier] for sample in fine) for tier in TIERS} if tells_cached else None
    num_hit = sum(num_cached.values()) if num_cached is not None else None
    most, least = sum(of_it.most for _, of_it in pairs), sum(of_it.least for _, of_it in pairs)
    return CacheSummary(
        num_ok=len(fine),
        num_prompt=num_prompt,
        num_cached=num_cached,
        tells_tiers=any(sample.cached_by_tier for sample in fine),
        hit_rate=None if num_hit is None else num_hit / num_prompt,
        hit_rate_of={tier: count / num_prompt for tier, count in (num_cached or {}).items()},
        most_hit_rate=most / num_prompt,
        least_hit_rate=least / num_prompt,
        share_of_most=num_hit / most if num_hit is not None and most else None,
        num_above_most=sum(sample.num_cached > of_it.most for sample, of_it in pairs),
        misses=dict(Counter(sample.miss for sample in fine if sample.miss).most_common()),
        ttft_ms=_ttft_by_kind(fine, tells_cached=tells_cached),
        input_tokens_per_s=num_prompt / max(run.end_s - run.begin_s, 1e-9),
        later_input_tokens_per_s=_later_rate(run, fine),
    )


def _ttft_by_kind(fine: Sequence[Sample], *, tells_cached: bool) -> dict[str, Spread]:
    values = [(kind_of(sample), value) for sample in fine if (value := ttft_s(sample)) is not None]
    found = {"all": spread(value for _, value in values)}
    for kind in KINDS if tells_cached else ():
        found[kind] = spread(value for its_kind, value in values if its_kind == kind)
    return found


def _later_rate(run: Run, fine: Sequence[Sample]) -> float | None:
    later = [sample for sample in fine if sample.turn > 0]
    if not later:
        return None
    duration_s = run.end_s - min(sample.begin_s for sample in later)
    return sum(max(0, sample.num_prompt) for sample in later) / max(duration_s, 1e-9)


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """One request as a cache sees it.

    Attributes:
        output: Token ids, int32 ``[m]``; an engine need not compute the last one, and may (a step ahead, or as a
            draft).
    """

    prompt: Int32Array  # token ids, int32 ``[n]``
    output: Int32Array
    begin_s: float  # when it was sent, seconds on any clock
    end_s: float  # when its reply ended, on the same clock; infinity when it never did
    namespace: str = ""  # requests of different namespaces share nothing


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens of one request that a cache without end could have given.

    A prefix that an earlier request is still computing may be found or not, depending on how far that is, and so may
    the page that a reply's last token fills. So there are two numbers, and a perfect cache's lies between them.
    """

    most: int  # those of every request that was sent before, whole replies included
    least: int  # those of requests that had ended before, without the last tokens of replies


def endless_cache(visits: Sequence[Visit], page_size: int) -> list[Held]:
    """Replays requests in the order in which they were sent; returns what was held of each, in the order given."""
    pages = _Pages(page_size)
    found: dict[int, Held] = {}
    for index in sorted(range(len(visits)), key=lambda at: (visits[at].begin_s, at)):
        found[index] = pages.look_up(visits[index])
        pages.add(visits[index])
    return [found[index] for index in range(len(visits))]


class _Pages:
    """A trie of pages: a node is the number of a prefix, an edge the bytes of one page."""

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * 4
        self._page_size = page_size
        self._children: dict[tuple[_Node, bytes], int] = {}
        self._ended_s: list[float] = []

    def look_up(self, visit: Visit) -> Held:
        """Counts the leading tokens that are there, and those of requests that have ended."""
        most = least = 0
        node: _Node = visit.namespace
        for page in self._cut(visit.prompt[:-1].tobytes()):
            child = self._children.get((node, page))
            if child is None:
                break
            node = child
            most += self._page_size
            if self._ended_s[child] <= visit.begin_s:
                least = most
        return Held(most=most, least=least)

    def add(self, visit: Visit) -> None:
        """Adds what the request may compute; a page has ended when the first request that surely computed it has."""
        node: _Node = visit.namespace
        num_sure = (visit.prompt.size + visit.output[:-1].size) // self._page_size
        for index, page in enumerate(self._cut(visit.prompt.tobytes() + visit.output.tobytes())):
            child = self._children.setdefault((node, page), len(self._ended_s))
            if child == len(self._ended_s):
                self._ended_s.append(math.inf)
            if index < num_sure:
                self._ended_s[child] = min(self._ended_s[child], visit.end_s)
            node = child

    def _cut(self, tokens: bytes) -> Iterator[bytes]:
        size = self._page_bytes
        return (tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size))
