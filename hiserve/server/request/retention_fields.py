"""Request fields that retain a whole prompt: the cache evicts it last."""

from __future__ import annotations

from typing import Literal

import msgspec

from hiserve.errors import RequestError
from hiserve.text.body.chat import DAY_S, FIVE_MINUTES_S, HALF_HOUR_S

Retention = Literal["in_memory", "in-memory", "24h"]
OPTION_TTL_S = {"30m": HALF_HOUR_S, "12h": DAY_S // 2}


class PromptCacheOptions(msgspec.Struct, frozen=True):
    """The object ``prompt_cache_options``.

    Attributes:
        mode: ``explicit`` retains nothing of itself; None is ``implicit``, which retains the whole prompt.
        ttl: How long, at least; None is 30 minutes.
        prewarm: Computes the prompt without a reply; not supported.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None

    def __post_init__(self) -> None:
        """Refuses a request without a reply."""
        if self.prewarm:
            param = "prompt_cache_options.prewarm"
            raise RequestError(f"{param} is not supported; send max_output_tokens: 1.", param=param)

    @property
    def seconds(self) -> int:
        """How long the whole prompt is retained; 0 is not at all."""
        return 0 if self.mode == "explicit" else OPTION_TTL_S[self.ttl or "30m"]


def retention_s(asked: Retention | None, options: PromptCacheOptions | None) -> int:
    """Returns how long the cache is to evict a prompt last, by ``prompt_cache_retention`` and ``prompt_cache_options``."""
    policy_s = 0 if asked is None else DAY_S if asked == "24h" else FIVE_MINUTES_S
    return max(policy_s, 0 if options is None else options.seconds)
