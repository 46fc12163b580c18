"""A stream that broke on one server goes on at another: both together are what one server would have said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hiserve.models.model_config import NANO, find_model
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.e2e.live import serve

Client = httpx.Client
TOKENIZER = Tokenizer.load(find_model(NANO))
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
DRAWN = {
    "temperature": 0.9,
    "top_p": 0.95,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy, with scores": (TEXT, {"temperature": 0, "logprobs": 2, "ignore_eos": True, "max_tokens": 20}),
    "drawn, with penalties": (TEXT, {**DRAWN, "ignore_eos": True, "max_tokens": 20}),
    "in a grammar": (TEXT, {**DRAWN, "guided_regex": "[a-z]{2,9}( [a-z]{2,9}){11}"}),
    "a call": (CHAT, {"temperature": 0.8, "tools": [TOOL], "tool_choice": "required"}),
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Client]]:
    flags = ("--cpu-threads", "1", "--seal-key", "one secret")
    with (
        serve(tmp_path_factory.mktemp("first"), *flags) as first,
        serve(tmp_path_factory.mktemp("second"), *flags) as second,
        Client(base_url=first.url, timeout=120) as one,
        Client(base_url=second.url, timeout=120) as other,
    ):
        yield one, other


def body_of(case: str) -> tuple[str, dict[str, Any]]:
    path, fields = CASES[case]
    prompt = (
        {"prompt": "Would you like"}
        if path == TEXT
        else {"messages": [{"role": "user", "content": "Weather in Rome?"}]}
    )
    return path, {**prompt, "max_tokens": 48, "stream": True, "return_token_ids": True, **fields}


def read(http: Client, path: str, body: dict[str, Any], most: int | None = None) -> list[dict[str, Any]]:
    """Returns the choices of a stream's events, or hangs up after those with so many tokens."""
    events, num_tokens = [], 0
    headers = {"x-request-id": "one-request"}
    with http.stream("POST", path, json=body, headers=headers) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return events
            if line:
                assert response.status_code == 200, line
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                events.append(choice)
                num_tokens += len(choice["token_ids"])
                if most is not None and num_tokens >= most:
                    return events
    raise AssertionError(f"{response.status_code}: {response.read()!r}")


def broken(http: Client, path: str, body: dict[str, Any], most: int) -> list[dict[str, Any]]:
    """Hangs up after so many tokens; once more where an end had come with them, as it may from a busy server."""
    while True:
        kept = read(http, path, body, most)
        if not any(event["finish_reason"] for event in kept):
            return kept


def shown(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the events of a reply say, all together."""
    deltas = [event.get("delta", {}) for event in events]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    scores = [event["logprobs"] for event in events if event["logprobs"]]
    return {
        "text": "".join(event.get("text") or event.get("delta", {}).get("content") or "" for event in events),
        "names": [call["name"] for call in calls if "name" in call],
        "arguments": "".join(call["arguments"] for call in calls),
        "token_ids": [index for event in events for index in event["token_ids"]],
        "offsets": [offset for each in scores for offset in each["text_offset"]],
        "logprobs": [score for each in scores for score in each["token_logprobs"]],
        "ends": [(event["finish_reason"], event["stop_reason"]) for event in events if event["finish_reason"]],
    }


def check_same(events: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    one, other = shown(events), shown(whole)
    assert one.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-4)
    assert one == other


@pytest.mark.parametrize("case", CASES)
def test_another_server_goes_on_with_a_stream_that_broke(servers: tuple[Client, Client], case: str) -> None:
    """S18 and S19: nothing twice, nothing lost, and without a seed in the request."""
    one, other = servers
    path, body = body_of(case)
    whole = read(one, path, body)
    check_same(read(other, path, body), whole)
    assert len(shown(whole)["token_ids"]) > 10
    for num_kept in (1, 7):
        kept = broken(one, path, body, num_kept)
        tokens = [index for event in kept for index in event["token_ids"]]
        assert tokens == shown(whole)["token_ids"][: len(tokens)]
        rest = read(other, path, {**body, "resume_token_ids": tokens})
        check_same([*kept, *rest], whole)


def test_each_choice_of_two_goes_on_at_another_server(servers: tuple[Client, Client]) -> None:
    one, other = servers
    path, body = TEXT, {"prompt": "Would you like", "max_tokens": 24, "ignore_eos": True, "stream": True, "n": 2}
    body |= {"return_token_ids": True, **DRAWN}
    whole, kept = read(one, path, body), broken(one, path, body, 15)
    tokens = [[index for event in kept if event["index"] == at for index in event["token_ids"]] for at in (0, 1)]
    rest = read(other, path, {**body, "resume_token_ids": tokens})
    for at in (0, 1):
        check_same(*([event for event in events if event["index"] == at] for events in ([*kept, *rest], whole)))


def test_a_message_goes_on_at_another_server(servers: tuple[Client, Client]) -> None:
    """The thought or text that broke goes on in its block."""
    path, body = "/v1/messages", {"messages": [{"role": "user", "content": "Would you like"}], "max_tokens": 24}
    body |= {"stream": True, "return_token_ids": True, **DRAWN}

    def said(http: Client, **fields: Any) -> list[dict[str, Any]]:
        reply = http.post(path, json=body | fields, headers={"x-request-id": "one-request"})
        assert reply.status_code == 200, reply.text
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
        return [event for event in events if event["type"] != "ping"]

    def tokens_of(events: list[dict[str, Any]]) -> list[int]:
        return [index for event in events for index in event.get("token_ids", ())]

    def texts(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
        deltas = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
        return [(index, delta.get("text") or delta.get("thinking") or "") for index, delta in deltas]

    whole = said(servers[0])
    breaks = [at for at, event in enumerate(whole) if "token_ids" in event and event["type"] == "content_block_delta"]
    kept = whole[: breaks[len(breaks) // 2] + 1]
    rest = said(servers[1], resume_token_ids=tokens_of(kept))
    assert tokens_of([*kept, *rest]) == tokens_of(whole)
    joined, expected = texts([*kept, *rest]), texts(whole)
    assert {at: "".join(text for index, text in joined if index == at) for at, _ in joined} == {
        at: "".join(text for index, text in expected if index == at) for at, _ in expected
    }
    assert rest[-2]["usage"]["output_tokens"] == whole[-2]["usage"]["output_tokens"] == len(tokens_of(whole))


def test_a_stop_text_may_lie_on_both_sides_of_the_break(servers: tuple[Client, Client]) -> None:
    one, other = servers
    path, body = body_of("greedy, with scores")
    events = read(one, path, body)
    tokens = [index for event in events for index in event["token_ids"]]
    texts = []
    for at in (6, 7, 8):  # the texts of three tokens
        (event,) = read(other, path, {**body, "max_tokens": at + 1, "resume_token_ids": tokens[:at]})
        texts.append(event["text"])
    stop = "".join(texts)
    body |= {"stop": [stop]}
    whole = read(one, path, body)
    assert shown(whole)["ends"] == [("stop", stop)]
    for num_kept in (7, 8):
        kept = read(one, path, {**body, "max_tokens": num_kept, "logprobs": None})[:-1]  # as if it had broken there
        tokens = [index for event in kept for index in event["token_ids"]]
        rest = read(other, path, {**body, "resume_token_ids": tokens})
        assert shown([*kept, *rest])["text"] == shown(whole)["text"]
        assert shown(rest)["ends"] == [("stop", stop)]


def test_tokens_that_a_grammar_does_not_have_are_refused(servers: tuple[Client, Client]) -> None:
    """The request fails, and the worker goes on."""
    _, other = servers
    path, body = body_of("in a grammar")
    stranger = read(other, *body_of("greedy, with scores"))[0]["token_ids"]
    for regex, resumed in (("[0-9]+", stranger), ("[a-z]", TOKENIZER.encode("a", add_special_tokens=False).tolist())):
        response = other.post(path, json={**body, "guided_regex": regex, "resume_token_ids": resumed})
        assert response.status_code == 400
        assert "resume_token_ids" in response.json()["error"]["message"]
    assert read(other, path, body)
