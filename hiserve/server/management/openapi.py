"""``/openapi.json``, made from the routes and their types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hiserve import __version__
from hiserve.server.reply.format import ServedModel, json_response
from hiserve.server.request.body import Body
from hiserve.server.request.known_fields import IGNORED, REFUSED
from hiserve.server.request.sampling_fields import TOKEN_ID
from hiserve.server.routes import Endpoint
from hiserve.text.body.json import REF, Schema, components

PATH_PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")
# Status -> its reason.
ERRORS = {
    400: "The request is malformed.",
    401: "No API key, or one that is not known.",
    403: "The key may not do this.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "The queue is full; come back later.",
    500: "The server failed.",
    503: "The server cannot serve now; come back later.",
    529: "The server cannot serve now; come back later.",
}


class Document:
    """The OpenAPI document, and the handler that shows it.

    Args:
        endpoints: All routes; read for each document.
        model: The served model.
        is_strict: Unknown fields are refused.
        has_keys: Requests must carry an API key.
    """

    def __init__(self, endpoints: Iterable[Endpoint], model: ServedModel, *, is_strict: bool, has_keys: bool) -> None:
        self._endpoints = endpoints
        self._model = model
        self._is_strict = is_strict
        self._has_keys = has_keys

    def routes(self) -> list[Endpoint]:
        """Returns the route."""
        return [Endpoint("/openapi.json", self.show, "GET", reply=dict[str, Any])]

    async def show(self, _: Request) -> Response:
        """Describes every route of this server."""
        return json_response(self.build())

    def build(self) -> dict[str, Any]:
        """Returns the OpenAPI document."""
        routes = list(self._endpoints)
        errors = {route.error_form.kind for route in routes}
        _, schemas = msgspec.json.schema_components([*errors, *(route.reply for route in routes)], ref_template=REF)
        bodies = {route.body.name: route.body for route in routes if route.body}
        schemas |= _body_schemas(bodies.values(), self._model, is_strict=self._is_strict)
        paths: dict[str, Any] = {}
        for route in routes:
            operations = {method.lower(): self._operation(route, method) for method in sorted(route.methods)}
            paths.setdefault(PATH_PARAMETER.sub(r"{\1}", route.path), {}).update(operations)
        components: dict[str, Any] = {"schemas": schemas}
        if self._has_keys:
            key = {"type": "apiKey", "in": "header", "name": "x-api-key"}
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}, "key": key}
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
            "responses": _responses(route, method),
        }
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name, _ in PATH_PARAMETER.findall(path)
        ]
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in route.query.items()
        ]
        if parameters:
            operation["parameters"] = parameters
        if route.body:
            reference = {"$ref": REF.format(name=route.body.name)}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        if self._has_keys and not route.is_public:
            operation["security"] = [{"bearer": []}, {"key": []}]
        return operation


def _responses(route: Endpoint, method: str) -> dict[str, Any]:
    """Returns the answers of a route, by status."""
    content: dict[str, Any] = {
        route.media: {"schema": msgspec.json.schema_components([route.reply], ref_template=REF)[0][0]}
    }
    if route.streams:
        content["text/event-stream"] = {}
    statuses = {413, 500, *route.errors}
    if not route.is_public:
        statuses |= {401, 403, 429, 503}
    if route.body or PATH_PARAMETER.search(route.path):
        statuses |= {400, 404}
    if route.query:
        statuses.add(400)
    form = route.error_form
    error = {"application/json": {"schema": {"$ref": REF.format(name=form.kind.__name__)}}}
    if method == "HEAD":
        content, error = {}, {}
    shown = {"200": {"description": "Done."} | ({"content": content} if content else {})}
    for status in sorted(form.statuses.get(status, status) for status in statuses):
        shown[str(status)] = {"description": ERRORS[status]} | ({"content": error} if error else {})
    return shown


def _body_schemas(bodies: Iterable[Body], model: ServedModel, *, is_strict: bool) -> dict[str, Schema]:
    """Returns the schemas of bodies and of the types in them, by name.

    Args:
        bodies: Of all routes.
        model: Bounds token ids and drafts.
        is_strict: Unknown fields are refused.
    """
    schemas: dict[str, Schema] = {}
    for body in bodies:
        for kind in body.types:
            schemas |= components(kind)[1]
        parts = [schemas.pop(kind.__name__) for kind in body.types]
        schema = parts[0] if body.ignores_others else _joined(parts, is_strict=is_strict)
        for field in body.either:
            schema["required"] = []
            given = {"required": [field], "properties": {field: {"not": {"type": "null"}}}}
            schema.setdefault("oneOf", []).append(given)
        schemas[body.name] = schema
        for kind in body.inner:
            schemas[kind.__name__] = _joined([schemas[kind.__name__]], is_strict=is_strict)
    bounded: dict[str, Schema] = _bounded(schemas, model.vocab_size)
    spec = bounded["SpecParams"]["properties"]
    spec["num_steps"] = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": model.spec_steps}, {"type": "null"}]}
    if not model.spec_steps:
        spec["enabled"] = {"enum": [False, None]}
    return bounded


def _joined(bodies: list[Schema], *, is_strict: bool) -> Schema:
    """Returns the schema of one object with the fields of several, and the fields of ``known_fields``."""
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
