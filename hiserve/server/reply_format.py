"""What the JSON of every reply shares: the served model, the head, the usage."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from hiserve.core.request import SamplingParams
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.server.generation import Choices


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model as clients see it.

    Attributes:
        name: What requests call it.
        root: What the server was started with.
        vocab_size: Token ids in prompts are below it.
        created: Unix time of the server's start.
        fingerprint: Changes when the same request may be answered differently.
        defaults: Sampling where a request is silent.
        spec_steps: Drafts that the engine verifies at once, at most; 0 without speculation.
    """

    name: str
    root: str
    vocab_size: int
    created: int
    fingerprint: str
    defaults: SamplingParams = SamplingParams()
    spec_steps: int = 0


class CachedTokensDetails(msgspec.Struct):
    """Cached tokens by the tier that had them."""

    device: int
    host: int
    store: int


class CacheMiss(msgspec.Struct):
    """Why no more of a prompt was cached, and where in it that ended, in tokens."""

    reason: str
    at: int


class PromptTokensDetails(msgspec.Struct):
    """How the tokens of the prompt came about."""

    cached_tokens: int
    cached_tokens_details: CachedTokensDetails
    cache_miss: CacheMiss | None


class SpecTokensDetails(msgspec.Struct):
    """What speculation gave; accepted are tokens beyond the one that every step gives."""

    accept_length: float
    proposed: int
    accepted: int
    verify_steps: int
    accepted_per_position: list[int]


class Usage(msgspec.Struct):
    """Tokens of a reply; without speculation there is nothing to say of it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    spec_tokens_details: SpecTokensDetails | UnsetType = UNSET


def envelope(model: ServedModel, prefix: str) -> dict[str, Any]:
    """Returns what every part of a reply begins with.

    Args:
        model: The served model.
        prefix: What the reply's id begins with.
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
    details = PromptTokensDetails(cached.num_tokens, by_tier, cache_miss(cached))
    return Usage(num_prompt, num_generated, num_prompt + num_generated, details, spec_details(choices.drafts))


def spec_details(drafts: DraftUse | None) -> SpecTokensDetails | UnsetType:
    """Returns what the usage of a reply says of speculation; nothing where there is none."""
    return UNSET if drafts is None else draft_details(drafts)


def draft_details(drafts: DraftUse) -> SpecTokensDetails:
    """Returns drafts in the form of ``usage``."""
    return msgspec.convert(drafts.shown(), SpecTokensDetails)


def cache_miss(cached: CacheUse) -> CacheMiss | None:
    """Returns why no more of a prompt was cached; None when nobody looked."""
    return CacheMiss(cached.miss, cached.miss_at) if cached.miss else None


def json_response(content: Any) -> Response:
    """Returns a JSON response."""
    return Response(msgspec.json.encode(content), media_type="application/json")
