"""The type of a route, and the dependencies of handlers that generate or encode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from hiserve.core.digest import namespace_digest
from hiserve.grammar.tools import ToolGrammars
from hiserve.grammar.vet import Vetting
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.http.auth import caller_of, namespace_of, tag_of
from hiserve.server.http.errors import OPENAI, ErrorForm
from hiserve.server.metrics.registry import Metrics
from hiserve.server.reply.format import ServedModel
from hiserve.server.reply.generation import RequestContext
from hiserve.server.reply.seals import Seals, Seeds
from hiserve.server.request.body import Body, BodyReader
from hiserve.text.abilities import Abilities
from hiserve.text.body.json import Schema
from hiserve.text.helpers.fair_threads import FairThreads
from hiserve.text.prompt.encoder import PromptEncoder
from hiserve.text.tokens.detokenizer import TokenBytes

NO_PARAMETERS: Mapping[str, Schema] = {}


class Endpoint(Route):
    """A route and its description. It answers the given methods alone (Starlette would add HEAD to GET).

    Args:
        path: As Starlette writes paths.
        handler: Answers a request; the first line of its docstring describes the route.
        methods: Of HTTP.
        reply: Type of the reply; text if ``media`` is not JSON.
        media: Content type of the reply.
        body: Form of the request's body; None without one.
        query: Schemas of the query parameters, by name.
        streams: A body with ``stream`` is answered with events.
        is_public: Answers without an API key.
        errors: Statuses of errors, beside those that follow from the other arguments.
        error_form: Form of the errors.
    """

    methods: set[str]

    def __init__(
        self,
        path: str,
        handler: Callable[[Request], Awaitable[Response]],
        *methods: str,
        reply: Any = str,
        media: str = "application/json",
        body: Body | None = None,
        query: Mapping[str, Schema] = NO_PARAMETERS,
        streams: bool = False,
        is_public: bool = False,
        errors: tuple[int, ...] = (),
        error_form: ErrorForm = OPENAI,
    ) -> None:
        super().__init__(path, handler, methods=methods)
        self.methods = set(methods)
        self.reply = reply
        self.media = media
        self.body = body
        self.query = query
        self.streams = streams
        self.is_public = is_public
        self.errors = errors
        self.error_form = error_form

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Returns how well a request matches, and its new scope, which names this route."""
        match, found = super().matches(scope)
        return match, {**found, "route": self}


class FrontEnd(NamedTuple):
    """Dependencies of the handlers that generate or encode.

    Attributes:
        handle: Holds the engine.
        bodies: Reads bodies.
        encoder: Encodes prompts; caches the token ids of replies.
        format_threads: Format large replies.
        token_bytes: Of the model's tokens.
        abilities: Read replies to conversations.
        metrics: Counts requests.
        model: The served model.
        vetting: Tries out grammars.
        tool_grammars: Of the tools of conversations.
        seals: Signs thoughts in replies and verifies them in requests.
        seeds: Draws the seeds of requests without one.
    """

    handle: EngineHandle
    bodies: BodyReader
    encoder: PromptEncoder
    format_threads: FairThreads
    token_bytes: TokenBytes
    abilities: Abilities
    metrics: Metrics
    model: ServedModel
    vetting: Vetting
    tool_grammars: ToolGrammars
    seals: Seals
    seeds: Seeds

    def draw_seed(self, request: Request) -> Callable[[int], int]:
        """Returns the seed of each prompt of a request, by the index of its first choice."""
        return partial(self.seeds.draw, tag_of(request))


# The first of these that a client sends is the name of its session.
SESSION_HEADERS = ("x-session-affinity", "session-id", "x-session-id", "x-claude-code-session-id")


def context_of(
    request: Request, salt: str | None, priority: int | None, rid: str | None, cache_key: str | None = None
) -> RequestContext:
    """Returns caller, priority and session of a request for the engine.

    Args:
        request: An authenticated request.
        salt: Narrows the namespace if not empty.
        priority: Larger is sooner.
        rid: Name by which the request can be aborted; None is its ``x-request-id``.
        cache_key: Name of its session where no header has one.
    """
    session = next((name for header in SESSION_HEADERS if (name := request.headers.get(header))), cache_key)
    return RequestContext(
        namespace_of(request, salt),
        priority or 0,
        caller_of(request).number,
        tag_of(request, rid),
        namespace_digest("session", session.encode(errors="surrogatepass")) if session else b"",
    )
