"""Every field that a request may carry changes what the engine is asked for, or what the reply shows."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.core.request import FinishReason, SamplingParams, SpecParams
from hiserve.models.generation_config import SamplingDefaults
from hiserve.server.request import known_fields
from hiserve.server.request.known_fields import known_to
from hiserve.server.request.sampling_fields import SamplingFields
from hiserve.server.sglang.types import GenerateRequest
from hiserve.text.body.json import decode
from tests.helpers import tiny_text
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import KNOWN, REPLY, TOKENIZER, Server, make_server, reply_script

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
THE = TOKENIZER.encode("the", add_special_tokens=False).tolist()

# A field, a value, and the sampling that the engine must see.
REACHES_THE_ENGINE: list[tuple[str, Any, dict[str, Any]]] = [
    ("temperature", 0.5, {"temperature": 0.5}),
    ("temperature", 0, {"temperature": 0.0}),
    ("top_p", 0.9, {"top_p": 0.9}),
    ("top_k", 7, {"top_k": 7}),
    ("top_k", -1, {"top_k": -1}),
    ("min_p", 0.1, {"min_p": 0.1}),
    ("repetition_penalty", 1.2, {"repetition_penalty": 1.2}),
    ("presence_penalty", -1.5, {"presence_penalty": -1.5}),
    ("frequency_penalty", 2, {"frequency_penalty": 2.0}),
    ("logit_bias", {"5": 100, "6": -1.5}, {"logit_bias": {5: 100.0, 6: -1.5}}),
    ("seed", 11, {"seed": 11}),
    ("seed", 0, {"seed": 0}),
    ("max_tokens", 5, {"max_tokens": 5}),
    ("max_completion_tokens", 4, {"max_tokens": 4}),
    ("min_tokens", 3, {"min_tokens": 3}),
    ("stop", "x", {"stop": ("x",)}),
    ("stop", ["x", "yz"], {"stop": ("x", "yz")}),
    ("stop_token_ids", [5, 6], {"stop_token_ids": (5, 6)}),
    ("include_stop_str_in_output", True, {"include_stop_str_in_output": True}),
    ("no_stop_trim", True, {"include_stop_str_in_output": True}),
    ("skip_special_tokens", False, {"skip_special_tokens": False}),
    ("ignore_eos", True, {"ignore_eos": True}),
    ("prompt_logprobs", 2, {"prompt_logprobs": 2}),
    ("spec", {"enabled": False}, {"spec": SpecParams(enabled=False)}),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("name", "value", "wanted"), REACHES_THE_ENGINE, ids=lambda value: str(value)[:30])
async def test_a_sampling_field_reaches_the_engine(
    server: Server, path: str, name: str, value: Any, wanted: dict[str, Any]
) -> None:
    good = {"messages": HI} if path == CHAT else {"prompt": [5]}  # one token: no scores to wait for
    await server.post(path, {**good, "max_tokens": 9})
    assert (await server.post(path, {**good, "max_tokens": 9, name: value, "stream": True})).status == 200
    silent, told = ({key: getattr(seen.sampling, key) for key in wanted} for seen in server.engine.seen)
    assert told == wanted
    assert silent != wanted


def test_every_sampling_field_is_tested() -> None:
    tested = {name for name, _, _ in REACHES_THE_ENGINE}
    assert tested | {"n"} >= known_to(SamplingFields)  # n: test_choices


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_models_own_defaults_fill_what_a_request_leaves_out(path: str) -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05)
    server = make_server(FakeEngineClient(script=lambda prompt: reply_script()), defaults=defaults)
    good = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    said = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    async with server.app.router.lifespan_context(server.app):
        await server.handle.wait_open()
        for fields in ({}, dict.fromkeys(said), said):
            assert (await server.post(path, {**good, **fields})).status == 200
    silent, null, told = ({name: getattr(seen.sampling, name) for name in said} for seen in server.engine.seen)
    assert silent == null == {name: getattr(defaults, name) for name in said}
    assert told == said


def test_what_a_model_is_silent_about_is_openais() -> None:
    given = SamplingDefaults(temperature=0.6, top_k=20)
    assert given.params() == SamplingParams(temperature=0.6, top_k=20)
    assert SamplingDefaults().params() == SamplingParams()


def test_fields_of_an_object_inside_a_body_are_named_with_it() -> None:
    with pytest.raises(Exception, match=r"sampling_params\.top_p must be a number above 0 and at most 1"):
        decode({"text": "x", "sampling_params": {"top_p": "x"}}, GenerateRequest)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_priority_and_the_name_reach_the_engine(server: Server, path: str) -> None:
    good = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    await server.post(path, {**good, "priority": -3, "rid": "mine"})
    await server.post(path, good)
    first, second = server.engine.seen
    assert (first.priority, second.priority) == (-3, 0)
    assert first.tag.endswith(":mine")
    assert first.tag != second.tag


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_salt_is_a_namespace_of_its_own(server: Server, path: str) -> None:
    good = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    for salt in (None, "", "a", "b", "a"):
        await server.post(path, {**good, "cache_salt": salt})
    none, empty, first, second, again = (seen.namespace for seen in server.engine.seen)
    assert none == empty == b""
    assert first == again
    assert len({none, first, second}) == 3


async def test_a_reply_is_remembered_under_its_salt(server: Server) -> None:
    spelt = [*tiny_text.spell_in_bytes(TOKENIZER, "the token"), tiny_text.END]
    server.engine.script = lambda prompt: [[index] for index in spelt]
    await server.chat("Hi", cache_salt="a")
    first = server.engine.seen[-1].prompt.tolist()
    await server.chat("Hi", "the token", "thank you", cache_salt="a")
    same = server.engine.seen[-1].prompt.tolist()
    await server.chat("Hi", "the token", "thank you", cache_salt="b")
    other = server.engine.seen[-1].prompt.tolist()
    assert same[: len(first) + len(spelt)] == [*first, *spelt]
    assert other[: len(first) + len(spelt)] != [*first, *spelt]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_text_ends_the_reply_and_the_request(server: Server, is_stream: bool) -> None:
    call = await server.chat("Hi", stop="oken", stream=is_stream)
    before = REPLY[: REPLY.index("oken")]
    if is_stream:
        choices = [event["choices"][0] for event in call.events[:-1]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == before
        end = choices[-1]
        assert all("stop_reason" not in choice for choice in choices[:-1])
    else:
        (end,) = call.json["choices"]
        assert end["message"]["content"] == before
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", "oken")
    assert [seen.aborted for seen in server.engine.seen] == [True], "the engine would have gone on"
    assert await server.metric("hiserve:request_success_total", finished_reason="stop") == 1


async def test_the_request_is_aborted_before_the_client_takes_the_last_event(server: Server) -> None:
    class Still(type(server.call("GET", "/health"))):  # type: ignore[misc]
        async def _send(self, message: dict[str, Any]) -> None:
            await super()._send(message)
            if "stop_reason" in self.text:
                assert [seen.aborted for seen in server.engine.seen] == [True]

    body = {"messages": HI, "stop": "oken", "stream": True}
    assert (await Still(server.app, "POST", CHAT, body).end()).status == 200


async def test_a_stop_text_stays_when_it_is_to_be_included(server: Server) -> None:
    reply = (await server.chat("Hi", stop="oken", include_stop_str_in_output=True)).json
    assert reply["choices"][0]["message"]["content"] == REPLY[: REPLY.index("oken")] + "oken"


async def test_a_stop_token_is_the_reason_and_the_models_own_end_is_none(server: Server) -> None:
    assert (await server.chat("Hi", stop_token_ids=[tiny_text.END])).json["choices"][0]["stop_reason"] == tiny_text.END
    assert (await server.chat("Hi")).json["choices"][0]["stop_reason"] is None


async def test_special_tokens_are_shown_when_they_are_not_to_be_skipped(server: Server) -> None:
    server.engine.script = lambda prompt: [[tiny_text.USER], THE]
    server.engine.finish = FinishReason.LENGTH
    assert (await server.complete("Hi")).json["choices"][0]["text"] == "the"
    assert (await server.complete("Hi", skip_special_tokens=False)).json["choices"][0]["text"] == "<|user|>the"


async def test_a_default_limit_leaves_room_for_min_tokens(server: Server) -> None:
    await server.complete("Hi", min_tokens=20)
    assert server.engine.seen[0].sampling.max_tokens == 20


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_min_tokens_beyond_the_context_is_a_400(server: Server, path: str) -> None:
    good = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    error = (await server.post(path, {**good, "min_tokens": 256})).json["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "min_tokens")


async def test_the_end_of_a_prompt_is_kept(server: Server) -> None:
    await server.complete([5, 6, 7, 8], truncate_prompt_tokens=2)
    await server.complete(list(range(5, 405)), truncate_prompt_tokens=-1)
    await server.complete("the token the token", truncate_prompt_tokens=3, add_special_tokens=False)
    await server.chat("the token")
    await server.chat("the token", truncate_prompt_tokens=3)
    ids, fitted, text, whole, chat = (seen.prompt.tolist() for seen in server.engine.seen)
    assert ids == [7, 8]
    assert fitted == list(range(150, 405))
    assert text == TOKENIZER.encode("the token the token", add_special_tokens=False).tolist()[-3:]
    assert chat == whole[-3:]


async def test_an_echo_shows_what_was_kept_of_the_prompt(server: Server) -> None:
    reply = (await server.complete("the token", truncate_prompt_tokens=1, echo=True)).json
    (kept,) = server.engine.seen[0].prompt.tolist()
    assert reply["choices"][0]["text"] == TOKENIZER.decode([kept]) + REPLY


async def test_chat_fields_reach_the_template() -> None:
    template = "{{ tools }}|{{ documents }}|{{ mood }}|{{ add_generation_prompt }}|{{ messages[-1].content }}"
    server = make_server(FakeEngineClient(script=lambda prompt: reply_script()), template=template)
    tool = {"type": "function", "function": {"name": "look"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "None|None||True|Hi"),
        ({"tools": [tool]}, f"{[tool]}|None||True|Hi"),
        ({"tools": [tool], "tool_choice": "auto"}, f"{[tool]}|None||True|Hi"),
        ({"tools": [tool], "tool_choice": "none"}, "None|None||True|Hi"),
        ({"documents": [{"a": "b"}]}, f"None|{[{'a': 'b'}]}||True|Hi"),
        ({"chat_template_kwargs": {"mood": "kind"}}, "None|None|kind|True|Hi"),
        ({"add_generation_prompt": False}, "None|None||False|Hi"),
        ({"continue_final_message": True}, "None|None||False|Hi"),
    ]
    async with server.app.router.lifespan_context(server.app):
        await server.handle.wait_open()
        for fields, wanted in cases:
            call = await server.chat("Hi", **fields)
            assert call.status == 200, call.text
            assert TOKENIZER.decode(server.engine.seen[-1].prompt.tolist(), skip_hidden=False) == wanted


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", sorted(known_fields.IGNORED))
async def test_what_changes_nothing_is_accepted_even_if_strict(path: str, name: str) -> None:
    server = make_server(FakeEngineClient(script=lambda prompt: reply_script()), strict_fields=True)
    good: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    async with server.app.router.lifespan_context(server.app):
        await server.handle.wait_open()
        assert (await server.post(path, {**good, name: "anything"})).status == 200


def test_a_field_is_in_one_table_only() -> None:
    assert not known_fields.IGNORED & (
        KNOWN["ChatCompletionRequest"] | KNOWN["CompletionRequest"] | known_fields.REFUSED.keys()
    )
    endpoints = ("ChatCompletionRequest", "CompletionRequest", "GenerateRequest", "MessagesRequest")
    assert not known_fields.REFUSED.keys() & frozenset.intersection(*(KNOWN[name] for name in endpoints))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("template", "is_warned"),
    [("{{ messages[-1].content }}", True), ("{{ tools }}{{ messages[-1].content }}", False)],
)
async def test_tools_that_the_template_hides_bring_a_warning_and_are_counted(
    template: str, is_warned: bool, is_stream: bool
) -> None:
    made = make_server(FakeEngineClient(script=lambda prompt: reply_script()), template=template)
    tool = {"type": "function", "function": {"name": "look"}}
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        call = await made.chat("Hi", tools=[tool], stream=is_stream)
        assert call.status == 200
        assert ("does not show tools" in call.headers.get("x-hiserve-warning", "")) == is_warned
        for plain in ({}, {"tools": []}, {"tools": [tool], "tool_choice": "none"}):
            assert "x-hiserve-warning" not in (await made.chat("Hi", **plain)).headers
        assert await made.metric("hiserve:chat_requests_with_hidden_tools_total") == is_warned
