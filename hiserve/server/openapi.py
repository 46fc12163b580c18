"""``/openapi.json``: every route, what it takes and what it answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hiserve import __version__
from hiserve.server import admin_types as admin
from hiserve.server import openai_types as openai
from hiserve.server import sglang_types as sglang
from hiserve.server import tokenize
from hiserve.server.auth import PUBLIC_PATHS
from hiserve.server.cache_routes import DEFAULT_DEPTH, FLUSHED, MAX_DEPTH
from hiserve.server.error_responses import Error
from hiserve.server.known_fields import IGNORED, REFUSED
from hiserve.server.reply_format import ServedModel, json_response
from hiserve.server.routes import Endpoint
from hiserve.server.sampling_fields import TOKEN_ID
from hiserve.text.chat_request import ChatFields
from hiserve.text.request_json import REF, Schema, components

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
# Name -> the types that a body is read as.
REQUESTS: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "ChatCompletionRequest": (openai.ChatOptions, ChatFields),
    "CompletionRequest": (openai.CompletionRequest,),
    "GenerateRequest": (sglang.GenerateRequest,),
    "TokenizeRequest": (tokenize.TokenizeRequest, ChatFields),
    "DetokenizeRequest": (tokenize.DetokenizeRequest,),
    "AbortRequest": (admin.AbortRequest,),
}
# Name -> fields of which exactly one must be there.
EITHER = {"GenerateRequest": ("text", "input_ids"), "TokenizeRequest": ("prompt", "messages")}
# Path -> its query parameters: name, schema.
_TIER = {"type": "string", "enum": list(FLUSHED)}
QUERIES: dict[str, dict[str, Any]] = {
    "/cache/tree": {"depth": {"type": "integer", "minimum": 1, "maximum": MAX_DEPTH, "default": DEFAULT_DEPTH}},
    "/flush_cache": {"tier": _TIER},
    "/reset_prefix_cache": {"tier": _TIER},
}
# Path -> form of its reply.
REPLIES: dict[str, Any] = {
    "/v1/chat/completions": openai.ChatCompletion,
    "/v1/completions": openai.Completion,
    "/v1/models": openai.ModelList,
    "/v1/models/{name:path}": openai.Card,
    "/generate": sglang.Generated | list[sglang.Generated],
    "/tokenize": tokenize.Tokenized,
    "/v1/tokenize": tokenize.Tokenized,
    "/detokenize": tokenize.Detokenized,
    "/v1/detokenize": tokenize.Detokenized,
    "/tokenizer_info": dict[str, Any],
    "/abort_request": admin.Aborted,
    "/cache/stats": admin.Caches,
    "/cache/tree": admin.Trees,
    "/flush_cache": admin.Flushed,
    "/reset_prefix_cache": admin.Flushed,
    "/health": admin.Health,
    "/ping": admin.Health,
    "/ready": admin.Health,
    "/health_generate": admin.Health,
    "/model_info": admin.ModelInfo,
    "/get_model_info": admin.ModelInfo,
    "/server_info": admin.ServerInfo,
    "/get_server_info": admin.ServerInfo,
    "/get_load": list[admin.Load],
    "/v1/loads": admin.Loads,
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
        endpoints: All routes; looked at when the document is asked for.
        model: The served model.
        is_strict: Fields that are not known are refused.
        has_keys: Requests must carry an API key.
    """

    def __init__(self, endpoints: Iterable[Endpoint], model: ServedModel, *, is_strict: bool, has_keys: bool) -> None:
        self._endpoints = endpoints
        self._model = model
        self._is_strict = is_strict
        self._has_keys = has_keys

    def routes(self) -> list[Endpoint]:
        """Returns the route."""
        return [Endpoint("/openapi.json", self.show, "GET")]

    async def show(self, _: Request) -> Response:
        """Describes every route of this server."""
        return json_response(self.build())

    def build(self) -> dict[str, Any]:
        """Returns the OpenAPI document."""
        _, schemas = msgspec.json.schema_components([Error, *REPLIES.values()], ref_template=REF)
        schemas |= request_schemas(self._model, is_strict=self._is_strict)
        paths: dict[str, Any] = {}
        for route in self._endpoints:
            operations = {method.lower(): self._operation(route, method) for method in sorted(route.methods)}
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

    def _operation(self, route: Endpoint, method: str) -> dict[str, Any]:
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


def request_schemas(model: ServedModel, *, is_strict: bool) -> dict[str, Schema]:
    """Returns the schemas of request bodies, and of what stands in them, by name.

    Args:
        model: Bounds token ids and drafts.
        is_strict: Fields that are not known are refused.
    """
    schemas: dict[str, Schema] = {}
    for name, kinds in REQUESTS.items():
        for kind in kinds:
            schemas |= components(kind)[1]
        bodies = [schemas.pop(kind.__name__) for kind in kinds]
        schemas[name] = _joined(bodies, is_strict=is_strict) if name != "AbortRequest" else bodies[0]
        for field in EITHER.get(name, ()):
            schemas[name]["required"] = []
            given = {"required": [field], "properties": {field: {"not": {"type": "null"}}}}
            schemas[name].setdefault("oneOf", []).append(given)
    schemas["NativeSampling"] = _joined([schemas["NativeSampling"]], is_strict=is_strict)
    bounded: dict[str, Schema] = _bounded(schemas, model.vocab_size)
    spec = bounded["SpecParams"]["properties"]
    spec["num_steps"] = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": model.spec_steps}, {"type": "null"}]}
    if not model.spec_steps:
        spec["enabled"] = {"enum": [False, None]}
    return bounded


def _joined(bodies: list[Schema], *, is_strict: bool) -> Schema:
    """Returns the schema of one object with the fields of several, and those that are taken with certain values alone."""
    known: dict[str, Schema] = {name: {"enum": [*values, None]} for name, values in REFUSED.items()}
    known |= {name: {} for name in IGNORED}
    for body in bodies:
        known |= body["properties"]
    required = [name for body in bodies for name in body.get("required", ())]
    closed = {"additionalProperties": False} if is_strict else {}
    return {"type": "object", "properties": dict(sorted(known.items())), "required": required} | closed


def _bounded(schema: Any, vocab_size: int) -> Any:
    """Returns a schema with token ids below the model's limit."""
    if isinstance(schema, list):
        return [_bounded(each, vocab_size) for each in schema]
    if not isinstance(schema, dict):
        return schema
    shown = {name: _bounded(each, vocab_size) for name, each in schema.items()}
    if schema.get("title") == TOKEN_ID:
        shown |= {"minimum": 0, "maximum": vocab_size - 1}
    return shown
