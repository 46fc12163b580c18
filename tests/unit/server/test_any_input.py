"""Whatever a client sends, the answer is one of a few, in one shape, and the engine is left alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiserve.server.request import known_fields
from tests.helpers.error_shape import fault_of_error
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import KNOWN, NATIVE_SAMPLING, Server, make_server, reply_script

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, ANTHROPIC = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
# Each route: a good body, and the fields that it knows.
ROUTES: dict[str, tuple[dict[str, Any], frozenset[str]]] = {
    CHAT: ({"messages": HI}, KNOWN["ChatCompletionRequest"]),
    TEXT: ({"prompt": "Hi"}, KNOWN["CompletionRequest"]),
    NATIVE: ({"text": "Hi"}, KNOWN["GenerateRequest"]),
    "/tokenize": ({"prompt": "Hi"}, KNOWN["TokenizeRequest"]),
    "/detokenize": ({"tokens": [5]}, KNOWN["DetokenizeRequest"]),
    "/abort_request": ({"rid": "x"}, KNOWN["AbortRequest"]),
    RESPONSES: ({"input": "Hi"}, KNOWN["ResponsesRequest"]),
    f"{RESPONSES}/input_tokens": ({"input": "Hi"}, KNOWN["InputTokensRequest"]),
    ANTHROPIC: ({"messages": HI, "max_tokens": 9}, KNOWN["MessagesRequest"]),
    f"{ANTHROPIC}/count_tokens": ({"messages": HI}, KNOWN["CountTokensRequest"]),
}
OTHERS = sorted(known_fields.IGNORED | set(known_fields.REFUSED))
EXPECTED = {200, 400, 413, 429, 503, 529}
LIMIT = 20_000

NUMBERS = st.one_of(
    st.integers(),
    st.integers(-2, 70),
    st.sampled_from([2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, 10**400, 499, 500, -1]),
    st.floats(),
    st.floats(-3, 3),
)
# Surrogates included; long ones too, of which no message may repeat much.
TEXTS = st.one_of(
    st.text(st.characters(), max_size=8),
    st.sampled_from(["", "Hi", "tiny", "auto", "none", "text", "\ud800", "x" * 1000, "\x00", "٣", "5", "<|end|>"]),
)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)


# Of bounded depth, and not st.recursive: that gives up a value of too many leaves in the middle of it and draws again.
VALUES = LEAVES | nested(LEAVES | nested(LEAVES | nested(LEAVES)))
PARTS = st.fixed_dictionaries({}, optional={"type": st.just("text") | VALUES, "text": VALUES, "image_url": VALUES})
FUNCTIONS = st.fixed_dictionaries({}, optional={"name": VALUES, "arguments": VALUES, "parameters": VALUES})
# Blocks of messages; their tags are theirs alone.
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"]) | VALUES},
    optional={
        "text": TEXTS,
        "thinking": VALUES,
        "signature": TEXTS,
        "data": TEXTS,
        "id": TEXTS,
        "tool_use_id": TEXTS,
        "name": TEXTS,
        "input": st.dictionaries(TEXTS, VALUES, max_size=3),
        "content": TEXTS
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=2)
        | VALUES,
        "is_error": st.booleans(),
        "cache_control": st.just({"type": "ephemeral"}) | VALUES,
    },
)
CALLS = st.fixed_dictionaries({}, optional={"type": VALUES, "id": VALUES, "function": FUNCTIONS | VALUES})
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | VALUES},
    optional={
        "content": VALUES | st.lists(PARTS, max_size=3) | st.lists(BLOCKS, max_size=3),
        "tool_calls": st.lists(CALLS, max_size=2),
        "name": VALUES,
    },
)
TOOLS = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace", "web_search"]) | VALUES},
    optional={
        "name": VALUES,
        "parameters": VALUES,
        "function": FUNCTIONS,
        "format": VALUES,
        "tools": st.lists(FUNCTIONS, max_size=2) | VALUES,
    },
)
ITEM_TYPES = ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call"]
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(ITEM_TYPES) | VALUES},
    optional={
        "role": st.sampled_from(["user", "assistant", "developer"]) | VALUES,
        "content": VALUES | st.lists(PARTS, max_size=3),
        "encrypted_content": VALUES,
        "call_id": st.just("c") | VALUES,
        "name": st.just("f") | VALUES,
        "namespace": VALUES,
        "arguments": VALUES,
        "input": VALUES,
        "output": VALUES,
    },
)
ANTHROPICS_TOOLS = st.fixed_dictionaries(
    {"name": TEXTS}, optional={"input_schema": VALUES, "type": VALUES, "defer_loading": VALUES}
)
# Values that come close to what a field takes.
NEAR: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(MESSAGES, max_size=3),
    "input": st.lists(ITEMS, max_size=4),
    "tools": st.lists(TOOLS | ANTHROPICS_TOOLS, max_size=3),
    "prompt": st.lists(NUMBERS | TEXTS | st.lists(st.integers(0, 520), max_size=4), max_size=4),
    "input_ids": st.lists(NUMBERS | st.lists(st.integers(-1, 520), max_size=4), max_size=4),
    "tokens": st.lists(st.integers(-1, 520), max_size=300),
    "stop": st.lists(TEXTS, max_size=20),
    "stop_token_ids": st.lists(NUMBERS, max_size=70),
    "logit_bias": st.dictionaries(st.integers(-1, 520).map(str), NUMBERS, max_size=4),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats"]), VALUES),
    "sampling_params": st.dictionaries(st.sampled_from(sorted(NATIVE_SAMPLING)), VALUES, max_size=4),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["a", "self", "messages", "bos_token", "range"]), VALUES),
}
KINDS = st.sampled_from(["auto", "any", "tool", "none", "enabled", "adaptive", "disabled", "json_schema"]) | VALUES
OF_MESSAGES = {
    "system": TEXTS | st.lists(BLOCKS, max_size=2),
    "tool_choice": st.fixed_dictionaries(
        {"type": KINDS}, optional={"name": TEXTS, "disable_parallel_tool_use": VALUES}
    ),
    "thinking": st.fixed_dictionaries({"type": KINDS}, optional={"budget_tokens": NUMBERS, "display": VALUES}),
    "context_management": st.fixed_dictionaries(
        {"edits": st.lists(st.fixed_dictionaries({"type": TEXTS, "keep": VALUES}))}
    ),
    "output_config": st.fixed_dictionaries({}, optional={"effort": TEXTS, "format": VALUES}),
    "stop_sequences": st.lists(TEXTS, max_size=20),
}
NEAR |= OF_MESSAGES
FIELDS = {name: near | VALUES for name, near in NEAR.items()}


def bodies(good: dict[str, Any], known: frozenset[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Good bodies with a few fields replaced by anything."""
    pairs = [st.tuples(st.just(name), FIELDS.get(name, VALUES)) for name in sorted(known)]
    fields = st.one_of(st.one_of(pairs), st.tuples(st.sampled_from(OTHERS) | st.text(max_size=300), VALUES))
    return st.lists(fields, min_size=1, max_size=3).map(lambda changed: {**good, **dict(changed)})


# Made once: no test case makes a strategy, whose choices could depend on what was made before.
BODIES = {path: bodies(*route) for path, route in ROUTES.items()}


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[asyncio.Runner, Server]]:
    """A server whose event loop lives as long as the module."""
    made = make_server(FakeEngineClient(script=lambda _: reply_script()), max_request_bytes=LIMIT)
    context = made.app.router.lifespan_context(made.app)
    with asyncio.Runner() as runner:
        runner.run(context.__aenter__())
        runner.run(made.handle.wait_open())
        yield runner, made
        runner.run(context.__aexit__(None, None, None))


def check(running: tuple[asyncio.Runner, Server], path: str, body: bytes) -> int:
    """Sends a body; fails unless its answer is as every answer must be. Returns the status."""
    runner, server = running
    call = runner.run(ended(server, path, body))
    assert server.engine.num_inflight == 0
    if call.status == 404:
        error = call.json["error"]
        assert error.get("param") in ("model", "previous_response_id") or "there is no model" in error["message"]
    else:
        assert call.status in EXPECTED, call.text
    if call.status != 200:
        assert not (told := fault_of_error(call.status, call.text.encode())), told
    elif call.headers["content-type"] == "application/json":
        json.loads(call.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    elif path == RESPONSES:
        assert json.loads(call.text.split("data: ")[-1])["type"] == "response.completed"
    elif path == ANTHROPIC:
        assert call.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    else:
        assert call.events[-1] == "[DONE]"
    return int(call.status)


async def ended(server: Server, path: str, body: bytes) -> Any:
    return await server.call("POST", path, body).end()


BOUNDED = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


SCORED = [
    (NATIVE, {"text": "Hi", "return_logprob": True}),
    (NATIVE, {"text": "Hi", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 3}),
    (TEXT, {"prompt": "Hi", "logprobs": 2, "echo": True}),
]


@pytest.mark.parametrize(("path", "body"), SCORED)
def test_bodies_that_ask_for_scores_are_answered(
    running: tuple[asyncio.Runner, Server], path: str, body: dict[str, Any]
) -> None:
    """One in some hundred of the bodies below does, so that the engine must have scores for any of them."""
    assert check(running, path, json.dumps(body).encode()) == 200


@pytest.mark.parametrize("path", ROUTES)
@given(data=st.data())
@BOUNDED
def test_any_value_of_any_field_has_one_of_the_expected_answers(
    running: tuple[asyncio.Runner, Server], path: str, data: st.DataObject
) -> None:
    body = data.draw(BODIES[path])
    status = check(running, path, json.dumps(body).encode())
    if status == 400 and not path.startswith(ANTHROPIC):
        param = running[0].run(ended(running[1], path, json.dumps(body).encode())).json["error"]["param"]
        root = param.split(".")[0].split("[")[0]
        assert root in {*body, *ROUTES[path][0], "text", "prompt", "rid"} or param[:100] in {
            name[:100] for name in body
        }


@pytest.mark.parametrize("path", ROUTES)
@given(raw=st.one_of(st.binary(max_size=40), VALUES.map(lambda value: json.dumps(value).encode())))
@BOUNDED
def test_any_bytes_have_one_of_the_expected_answers(
    running: tuple[asyncio.Runner, Server], path: str, raw: bytes
) -> None:
    check(running, path, raw)


@pytest.mark.parametrize("path", ROUTES)
@given(size=st.integers(LIMIT - 20, LIMIT + 20))
@settings(deadline=None, max_examples=10)
def test_any_body_over_the_limit_is_too_large(running: tuple[asyncio.Runner, Server], path: str, size: int) -> None:
    assert (check(running, path, b"{}".ljust(size)) == 413) == (size > LIMIT)
