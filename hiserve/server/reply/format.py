"""Common parts of replies: the served model, the head, the usage."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from hiserve.core.request import SamplingParams
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.server.reply.choices import Choices
from hiserve.text.prompt.parts import PartName, Place

WARNING_HEADER = "x-hiserve-warning"
MAX_NAMED_CHARS = 200
UNPRINTABLE = re.compile("[^ -~]")


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model as clients see it.

    Attributes:
        name: Its name in requests.
        root: The model as given to the server.
        vocab_size: Token ids in prompts are below it.
        created: Unix time of the server's start.
        fingerprint: Changes if the same request may get another reply.
        defaults: Sampling values of omitted fields.
        spec_steps: Most drafts that a step verifies; 0 without speculation.
        page_size: Tokens that the cache keeps together; 0 without a cache.
        end_token_ids: Tokens that end every reply, unless its request ignores them.
    """

    name: str
    root: str
    vocab_size: int
    created: int
    fingerprint: str
    defaults: SamplingParams = SamplingParams()
    spec_steps: int = 0
    page_size: int = 0
    end_token_ids: tuple[int, ...] = ()


class PromptUse(NamedTuple):
    """Tokens of a prompt, by their origin.

    Attributes:
        cached: Tokens from the cache.
        written: Computed tokens in pages that the cache has now.
        rest: Other computed tokens.
    """

    cached: int
    written: int
    rest: int


class CachedTokensDetails(msgspec.Struct):
    """Cached tokens by tier."""

    device: int
    host: int
    store: int


class CacheMiss(msgspec.Struct):
    """The reason why no more of a prompt was cached, and its position in tokens; of a conversation the turn and its part."""

    reason: str
    at: int
    turn: int | UnsetType = UNSET
    part: PartName | UnsetType = UNSET


class PromptTokensDetails(msgspec.Struct):
    """Cached tokens of the prompt."""

    cached_tokens: int
    cached_tokens_details: CachedTokensDetails
    cache_miss: CacheMiss | None


class SpecTokensDetails(msgspec.Struct):
    """Drafts; accepted tokens are those beyond the one of every step."""

    accept_length: float
    proposed: int
    accepted: int
    verify_steps: int
    accepted_per_position: list[int]


class Usage(msgspec.Struct):
    """Tokens of a reply."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    spec_tokens_details: SpecTokensDetails | UnsetType = UNSET


def envelope(model: ServedModel, prefix: str) -> dict[str, Any]:
    """Returns the first fields of a reply and of each of its events.

    Args:
        model: The served model.
        prefix: Start of the reply's id.
    """
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.fingerprint,
    }


def usage(choices: Choices) -> Usage:
    """Returns the token counts of a reply so far."""
    num_prompt, num_generated, cached = choices.num_prompt, choices.num_generated, choices.cached
    by_tier = CachedTokensDetails(cached.device, cached.host, cached.store)
    details = PromptTokensDetails(cached.num_tokens, by_tier, cache_miss(cached, choices.miss_place))
    return Usage(num_prompt, num_generated, num_prompt + num_generated, details, spec_details(choices.drafts))


def prompt_use(choices: Choices, page_size: int) -> PromptUse:
    """Returns the prompt's tokens by their origin; the sum is all of them.

    Args:
        choices: Of one prompt.
        page_size: Of the served model.
    """
    num_prompt, cached = choices.num_prompt, choices.cached.num_tokens
    kept = num_prompt - num_prompt % page_size if page_size else 0
    written = max(0, kept - cached)
    return PromptUse(cached, written, num_prompt - cached - written)


def spec_details(drafts: DraftUse | None) -> SpecTokensDetails | UnsetType:
    """Returns ``spec_tokens_details`` of a usage; unset without speculation."""
    return UNSET if drafts is None else draft_details(drafts)


def draft_details(drafts: DraftUse) -> SpecTokensDetails:
    """Returns drafts in the form of ``usage``."""
    return msgspec.convert(drafts.shown(), SpecTokensDetails)


def cache_miss(cached: CacheUse, place: Place | None = None) -> CacheMiss | None:
    """Returns the reason why no more of a prompt was cached; None if the prompt was not looked up."""
    if not cached.miss:
        return None
    return CacheMiss(cached.miss, cached.miss_at, *(UNSET, UNSET) if place is None else place[:2])


def warned(response: Response, warning: str) -> Response:
    """Returns the response with the header of a warning; unchanged for an empty text."""
    if warning:
        response.headers[WARNING_HEADER] = warning
    return response


def named_in(warning: str, fact: str, names: Collection[str]) -> str:
    """Returns a warning that ends with a fact and the names that it is of; unchanged without any."""
    if not names:
        return warning
    shown = UNPRINTABLE.sub("?", ", ".join(sorted(set(names)))[:MAX_NAMED_CHARS])
    return "; ".join(filter(None, (warning, f"{fact}: {shown}")))


def json_response(content: Any) -> Response:
    """Returns a JSON response."""
    return Response(msgspec.json.encode(content), media_type="application/json")
