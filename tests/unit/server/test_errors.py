"""Malformed requests never reach the engine, and every failure has OpenAI's nested shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hiserve.errors import EngineError, HiserveError, OverloadedError, UnavailableError
from hiserve.server.request import known_fields
from tests.helpers.error_shape import fault_of_error
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import KNOWN, Server, make_server, reply_script

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def assert_error(call: Any, status: int, code: str, param: str | None) -> str:
    assert call.status == status, call.text
    error = call.json["error"]
    assert set(call.json) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert not (told := fault_of_error(status, call.text.encode())), told
    return str(error["message"])


BAD_BODIES = [
    b"",
    b"{",
    b"hello",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe\xfa",
    b"[" * 200_000,
    b'{"messages": ' + b"[" * 100_000,
    b'{"seed": ' + b"9" * 10_000 + b"}",
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
async def test_a_body_that_is_not_a_json_object_is_a_400(server: Server, path: str, body: bytes) -> None:
    assert_error(await server.post(path, body), 400, "invalid_json", None)
    assert server.engine.seen == []


NAN, INF = float("nan"), float("inf")
# Bad in both endpoints: (fields, param).
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": INF}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": NAN}, "top_p"),
    ({"top_p": {}}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"top_k": False}, "top_k"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 10**4000}, "seed"),
    ({"n": -(10**4000)}, "n"),
    ({"best_of": 10**4000}, "best_of"),
    ({"seed": 1.0}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"max_tokens": NAN}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"stream": 1}, "stream"),
    ({"stream": "true"}, "stream"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": "x"}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"continuous_usage_stats": "x"}}, "stream_options.continuous_usage_stats"),
    ({"model": 5}, "model"),
    ({"model": "\ud800"}, "model"),
    ({"model": ["tiny"]}, "model"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": True}, "n"),
    ({"n": "1"}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x", 5]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"stop_token_ids": 1}, "stop_token_ids"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids"),
    ({"stop_token_ids": [500]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"500": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": NAN}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": NAN}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"no_stop_trim": 1}, "no_stop_trim"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"logprobs": "1"}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"suffix": "x"}, "suffix"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "\ud800"}, "cache_salt"),
    ({"rid": 5}, "rid"),
    ({"priority": 1.5}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40])
async def test_a_bad_field_is_a_400_that_names_it(
    server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    good = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    assert_error(await server.post(path, {**good, **fields}), 400, "invalid_request", param)
    assert server.engine.seen == []


CHAT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": "2"}, "top_logprobs"),
    ({"echo": True}, "echo"),
    ({"max_tokens": 0, "echo": False}, "max_tokens"),
]
TEXT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"documents": [{}]}, "documents"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [(CHAT, *case) for case in CHAT_ONLY] + [(TEXT, *case) for case in TEXT_ONLY],
    ids=lambda value: str(value)[:40],
)
async def test_a_field_that_is_bad_in_one_endpoint_is_a_400_there(
    server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    good = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    assert_error(await server.post(path, {**good, **fields}), 400, "invalid_request", param)
    assert server.engine.seen == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", known_fields.REFUSED)
async def test_what_is_not_built_is_never_silently_ignored(server: Server, path: str, name: str) -> None:
    if name in KNOWN["ChatCompletionRequest" if path == CHAT else "CompletionRequest"]:
        return
    good = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    call = await server.post(path, {**good, name: {"made": "up"}})
    assert assert_error(call, 400, "invalid_request", name) == f"{name} is not supported yet."
    for neutral in [None, *known_fields.REFUSED[name]]:
        assert (await server.post(path, {**good, name: neutral})).status == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_strict_fields_refuses_what_no_table_knows(path: str) -> None:
    good: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    extra = {"made_up": None}
    for is_strict in (False, True):
        server = make_server(FakeEngineClient(script=lambda prompt: reply_script()), strict_fields=is_strict)
        async with server.app.router.lifespan_context(server.app):
            await server.handle.wait_open()
            assert (await server.post(path, {**good, "user": "ann"})).status == 200
            call = await server.post(path, {**good, **extra})
            if is_strict:
                assert_error(call, 400, "invalid_request", "made_up")
                assert_error(await server.post(path, {**good, "x" * 1000: 1}), 400, "invalid_request", "x" * 100)
            else:
                assert call.status == 200


BAD_PROMPTS = [
    None,
    "",
    [],
    [[]],
    [""],
    5,
    {},
    True,
    ["a", ""],
    ["a", 5],
    [[1], []],
    [[1], [500]],
    ["a"] * 1025,
    [-1],
    [5, -1, 6],
    [500],
    [2**31],
    [2**70],
    [1.5],
    [1.0],
    [True],
    [1, "a"],
    [1, [2]],
    [None],
    [NAN],
    "\ud800",
    "fine \udfff",
    ["\ud800"],
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=[ascii(prompt)[:30] for prompt in BAD_PROMPTS])
async def test_a_bad_prompt_is_a_400(server: Server, prompt: Any) -> None:
    assert_error(await server.complete(prompt), 400, "invalid_request", "prompt")
    assert server.engine.seen == []


async def test_the_largest_token_id_is_served(server: Server) -> None:
    assert (await server.complete([0, 499])).status == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": "x", "\ud800": "\ud800"}], "messages[0]"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ],
)
async def test_bad_messages_are_a_400_that_says_where(server: Server, messages: Any, param: str) -> None:
    assert_error(await server.post(CHAT, {"messages": messages}), 400, "invalid_request", param)
    assert server.engine.seen == []


async def test_another_model_is_a_404(server: Server) -> None:
    for call in (await server.chat("Hi", model="gpt-x"), await server.complete("Hi", model="gpt-x")):
        assert "'tiny'" in assert_error(call, 404, "model_not_found", "model")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_that_is_too_long_is_context_length_exceeded(server: Server, is_stream: bool) -> None:
    message = assert_error(await server.complete([5] * 256, stream=is_stream), 400, "context_length_exceeded", "prompt")
    assert message == (
        "the prompt is too long: it has 256 tokens; this model's maximum context length is 256 tokens, reply included. "
        "Shorten the prompt."
    )
    assert_error(await server.chat("text " * 300, stream=is_stream), 400, "context_length_exceeded", "messages")
    assert_error(await server.complete("x" * 10**6), 400, "context_length_exceeded", "prompt")
    assert server.engine.seen == []


async def test_a_limit_that_does_not_fit_says_what_would(server: Server) -> None:
    call = await server.complete([5] * 200, max_tokens=57)
    message = assert_error(call, 400, "context_length_exceeded", "max_tokens")
    assert "200 tokens" in message
    assert "lower max_tokens to 56" in message
    assert (await server.complete([5] * 200, max_tokens=56)).status == 200
    call = await server.post(CHAT, {"messages": HI, "max_completion_tokens": 256})
    assert_error(call, 400, "context_length_exceeded", "max_completion_tokens")


async def test_unknown_routes_and_methods_have_the_same_shape(server: Server) -> None:
    assert_error(await server.get("/v1/embeddings"), 404, "not_found", None)
    assert_error(await server.get("/nowhere/"), 404, "not_found", None)
    call = await server.get(CHAT)
    assert_error(call, 405, "method_not_allowed", None)
    assert call.headers["allow"] == "POST"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"),
    [(OverloadedError("the queue is full."), 429), (UnavailableError("no worker."), 503), (EngineError("broke."), 500)],
)
async def test_an_engine_failure_before_the_first_token_has_its_status(
    server: Server, failure: HiserveError, status: int, is_stream: bool
) -> None:
    server.engine.fail_at, server.engine.failure = 0, failure
    call = await server.chat("Hi", stream=is_stream)
    assert_error(call, status, failure.code, None)
    assert call.headers["content-type"] == "application/json"
    assert ("retry-after" in call.headers) == (status in (429, 503))


async def test_an_engine_failure_after_the_first_byte_is_the_last_event(server: Server) -> None:
    server.engine.fail_at, server.engine.failure = 2, EngineError("the worker broke.")
    call = await server.chat("Hi", stream=True)
    assert call.status == 200
    *before, last = call.events
    assert last == {
        "error": {"message": "the worker broke.", "type": "server_error", "param": None, "code": "engine_error"}
    }
    assert before
    assert all("choices" in event for event in before)


async def test_our_own_fault_is_a_500_without_its_details(server: Server) -> None:
    server.engine.fail_at, server.engine.failure = 0, RuntimeError("secret path /srv/x")
    call = server.call("POST", CHAT, {"messages": HI})
    with pytest.raises(RuntimeError, match="secret"):  # passed on, for the log
        await call.end()
    assert_error(call, 500, "internal_error", None)
    server.engine.fail_at = 1
    call = server.call("POST", CHAT, {"messages": HI, "stream": True})
    with pytest.raises(RuntimeError, match="secret"):
        await call.end()
    assert call.events[-1]["error"]["code"] == "internal_error"
    assert "secret" not in call.text


async def test_a_stream_that_stops_without_a_finish_is_our_fault(server: Server) -> None:
    server.engine.script = lambda prompt: []
    call = server.call("POST", CHAT, {"messages": HI})
    with pytest.raises(Exception, match="ended after 0 tokens"):
        await call.end()
    server.engine.seen.clear()
    assert_error(call, 500, "internal_error", None)


async def test_requests_are_503_while_loading_and_while_draining() -> None:
    loaded = asyncio.Event()
    engine = FakeEngineClient(script=lambda prompt: reply_script())

    async def start() -> FakeEngineClient:
        await loaded.wait()
        return engine

    server = make_server(engine, start)
    async with server.app.router.lifespan_context(server.app):
        call = await server.chat("Hi")
        assert "loading" in assert_error(call, 503, "unavailable", None)
        assert call.headers["retry-after"] == "1"
        assert "loading" in assert_error(await server.get("/ready"), 503, "unavailable", None)
        assert (await server.get("/health")).status == 200
        loaded.set()
        await server.handle.wait_open()
        assert (await server.chat("Hi")).status == (await server.get("/ready")).status == 200
        server.handle.drain()
        assert "shutting down" in assert_error(await server.chat("Hi"), 503, "unavailable", None)
        assert "shutting down" in assert_error(await server.get("/ready"), 503, "unavailable", None)
    assert engine.stopped == 1


async def test_a_malformed_request_is_a_400_even_while_loading() -> None:
    server = make_server(FakeEngineClient(script=lambda prompt: reply_script()))
    assert_error(await server.chat("Hi", temperature=-1), 400, "invalid_request", "temperature")


async def test_readiness_follows_the_engine(server: Server) -> None:
    server.engine.is_ready = False
    assert "not running" in assert_error(await server.get("/ready"), 503, "unavailable", None)
    assert_error(await server.chat("Hi"), 503, "unavailable", None)


async def test_a_failed_start_is_reported_and_kept_for_the_command() -> None:
    async def start() -> FakeEngineClient:
        raise EngineError("no weights.")

    server = make_server(FakeEngineClient(script=lambda prompt: []), start)
    async with server.app.router.lifespan_context(server.app):
        with pytest.raises(EngineError, match="no weights"):
            await server.handle.wait_open()
        assert "failed to start" in assert_error(await server.get("/ready"), 503, "unavailable", None)


async def test_errors_are_plain_json_whatever_the_client_sent(server: Server) -> None:
    for body in ({"model": "ÿ\x00\u2028"}, {"model": "x" * 10**5}, {"messages": [{"role": "\ud800"}]}):
        call = await server.post(CHAT, body)
        assert call.status in (400, 404)
        assert len(json.dumps(call.json)) < 1000
