"""Routes, and what the handlers of all endpoints that generate or encode share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from hiserve.server.auth import caller_of, namespace_of, tag_of
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.generation import RequestContext
from hiserve.server.metrics import Metrics
from hiserve.server.reply_format import ServedModel
from hiserve.server.request_body import BodyReader
from hiserve.text.detokenizer import TokenBytes
from hiserve.text.fair_threads import FairThreads
from hiserve.text.prompt_encoder import PromptEncoder


class Endpoint(Route):
    """A route that answers the given methods alone, and is known to the requests that it answers.

    Args:
        path: As Starlette writes paths.
        handler: Answers a request; the first line of its docstring describes the route.
        methods: Of HTTP.

    Attributes:
        methods: The same: Starlette would add HEAD to GET.
    """

    methods: set[str]

    def __init__(self, path: str, handler: Callable[[Request], Awaitable[Response]], *methods: str) -> None:
        super().__init__(path, handler, methods=methods)
        self.methods = set(methods)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Returns how well a request matches, and what its scope gains."""
        match, found = super().matches(scope)
        return match, {**found, "route": self}


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
