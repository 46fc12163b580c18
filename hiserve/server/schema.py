"""``/openapi.json``: every route, what it takes and what it answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from starlette.routing import Route

from hiserve import __version__
from hiserve.server import reply_schemas as replies
from hiserve.server.auth import PUBLIC_PATHS
from hiserve.server.cache_routes import DEFAULT_DEPTH, FLUSHED, MAX_DEPTH
from hiserve.server.reply_format import json_response
from hiserve.server.request_schemas import request_bodies

REF = "#/components/schemas/{name}"
PATH_PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")
# Path -> name of its body's schema.
BODIES = {
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/completions": "CompletionRequest",
    "/generate": "GenerateRequest",
    "/tokenize": "TokenizeRequest",
    "/v1/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
    "/v1/detokenize": "DetokenizeRequest",
    "/abort_request": "AbortRequest",
}
# Path -> its query parameters: name, schema.
_TIER = {"type": "string", "enum": list(FLUSHED)}
QUERIES: dict[str, dict[str, Any]] = {
    "/cache/tree": {"depth": {"type": "integer", "minimum": 1, "maximum": MAX_DEPTH, "default": DEFAULT_DEPTH}},
    "/flush_cache": {"tier": _TIER},
    "/reset_prefix_cache": {"tier": _TIER},
}
# Path -> form of its reply.
REPLIES: dict[str, Any] = {
    "/v1/chat/completions": replies.ChatCompletion,
    "/v1/completions": replies.Completion,
    "/v1/models": replies.ModelList,
    "/v1/models/{name:path}": replies.Card,
    "/generate": replies.Generated | list[replies.Generated],
    "/tokenize": replies.Tokenized,
    "/v1/tokenize": replies.Tokenized,
    "/detokenize": replies.Detokenized,
    "/v1/detokenize": replies.Detokenized,
    "/tokenizer_info": dict[str, Any],
    "/abort_request": replies.Aborted,
    "/cache/stats": replies.Caches,
    "/cache/tree": replies.Trees,
    "/flush_cache": replies.Flushed,
    "/reset_prefix_cache": replies.Flushed,
    "/health": replies.Health,
    "/ping": replies.Health,
    "/ready": replies.Health,
    "/health_generate": replies.Health,
    "/model_info": replies.ModelInfo,
    "/get_model_info": replies.ModelInfo,
    "/server_info": replies.ServerInfo,
    "/get_server_info": replies.ServerInfo,
    "/get_load": list[replies.Load],
    "/v1/loads": replies.Loads,
    "/openapi.json": dict[str, Any],
}
STREAMED = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})
TEXT_REPLIES = {"/metrics": "text/plain", "/": "text/html", "/docs": "text/html"}
# Status -> when a request is answered with it.
ANYWHERE = {413: "The body is too large.", 500: "The server failed."}
WITH_KEY = {401: "No API key, or one that is not known.", 403: "The key may not do this."}
WITH_BODY = {400: "The request is malformed.", 404: "There is no such model."}
WITH_ENGINE = {429: "The queue is full; come back later.", 503: "The server cannot serve now; come back later."}


class Document:
    """The OpenAPI document, and the handler that shows it.

    Args:
        routers: Of all routes; looked at when the document is asked for.
        vocab_size: Token ids are below it.
        spec_steps: Drafts that the engine verifies at once, at most; 0 without speculation.
        is_strict: Fields that are not known are refused.
        has_keys: Requests must carry an API key.
    """

    def __init__(
        self, routers: Iterable[APIRouter], *, vocab_size: int, spec_steps: int, is_strict: bool, has_keys: bool
    ) -> None:
        self._routers = routers
        self._vocab_size = vocab_size
        self._spec_steps = spec_steps
        self._is_strict = is_strict
        self._has_keys = has_keys

    def router(self) -> APIRouter:
        """Returns the route."""
        router = APIRouter()
        router.add_api_route("/openapi.json", self.show, methods=["GET"])
        return router

    async def show(self) -> Response:
        """Describes every route of this server."""
        return json_response(self.build())

    def build(self) -> dict[str, Any]:
        """Returns the OpenAPI document."""
        forms = [
            msgspec.json.schema_components([form], ref_template=REF) for form in (replies.Error, *REPLIES.values())
        ]
        schemas = {name: schema for _, components in forms for name, schema in components.items()}
        schemas |= request_bodies(self._vocab_size, spec_steps=self._spec_steps, is_strict=self._is_strict)
        paths: dict[str, Any] = {}
        for route in (route for router in self._routers for route in router.routes):
            assert isinstance(route, Route), f"a route of another kind: {route}"
            operations = {method.lower(): self._operation(route, method) for method in sorted(route.methods or ())}
            paths.setdefault(PATH_PARAMETER.sub(r"{\1}", route.path), {}).update(operations)
        components: dict[str, Any] = {"schemas": schemas}
        if self._has_keys:
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        return {
            "openapi": "3.1.0",
            "info": {"title": "hiserve", "version": __version__},
            "paths": paths,
            "components": components,
        }

    def _operation(self, route: Route, method: str) -> dict[str, Any]:
        path = route.path
        documentation = inspect.getdoc(route.endpoint) or ""
        operation: dict[str, Any] = {
            "operationId": f"{method.lower()}{re.sub(r'[^a-z0-9]+', '_', path)}",
            "summary": documentation.partition("\n")[0],
            "responses": self._responses(path, method),
        }
        if names := PATH_PARAMETER.findall(path):
            schema = {"type": "string", "minLength": 1}
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": schema} for name, _ in names
            ]
        if path in QUERIES:
            operation["parameters"] = [
                {"name": name, "in": "query", "required": False, "schema": schema}
                for name, schema in QUERIES[path].items()
            ]
        if path in BODIES:
            reference = {"$ref": REF.format(name=BODIES[path])}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        if self._has_keys and path not in PUBLIC_PATHS:
            operation["security"] = [{"bearer": []}]
        return operation

    def _responses(self, path: str, method: str) -> dict[str, Any]:
        content: dict[str, Any] = {}
        if path in REPLIES:
            content["application/json"] = {
                "schema": msgspec.json.schema_components([REPLIES[path]], ref_template=REF)[0][0]
            }
        if path in STREAMED:
            content["text/event-stream"] = {}
        if path in TEXT_REPLIES:
            content[TEXT_REPLIES[path]] = {"schema": {"type": "string"}}
        failures = dict(ANYWHERE)
        if path not in PUBLIC_PATHS:
            failures |= WITH_KEY | WITH_ENGINE
        elif path == "/ready":
            failures[503] = WITH_ENGINE[503]
        if path in BODIES or PATH_PARAMETER.search(path):
            failures |= WITH_BODY
        if path in QUERIES:
            failures[400] = WITH_BODY[400]
        error = {"application/json": {"schema": {"$ref": REF.format(name="Error")}}}
        if method == "HEAD":
            content, error = {}, {}
        shown = {"200": {"description": "Done."} | ({"content": content} if content else {})}
        for status, description in sorted(failures.items()):
            shown[str(status)] = {"description": description} | ({"content": error} if error else {})
        return shown
