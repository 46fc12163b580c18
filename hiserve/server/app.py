"""The HTTP application: routes, errors and request ids around one engine."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hiserve.core.resolve import Resolved
from hiserve.errors import HiserveError
from hiserve.grammar.tools import ToolGrammars
from hiserve.grammar.vet import Vetting
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.http.auth import Auth, AuthMiddleware
from hiserve.server.http.errors import CLIENT_CLOSED_REQUEST, OPENAI, ErrorForm, error_response, failure_response
from hiserve.server.http.tracing import Traces, open_traces
from hiserve.server.management.admin import AdminRoutes
from hiserve.server.management.cache import CacheRoutes
from hiserve.server.management.debug import DebugRoutes
from hiserve.server.management.health import HealthRoutes
from hiserve.server.management.openapi import Document
from hiserve.server.management.pages import DashboardRoutes, PageRoutes
from hiserve.server.messages.routes import MessagesRoutes
from hiserve.server.metrics.registry import Metrics
from hiserve.server.openai.routes import OpenAIRoutes
from hiserve.server.openai.tokenize import TokenRoutes
from hiserve.server.reply.format import ServedModel
from hiserve.server.reply.seals import Seals, Seeds
from hiserve.server.request.body import BodyLimit, BodyReader
from hiserve.server.responses.routes import ResponseRoutes
from hiserve.server.responses.store import open_responses
from hiserve.server.routes import FrontEnd
from hiserve.server.sglang.routes import NativeRoutes
from hiserve.text.abilities import Abilities
from hiserve.text.body.parser import Sizes
from hiserve.text.helpers.fair_threads import FairThreads
from hiserve.text.prompt.encoder import PromptEncoder
from hiserve.text.tokens.detokenizer import TokenBytes

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
NO_ROUTE = "none"


def create_app(
    *,
    handle: EngineHandle,
    encoder: PromptEncoder,
    vetting: Vetting,
    token_bytes: TokenBytes,
    abilities: Abilities,
    metrics: Metrics,
    model: ServedModel,
    resolved: Resolved,
    tokenizer_info: bytes,
    startup_s: dict[str, float],
) -> Starlette:
    """Builds the application.

    Its lifespan starts the engine without waiting for it, so that ``/health`` answers while the model loads,
    and stops it at the end.

    Args:
        handle: Starts and stops the engine.
        encoder: Encodes prompts; closed at the end.
        vetting: Vets grammars; closed at the end.
        token_bytes: Makes detokenizers.
        abilities: Read replies to conversations.
        metrics: Counts requests.
        model: The served model.
        resolved: The configuration in force, for ``/server_info``.
        tokenizer_info: Reply of ``/tokenizer_info``, JSON.
        startup_s: Seconds per start-up phase of this process, for ``/server_info``.
    """
    auth = Auth(resolved.settings.server)
    format_threads = FairThreads(1, "hiserve-format")
    server = resolved.settings.server
    is_strict = server.strict_fields
    max_model_len = resolved.settings.model.max_model_len
    traces = open_traces(server.otel_endpoint, model.name)
    _follow(metrics, encoder, vetting, traces)
    bodies = BodyReader(encoder.helpers, Sizes(model.vocab_size, max_model_len), model.name, is_strict=is_strict)
    grammars, seals, seeds = ToolGrammars(abilities), Seals(server.seal_key), Seeds(server.seal_key)
    front = FrontEnd(
        handle, bodies, encoder, format_threads, token_bytes, abilities, metrics, model, vetting, grammars, seals, seeds
    )
    responses = ResponseRoutes(front, open_responses(server.responses_store))
    dashboard = DashboardRoutes(server)
    endpoints = [
        *OpenAIRoutes(front).routes(),
        *responses.routes(),
        *MessagesRoutes(front, keeps_volatile=server.keep_volatile).routes(),
        *NativeRoutes(front).routes(),
        *TokenRoutes(front, tokenizer_info, max_model_len=max_model_len).routes(),
        *HealthRoutes(handle, auth, metrics).routes(),
        *AdminRoutes(handle, bodies, auth, model, abilities, resolved, startup_s).routes(),
        *CacheRoutes(handle, auth, resolved.settings.cache).routes(),
        *DebugRoutes(handle, auth).routes(),
        *dashboard.routes(),
    ]
    document = Document(endpoints, model, is_strict=is_strict, has_keys=bool(server.api_key))
    endpoints += [*document.routes(), *PageRoutes(model, document.build, has_keys=bool(server.api_key)).routes()]
    app = Starlette(
        routes=endpoints,
        exception_handlers={HTTPException: _no_route, ClientDisconnect: _gone},
        lifespan=_lifespan(handle, encoder, vetting, responses, traces, format_threads),
    )
    app.router.redirect_slashes = False
    # The middleware that is added last gets a request first.
    app.add_middleware(BodyLimit, max_bytes=server.max_request_bytes)
    public = dashboard.paths.union(each.path for each in endpoints if each.is_public)
    app.add_middleware(AuthMiddleware, auth=auth, public=public)
    forms = {each.path: each.error_form for each in endpoints}
    app.add_middleware(RequestIdMiddleware, metrics=metrics, forms=forms, traces=traces)
    return app


def _follow(metrics: Metrics, encoder: PromptEncoder, vetting: Vetting, traces: Traces | None) -> None:
    """Adds the counts of encoder, vetting and traces to the metrics."""
    metrics.follow(
        "history_replies",
        "Replies of the assistant in prompts: their tokens kept, cut at a change, or why encoded afresh.",
        "tokens",
        encoder.splices,
    )
    metrics.follow("grammar_trials", "Grammars that a process tried out first, by outcome.", "outcome", vetting.trials)
    if traces is not None:
        metrics.follow(
            "traced_requests", "Requests whose trace a collector took, or did not.", "outcome", traces.counts
        )


def _lifespan(
    handle: EngineHandle,
    encoder: PromptEncoder,
    vetting: Vetting,
    responses: ResponseRoutes,
    traces: Traces | None,
    format_threads: FairThreads,
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        handle.open()
        if traces is not None:
            traces.open()
        try:
            yield
        finally:
            await handle.close()
            await encoder.close()
            await vetting.close()
            await responses.close()
            if traces is not None:
                await traces.close()
            format_threads.close()

    return lifespan


class RequestIdMiddleware:
    """The outermost layer: every response has an ``x-request-id``, and every exception becomes a response.

    The id is that of the request's header if it is printable, otherwise a random one.

    Args:
        app: The application that gets the requests.
        metrics: Counts the responses.
        forms: Forms of errors by path; others have OpenAI's.
        traces: Records the requests; None for no traces.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, forms: Mapping[str, ErrorForm], traces: Traces | None) -> None:
        self._app = app
        self._metrics = metrics
        self._forms = forms
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application. An error of our own is raised again, to be logged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given.decode() if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)

        form = self._forms.get(scope["path"], OPENAI)
        scope.setdefault("state", {}).update(request_id=request_id, error_form=form)
        trace = self._traces and self._traces.begin(scope)
        status = 0
        failure: Exception | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.responded(getattr(scope.get("route"), "path", NO_ROUTE), status)
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if form.id_header:
                    headers[form.id_header] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            failure = error
            if not status:
                await failure_response(error, form, request_id)(scope, receive, send_with_id)
                if isinstance(error, HiserveError):
                    return
            raise
        finally:
            if self._traces and trace:
                self._traces.end(trace, scope, status, failure)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    named = f"{request.method} {request.url.path[:200]}"
    message, code = {
        405: (f"{named} is not allowed.", "method_not_allowed"),
        404: (f"there is no route {named}.", "not_found"),
    }.get(error.status_code, (str(error.detail), "invalid_request"))
    state = request.state
    response = error_response(error.status_code, message, code=code, form=state.error_form, request_id=state.request_id)
    response.headers.update(error.headers or {})
    return response


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
