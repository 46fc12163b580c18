"""Chat and text completions, whole and streamed, in OpenAI's form."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.core.request import FinishReason
from tests.helpers import tiny_text
from tests.unit.server.conftest import REPLY, TOKENIZER, Server, on_device, reply_script

NUM_REPLY = len(reply_script())


def texts(events: list[Any]) -> list[str]:
    choices = [event["choices"][0] for event in events if event != "[DONE]" and event["choices"]]
    return [choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices]


async def test_a_whole_chat_reply(server: Server) -> None:
    server.engine.cached = 3
    call = await server.chat("Hi", model="tiny")
    assert call.status == 200
    assert call.headers["content-type"] == "application/json"
    reply = call.json
    prompt = TOKENIZER.encode("<|bos|><|user|>Hi<|end|><|assistant|>", add_special_tokens=False)
    assert server.engine.seen[0].prompt.tolist() == prompt.tolist()
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply.pop("created") > 1_000_000
    assert reply == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": REPLY, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": NUM_REPLY,
            "total_tokens": len(prompt) + NUM_REPLY,
            "prompt_tokens_details": on_device(3),
        },
    }


async def test_a_whole_text_completion(server: Server) -> None:
    server.engine.finish = FinishReason.LENGTH
    reply = (await server.complete("the text")).json
    assert reply["id"].startswith("cmpl-")
    assert reply["object"] == "text_completion"
    assert reply["choices"] == [
        {"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert reply["usage"]["prompt_tokens_details"] == on_device(0)
    assert server.engine.seen[0].prompt.tolist() == TOKENIZER.encode("the text", add_special_tokens=True).tolist()


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_a_prompt_of_token_ids_reaches_the_engine_as_it_is(server: Server, prompt: list[Any]) -> None:
    assert (await server.complete(prompt)).status == 200
    assert server.engine.seen[0].prompt.tolist() == [5, 6, 7]


async def test_a_prompt_in_a_list_of_one_is_that_prompt(server: Server) -> None:
    await server.complete(["the text"])
    assert server.engine.seen[0].prompt.tolist() == TOKENIZER.encode("the text", add_special_tokens=True).tolist()


async def test_a_streamed_chat_reply(server: Server) -> None:
    call = await server.chat("Hi", stream=True)
    assert call.status == 200
    assert call.headers["content-type"].startswith("text/event-stream")
    *events, done = call.events
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(texts(events)) == REPLY
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert events[-1]["choices"][0]["delta"] == {}
    assert all("usage" not in event and "token_ids" not in event["choices"][0] for event in events)


async def test_a_streamed_text_completion(server: Server) -> None:
    *events, done = (await server.complete("x", stream=True)).events
    assert done == "[DONE]"
    assert "".join(texts(events)) == REPLY
    assert {event["object"] for event in events} == {"text_completion"}


async def test_no_event_holds_part_of_a_character(server: Server) -> None:
    alphabet = {token: index for index, token in TOKENIZER.vocab.items()}
    server.engine.script = lambda prompt: [[alphabet[char]] for char in "ðŁĻĤ"]
    server.engine.finish = FinishReason.LENGTH
    *events, _ = (await server.chat("Hi", stream=True)).events
    assert [text for text in texts(events) if text] == ["🙂"]
    assert len(events) == 2, "the opening, and one event for the four bytes and the finish"


async def test_a_reply_cut_inside_a_character_ends_with_a_replacement(server: Server) -> None:
    alphabet = {token: index for index, token in TOKENIZER.vocab.items()}
    server.engine.script = lambda prompt: [[alphabet[char]] for char in "aðŁ"]
    server.engine.finish = FinishReason.LENGTH
    assert (await server.chat("Hi")).json["choices"][0]["message"]["content"] == "a\ufffd"
    *events, _ = (await server.chat("Hi", stream=True)).events
    assert "".join(texts(events)) == "a\ufffd"


async def test_usage_is_the_last_event_when_asked_for(server: Server) -> None:
    server.engine.cached = 2
    *events, last, done = (await server.chat("Hi", stream=True, stream_options={"include_usage": True})).events
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == NUM_REPLY
    assert last["usage"]["prompt_tokens_details"] == on_device(2)
    assert all(event["usage"] is None for event in events)


async def test_running_usage_counts_up_in_every_event(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, _ = (await server.complete("x", stream=True, stream_options=options)).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == NUM_REPLY


async def test_running_usage_is_a_part_of_the_usage_that_is_asked_for(server: Server) -> None:
    *events, _ = (await server.complete("x", stream=True, stream_options={"continuous_usage_stats": True})).events
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_token_ids_are_returned_whole_and_streamed(server: Server, path: str) -> None:
    async def ask(**fields: Any) -> Any:
        return await (server.chat if path == "chat" else server.complete)("Hi", return_token_ids=True, **fields)

    flat = [index for tokens in reply_script() for index in tokens]

    def of_prompt(reply: dict[str, Any]) -> Any:
        """Chat shows the prompt once, text completions with each choice."""
        return (reply if path == "chat" else reply["choices"][0]).get("prompt_token_ids")

    whole = (await ask()).json
    prompt = server.engine.seen[0].prompt.tolist()
    assert of_prompt(whole) == prompt
    assert whole["choices"][0]["token_ids"] == flat
    *events, _ = (await ask(stream=True)).events
    assert [of_prompt(event) for event in events] == [prompt] + [None] * (len(events) - 1)
    assert [index for event in events for index in event["choices"][0]["token_ids"]] == flat


async def test_sampling_fields_reach_the_engine(server: Server) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 11, "max_tokens": 5, "ignore_eos": True}
    await server.chat("Hi", **fields)
    sampling = server.engine.seen[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields


async def test_defaults_are_openais(server: Server) -> None:
    await server.chat("Hi")
    await server.complete("Hi")
    chat, text = (seen.sampling for seen in server.engine.seen)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.ignore_eos) == (1.0, 1.0, 0, False)
    assert chat.max_tokens is None
    assert text.max_tokens == 16


async def test_the_default_limit_of_a_completion_shrinks_to_what_fits(server: Server) -> None:
    assert (await server.complete([5] * 250)).status == 200
    assert server.engine.seen[0].sampling.max_tokens == 6


async def test_max_completion_tokens_goes_before_max_tokens(server: Server) -> None:
    await server.chat("Hi", max_tokens=9, max_completion_tokens=4)
    assert server.engine.seen[0].sampling.max_tokens == 4


async def test_extras_and_neutral_values_are_accepted(server: Server) -> None:
    extras = {"user": "ann", "metadata": {"a": 1}, "store": False, "service_tier": "auto", "made_up": [1], "rid": "x"}
    neutral = {"n": 1, "stop": None, "tools": [], "tool_choice": "auto", "logprobs": False, "logit_bias": {}}
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "min_p": 0}
    more = {"response_format": {"type": "text"}, "temperature": None, "max_tokens": None, "stream": None, "seed": None}
    call = await server.chat("Hi", **extras, **neutral, **penalties, **more, stream_options=None, model=None)
    assert call.status == 200, call.text


async def test_a_reply_keeps_its_tokens_in_the_next_turn(server: Server) -> None:
    spelt = [*tiny_text.spell_in_bytes(TOKENIZER, "the token"), tiny_text.END]
    server.engine.script = lambda prompt: [[index] for index in spelt]
    for is_stream in (False, True):
        assert (await server.chat("Hi", stream=is_stream)).status == 200
        first = server.engine.seen[-1].prompt.tolist()
        await server.chat("Hi", "the token", "thank you")
        second = server.engine.seen[-1].prompt.tolist()
        assert second[: len(first) + len(spelt)] == [*first, *spelt]
    assert TOKENIZER.encode("the token", add_special_tokens=False).tolist() != spelt[:-1]


async def test_an_aborted_reply_is_not_remembered(server: Server) -> None:
    server.engine.finish = FinishReason.ABORT
    assert (await server.chat("Hi")).json["choices"][0]["finish_reason"] == "abort"
    assert server.reply_cache.num_entries == 0


async def test_text_completions_are_not_remembered(server: Server) -> None:
    await server.complete("Hi")
    assert server.reply_cache.num_entries == 0


async def test_models_are_listed_and_found_by_name(server: Server) -> None:
    (card,) = (await server.get("/v1/models")).json["data"]
    assert (card["id"], card["object"], card["max_model_len"], card["root"]) == ("tiny", "model", 256, "/models/tiny")
    assert (await server.get("/v1/models/tiny")).json == card
    missing = await server.get("/v1/models/meta/other")
    assert missing.status == 404
    assert missing.json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere"])
async def test_the_request_id_comes_back(server: Server, path: str) -> None:
    assert (await server.call("GET", path, x_request_id="abc-123").end()).headers["x-request-id"] == "abc-123"
    made = [(await server.get(path)).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]


@pytest.mark.parametrize("bad", ["", "two words", "é", "x" * 200])
async def test_a_request_id_that_is_not_printable_is_replaced(server: Server, bad: str) -> None:
    returned = (await server.call("GET", "/health", x_request_id=bad).end()).headers["x-request-id"]
    assert returned != bad
    assert returned
