"""Measurements of the replies of ``hiserve chat``, and the five lines of ``/stats``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class ReplyStats(msgspec.Struct, kw_only=True):
    """One reply, measured by the client.

    Attributes:
        text: The reply.
        finish: Its finish reason.
        ttft_s: Seconds to the first event with text; 0 without one.
        total_s: Seconds to the end.
        num_prompt: Tokens in the prompt.
        num_cached: Of these, served from the cache.
        num_generated: Tokens generated.
    """

    text: str = ""
    finish: str = "abort"
    ttft_s: float = 0.0
    total_s: float = 0.0
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, the first token left out."""
        span = self.total_s - self.ttft_s
        return (self.num_generated - 1) / span if span > 0 and self.num_generated > 1 else 0.0


def stats_lines(turns: Sequence[ReplyStats], workers: Sequence[dict[str, Any]]) -> list[str]:
    """Returns five lines: this conversation, then requests, cache, hits and drafts of all workers together.

    Args:
        turns: Of this conversation.
        workers: As ``/server_info`` lists them.
    """
    num_prompt = sum(turn.num_prompt for turn in turns)
    num_cached = sum(turn.num_cached for turn in turns)
    stats = [worker["stats"] for worker in workers]
    running, waiting, steps, computed = (
        sum(each.get(name, 0) for each in stats) for name in ("running", "waiting", "steps", "prompt_tokens")
    )
    caches = [each.get("cache") or {} for each in stats]
    tiers, hits = [], []
    for tier in ("device", "host", "store"):
        sizes = [cache[tier] for cache in caches if cache.get(tier)]
        total, free = (sum(size.get(name, 0) for size in sizes) for name in ("num_pages", "num_free"))
        tiers.append(f"{tier} {_pages(total, free, tier)}" if sizes else f"no {tier}")
        hits.append(f"{tier} {sum((cache.get('cached_tokens') or {}).get(tier, 0) for cache in caches):,}")
    return [
        f"conversation: {len(turns)} turns, {num_prompt:,} prompt tokens, {_share(num_cached, num_prompt)} cached, "
        f"{sum(turn.num_generated for turn in turns):,} generated",
        f"server: {len(workers)} worker{'s'[: len(workers) != 1]}, {running:,} running, {waiting:,} waiting, {steps:,} steps",
        f"cache: {', '.join(tiers)}",
        f"prompt tokens from the cache: {', '.join(hits)}, of {computed:,}",
        _drafts_line([use for each in stats for use in ((each.get("drafts") or {}).get("by_source") or {}).values()]),
    ]


def _pages(total: int, free: int, tier: str) -> str:
    return f"{total:,} pages" if tier == "store" else f"{total - free:,} of {total:,} pages"


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole if whole else 0:.0f} %)"


def _drafts_line(uses: Sequence[dict[str, Any]]) -> str:
    """Returns a line about the drafts; ``uses`` are those of each worker and source."""
    proposed, accepted, steps = (sum(use[name] for use in uses) for name in ("proposed", "accepted", "verify_steps"))
    if not steps:
        return "drafts: none verified"
    return f"drafts: {_share(accepted, proposed)} of {proposed:,} accepted, {1 + accepted / steps:.2f} tokens a verifying step"
