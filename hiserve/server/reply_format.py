"""What the JSON of every reply shares: the served model, the head, the usage."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
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


def usage(choices: Choices) -> dict[str, Any]:
    """Returns the token counts of a reply so far."""
    num_prompt, num_generated, cached = choices.num_prompt, choices.num_generated, choices.cached
    details = {
        "cached_tokens": cached.num_tokens,
        "cached_tokens_details": {"device": cached.device, "host": cached.host, "store": cached.store},
        "cache_miss": cache_miss(cached),
    }
    counts = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": details,
    }
    return counts | spec_details(choices.drafts)


def spec_details(drafts: DraftUse | None) -> dict[str, Any]:
    """Returns what the usage of a reply says of speculation; nothing where there is none."""
    return {} if drafts is None else {"spec_tokens_details": drafts.shown()}


def cache_miss(cached: CacheUse) -> dict[str, Any] | None:
    """Returns why no more of a prompt was cached, and where in it that ended, in tokens; None when nobody looked."""
    return {"reason": cached.miss, "at": cached.miss_at} if cached.miss else None


def json_response(content: Any) -> Response:
    """Returns a JSON response."""
    return Response(msgspec.json.encode(content), media_type="application/json")
