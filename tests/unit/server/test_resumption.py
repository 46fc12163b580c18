"""``resume_token_ids``: a stream that goes on after a broken one, so that both together are the whole; seeds from request ids."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hiserve.core.request import FinishReason
from tests.helpers import tiny_text
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import TOKENIZER, Server, make_server, reply_script
from tests.unit.server.resumptions import CALLS, CHAT, NATIVE, PROMPTS, TEXT, scripted

ALWAYS = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CUSTOM = {"type": "custom", "custom": {"name": "note"}}


def merged(parts: list[Any], into: dict[str, Any] | None = None) -> dict[str, Any]:
    """Joins the deltas of a choice: texts and lists grow, calls by their index, other values are replaced."""
    made: dict[str, Any] = {} if into is None else into
    for part in parts:
        for name, value in part.items():
            if name == "tool_calls":
                for call in value:
                    merged(
                        [{key: it for key, it in call.items() if key != "index"}], made.setdefault(call["index"], {})
                    )
            elif isinstance(value, dict):
                merged([value], made.setdefault(name, {}))
            elif isinstance(value, str | list) and name not in ("finish_reason", "role", "id", "type"):
                made[name] = made.get(name, type(value)()) + value
            elif value is not None:
                made[name] = value
    return made


async def whole_and_resumed(server: Server, path: str, ids: list[int], **fields: Any) -> list[list[Any]]:
    """Returns the events of a stream, then for each place at which it can break those up to there with those of the resumed one."""
    body = {**PROMPTS[path], **ALWAYS, **fields}
    *events, usage, done = (await server.post(path, body)).events
    assert done == "[DONE]"
    runs = [[*events, usage]]
    num_seen = 0
    for index, event in enumerate(events):
        choice = event["choices"][0]
        num_seen += len(choice["token_ids"])
        if choice["token_ids"] and not choice["finish_reason"]:
            call = await server.post(path, {**body, "resume_token_ids": ids[:num_seen]})
            assert call.status == 200, call.text
            *rest, _ = call.events
            seen = server.engine.seen[-1]
            assert seen.prompt.tolist()[-num_seen:] == ids[:num_seen]
            assert seen.num_resumed == num_seen
            runs.append([*events[: index + 1], *rest])
    return runs


def check_equal(runs: list[list[Any]], number: int) -> dict[str, Any]:
    """Checks that all runs are one reply with one usage; returns the reply."""
    assert len(runs) > number
    whole, *others = [(merged([event["choices"][0] for event in run[:-1]]), run[-1]["usage"]) for run in runs]
    ids = {call["id"] for call in whole[0].get("delta", {}).values() if isinstance(call, dict)}
    for reply, usage in others:
        for name, call in reply.get("delta", {}).items():
            if isinstance(name, int):  # a call that had not begun gets an id of its own
                assert call["id"] not in ids or call["id"] == whole[0]["delta"][name]["id"]
                call["id"] = whole[0]["delta"][name]["id"]
        assert reply == whole[0]
        assert usage == whole[1]
    return whole[0]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_both_parts_of_a_stream_are_the_whole(server: Server, path: str) -> None:
    """A text with a character of four tokens, its scores and their places."""
    ids = scripted(server, "the token 🙂 the text")
    fields = {"logprobs": True} if path == CHAT else {"logprobs": 2, "echo": True}
    reply = check_equal(await whole_and_resumed(server, path, ids, **fields), 7)
    assert (reply["delta"]["content"] if path == CHAT else reply["text"]).endswith("the token 🙂 the text")
    assert reply["token_ids"] == ids
    if path == CHAT:
        assert [score["logprob"] for score in reply["logprobs"]["content"]] == [-at for at in range(len(ids))]


async def test_a_stop_text_over_the_break_ends_the_reply(server: Server) -> None:
    ids = scripted(server, "the token and the text", FinishReason.LENGTH)
    reply = check_equal(await whole_and_resumed(server, TEXT, ids, stop=["and the"]), 3)
    assert (reply["text"], reply["stop_reason"], reply["finish_reason"]) == ("the token ", "and the", "stop")


async def test_thoughts_and_calls_go_on_where_they_broke() -> None:
    template = tiny_text.TEMPLATE + "{% if tools %}<tool_call>{% endif %}"
    server = make_server(FakeEngineClient(script=lambda _: []), template=template, reply_format="hermes")
    async with server.app.router.lifespan_context(server.app):
        await server.handle.wait_open()
        ids = scripted(server, CALLS)
        reply = check_equal(await whole_and_resumed(server, CHAT, ids, tools=[TOOL, CUSTOM]), 50)
    delta = reply["delta"]
    assert (delta["reasoning_content"], delta["content"].strip()) == ("so", "well")
    assert json.loads(delta[0]["function"]["arguments"]) == {"at": "the 🙂"}
    assert delta[1]["custom"] == {"name": "note", "input": 'a "b"'}
    assert reply["finish_reason"] == "tool_calls"


async def test_the_events_of_a_resumed_generate_have_the_whole(server: Server) -> None:
    ids = scripted(server, "the token 🙂", FinishReason.LENGTH)
    *_, last, _ = (await server.post(NATIVE, {**PROMPTS[NATIVE], "stream": True, "resume_token_ids": ids[:2]})).events
    assert (last["text"], last["output_ids"]) == ("the token 🙂", ids)
    assert last["meta_info"]["completion_tokens"] == len(ids)
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": len(ids)}


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize(
    ("resumed", "fields", "fault"),
    [
        ([500], {}, "between 0 and 499"),
        ([-1], {}, "between 0 and 499"),
        ([], {}, "empty"),
        ("text", {}, "list"),
        ([[5]], {}, "token ids"),
        ([1.5], {}, "token ids"),
        ([5, 6], {"stream": False}, "no stream"),
        ([5, 6], {"n": 2}, "2 choices"),
        ([[5]], {"n": 2}, "2 choices"),
        ([[5], 6], {"n": 2}, "2 choices"),
        ([[5], [-1]], {"n": 2}, "between 0 and 499"),
        ([None, None], {"n": 2}, "all choices have ended"),
        ([5, 6], {"max_tokens": 2}, "at most 2"),
        ([5] * 256, {}, "nothing is left"),
        ([5, 7, 6], {"stop_token_ids": [7]}, "token 7 at index 1"),
        ([5, tiny_text.END, 6], {}, f"token {tiny_text.END} at index 1"),
        (TOKENIZER.encode("the end", add_special_tokens=False).tolist(), {"stop": "the"}, "ends with token"),
    ],
)
async def test_what_cannot_be_resumed_is_refused(
    server: Server, path: str, resumed: Any, fields: dict[str, Any], fault: str
) -> None:
    body = {**PROMPTS[path], "stream": True, **fields}
    if path == NATIVE:
        names = {"max_tokens": "max_new_tokens"}
        own = {names.get(name, name): value for name, value in fields.items() if name != "stream"}
        body = {**PROMPTS[path], "stream": fields.get("stream", True), "sampling_params": own}
    call = await server.post(path, {**body, "resume_token_ids": resumed})
    error = call.json["error"]
    assert (call.status, error["param"]) == (400, "resume_token_ids"), error
    assert fault in error["message"]
    assert not server.engine.seen


async def test_end_tokens_that_a_request_ignores_end_nothing(server: Server) -> None:
    scripted(server, "the token")
    call = await server.complete("Hi", stream=True, ignore_eos=True, resume_token_ids=[tiny_text.END])
    assert call.status == 200


# --- seeds -----------------------------------------------------------------------------------


async def seeds_of(server: Server, path: str, request_id: str, key: str = "", **fields: Any) -> list[int]:
    num_before = len(server.engine.seen)
    headers = {"x_request_id": request_id, "authorization": f"Bearer {key}"}
    assert (await server.post(path, {**PROMPTS[path], **fields}, **headers)).status == 200
    return [seen.sampling.seed for seen in server.engine.seen[num_before:]]


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
async def test_requests_of_one_id_draw_one_seed_on_servers_with_one_secret(path: str) -> None:
    seeds = []
    for key in ("a", "a", "b", None, None):
        server = make_server(FakeEngineClient(script=lambda _: reply_script()), seal_key=key)
        async with server.app.router.lifespan_context(server.app):
            await server.handle.wait_open()
            first = await seeds_of(server, path, "req-1")
            assert await seeds_of(server, path, "req-1") == first
            assert await seeds_of(server, path, "req-2") != first
            assert await seeds_of(server, path, "not an id") != await seeds_of(server, path, "not an id")
            seeds += first
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 4, "another secret, and each server without one, has other seeds"


async def test_requests_of_two_callers_with_one_id_have_seeds_of_their_own() -> None:
    server = make_server(FakeEngineClient(script=lambda _: reply_script()), seal_key="a", api_key=("one", "two"))
    async with server.app.router.lifespan_context(server.app):
        await server.handle.wait_open()
        seeds = [await seeds_of(server, TEXT, "req-1", key) for key in ("one", "two", "one")]
    assert seeds[0] == seeds[2] != seeds[1]


async def test_prompts_of_one_request_have_seeds_of_their_own_and_a_given_seed_is_kept(server: Server) -> None:
    first, second = await seeds_of(server, TEXT, "req-1", prompt=["Hi", "Hi"])
    assert first != second
    assert await seeds_of(server, TEXT, "req-1", seed=5) == [5]
