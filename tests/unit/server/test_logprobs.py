"""Scores of tokens in the two forms of OpenAI, and vLLM's for prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from hiserve.core.plan import Scores
from hiserve.core.request import FinishReason
from hiserve.server.reply.logprobs import LEAST_LOGPROB, token_text
from tests.helpers import tiny_text
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import TOKENIZER, Server, make_server

ALPHABET = {token: index for index, token in TOKENIZER.vocab.items()}
THE, TOKEN = TOKENIZER.encode("the token", add_special_tokens=False).tolist()[:2]
FIRST, SECOND = (TOKENIZER.decode([index]) for index in (THE, TOKEN))
BYTES = [ALPHABET[char] for char in "ðŁĻĤ"]  # one character in four tokens


def pack(*scored: tuple[float, list[tuple[int, float]]]) -> bytes:
    """Scores of several tokens: (logprob, [(likely token, its logprob), ...])."""
    num_top = len(scored[0][1])
    scores = Scores(
        logprobs=np.array([logprob for logprob, _ in scored], dtype=np.float32),
        top_tokens=np.array([[token for token, _ in top] for _, top in scored], dtype=np.int32).reshape(
            len(scored), num_top
        ),
        top_logprobs=np.array([[lp for _, lp in top] for _, top in scored], dtype=np.float32).reshape(
            len(scored), num_top
        ),
    )
    return scores.pack(0, num_top, len(scored))


def script_of(server: Server, *deltas: tuple[list[int], bytes], finish: FinishReason = FinishReason.LENGTH) -> None:
    server.engine.script = lambda prompt: [tokens for tokens, _ in deltas]
    server.engine.scores = [scores for _, scores in deltas]
    server.engine.finish = finish


def joined(events: list[Any], name: str) -> list[Any]:
    """One list of all chunks' logprobs."""
    shown = [event["choices"][0]["logprobs"] for event in events if event != "[DONE]" and event["choices"]]
    return [entry for logprobs in shown if logprobs for entry in logprobs[name]]


TWO = (
    ([THE], pack((-0.5, [(THE, -0.5), (TOKEN, -1.0)]))),
    ([TOKEN], pack((-3.0, [(BYTES[0], -0.25), (THE, -2.0)]))),
)


async def test_a_chat_choice_has_one_entry_a_token(server: Server) -> None:
    script_of(server, *TWO)
    logprobs = (await server.chat("Hi", logprobs=True, top_logprobs=2)).json["choices"][0]["logprobs"]
    assert server.engine.seen[0].sampling.logprobs == 2
    assert logprobs["refusal"] is None
    first = {"token": FIRST, "logprob": -0.5, "bytes": list(FIRST.encode())}
    second = {"token": SECOND, "logprob": -1.0, "bytes": list(SECOND.encode())}
    part = {"token": "bytes:\\xf0", "logprob": -0.25, "bytes": [0xF0]}
    assert logprobs["content"] == [
        {**first, "top_logprobs": [first, second]},
        {**second, "logprob": -3.0, "top_logprobs": [part, {**first, "logprob": -2.0}]},
    ]


async def test_a_text_completion_has_four_parallel_lists(server: Server) -> None:
    script_of(server, *TWO)
    call = await server.complete("Hi", logprobs=2)
    assert call.json["choices"][0]["logprobs"] == {
        "tokens": [FIRST, SECOND],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{FIRST: -0.5, SECOND: -1.0}, {"bytes:\\xf0": -0.25, FIRST: -2.0, SECOND: -3.0}],
        "text_offset": [0, len(FIRST)],
    }


@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_streamed_logprobs_joined_are_those_of_the_whole_reply(server: Server, path: str) -> None:
    script_of(server, *TWO)

    async def ask(**fields: Any) -> Any:
        if path == "chat":
            return await server.chat("Hi", logprobs=True, top_logprobs=2, **fields)
        return await server.complete("Hi", logprobs=2, **fields)

    whole = (await ask()).json["choices"][0]["logprobs"]
    events = (await ask(stream=True)).events
    for name in ["content"] if path == "chat" else list(whole):
        assert joined(events, name) == whole[name]


async def test_no_likeliest_tokens_are_shown_when_none_are_asked_for(server: Server) -> None:
    script_of(server, ([THE], pack((-0.5, []))))
    (entry,) = (await server.chat("Hi", logprobs=True)).json["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []
    assert server.engine.seen[-1].sampling.logprobs == 0
    logprobs = (await server.complete("Hi", logprobs=0)).json["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{FIRST: -0.5}]


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"logprobs": None}])
async def test_without_logprobs_none_are_asked_for_or_shown(server: Server, fields: dict[str, Any]) -> None:
    for call in (await server.chat("Hi", **fields), await server.complete("Hi", **fields)):
        assert call.json["choices"][0]["logprobs"] is None
    assert [seen.sampling.logprobs for seen in server.engine.seen] == [None, None]


async def test_tokens_without_a_text_of_their_own_still_have_a_chunk_with_their_scores(server: Server) -> None:
    script_of(server, *[([token], pack((-1.0, []))) for token in BYTES])
    events = (await server.chat("Hi", logprobs=True, stream=True)).events
    entries = joined(events, "content")
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in "🙂".encode()]
    offsets = (await server.complete("Hi", logprobs=0)).json["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 0, 0, 0]
    events = (await server.complete("Hi", logprobs=0, stream=True)).events
    assert joined(events, "text_offset") == offsets


async def test_the_end_token_is_shown_as_it_is_spelled(server: Server) -> None:
    script_of(server, ([THE, tiny_text.END], pack((-0.5, []), (-0.1, []))), finish=FinishReason.STOP)
    choice = (await server.chat("Hi", logprobs=True)).json["choices"][0]
    assert choice["message"]["content"] == FIRST
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [FIRST, "<|end|>"]


async def test_tokens_behind_a_stop_text_have_no_scores(server: Server) -> None:
    script_of(server, ([THE, TOKEN, THE], pack((-0.5, []), (-0.25, []), (-0.125, []))))
    reply = (await server.chat("Hi", logprobs=True, stop=[SECOND])).json
    assert [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]] == [-0.5, -0.25]
    assert reply["usage"]["completion_tokens"] == 2


async def test_minus_infinity_is_a_number_of_json(server: Server) -> None:
    script_of(server, ([THE], pack((-np.inf, [(TOKEN, -np.inf)]))))
    (entry,) = (await server.chat("Hi", logprobs=True, top_logprobs=1)).json["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == LEAST_LOGPROB


async def test_of_two_tokens_that_read_the_same_the_likelier_is_shown(server: Server) -> None:
    script_of(server, ([THE], pack((-2.0, [(THE, -0.5)]))))
    assert (await server.complete("Hi", logprobs=1)).json["choices"][0]["logprobs"]["top_logprobs"] == [{FIRST: -0.5}]


# --- prompts ---------------------------------------------------------------------------------

PROMPT = [THE, TOKEN, THE]
OF_PROMPT = [pack((-1.0, [(TOKEN, -1.0)])), pack((-2.0, [(TOKEN, -0.5)]))]


@pytest.mark.parametrize("is_together", [False, True])
async def test_an_echo_begins_with_the_prompt_and_its_scores(server: Server, is_together: bool) -> None:
    """The scores of the prompt come alone, or together with the first token."""
    last = pack((-4.0, [(THE, -0.125)]))
    if is_together:
        script_of(server, ([TOKEN], b"".join(OF_PROMPT) + last))
    else:
        script_of(server, ([], OF_PROMPT[0]), ([], OF_PROMPT[1]), ([TOKEN], last))
    choice = (await server.complete(PROMPT, echo=True, logprobs=1, max_tokens=1)).json["choices"][0]
    assert server.engine.seen[0].sampling.prompt_logprobs == 1
    assert choice["text"] == FIRST + SECOND + FIRST + SECOND
    assert choice["logprobs"] == {
        "tokens": [FIRST, SECOND, FIRST, SECOND],
        "token_logprobs": [None, -1.0, -2.0, -4.0],
        "top_logprobs": [None, {SECOND: -1.0}, {SECOND: -0.5, FIRST: -2.0}, {FIRST: -0.125, SECOND: -4.0}],
        "text_offset": [0, len(FIRST), len(FIRST + SECOND), len(FIRST + SECOND + FIRST)],
    }
    *events, _ = (await server.complete(PROMPT, echo=True, logprobs=1, max_tokens=1, stream=True)).events
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    for name, shown in choice["logprobs"].items():
        assert joined(events, name) == shown
    assert len(events) == 2, "the prompt, and the token"


async def test_max_tokens_0_scores_the_prompt_alone(server: Server) -> None:
    script_of(server, ([TOKEN], b"".join(OF_PROMPT) + pack((-4.0, [(THE, -0.125)]))), finish=FinishReason.STOP)
    reply = (await server.complete(PROMPT, echo=True, logprobs=1, max_tokens=0)).json
    assert server.engine.seen[0].sampling.max_tokens == 1
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (FIRST + SECOND + FIRST, "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert reply["usage"]["completion_tokens"] == 0
    *events, _ = (await server.complete(PROMPT, echo=True, max_tokens=0, stream=True)).events
    assert [(event["choices"][0]["text"], event["choices"][0]["finish_reason"]) for event in events] == [
        (FIRST + SECOND + FIRST, None),
        ("", "length"),
    ]


async def test_an_echo_of_a_text_is_that_text_to_the_letter(server: Server) -> None:
    """Special tokens spelled out in a prompt are part of what the client sent."""
    server.engine.script = lambda prompt: [[THE]]
    server.engine.finish = FinishReason.LENGTH
    text = "<|user|>größer <|end|>"
    assert (await server.complete(text, echo=True)).json["choices"][0]["text"] == text + FIRST
    ids = TOKENIZER.encode(text, add_special_tokens=False).tolist()
    assert (await server.complete(ids, echo=True)).json["choices"][0]["text"] == text + FIRST


async def test_a_start_token_that_the_client_did_not_send_is_scored_but_not_shown() -> None:
    server = make_server(FakeEngineClient(script=lambda prompt: []), tokenizer=tiny_text.with_start_token())
    async with server.app.router.lifespan_context(server.app):
        await server.handle.wait_open()
        script_of(server, ([THE], b"".join(OF_PROMPT) + pack((-4.0, [(THE, -0.125)]))))
        (choice,) = (await server.complete(FIRST + SECOND, echo=True, logprobs=1)).json["choices"]
        assert choice["text"] == FIRST + SECOND + FIRST
        assert choice["logprobs"]["tokens"] == ["<|bos|>", FIRST, SECOND, FIRST]
        assert choice["logprobs"]["text_offset"] == [0, 0, len(FIRST), len(FIRST + SECOND)]
        script_of(server, ([THE], b""))
        await server.complete(FIRST + SECOND, add_special_tokens=False)
    assert [seen.prompt.tolist() for seen in server.engine.seen] == [[tiny_text.BOS, THE, TOKEN], [THE, TOKEN]]


async def test_without_logprobs_an_echo_asks_for_no_scores(server: Server) -> None:
    await server.complete(PROMPT, echo=True)
    assert server.engine.seen[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_prompt_logprobs_are_listed_by_token(server: Server, path: str, is_stream: bool) -> None:
    async def ask(**fields: Any) -> Any:
        return await (server.chat("Hi", **fields) if path == "chat" else server.complete(PROMPT, **fields))

    script_of(server, ([TOKEN], b""))
    await ask()
    prompt = server.engine.seen[-1].prompt.tolist()
    script_of(server, ([TOKEN], b"".join(pack((-2.0, [(THE, -0.5)])) for _ in prompt[1:])))
    call = await ask(prompt_logprobs=1, stream=is_stream)
    reply = call.events[0] if is_stream else call.json
    shown = (reply if path == "chat" else reply["choices"][0])["prompt_logprobs"]
    assert shown[0] is None
    assert len(shown) == len(prompt)
    for token, entries in zip(prompt[1:], shown[1:], strict=True):
        top = {"logprob": -0.5, "rank": 1, "decoded_token": FIRST}
        assert entries[str(THE)] == (top if token != THE else {**top, "logprob": -2.0})
        assert entries[str(token)]["logprob"] == -2.0
        assert set(entries) == {str(THE), str(token)}


async def test_an_echo_with_fewer_scores_than_the_prompts_shows_as_many_as_were_asked_for(server: Server) -> None:
    both = pack((-1.0, [(TOKEN, -1.0), (THE, -3.0)])) + pack((-2.0, [(TOKEN, -0.5), (THE, -2.0)]))
    script_of(server, ([TOKEN], both + pack((-4.0, [(THE, -0.125)]))))
    choice = (await server.complete(PROMPT, echo=True, logprobs=1, prompt_logprobs=2)).json["choices"][0]
    assert choice["logprobs"]["top_logprobs"][1] == {SECOND: -1.0}
    assert [len(entries) for entries in choice["prompt_logprobs"][1:]] == [2, 2]


async def test_a_reply_aborted_before_its_prompt_was_computed_shows_what_is_known(server: Server) -> None:
    script_of(server, ([], OF_PROMPT[0]), finish=FinishReason.ABORT)
    choice = (await server.complete(PROMPT, echo=True, logprobs=1)).json["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert choice["logprobs"]["tokens"] == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("spelled", "text"), [(b"a", "a"), ("é".encode(), "é"), (b"\xe2\x80", "bytes:\\xe2\\x80"), (b"", "")]
)
def test_a_token_that_is_no_text_is_spelled_in_bytes(spelled: bytes, text: str) -> None:
    assert token_text(spelled) == text


@pytest.mark.parametrize("is_stream", [False, True])
async def test_one_choice_of_a_prompt_scores_it_for_all(server: Server, is_stream: bool) -> None:
    """The others wait with what they show until the prompt's scores are there."""
    scored, begun = asyncio.Event(), []

    async def step(index: int) -> None:
        if index == 0:
            begun.append(server.engine.seen[-1].choice)
        if index == 0 and begun == [0]:
            await scored.wait()

    script_of(server, ([], b"".join(OF_PROMPT)), ([TOKEN], b""))
    server.engine.step = step
    call = server.call("POST", "/v1/completions", {"prompt": PROMPT, "n": 3, "prompt_logprobs": 1, "stream": is_stream})
    while not all(seen.finished for seen in server.engine.seen[1:]) or len(server.engine.seen) < 3:
        await asyncio.sleep(0)
    assert not call.chunks
    scored.set()
    await call.end()
    assert [seen.sampling.prompt_logprobs for seen in server.engine.seen] == [1, None, None]
    events = call.events[:-1] if is_stream else [call.json]
    shown = [
        choice["prompt_logprobs"] for event in events for choice in event["choices"] if "prompt_logprobs" in choice
    ]
    assert shown[0][1:] == [
        {str(TOKEN): {"logprob": -1.0, "rank": 1, "decoded_token": SECOND}},
        {str(TOKEN): {"logprob": -0.5, "rank": 1, "decoded_token": SECOND}, str(THE): shown[0][2][str(THE)]},
    ]
    assert shown == 3 * shown[:1]
