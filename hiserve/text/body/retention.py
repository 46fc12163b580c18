"""Fields of requests that retain prompts: breakpoints up to a part, and the whole prompt. The cache evicts these last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from hiserve.core.request import MAX_RETAIN_S
from hiserve.errors import RequestError
from hiserve.text.conversation import Text

MAX_BREAKPOINTS = 4  # parts with ``cache_control``
FIVE_MINUTES_S, HALF_HOUR_S, HOUR_S, DAY_S = 300, 1800, 3600, MAX_RETAIN_S
OPTION_TTL_S = {"30m": HALF_HOUR_S, "12h": DAY_S // 2}
Retention = Literal["in_memory", "in-memory", "24h"]


class CacheControl(msgspec.Struct, frozen=True):
    """A hint that the prompt up to here comes again within the time: the cache evicts it last."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> int:
        """The time, from the last use of the prompt."""
        return HOUR_S if self.ttl == "1h" else FIVE_MINUTES_S


class CacheBreakpoint(msgspec.Struct, frozen=True):
    """``prompt_cache_breakpoint``: OpenAI's spelling of the same hint, for 30 minutes."""

    mode: Literal["explicit"]

    @property
    def seconds(self) -> int:
        """As for ``CacheControl``."""
        return HALF_HOUR_S


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


def seconds_of(hint: CacheControl | CacheBreakpoint | None) -> int:
    """Returns how long the prompt up to a part is to be kept; 0 without a breakpoint."""
    return 0 if hint is None else hint.seconds


def joined_texts(pieces: Sequence[tuple[str, int]]) -> list[Text]:
    """Joins texts up to each breakpoint, so that a part ends there.

    Args:
        pieces: Each text, with how long the prompt up to its end is to be kept; 0 is no breakpoint.
    """
    joined, words = list[Text](), list[str]()
    for i, (text, retain_s) in enumerate(pieces):
        words.append(text)
        if retain_s or i == len(pieces) - 1:
            joined.append(Text("".join(words), retain_s))
            words = []
    return joined


def check_breakpoints(controls: Iterable[CacheControl | None]) -> None:
    """Refuses more than ``MAX_BREAKPOINTS`` breakpoints, in the words that clients of Anthropic know.

    Raises:
        RequestError: There are more.
    """
    number = sum(control is not None for control in controls)
    if number > MAX_BREAKPOINTS:
        raise RequestError(
            f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided. Found {number}.",
            param="cache_control",
        )


def retention_s(asked: Retention | None, options: PromptCacheOptions | None) -> int:
    """Returns how long the cache is to evict a prompt last, by ``prompt_cache_retention`` and ``prompt_cache_options``."""
    policy_s = 0 if asked is None else DAY_S if asked == "24h" else FIVE_MINUTES_S
    return max(policy_s, 0 if options is None else options.seconds)
