"""``/v1/responses`` as OpenAI's own client uses it: items in and out, events, state."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from hiserve.core.request import FinishReason, Grammar
from hiserve.errors import EngineError, RequestError
from hiserve.grammar import tools as tool_grammars
from hiserve.server import conversations
from hiserve.server.responses import routes as responses
from hiserve.server.responses.request import conversation_of, read_tools
from hiserve.server.responses.store import ResponseStore, StoredResponse
from hiserve.server.responses.types import InputFields
from hiserve.text.body.json import decode
from hiserve.text.conversation import Call, Text, Thought
from tests.unit.server.conftest import TOKENIZER, Server
from tests.unit.server.tool_replies import (
    ARGUMENTS,
    CALL,
    SOURCE,
    TOOL,
    TWO,
    Trusting,
    client_of,
    script,
    serving,
)

LOOK = {"type": "function", **TOOL["function"]}
PATCH = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/ start?"}}  # fmt: skip
SPACE = {"type": "namespace", "name": "files", "description": "d", "tools": [{"type": "function", "name": "read"}]}
SEALED = ["reasoning.encrypted_content"]
SIZES = [1, 2, 3, 7, 1000]


def texts_of(prompts: list[Any]) -> list[str]:
    return [TOKENIZER.decode(seen.prompt, skip_hidden=False) for seen in prompts]


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; the name of each equals its type."""
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events without ids and numbers, deltas in a row as one."""
    made: list[dict[str, Any]] = []
    for event in events:
        shown = {name: value for name, value in event.items() if name not in ("sequence_number", "item_id", "response")}
        if "item" in shown:
            shown["item"] = {name: value for name, value in shown["item"].items() if name not in ("id", "call_id")}
        if made and "delta" in shown and made[-1]["type"] == shown["type"]:
            made[-1]["delta"] += shown["delta"]
        else:
            made.append(shown)
    return made


async def streamed(server: Server, **fields: Any) -> list[dict[str, Any]]:
    call = await server.post("/v1/responses", {"input": "Hi", "stream": True, **fields})
    assert call.status == 200, call.text
    return events_of(call.text)


async def test_openais_client_gets_reasoning_words_and_calls() -> None:
    async with serving(TWO) as server, client_of(server) as client:
        server.engine.cached = 16
        reply = await client.responses.create(model="tiny", input="Hi", tools=[LOOK], metadata={"a": "b"})  # type: ignore[list-item]
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, _, first, second = reply.output
    assert thought.content[0].text == "so"  # type: ignore[union-attr,index]
    assert reply.output_text == "Let me see."
    assert first.arguments == second.arguments == ARGUMENTS  # type: ignore[union-attr]
    assert len({item.id for item in reply.output} | {first.call_id, second.call_id}) == 6  # type: ignore[union-attr]
    assert (reply.status, reply.incomplete_details, reply.metadata, reply.store) == (
        "completed",
        None,
        {"a": "b"},
        True,
    )
    usage = reply.usage
    assert usage is not None
    assert usage.input_tokens + usage.output_tokens == usage.total_tokens
    assert usage.output_tokens == len(script(TWO, 1))
    assert usage.input_tokens_details.cached_tokens == 16
    assert usage.output_tokens_details.reasoning_tokens == len(
        TOKENIZER.encode("<think>\nso", add_special_tokens=False)
    )


@pytest.mark.parametrize("size", SIZES)
async def test_any_partition_of_the_tokens_gives_the_same_events(size: int) -> None:
    tools = [LOOK, PATCH]
    text = TWO + '\n<tool_call>\n{"name": "patch", "arguments": {"input": "x\\nx"}}\n</tool_call>'
    found = []
    for each in (1, size):
        async with serving(text, each, seal_key="k") as server:
            events = await streamed(server, tools=tools, include=SEALED)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        found.append(joined(events))
    assert found[0] == found[1]
    kinds = [event["type"].removeprefix("response.") for event in found[0]]
    item = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]  # fmt: skip
    thought = [kind.replace("output_text", "reasoning_text") for kind in item]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    custom = [kind.replace("function_call_arguments", "custom_tool_call_input") for kind in call]
    assert kinds == ["created", "in_progress", *thought, *item, *call, *call, *custom, "completed"]


@pytest.mark.parametrize("seed", range(12))
async def test_random_partitions_of_mixed_replies_give_the_same_events(seed: int) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    words = ["Let me see. ", "é🙂", " ", "\n", CALL + "\n", "<tool_call>no", "<think>\nx\n</think>\n\n"]
    text = "".join(draw.choice(words) for _ in range(draw.randint(1, 8)))
    found = []
    for _ in range(3):
        async with serving(text, seal_key="k") as server:
            ids = [index for delta in script(text, 1) for index in delta]
            cuts = sorted(draw.sample(range(1, len(ids)), min(len(ids) - 1, draw.randint(0, 12))))
            pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
            server.engine.script = lambda _, pieces=pieces: pieces  # type: ignore[misc]
            events = await streamed(server, tools=[LOOK])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        found.append(joined(events))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("size", SIZES)
async def test_a_stream_ends_with_the_reply_that_is_not_streamed(size: int) -> None:
    async with serving(TWO, size) as server, client_of(server) as client:
        async with client.responses.stream(model="tiny", input="Hi", tools=[LOOK]) as stream:  # type: ignore[list-item]
            last = await stream.get_final_response()
        whole = await client.responses.create(model="tiny", input="Hi", tools=[LOOK])  # type: ignore[list-item]

    def plain(reply: Any) -> Any:
        shown = reply.to_dict()
        for item in shown["output"]:
            item.pop("id"), item.pop("call_id", None), item.pop("parsed_arguments", None)
            for part in item.get("content", ()):
                part.pop("parsed", None)
        return {name: value for name, value in shown.items() if name not in ("id", "created_at")}

    assert plain(last) == plain(whole)


CHOICES: list[tuple[Any, list[str], bool]] = [
    ("required", ["look", "patch", "files__read"], False),
    ({"type": "function", "name": "look"}, ["look"], True),
    ({"type": "custom", "name": "patch"}, ["patch"], True),
    ({"type": "function", "name": "read", "namespace": "files"}, ["files__read"], True),
    (
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [
                {"type": "web_search"},
                {"type": "function", "name": "look"},
                {"type": "custom", "name": "patch"},
            ],
        },
        ["look", "patch"],
        False,
    ),
]


@pytest.mark.parametrize(("choice", "names", "is_single"), CHOICES, ids=[str(case[0])[:40] for case in CHOICES])
async def test_a_choice_of_tools_is_a_grammar_of_their_calls(choice: Any, names: list[str], is_single: bool) -> None:
    vetting = Trusting()
    async with serving(TWO, vetting=vetting, template=SOURCE) as server:
        call = await server.post("/v1/responses", {"input": "Hi", "tools": [LOOK, PATCH, SPACE], "tool_choice": choice})
        auto = await server.post("/v1/responses", {"input": "Hi", "tools": [LOOK, PATCH, SPACE]})
    assert {call.status, auto.status} == {200}, call.text
    assert call.json["tool_choice"] == choice
    ((grammar, param),) = (asked for asked in vetting.asked if asked[1] != "tools[1].format.definition")
    assert param == "tool_choice"
    assert [name for name in ("look", "patch", "files__read") if name in grammar.text] == names
    assert len([item for item in call.json["output"] if item["type"] == "function_call"]) == (1 if is_single else 2)


async def test_the_rules_of_a_custom_tool_are_held_where_they_are_regular_and_counted_where_not() -> None:
    vetting = Trusting()
    held = {**PATCH, "name": "move", "format": PATCH["format"] | {"definition": 'start: "up" | "down" /[1-9]/'}}
    async with serving(TWO, vetting=vetting, template=SOURCE) as server:
        first = await server.post("/v1/responses", {"input": "Hi", "tools": [held]})
        second = await server.post("/v1/responses", {"input": "Hi", "tools": [held, PATCH]})
        counted = await server.metric("hiserve:ignored_request_parts_total", part="tool_grammar")
    assert "x-hiserve-warning" not in first.headers
    assert (
        second.headers["x-hiserve-warning"]
        == "the model sees the grammars of these tools, but they are not held: patch"
    )
    assert counted == 1
    assert [param for _, param in vetting.asked] == ["tools", "tools[1].format.definition", "tools"], "under auto too"
    assert "(?:up)" in vetting.asked[0][0].text


class Judging(Trusting):
    """Vetting that refuses some grammars."""

    async def check(self, grammar: Grammar, param: str, **_: Any) -> tuple[Grammar, list[str]]:
        self.asked.append((grammar, param))
        for word, code in (("broken", "invalid_grammar"), ("slow", "grammar_too_complex")):
            if word in grammar.text:
                raise RequestError(f"{param} cannot be used as a grammar: {word}.", code=code, param=param)
        return grammar, []


@pytest.mark.parametrize(("word", "status"), [("broken", 400), ("slow", 200), ("sound", 200)])
async def test_rules_that_are_only_shown_are_refused_where_they_are_no_grammar(word: str, status: int) -> None:
    rules = f"start: {word} start?"
    shown = {**PATCH, "format": PATCH["format"] | {"definition": rules}}
    vetting = Judging()
    async with serving(TWO, vetting=vetting, template=SOURCE) as server:
        call = await server.post("/v1/responses", {"input": "Hi", "tools": [LOOK, shown]})
        assert (call.status, bool(server.engine.seen)) == (status, status == 200), call.text
    param = "tools[1].format.definition"
    assert vetting.asked == [(Grammar.of("lark", rules), param)]
    if status == 400:
        assert (call.json["error"]["param"], call.json["error"]["code"]) == (param, "invalid_grammar")
    else:
        assert "patch" in call.headers["x-hiserve-warning"]


async def test_the_rules_that_are_read_have_one_limit_for_all_tools_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = PATCH["format"] | {"definition": 'start: "up" | "down"'}
    monkeypatch.setattr(tool_grammars, "MAX_CHARS", 2 * len(form["definition"]) - 1)
    tools = [{**PATCH, "name": name, "format": form} for name in ("first", "second")]
    async with serving(TWO, vetting=Trusting(), template=SOURCE) as server:
        one = await server.post("/v1/responses", {"input": "Hi", "tools": tools[:1]})
        two = await server.post("/v1/responses", {"input": "Hi", "tools": tools})
    assert {one.status, two.status} == {200}, two.text
    assert "x-hiserve-warning" not in one.headers
    assert two.headers["x-hiserve-warning"].endswith("not held: second")


async def test_a_format_beside_a_call_that_must_be_made_is_echoed_and_constrains_nothing() -> None:
    """instructor sends the parameters of the tool as the format, too."""
    parameters = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
    tool = {"type": "function", "name": "look", "parameters": parameters}
    form = {"type": "json_schema", "name": "look", "schema": parameters, "strict": True}
    asked = {"input": "Hi", "tools": [tool], "tool_choice": {"type": "function", "name": "look"}}
    async with serving(TWO, vetting=Trusting(), template=SOURCE) as server:
        plain = await server.post("/v1/responses", asked)
        beside = await server.post("/v1/responses", asked | {"text": {"format": form}})
        first, second = (seen.sampling.grammar for seen in server.engine.seen)
    assert (plain.status, beside.status) == (200, 200), beside.text
    assert first == second
    assert beside.json["text"]["format"] == form


REFUSED_CHOICES: list[tuple[Any, str]] = [
    ({"type": "web_search"}, "hosted"),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "no tool that is served"),
    ({"type": "function"}, "names no tool"),
    ({"type": "function", "name": "none"}, "none of tools"),
]
TWO_ALLOWED: list[tuple[Any, str]] = [
    ({"type": "function"}, "names no tool"),
    ({"type": "custom", "name": "none"}, "none of tools"),
]


@pytest.mark.parametrize(("choice", "fault"), REFUSED_CHOICES)
async def test_a_choice_of_no_tool_is_refused(choice: Any, fault: str) -> None:
    async with serving(TWO, template=SOURCE) as server:
        call = await server.post("/v1/responses", {"input": "Hi", "tools": [LOOK], "tool_choice": choice})
    assert (call.status, call.json["error"]["param"]) == (400, "tool_choice")
    assert fault in call.json["error"]["message"]


@pytest.mark.parametrize(("tool", "fault"), TWO_ALLOWED)
async def test_the_allowed_tool_at_fault_is_named_by_its_place(tool: Any, fault: str) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, LOOK, tool]}
    async with serving(TWO, template=SOURCE) as server:
        call = await server.post("/v1/responses", {"input": "Hi", "tools": [LOOK], "tool_choice": choice})
    assert (call.status, call.json["error"]["param"]) == (400, "tool_choice.tools[2]")
    assert fault in call.json["error"]["message"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "custom", "name": "look"}, LOOK], "tools[1].name"),
        ([LOOK, SPACE, {"type": "function", "name": f"{SPACE['name']}__{SPACE['tools'][0]['name']}"}], "tools[2].name"),
        ([LOOK, {**SPACE, "tools": [LOOK, {**LOOK, "type": "custom"}]}], "tools[1].tools[1].name"),
    ],
)
async def test_two_tools_whose_calls_could_be_of_either_are_refused(tools: list[Any], param: str) -> None:
    async with serving(TWO, template=SOURCE) as server:
        call = await server.post("/v1/responses", {"input": "Hi", "tools": tools})
        again = await server.post("/v1/responses", {"input": "Hi", "tools": [LOOK, LOOK, SPACE]})
    assert (call.status, call.json["error"]["param"]) == (400, param)
    assert again.status == 200, "a function that is given twice"


BAD: Any = {"type": "string"}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search"}, LOOK, {"type": "function", "name": "a b"}], "tools[2].name"),
        ([{"type": "web_search"}, {"type": "function", "name": "f", "parameters": BAD}], "tools[1].parameters"),
        ([LOOK, {**SPACE, "tools": [LOOK, {"type": "function", "name": "f", "parameters": BAD}]}], "tools[1].tools[1].parameters"),
    ],
)  # fmt: skip
async def test_a_tool_that_cannot_be_called_is_named_as_the_client_has_it(tools: list[Any], param: str) -> None:
    async with serving(TWO, template=SOURCE) as server:
        call = await server.post("/v1/responses", {"input": "Hi", "tools": tools, "tool_choice": "required"})
    assert (call.status, call.json["error"]["param"]) == (400, param)
    assert call.json["error"]["message"].startswith(f"{param} ")


async def test_an_input_that_is_too_long_is_told_without_fields_of_other_protocols(server: Server) -> None:
    for size in (3_000, 300_000):
        call = await server.post("/v1/responses", {"input": "x" * size})
        assert (call.status, call.json["error"]["param"]) == (400, "input")
        assert "messages" not in call.json["error"]["message"]


SAID: Any = {"role": "assistant", "type": "message"}
WORDS_IN_A_ROW: list[tuple[list[Any], str]] = [
    ([SAID | {"content": "One"}, SAID | {"content": "Two"}], "One|Two"),
    ([SAID | {"content": "One"}, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}, SAID | {"content": "Two"}], "One|(so)Two"),
    ([{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}, SAID | {"content": "One"}], "(so)One"),
    ([SAID | {"content": "One"}, {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}, SAID | {"content": "Two"}], "One[look]|Two"),
]  # fmt: skip


@pytest.mark.parametrize(("items", "expected"), WORDS_IN_A_ROW, ids=[case[1] for case in WORDS_IN_A_ROW])
def test_each_message_of_the_assistant_is_a_turn_with_the_thought_before_it(items: list[Any], expected: str) -> None:
    spelled: dict[type, str] = {Thought: "({0.text})", Text: "{0.text}", Call: "[{0.name}]"}
    turns = conversation_of(decode({"input": items}, InputFields), [], read_tools([]), lambda _: None).turns
    assert {turn.role for turn in turns} == {"assistant"}
    shown = ["".join(spelled[type(part)].format(part) for part in turn.parts) for turn in turns]
    assert "|".join(shown) == expected


async def test_the_echo_of_tools_counts_in_the_store(tmp_path: Path) -> None:
    """``GET`` returns it; the documentation says so."""
    sizes = []
    for description in ("d", "d" * 1_000):
        path, tool = tmp_path / f"{len(sizes)}.db", {**LOOK, "description": description}
        async with serving("Yes.", responses_store=f"sqlite:{path}") as server:
            call = await server.post("/v1/responses", {"input": "Hi", "tools": [tool]})
            assert call.json["tools"] == [tool]
        with contextlib.closing(ResponseStore(path)) as store:
            sizes.append(store.num_bytes)
    assert sizes[1] - sizes[0] >= 999 - 20, "of which ids and counts of tokens take some"


async def test_parsed_replies_and_parsed_arguments() -> None:
    class Place(pydantic.BaseModel):
        where: str

    vetting = Trusting()
    async with serving('{"where": "Oslo"}', vetting=vetting) as server, client_of(server) as client:
        reply = await client.responses.parse(model="tiny", input="Hi", text_format=Place)
        sampling = server.engine.seen[0].sampling
    ((grammar, param),) = vetting.asked
    assert reply.output_parsed == Place(where="Oslo")
    assert json.loads(grammar.text)["required"] == ["where"]
    assert param == "text.format.schema"
    assert sampling.grammar is not None
    assert sampling.grammar.kind == "json"


async def test_a_limit_beyond_the_room_is_cut_and_the_reply_incomplete() -> None:
    async with serving("Let me see") as server:
        server.engine.finish = FinishReason.LENGTH
        reply = (await server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 32_000})).json
        (seen,) = server.engine.seen
        events = await streamed(server)
        too_long = await server.post("/v1/responses", {"input": "x " * 5000, "max_output_tokens": 32_000})
    assert seen.sampling.max_tokens == server.engine.max_model_len - len(seen.prompt)
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (reply["max_output_tokens"], reply["output"][0]["status"]) == (32_000, "incomplete")
    assert events[-1]["type"] == "response.incomplete"
    assert too_long.status == 400
    assert too_long.json["error"]["code"] == "context_length_exceeded"
    assert too_long.json["error"]["param"] == "input"


async def test_a_call_that_is_cut_is_incomplete() -> None:
    async with serving(CALL[:60]) as server:
        server.engine.finish = FinishReason.LENGTH
        (call,) = (await server.post("/v1/responses", {"input": "Hi", "tools": [LOOK]})).json["output"]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    assert ARGUMENTS.startswith(call["arguments"])


async def test_a_failure_after_the_first_event_ends_the_stream_as_failed() -> None:
    async with serving("Let me see", 1) as server:
        server.engine.fail_at, server.engine.failure = 2, EngineError("the engine lost this request; try again.")
        events = await streamed(server)
        whole = await server.post("/v1/responses", {"input": "Hi"})
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {
        "code": "engine_error",
        "message": "the engine lost this request; try again.",
    }
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert whole.status == 500


async def test_a_response_that_is_aborted_says_so() -> None:
    async with serving("Let me see") as server:
        server.engine.finish = FinishReason.ABORT
        reply = (await server.post("/v1/responses", {"input": "Hi"})).json
        events = await streamed(server)
    assert (reply["status"], reply["output"][0]["status"]) == ("cancelled", "incomplete")
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")


async def test_a_store_that_fails_costs_no_reply(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    async with serving("Yes.", responses_store=f"sqlite:{path}") as server:
        with contextlib.closing(sqlite3.connect(path)) as other:
            other.execute("DROP TABLE responses")
        call = await server.post("/v1/responses", {"input": "Hi"})
        events = await streamed(server)
        kept = await server.get(f"/v1/responses/{call.json['id']}")
        again = await server.post("/v1/responses", {"input": "Hi", "previous_response_id": call.json["id"]})
    assert (call.status, events[-1]["type"], kept.status, again.status) == (200, "response.completed", 503, 503)


@pytest.mark.parametrize("size", SIZES)
async def test_white_space_is_no_message_unless_it_is_the_reply(size: int) -> None:
    shown = []
    for text in ("", " \n ", "<think>\nso\n</think>\n\n  " + CALL):
        async with serving(text, size) as server:
            items = (await server.post("/v1/responses", {"input": "Hi", "tools": [LOOK]})).json["output"]
        shown.append([(item["type"], item.get("content") and item["content"][0]["text"]) for item in items])
    assert shown == [[("message", "")], [("message", " \n ")], [("reasoning", "so"), ("function_call", None)]]


async def test_calls_of_namespaces_and_custom_tools_come_as_the_client_knows_them_and_go_back() -> None:
    text = (
        '<tool_call>\n{"name": "files__read", "arguments": {"at": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "patch", "arguments": {"input": "xx\\n\\"x\\""}}\n</tool_call>'
    )
    tools = [SPACE, PATCH, {"type": "web_search"}]
    hostile = {"type": "x\r\ny: é\x00" + 500 * "z"}
    async with serving(text, template=SOURCE) as server, client_of(server) as client:
        reply = await client.responses.create(model="tiny", input="Hi", tools=tools)  # type: ignore[arg-type]
        read, patch = reply.output
        items: list[Any] = [{"role": "user", "content": "Hi"}, *(item.to_dict() for item in reply.output)]
        items += [
            {"type": "function_call_output", "call_id": read.call_id, "output": "found"},  # type: ignore[union-attr]
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": [{"type": "input_text", "text": "done"}]},  # type: ignore[union-attr]
        ]  # fmt: skip
        await client.responses.create(model="tiny", input=items, tools=tools)  # type: ignore[arg-type]
        first, second = server.engine.seen
        call = await server.post("/v1/responses", {"input": "Hi", "tools": [*tools, hostile]})
        assert await server.metric("hiserve:ignored_request_parts_total", part="hosted_tool") == 4
    assert (read.type, read.name, read.namespace, read.arguments) == ("function_call", "read", "files", '{"at": 1}')  # type: ignore[union-attr]
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", 'xx\n"x"')  # type: ignore[union-attr]
    shown = texts_of([first])[0]
    assert '"name": "files__read"' in shown
    assert "start: /x+/" in shown
    assert "web_search" not in shown
    reply_ids = [index for delta in script(text, 1) for index in delta]
    assert second.prompt.tolist()[: len(first.prompt) + len(reply_ids)] == [*first.prompt.tolist(), *reply_ids]
    warning = call.headers["x-hiserve-warning"]
    assert "web_search" in warning
    assert "x??y: ??zzz" in warning
    assert len(warning) < 400


def test_a_part_that_refuses_is_text() -> None:
    part = {"type": "refusal", "refusal": "I will not.", "text": None}
    items = [{"role": "user", "content": "Hi"}, {"type": "message", "role": "assistant", "content": [part]}]
    turns = conversation_of(decode({"input": items}, InputFields), [], read_tools([]), lambda _: None).turns
    assert turns[1].parts == (Text("I will not."),)


CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Let me see.", "reasoning_content": "so", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where": "é"}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": "Thanks"},
]  # fmt: skip
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"where": "é"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "found"},
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": "Thanks"},
]  # fmt: skip


MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": [
        {"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "c1", "name": "look", "input": {"where": "é"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "found"}]},
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": "Thanks"},
]  # fmt: skip


@pytest.mark.parametrize("order", [1, -1])
async def test_the_same_conversation_has_the_same_prompt_in_three_protocols(order: int) -> None:
    look = {"strict": False, **dict(list(LOOK.items())[::order])}
    asked = {"name": "look", "input_schema": LOOK["parameters"]}
    async with serving("Done.", template=SOURCE) as server:
        chat = await server.post("/v1/chat/completions", {"messages": CHAT, "tools": [TOOL]})
        body = {"instructions": "Be short.", "input": ITEMS, "tools": [look]}
        reply = await server.post("/v1/responses", body)
        number = await server.post("/v1/responses/input_tokens", body)
        fields = {"max_tokens": 100, "system": "Be short.", "messages": MESSAGES, "tools": [asked]}
        message = await server.post("/v1/messages", fields)
        first, second, third = server.engine.seen
    assert {chat.status, reply.status, message.status} == {200}, reply.text + message.text
    assert texts_of([first]) == texts_of([second]) == texts_of([third])
    assert first.prompt.tolist() == second.prompt.tolist() == third.prompt.tolist()
    assert number.json == {"object": "response.input_tokens", "input_tokens": len(second.prompt)}


async def test_a_sealed_thought_comes_back_and_another_server_s_is_ignored() -> None:
    template = (
        "{% for message in messages %}{{ message.reasoning_content or '' }}|{{ message.content }}{% endfor %}"
        + ("{#- <think></think> -#}")
    )
    text = "<think>\nso\n</think>\n\nYes."
    async with serving(text, template=template, seal_key="k") as server, client_of(server) as client:
        reply = await client.responses.create(model="tiny", input="Hi", include=SEALED)  # type: ignore[arg-type]
    thought, words = (item.to_dict() for item in reply.output)
    assert thought["encrypted_content"]
    hidden = {name: value for name, value in thought.items() if name != "content"}
    async with serving(text, template=template, seal_key="k") as server, client_of(server) as client:
        for given in (thought, hidden, {**hidden, "encrypted_content": "A" * 64}):
            items: Any = [{"role": "user", "content": "Hi"}, given, words, {"role": "user", "content": "So?"}]
            await client.responses.create(model="tiny", input=items)
        assert await server.metric("hiserve:ignored_request_parts_total", part="thought") == 1
        shown = texts_of(server.engine.seen)
    assert [text.count("so|Yes.") for text in shown] == [1, 1, 0]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_next_step_of_an_agent_begins_with_the_tokens_of_this_one(is_stream: bool) -> None:
    text = 'Now.\n<tool_call>\n{"name": "look", "arguments": {"where":   "Oslo"}}\n</tool_call>'
    async with serving(text, template=SOURCE) as server, client_of(server) as client:
        fields: dict[str, Any] = {"model": "tiny", "tools": [LOOK]}
        async with client.responses.stream(input="Hi", **fields) as stream:
            last = await stream.get_final_response()
        whole = await client.responses.create(input="Hi", **fields)
        reply = last if is_stream else whole
        words, call = reply.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "x"}  # type: ignore[union-attr]
        spelled = {**call.to_dict(), "arguments": '{"where":"Oslo"}'}
        items: Any = [{"role": "user", "content": "Hi"}, words.to_dict(), spelled, output]
        await client.responses.create(input=items, **fields)
        await client.responses.create(input=[output], previous_response_id=reply.id, **fields)
        first, _, second, third = server.engine.seen
    reply_ids = [index for delta in script(text, 1) for index in delta]
    assert second.prompt.tolist()[: len(first.prompt) + len(reply_ids)] == [*first.prompt.tolist(), *reply_ids]
    assert third.prompt.tolist() == second.prompt.tolist()


async def test_stored_responses_are_read_continued_and_deleted() -> None:
    async with serving("Yes.") as server, client_of(server) as client:
        first = await client.responses.create(model="tiny", input="One", instructions="Be short.")
        second = await client.responses.create(model="tiny", input="Two", previous_response_id=first.id)
        assert (await client.responses.retrieve(first.id)).to_dict() == first.to_dict()
        assert (await server.get(f"/v1/responses/{first.id}?stream=false")).status == 200
        with pytest.raises(openai.BadRequestError, match="not streamed again"):
            await client.responses.retrieve(first.id, stream=True)
        shown = await client.responses.input_items.list(second.id, order="asc")
        texts = [item.content[0].text for item in shown.data]  # type: ignore[union-attr]
        newest = await client.responses.input_items.list(second.id, limit=1)
        rest = await client.responses.input_items.list(second.id, limit=1, after=newest.data[0].id)  # type: ignore[arg-type]
        not_kept = await client.responses.create(model="tiny", input="Hi", store=False)
        await client.responses.delete(first.id)
        statuses = []
        for gone in (first.id, not_kept.id, "resp_x"):
            for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
                statuses.append((await server.call(method, f"/v1/responses/{gone}{path}").end()).status)
        again = await server.post("/v1/responses", {"input": "Hi", "previous_response_id": second.id})
        prompts = texts_of(server.engine.seen[:2])
    assert texts == ["One", "Yes.", "Two"]
    assert newest.has_more
    assert [item.content[0].text for item in rest.data] == ["Yes."]  # type: ignore[union-attr]
    assert not not_kept.store
    assert set(statuses) == {404}
    assert again.json["error"]["code"] == "previous_response_not_found"
    assert again.json["error"]["param"] == "previous_response_id"
    assert "Be short." in prompts[0]
    assert "Be short." not in prompts[1]
    assert "One<|end|><|assistant|>Yes.<|end|><|user|>Two" in prompts[1]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=x", "limit=%D9%A3"])
async def test_pages_that_are_impossible_are_refused(query: str) -> None:
    async with serving("Yes.") as server:
        made = (await server.post("/v1/responses", {"input": "Hi"})).json["id"]
        call = await server.get(f"/v1/responses/{made}/input_items?{query}")
    assert (call.status, call.json["error"]["param"]) == (400, query.partition("=")[0])


async def test_no_caller_reads_another_s_and_nothing_is_kept_where_the_store_is_off() -> None:
    async with serving("Yes.", api_key=("a", "b"), share_prefixes=True) as server:
        body = {"input": "Hi"}
        made = (await server.call("POST", "/v1/responses", body, authorization="Bearer a").end()).json["id"]
        for key, status in (("a", 200), ("b", 404)):
            for path in ("", "/input_items"):
                call = await server.call("GET", f"/v1/responses/{made}{path}", authorization=f"Bearer {key}").end()
                assert call.status == status
            again = {**body, "previous_response_id": made}
            assert (
                await server.call("POST", "/v1/responses", again, authorization=f"Bearer {key}").end()
            ).status == status
        assert (await server.call("DELETE", f"/v1/responses/{made}", authorization="Bearer b").end()).status == 404
    async with serving("Yes.", responses_store="off") as server:
        reply = (await server.post("/v1/responses", {"input": "Hi", "store": True})).json
        assert reply["store"] is False
        assert (await server.get(f"/v1/responses/{reply['id']}")).status == 404
        call = await server.post("/v1/responses", {"input": "Hi", "previous_response_id": reply["id"]})
        assert call.json["error"]["code"] == "previous_response_not_found"


async def test_the_oldest_exchanges_go_where_the_request_allows_it() -> None:
    words = "word " * 200
    items = [{"role": role, "content": f"{i} {words}"} for i in range(4) for role in ("user", "assistant")]
    items = [{"role": "developer", "content": "Be short."}, *items, {"role": "user", "content": "So?"}]
    async with serving("Yes.") as server:
        refused = await server.post("/v1/responses", {"input": items})
        call = await server.post("/v1/responses", {"input": items, "truncation": "auto"})
        alone = await server.post("/v1/responses", {"input": words * 10, "truncation": "auto"})
        (shown,) = texts_of(server.engine.seen)
    assert (refused.status, call.status, alone.status) == (400, 200, 400), call.text
    assert "Be short." in shown
    assert shown.endswith("So?<|end|><|assistant|>")
    assert "0 word" not in shown
    assert "3 word" in shown, shown[:200]


CROWD = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}] * 800}
# ``tests/helpers/bad_requests.py`` has the others.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"tools": [CROWD, CROWD]}, "tools"),
    ({"input": [{"role": "user", "content": "Hi"}] * 4097}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" * 40_000}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "\\ud800"}'}]}, "input[0].arguments"),
    ({"tools": [LOOK | {"description": "\ud800"}]}, "tools"),
    ({"metadata": {"a": "\ud800"}}, "metadata"),
    ({"reasoning": {"effort": "\ud800"}}, "reasoning"),
    ({"tool_choice": {"type": "function", "name": "\ud800"}}, "tool_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{i} {param}" for i, (_, param) in enumerate(REFUSED)])
async def test_what_cannot_be_served_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    call = await server.post("/v1/responses", json.dumps({"input": "Hi", **fields}).encode())
    assert (call.status, call.json["error"]["param"]) == (400, param), call.text
    assert not server.engine.seen


async def test_what_changes_nothing_is_taken(server: Server) -> None:
    fields = {
        "service_tier": "auto", "safety_identifier": "x", "stream_options": {"include_obfuscation": False}, "max_tool_calls": 3,
        "top_logprobs": 0, "prompt_cache_key": "thread", "user": "u", "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["web_search_call.action.sources"], "text": {"verbosity": "low"}, "background": False, "made_up": 1,
    }  # fmt: skip
    call = await server.post("/v1/responses", {"input": "Hi", **fields})
    assert call.status == 200, call.text
    for name in ("prompt_cache_key", "user", "max_tool_calls"):
        assert call.json[name] == fields[name]


async def test_a_coding_agent_s_request_is_served() -> None:
    """Of Codex 0.169, its texts replaced."""

    def said(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    functions = [{**LOOK, "name": f"tool_{i}", "description": "x" * 200, "strict": False} for i in range(7)]
    space = {**SPACE, "tools": [{**LOOK, "name": f"inner_{i}", "strict": False} for i in range(5)]}
    body = {
        "instructions": "x" * 400, "input": [said("developer", "y" * 900), said("developer", "z" * 90), said("user", "Hi")],
        "tools": [*functions, space, {"type": "web_search", "external_web_access": False}], "tool_choice": "auto",
        "parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "store": False, "stream": True, "include": SEALED,
        "prompt_cache_key": "0199-thread", "text": {"verbosity": "low"}, "client_metadata": {"x-codex-installation-id": "i"},
    }  # fmt: skip
    text = (
        '<think>\nso\n</think>\n\n<tool_call>\n{"name": "files__inner_3", "arguments": {"where":   "x"}}\n</tool_call>'
    )
    async with serving(text, 3) as server:
        server.engine.max_model_len = 32_000
        events = events_of((await server.post("/v1/responses", body)).text)
        thought, call = events[-1]["response"]["output"]
        items = [*body["input"], {**thought, "content": None}, call]
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "ok"})
        again = await server.post("/v1/responses", {**body, "input": items})
        first, second = server.engine.seen
        assert (await server.get(f"/v1/responses/{events[-1]['response']['id']}")).status == 404
    assert again.status == 200, again.text
    assert (call["name"], call["namespace"], call["arguments"]) == ("inner_3", "files", '{"where":   "x"}')
    assert thought["encrypted_content"]
    assert second.prompt.tolist()[: len(first.prompt)] == first.prompt.tolist()


async def test_the_last_event_follows_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, real = list[str](), ResponseStore.put
    async with serving("Yes.") as server:
        call = server.call("POST", "/v1/responses", {"input": "Hi", "stream": True})

        def put(store: ResponseStore, caller: bytes, stored: StoredResponse, item_ids: list[str]) -> bool:
            shown.append(call.text)
            return real(store, caller, stored, item_ids)

        monkeypatch.setattr(ResponseStore, "put", put)
        await call.end()
    (before,) = shown
    assert "response.created" in before
    assert "response.completed" not in before
    assert "response.completed" in call.text


async def test_items_of_a_request_count_with_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_CHAIN_ITEMS", 3)
    async with serving("Yes.") as server:
        first = await server.post("/v1/responses", {"input": "Hi"})
        item = {"role": "user", "content": "So?"}
        replies = [
            await server.post("/v1/responses", {"input": [item] * number, "previous_response_id": first.json["id"]})
            for number in (1, 2)
        ]
    assert [reply.status for reply in replies] == [200, 400]
    assert replies[1].json["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/responses/input_tokens", "input"), ("/v1/messages/count_tokens", "messages")]
)
async def test_what_is_too_long_to_be_counted_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    monkeypatch.setattr(conversations, "MAX_CHARS", 100)
    for number, status in ((20, 200), (101, 400)):
        given: Any = "x" * number
        given = given if field == "input" else [{"role": "user", "content": given}]
        call = await server.post(path, {field: given})
        assert call.status == status, call.text
    assert f"{field} must be at most 100 characters long." in call.text
