"""Scores of the tokens of a response's texts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hiserve.core.plan import Scores
from tests.unit.server.conftest import Server
from tests.unit.server.tool_replies import CALL, TOOL, client_of, script, serving

FUNCTION: Any = TOOL["function"]
LOOK: Any = {"type": "function", **FUNCTION}
SCORED: Any = ["message.output_text.logprobs"]
NUM_TOP = 2


def score(server: Server, text: str, size: int, num_top: int) -> None:
    """Gives the token at i of each reply the score -i / 8, and its likeliest the ids from i on."""
    number, packed = 0, []
    for tokens in script(text, size):
        at = np.arange(number, number + len(tokens))
        number += len(tokens)
        top = at[:, None] + np.arange(num_top)
        scores = Scores(
            logprobs=(-at / 8).astype(np.float32),
            top_tokens=top.astype(np.int32),
            top_logprobs=(-top / 8).astype(np.float32),
        )
        packed.append(scores.pack(0, num_top, len(tokens)))
    server.engine.scores = packed


TEXTS = {
    "Let me see.": ["Let me see."],
    " é🙂 so": [" é🙂 so"],
    "Now.\n" + CALL: ["Now."],
    CALL + "\n" + CALL: [],
    "<think>\nso\n</think>\n\nYes 🙂": ["Yes 🙂"],
    "<think>\nso\n</think>\n\nNow.\n" + CALL: ["Now."],
}


@pytest.mark.parametrize("text", TEXTS)
async def test_the_tokens_of_texts_have_their_scores_whatever_the_partition(text: str) -> None:
    found = []
    for size in (1, 2, 3, 1000):
        async with serving(text, size) as server:
            score(server, text, size, NUM_TOP)
            body = {"input": "Hi", "tools": [LOOK], "include": SCORED, "top_logprobs": NUM_TOP}
            reply = (await server.post("/v1/responses", body)).json
            lines = (await server.post("/v1/responses", {**body, "stream": True})).text.splitlines()
            assert server.engine.seen[0].sampling.logprobs == NUM_TOP
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        deltas = [
            entry for event in events if event["type"].endswith("text.delta") for entry in event.get("logprobs", ())
        ]
        done = [
            entry for event in events if event["type"] == "response.output_text.done" for entry in event["logprobs"]
        ]
        last = events[-1]["response"]["output"]
        whole, streamed = (
            [
                (part["text"], part["logprobs"])
                for item in output
                if item["type"] == "message"
                for part in item["content"]
            ]
            for output in (reply["output"], last)
        )
        assert whole == streamed
        assert deltas == done == [entry for _, entries in whole for entry in entries]
        found.append(whole)
    assert all(each == found[0] for each in found)
    assert [shown for shown, _ in found[0]] == TEXTS[text]
    for shown, entries in found[0]:
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode().endswith(shown)
        assert {len(entry["top_logprobs"]) for entry in entries} == {NUM_TOP}
        assert [entry["logprob"] for entry in entries] == [entries[0]["logprob"] - i / 8 for i in range(len(entries))]


async def test_openais_client_reads_the_scores() -> None:
    async with serving("Yes.", 1) as server, client_of(server) as client:
        score(server, "Yes.", 1, 1)
        reply = await client.responses.create(model="tiny", input="Hi", include=SCORED, top_logprobs=1)
        plain = await server.post("/v1/responses", {"input": "Hi", "include": SCORED})
        kept = await client.responses.retrieve(reply.id)
    message: Any = reply.output[0]
    (part,) = message.content
    assert "".join(entry.token for entry in part.logprobs) == "Yes."
    assert part.logprobs[0].top_logprobs[0].logprob == 0
    assert (reply.top_logprobs, kept.to_dict()) == (1, reply.to_dict())
    assert plain.json["top_logprobs"] == 0


async def test_likeliest_tokens_without_scores_are_refused(server: Server) -> None:
    call = await server.post("/v1/responses", {"input": "Hi", "top_logprobs": 2})
    assert (call.status, call.json["error"]["param"]) == (400, "top_logprobs")
    assert SCORED[0] in call.json["error"]["message"]
