"""Shared by the handlers of all endpoints that generate or encode."""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request

from hiserve.server.auth import caller_of, namespace_of, tag_of
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.generation import RequestContext
from hiserve.server.metrics import Metrics
from hiserve.server.reply_format import ServedModel
from hiserve.server.request_body import BodyReader
from hiserve.text.detokenizer import TokenBytes
from hiserve.text.fair_threads import FairThreads
from hiserve.text.prompt_encoder import PromptEncoder


class FrontEnd(NamedTuple):
    """Everything between a request's body and the engine.

    Attributes:
        handle: Has the engine.
        bodies: Reads bodies.
        encoder: Encodes prompts and remembers replies.
        words: Where large replies are worded.
        token_bytes: Of the model's tokens.
        metrics: Where requests are counted.
        model: The served model.
    """

    handle: EngineHandle
    bodies: BodyReader
    encoder: PromptEncoder
    words: FairThreads
    token_bytes: TokenBytes
    metrics: Metrics
    model: ServedModel


def context_of(request: Request, salt: str | None, priority: int | None, rid: str | None) -> RequestContext:
    """Returns for whom the engine runs a request, and when.

    Args:
        request: Came through authentication.
        salt: Narrows the namespace; empty narrows nothing.
        priority: Larger is sooner.
        rid: Name by which the request can be aborted; None is its ``x-request-id``.
    """
    return RequestContext(namespace_of(request, salt), priority or 0, caller_of(request).number, tag_of(request, rid))
