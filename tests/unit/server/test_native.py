"""``/generate``: SGLang's requests and replies."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from hiserve.core.plan import Scores
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.errors import EngineError
from hiserve.server.reply.logprobs import Scored
from hiserve.server.sglang.routes import Entry, NativeFormatter
from tests.helpers import tiny_text
from tests.helpers.asgi import Call
from tests.helpers.waiting import until
from tests.unit.server.conftest import NUM_STEPS, REPLY, TOKENIZER, Server, reply_script

IDS = [token for step in reply_script() for token in step]


async def generate(server: Server, **body: Any) -> Call:
    return await server.post("/generate", body)


async def test_a_text_is_continued(server: Server) -> None:
    server.engine.cached, server.engine.queue_s = 1, 0.25
    call = await generate(server, text="the token", sampling_params={"max_new_tokens": 20, "temperature": 0})
    reply = call.json
    assert (reply["text"], reply["output_ids"]) == (REPLY, IDS)
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": tiny_text.END}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, NUM_STEPS, 1)
    assert meta["queue_time"] == 0.25
    assert 0 < meta["e2e_latency"] < 10
    assert meta["id"] == call.headers["x-request-id"]
    assert meta["weight_version"] == "fp"
    assert "output_token_logprobs" not in meta
    (seen,) = server.engine.seen
    assert seen.prompt.tolist() == TOKENIZER.encode("the token", add_special_tokens=True).tolist()
    assert (seen.sampling.max_tokens, seen.sampling.temperature) == (20, 0)


async def test_every_event_of_a_stream_holds_everything_so_far(server: Server) -> None:
    call = await generate(server, input_ids=[5, 6], stream=True, rid="mine")
    *events, done = call.events
    assert done == "[DONE]"
    texts, ids = [event["text"] for event in events], [event["output_ids"] for event in events]
    assert len(events) > 3
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(ids))
    assert (texts[-1], ids[-1]) == (REPLY, IDS)
    assert [event["meta_info"]["completion_tokens"] for event in events] == [len(tokens) for tokens in ids]
    ends = [event["meta_info"]["finish_reason"] for event in events]
    assert ends == [None] * (len(events) - 1) + [{"type": "stop", "matched": tiny_text.END}]
    assert {event["meta_info"]["id"] for event in events} == {"mine"}
    assert "index" not in events[0]


SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_new_tokens": 7}, {"max_tokens": 7}),
    ({}, {"max_tokens": 128}),
    ({"min_new_tokens": 3}, {"min_tokens": 3}),
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_k": 5}, {"top_k": 5}),
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"stop": "x"}, {"stop": ("x",)}),
    ({"stop": ["x", "y"]}, {"stop": ("x", "y")}),
    ({"stop_token_ids": [3]}, {"stop_token_ids": (3,)}),
    ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
    ({"seed": 4}, {"seed": 4}),
    ({"sampling_seed": 4}, {"seed": 4}),
    ({"logit_bias": {"5": 1}}, {"logit_bias": {5: 1.0}}),
]


@pytest.mark.parametrize(("given", "changed"), SAMPLING, ids=[str(given) for given, _ in SAMPLING])
async def test_every_sampling_parameter_reaches_the_engine(
    server: Server, given: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert (await generate(server, text="Hi", sampling_params=given)).status == 200
    expected = msgspec.structs.replace(SamplingParams(max_tokens=128), **changed)
    sampling = server.engine.seen[0].sampling
    assert sampling == msgspec.structs.replace(expected, seed=expected.seed or sampling.seed)


async def test_several_prompts_and_choices_are_a_list_in_order(server: Server) -> None:
    call = await generate(
        server, text=["Hi", "the token"], rid=["a", "b"], sampling_params=[{"n": 2, "seed": 1}, {"top_k": 3}]
    )
    assert [reply["meta_info"]["id"] for reply in call.json] == ["a", "a", "b"]
    assert [reply["text"] for reply in call.json] == [REPLY] * 3
    seen = sorted(server.engine.seen, key=lambda one: (one.tag, one.choice))
    assert [one.choice for one in seen] == [0, 1, 0]
    assert [one.sampling.top_k for one in seen] == [0, 0, 3]
    assert [one.tag for one in seen] == [":a", ":a", ":b"]
    assert {one.sampling.n for one in seen} == {1}
    single = await generate(server, input_ids=[[5, 6]])
    assert [reply["text"] for reply in single.json] == [REPLY]


async def test_events_of_several_choices_say_whose_they_are(server: Server) -> None:
    call = await generate(server, input_ids=[[5], [6, 7]], stream=True)
    last = {event["index"]: event for event in call.events[:-1]}
    assert [last[i]["text"] for i in (0, 1)] == [REPLY, REPLY]
    assert [last[i]["meta_info"]["prompt_tokens"] for i in (0, 1)] == [1, 2]


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        (FinishReason.LENGTH, {}, {"type": "length", "length": NUM_STEPS}),
        (FinishReason.STOP, {"stop": " token"}, {"type": "stop", "matched": " token"}),
        (FinishReason.STOP, {"stop_token_ids": [tiny_text.END]}, {"type": "stop", "matched": tiny_text.END}),
        (FinishReason.ABORT, {}, {"type": "abort", "message": "the request was aborted."}),
    ],
)
async def test_the_reply_says_why_it_ended(
    server: Server, finish: FinishReason, stop: dict[str, Any], expected: dict[str, Any]
) -> None:
    server.engine.finish = finish
    call = await generate(server, text="Hi", sampling_params=stop)
    assert call.json["meta_info"]["finish_reason"] == expected


async def test_a_request_that_is_aborted_keeps_what_it_has(server: Server) -> None:
    num_held = 0

    async def step(index: int) -> None:
        nonlocal num_held
        if index == 2:
            num_held += 1
            await asyncio.Event().wait()

    server.engine.step = step
    calls = [server.call("POST", "/generate", {"text": "Hi", "rid": "r", "stream": flag}) for flag in (False, True)]
    await until(lambda: num_held == 2)
    assert (await server.post("/abort_request", {"rid": "r"})).json == {"aborted": 2}
    whole, stream = [await call.end() for call in calls]
    for reply in (whole.json, stream.events[-2]):
        assert reply["output_ids"] == IDS[:2]
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert stream.events[-1] == "[DONE]"


def scores_of(tokens: list[int], num_top: int) -> bytes:
    """Token t has logprob -t/16, and the likeliest tokens 0, 1, ... with -1/4, -2/4, ..."""
    rows = len(tokens)
    top = np.tile(np.arange(num_top, dtype=np.int32), (rows, 1))
    logprobs = -np.array(tokens, dtype=np.float32) / 16
    return Scores(logprobs, top, -(1 + top.astype(np.float32)) / 4).pack(0, num_top, rows)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "num_input", "num_top"),
    [
        ({}, None, 0),
        ({"logprob_start_len": -1}, None, 0),
        ({"logprob_start_len": 0}, 3, 0),
        ({"logprob_start_len": 1, "top_logprobs_num": 2}, 2, 2),
        ({"logprob_start_len": 9, "top_logprobs_num": 1}, 0, 1),
    ],
)
async def test_logprobs_of_output_and_input(
    server: Server, is_stream: bool, fields: dict[str, Any], num_input: int | None, num_top: int
) -> None:
    prompt = [5, 6, 7]
    server.engine.script = lambda _: [[16, 32], [tiny_text.END]]
    before = b"" if num_input is None else scores_of(prompt[1:], num_top)
    server.engine.scores = [before + scores_of([16, 32], num_top), scores_of([tiny_text.END], num_top)]
    call = await generate(server, input_ids=prompt, return_logprob=True, stream=is_stream, **fields)
    meta = (call.events[-2] if is_stream else call.json)["meta_info"]
    assert meta["output_token_logprobs"] == [[-1, 16, None], [-2, 32, None], [-1 / 16, 1, None]]
    sampling = server.engine.seen[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (num_top, None if num_input is None else num_top)
    top = [[-0.25 * (i + 1), i, None] for i in range(num_top)]
    if num_top:
        assert meta["output_top_logprobs"] == [top] * 3
    if num_input is None:
        assert "input_token_logprobs" not in meta
        return
    known = [[None, prompt[-num_input], None]] if num_input else []
    known += [[-token / 16, token, None] for token in prompt[len(prompt) - num_input + 1 :] if num_input]
    assert meta["input_token_logprobs"] == known
    if num_top:
        assert meta["input_top_logprobs"] == [None, *[top] * (num_input - 1)][:num_input]


async def test_the_logprobs_of_the_input_are_worded_once_a_choice(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each event of a stream repeats them: worded each time, a long prompt would cost as much at every token."""
    num_worded = 0

    def counted(self: NativeFormatter, scored: Scored) -> Entry:
        nonlocal num_worded
        num_worded += 1
        return worded(self, scored)

    worded = NativeFormatter._entry
    monkeypatch.setattr(NativeFormatter, "_entry", counted)
    prompt, steps = list(range(5, 45)), [[16]] * 30
    server.engine.script = lambda _: steps
    server.engine.scores = [scores_of(prompt[1:], 0) + scores_of([16], 0), *[scores_of([16], 0)] * 29]
    params = {"n": 2, "ignore_eos": True}
    call = await generate(
        server, input_ids=prompt, sampling_params=params, return_logprob=True, logprob_start_len=0, stream=True
    )
    shown = [event["meta_info"]["input_token_logprobs"] for event in call.events[:-1]]
    assert len(shown) == 60
    assert shown == 60 * [[[None, 5, None], *[[-token / 16, token, None] for token in prompt[1:]]]]
    assert num_worded == 2 * (len(prompt) - 1 + len(steps))


async def test_the_texts_of_scored_tokens_are_shown_on_request(server: Server) -> None:
    server.engine.script = lambda _: [[tiny_text.END]]
    server.engine.scores = [scores_of([tiny_text.END], 0)]
    call = await generate(server, input_ids=[5], return_logprob=True, return_text_in_logprobs=True)
    assert call.json["meta_info"]["output_token_logprobs"] == [[-1 / 16, 1, "<|end|>"]]


async def test_no_new_tokens_scores_the_prompt_alone(server: Server) -> None:
    server.engine.script = lambda _: [[16]]
    server.engine.finish = FinishReason.LENGTH
    server.engine.scores = [scores_of([6], 0) + scores_of([16], 0)]
    call = await generate(
        server, input_ids=[5, 6], sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
    )
    reply = call.json
    assert (reply["text"], reply["output_ids"]) == ("", [])
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert reply["meta_info"]["input_token_logprobs"] == [[None, 5, None], [-6 / 16, 6, None]]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": 5}, "text"),
    ({"text": [1, 2]}, "text"),
    ({"text": ["a", 2]}, "text"),
    ({"text": ["a"] * 1025}, "text"),
    ({"input_ids": "a"}, "input_ids"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [500]}, "input_ids"),
    ({"input_ids": [[1], []]}, "input_ids"),
    ({"input_ids": ["a"]}, "input_ids"),
    ({"text": "a", "sampling_params": 5}, "sampling_params"),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params"),
    ({"text": "a", "sampling_params": {"temperature": "x"}}, "sampling_params.temperature"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "sampling_params": {"min_new_tokens": 1.5}}, "sampling_params.min_new_tokens"),
    ({"text": "a", "sampling_params": {"regex": "x"}}, "sampling_params.regex"),
    ({"text": "a", "sampling_params": {"json_schema": "{}"}}, "sampling_params.json_schema"),
    ({"text": "a", "sampling_params": {"temperature": 200}}, "sampling_params.temperature"),
    ({"text": "a", "sampling_params": {"stop_token_ids": [-1]}}, "sampling_params.stop_token_ids"),
    ({"text": "a", "sampling_params": {"sampling_seed": -(2**63) - 1}}, "sampling_params.sampling_seed"),
    ({"text": "a", "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}}, "sampling_params.min_new_tokens"),
    ({"text": ["a"] * 100, "sampling_params": {"n": 64}}, "sampling_params.n"),
    ({"text": "a", "rid": 5}, "rid"),
    ({"text": "a", "rid": ["x"]}, "rid"),
    ({"text": "a", "stream": "x"}, "stream"),
    ({"text": "a", "return_logprob": 1}, "return_logprob"),
    ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "image_data": "x"}, "image_data"),
    ({"text": "a", "lora_path": "x"}, "lora_path"),
    ({"text": "a", "priority": "x"}, "priority"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[str(body)[:60] for body, _ in BAD])
async def test_a_bad_field_is_a_400_that_names_it(server: Server, body: dict[str, Any], param: str) -> None:
    call = await generate(server, **body)
    assert (call.status, call.json["error"]["param"]) == (400, param), call.text
    assert server.engine.seen == []


async def test_what_does_not_fit_the_context_is_refused(server: Server) -> None:
    for body, param in (
        ({"input_ids": [5] * 256}, "input_ids"),
        ({"text": "x" * 10**6}, "text"),
        ({"input_ids": [5] * 200, "sampling_params": {"max_new_tokens": 57}}, "sampling_params.max_new_tokens"),
        ({"input_ids": [5] * 200, "sampling_params": {"min_new_tokens": 57}}, "sampling_params.min_new_tokens"),
    ):
        call = await generate(server, **body)
        assert call.json["error"]["code"] == "context_length_exceeded"
        assert call.json["error"]["param"] == param
    assert (await generate(server, input_ids=[5] * 250)).status == 200
    assert server.engine.seen[-1].sampling.max_tokens == 6
    assert (await generate(server, input_ids=[5] * 10, sampling_params={"min_new_tokens": 200})).status == 200
    assert server.engine.seen[-1].sampling.max_tokens == 200


async def test_salt_and_priority_reach_the_engine(server: Server) -> None:
    await generate(server, text="Hi")
    await generate(server, text="Hi", cache_salt="s", priority=3)
    assert [(bool(seen.namespace), seen.priority) for seen in server.engine.seen] == [(False, 0), (True, 3)]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_is_told_as_on_other_routes(server: Server, is_stream: bool) -> None:
    server.engine.fail_at, server.engine.failure = 0, EngineError("broke.")
    call = await generate(server, text="Hi", stream=is_stream)
    assert (call.status, call.json["error"]["code"]) == (500, "engine_error")
    assert call.headers["x-should-retry"] == "false"
