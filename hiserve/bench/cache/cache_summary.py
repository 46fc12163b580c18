"""Turns a run into the figures of a cache: hit rates by tier against an endless cache, and TTFT by kind of hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from hiserve.bench.cache.endless_cache import Held
from hiserve.bench.summary import Spread, cached_tokens, spread, ttft_s
from hiserve.bench.workload import Run, Sample

TIERS = ("device", "host", "store")
MISS = "miss"
# A prompt of which less came from the cache is a miss: its first token waits for what is computed.
LEAST_HIT = 0.5
KINDS = (*TIERS, MISS)


class CacheSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a run. Shares are of the prompt tokens of requests that ended well.

    Attributes:
        num_ok: Those requests.
        num_prompt: Their prompt tokens.
        num_cached: Of these, from each tier; None if the server does not tell.
        tells_tiers: The server said which tier; otherwise all that is cached counts as from the device.
        hit_rate: Share of all tiers together, or None if the server does not tell.
        hit_rate_of: The share of each tier; empty if the server does not tell.
        most_hit_rate: Share that a cache without end could have given at most (see ``endless_cache.Held``).
        least_hit_rate: Share that it would have given in any case.
        share_of_most: Cached tokens per token of ``most_hit_rate``; None if either is not there.
        num_above_most: Requests with more cached tokens than that: the cache was not empty when the run began.
        misses: Requests by the server's reason for what it did not find.
        ttft_ms: Time to first token of all requests, and of those of each kind of hit (see ``kind_of``).
        input_tokens_per_s: Prompt tokens over the whole run.
        later_input_tokens_per_s: Prompt tokens of requests that are not their session's first, over the time from
            the first of them to the end; None where no session has a second one.
    """

    num_ok: int
    num_prompt: int
    num_cached: dict[str, int] | None
    tells_tiers: bool
    hit_rate: float | None
    hit_rate_of: dict[str, float]
    most_hit_rate: float
    least_hit_rate: float
    share_of_most: float | None
    num_above_most: int
    misses: dict[str, int]
    ttft_ms: dict[str, Spread]
    input_tokens_per_s: float
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
    """Computes all figures of a run and of what an endless cache held of each sample's prompt."""
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
