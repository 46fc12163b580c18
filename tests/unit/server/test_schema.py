"""``/openapi.json`` is true: every route is in it, replies have the forms it says, and limits are those checked."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from hiserve.core.request import RANGES
from hiserve.server.request import known_fields
from hiserve.server.routes import Endpoint
from tests.helpers.asgi import Call
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import KNOWN, NATIVE_SAMPLING, Server, make_server

HI = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/generate": {"text": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/v1/tokenize": {"messages": HI},
    "/detokenize": {"tokens": [5]},
    "/v1/detokenize": {"tokens": [5]},
    "/abort_request": {"rid": "x"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HI},
}

STREAMED = ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages")
PUBLIC = {"/", "/dashboard", "/dashboard/{file}", "/health", "/ready", "/metrics", "/ping"}
TEXTS = {
    "/": "text/html",
    "/dashboard": "text/html",
    "/dashboard/{file}": "*/*",
    "/docs": "text/html",
    "/metrics": "text/plain",
}
SEEN = (
    *("/v1/models", "/v1/models/{name:path}", "/tokenizer_info", "/openapi.json"),
    *("/health", "/ping", "/ready", "/health_generate"),
    *("/server_info", "/get_server_info", "/model_info", "/get_model_info", "/get_load", "/v1/loads"),
    *("/cache/stats", "/cache/tree", "/debug/rows", "/debug/steps"),
)
# Of a response that is stored before each is asked.
STORED = ("/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items")
FLUSHES = ("/flush_cache", "/reset_prefix_cache")
BODIES = {
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/completions": "CompletionRequest",
    "/generate": "GenerateRequest",
    "/tokenize": "TokenizeRequest",
    "/v1/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
    "/v1/detokenize": "DetokenizeRequest",
    "/abort_request": "AbortRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/responses/input_tokens": "InputTokensRequest",
    "/v1/messages": "MessagesRequest",
    "/v1/messages/count_tokens": "CountTokensRequest",
}


def endpoints(server: Server) -> dict[str, Endpoint]:
    """Routes by their path; of those with one path, the one that is read."""
    return {route.path: route for route in sorted(server.app.routes, key=lambda route: "GET" in route.methods)}


async def document(server: Server) -> dict[str, Any]:
    return dict((await server.get("/openapi.json")).json)


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    """Of a server like that of each test: to make them takes 0.1 s of CPU."""
    made = make_server(FakeEngineClient(script=lambda prompt: []))
    return dict(asyncio.run(document(made))["components"]["schemas"])


def template(path: str) -> str:
    """Path in the document -> path of the route."""
    return path.replace("{name}", "{name:path}")


async def ask(server: Server, path: str, method: str) -> Call:
    if "{response_id}" in path:
        stored = await server.post("/v1/responses", GOOD["/v1/responses"])
        path = path.replace("{response_id}", stored.json["id"])
    return await server.call(
        method.upper(), path.replace("{name}", "tiny").replace("{file}", "app.js"), GOOD.get(path, b"")
    ).end()


async def test_every_route_is_described_and_every_description_is_a_route(server: Server) -> None:
    described = await document(server)
    assert described["openapi"].startswith("3.1")
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            call = await ask(server, path, method)
            assert call.status == 200, (path, method, call.text)
            assert operation["summary"]
            busy = "529" if path.startswith("/v1/messages") else "503"
            for status in ("401", busy) if path not in PUBLIC else ():
                assert status in operation["responses"]
        for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"} - {name.upper() for name in operations}:
            is_an_id = path == "/v1/responses/input_tokens" and method in ("GET", "DELETE")  # of no response
            assert (await ask(server, path, method)).status == (404 if is_an_id else 405)
    table = endpoints(server)
    assert {template(path) for path in described["paths"]} == table.keys() == {*GOOD, *SEEN, *STORED, *FLUSHES, *TEXTS}
    assert {path: route.body.name for path, route in table.items() if route.body} == BODIES
    assert {path for path, route in table.items() if route.is_public} == PUBLIC
    assert {path for path, route in table.items() if route.streams} == set(STREAMED)
    assert {path: route.media for path, route in table.items() if route.media != "application/json"} == TEXTS
    ids = re.findall(r'"operationId":"(\w+)"', (await server.get("/openapi.json")).text)
    assert len(set(ids)) == len(ids) > 25


async def test_every_reference_leads_somewhere(server: Server) -> None:
    text = (await server.get("/openapi.json")).text
    schemas = json.loads(text)["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert references <= schemas.keys()
    assert {"ChatCompletionRequest", "CompletionRequest", "GenerateRequest", "Error", "MessagesError"} <= references


@pytest.mark.parametrize("path", [*GOOD, *SEEN, *STORED, *FLUSHES])
async def test_replies_have_the_form_that_is_described(server: Server, path: str) -> None:
    method = "GET" if path in SEEN + STORED else "POST"
    call = await ask(server, path.replace("{name:path}", "{name}"), method)
    msgspec.json.decode(call.text, type=endpoints(server)[path].reply)
    assert call.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", STREAMED)
async def test_streams_are_events(server: Server, path: str) -> None:
    call = await server.post(path, {**GOOD[path], "stream": True})
    assert call.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("path", sorted(GOOD))
async def test_refusals_have_the_form_that_is_described(server: Server, path: str) -> None:
    call = await server.post(path, b"[]")
    assert call.status == 400
    msgspec.json.decode(call.text, type=endpoints(server)[path].error_form.kind)


async def test_every_field_that_is_read_is_described(server: Server) -> None:
    schemas = (await document(server))["components"]["schemas"]

    def names(schema: str) -> set[str]:
        return set(schemas[schema]["properties"])

    everywhere = known_fields.REFUSED.keys() | known_fields.IGNORED
    for name, fields in KNOWN.items():
        assert names(name) == (fields if name == "AbortRequest" else fields | everywhere)
    assert names("NativeSampling") == NATIVE_SAMPLING | everywhere


def inner(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field without its null."""
    return dict(schema["anyOf"][0])


@pytest.mark.parametrize("name", sorted(RANGES.keys() - {"logprobs"}))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_described_limits_are_those_that_are_checked(
    server: Server, schemas: dict[str, Any], path: str, name: str
) -> None:
    described = inner(schemas[BODIES[path]]["properties"][name])
    step = 1 if described["type"] == "integer" else 1e-6
    least = described["minimum"] if "minimum" in described else described["exclusiveMinimum"] + step
    too_much = described["maximum"] + max(step, described["maximum"] * 1e-6 if step < 1 else 0)
    echo = {"echo": True} if (path, name) == ("/v1/completions", "max_tokens") else {}  # 0 needs the echo
    taken = []
    for value in (least - step, least, described["maximum"], too_much):
        server.engine.seen.clear()
        call = await server.post(path, {**GOOD[path], **echo, name: value, "stream": True})
        taken.append(bool(server.engine.seen) or call.json["error"]["code"] == "context_length_exceeded")
    assert taken == [False, True, True, False]


async def test_a_strict_server_describes_itself_as_strict() -> None:
    for is_strict in (False, True):
        made = make_server(FakeEngineClient(script=lambda prompt: []), strict_fields=is_strict)
        schemas = (await document(made))["components"]["schemas"]
        for name in set(BODIES.values()) - {"AbortRequest"}:
            assert ("additionalProperties" in schemas[name]) == is_strict


async def test_keys_are_described_where_they_are_needed() -> None:
    made = make_server(FakeEngineClient(script=lambda prompt: []), api_key="k")
    call = await made.call("GET", "/openapi.json", authorization="Bearer k").end()
    for path, operations in call.json["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in PUBLIC)
    assert call.json["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"


def patterns(schema: Any) -> list[str]:
    """Patterns of texts in a schema; those of an object's names are its own affair."""
    if isinstance(schema, list):
        return [found for each in schema for found in patterns(each)]
    if not isinstance(schema, dict):
        return []
    own = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    return own + [found for name, each in schema.items() if name != "propertyNames" for found in patterns(each)]


async def test_no_type_of_a_request_has_a_pattern(server: Server) -> None:
    """msgspec 0.22 frees memory twice at the exit of a process that has a type of texts with a pattern, or of lists of them."""
    schemas = (await document(server))["components"]["schemas"]
    assert patterns([{"type": "string", "pattern": "x"}]) == ["x"]
    assert patterns(schemas) == []
