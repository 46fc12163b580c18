"""Use of the cache and of drafts by a request."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import msgspec

COLD = "cold"
SOURCES = (COLD, "device", "host", "store")


class CacheUse(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens that were not computed, by the tier that had them when the request was admitted."""

    device: int = 0
    host: int = 0  # from the host, not brought from a store for this request
    store: int = 0  # brought from a store for this request
    miss: str = ""  # ``MissReason`` of the first token not found; empty without a lookup
    miss_at: int = 0  # position of the miss in the prompt, in tokens

    @property
    def num_tokens(self) -> int:
        """All of them together."""
        return self.device + self.host + self.store

    @property
    def is_short(self) -> bool:
        """Whether more of the prompt could have been cached."""
        return self.miss not in ("", "page_remainder")

    @property
    def source(self) -> str:
        """The tier with most of them, the nearest of equals; ``COLD`` without any. One of ``SOURCES``."""
        return max(SOURCES[1:], key=lambda tier: int(getattr(self, tier))) if self.num_tokens else COLD

    def within(self, num_prompt: int) -> CacheUse:
        """Returns the use of a prompt of which generated tokens were looked up too: those do not count."""
        if self.num_tokens <= num_prompt:
            return self
        device = min(self.device, num_prompt)
        host = min(self.host, num_prompt - device)
        return CacheUse(device, host, num_prompt - device - host)

    def __add__(self, other: CacheUse) -> CacheUse:
        """Returns the sum of two prompts, with the miss of the first."""
        return CacheUse(
            self.device + other.device, self.host + other.host, self.store + other.store, self.miss, self.miss_at
        )


NOTHING = CacheUse()  # of a request that never reached a worker


class DraftUse(msgspec.Struct, frozen=True, array_like=True):
    """Verified and accepted drafts.

    A step appends one token to a reply without drafts. Each accepted draft is one token more; drafts after the end of the
    reply do not count.
    """

    verify_steps: int = 0  # steps of a row that verified a draft at least
    proposed: int = 0  # drafts that they verified
    # Of them, those accepted: of the first drafts, of the second ones, and so on
    accepted_per_position: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        """All accepted drafts."""
        return sum(self.accepted_per_position)

    @property
    def accept_length(self) -> float:
        """Mean tokens that a verifying step appends, at least 1; the ends of replies count.

        ``usage``, metrics, benchmarks and docs/figures.md show this accept length.
        """
        return 1 + self.accepted / max(1, self.verify_steps)

    def __add__(self, other: DraftUse) -> DraftUse:
        """Returns both together."""
        positions = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return DraftUse(
            self.verify_steps + other.verify_steps, self.proposed + other.proposed, tuple(map(sum, positions))
        )

    def shown(self) -> dict[str, Any]:
        """Returns it as ``usage.spec_tokens_details``."""
        return {
            "accept_length": self.accept_length,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "verify_steps": self.verify_steps,
            "accepted_per_position": self.accepted_per_position,
        }


class DraftStats(msgspec.Struct, frozen=True):
    """Drafts of one worker. Counters never decrease."""

    by_source: dict[str, DraftUse] = {}  # by ``CacheUse.source`` of the requests; empty without speculation
    chosen_steps: dict[str, int] = {}  # steps that sample, by the number of drafts after them
    reply_searches: dict[
        str, int
    ] = {}  # of the replies kept, by the result: ``found``, ``none``; empty without such searches
    kept_reply_tokens: int = 0  # a gauge


class GrammarStats(msgspec.Struct, frozen=True):
    """Masks of one worker. Counters never decrease."""

    masks: int = 0  # computed: one for each place of a row at which it drew a token under a grammar
    refused_drafts: int = 0  # drafts that a grammar refused, and those after them
    mask_seconds: float = 0.0  # that draws waited for masks, after the commit of the step before
