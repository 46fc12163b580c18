"""Large replies are worded in a thread, one at a time, and the scores of prompts in a reply have a bound."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from hiserve.core.plan import Scores
from hiserve.server.openai.tokenize import QUICK_TOKENS
from hiserve.server.reply.generation import QUICK_SCORE_BYTES
from hiserve.server.reply.logprobs import MAX_PROMPT_SCORES
from hiserve.text.prompt.encoder import PromptEncoder
from hiserve.text.tokens.detokenizer import TokenBytes
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import Server, make_server

TEXT, CHAT, NATIVE = "/v1/completions", "/v1/chat/completions", "/generate"
PROMPT = [5] * 200
NUM_TOP = 20
SCORED = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": NUM_TOP, "return_text_in_logprobs": True}
NATIVE_BODY = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, **SCORED}
LONG_CHAT = {"messages": [{"role": "user", "content": "Hi" * 50}], "max_tokens": 1}


def scores_of(num_tokens: int) -> bytes:
    top = np.tile(np.arange(NUM_TOP, dtype=np.int32), (num_tokens, 1))
    logprobs = -np.ones(num_tokens, dtype=np.float32)
    return Scores(logprobs, top, -top.astype(np.float32)).pack(0, NUM_TOP, num_tokens)


@pytest_asyncio.fixture
async def scoring() -> AsyncIterator[Server]:
    """Its engine scores all tokens of a prompt, and one token of the reply where that is asked for."""
    engine = FakeEngineClient(script=lambda prompt: [[16]])
    made = make_server(engine)
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        yield made


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads in which tokens were spelled."""
    found: set[str] = set()
    piece, detokenize = TokenBytes.bytes_of, PromptEncoder.detokenize

    def seen_piece(self: TokenBytes, index: int) -> bytes:
        found.add(threading.current_thread().name.partition("_")[0])
        return piece(self, index)

    def seen_detokenize(self: PromptEncoder, ids: Any) -> str:
        found.add(threading.current_thread().name.partition("_")[0])
        return detokenize(self, ids)

    monkeypatch.setattr(TokenBytes, "bytes_of", seen_piece)
    monkeypatch.setattr(PromptEncoder, "detokenize", seen_detokenize)
    return found


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "num_reply"),
    [
        (TEXT, {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": NUM_TOP}, 0),
        (CHAT, {**LONG_CHAT, "prompt_logprobs": NUM_TOP}, 0),
        (NATIVE, NATIVE_BODY, 1),
    ],
    ids=["text", "chat", "native"],
)
async def test_the_scores_of_a_long_prompt_are_worded_in_a_thread(
    scoring: Server, threads: set[str], path: str, body: dict[str, Any], num_reply: int, is_stream: bool
) -> None:
    num_prompt = 200
    if path == CHAT:
        plain = await scoring.post(path, LONG_CHAT)
        num_prompt = plain.json["usage"]["prompt_tokens"]
    scoring.engine.scores = [scores_of(num_prompt - 1 + num_reply)]
    assert len(scoring.engine.scores[0]) > QUICK_SCORE_BYTES
    threads.clear()
    call = await scoring.post(path, {**body, "stream": is_stream})
    assert call.status == 200, call.text
    main = threading.current_thread().name
    if not (num_reply and is_stream):
        assert threads == {"hiserve-format"}
    else:  # the scores of the reply are worded as they come
        assert threads == {"hiserve-format", main.partition("_")[0]}


async def test_many_tokens_are_spelled_in_a_thread(scoring: Server, threads: set[str]) -> None:
    few = await scoring.post("/tokenize", {"prompt": "ab " * 5, "return_token_strs": True})
    assert few.json["count"] == len(few.json["token_strs"])
    assert threads == {threading.current_thread().name.partition("_")[0]}
    threads.clear()
    many = await scoring.post("/tokenize", {"prompt": "ab " * QUICK_TOKENS, "return_token_strs": True})
    assert many.json["count"] == len(many.json["token_strs"]) > QUICK_TOKENS
    text = await scoring.post("/detokenize", {"tokens": many.json["tokens"]})
    assert text.json["prompt"] == "ab " * QUICK_TOKENS
    assert threads == {"hiserve-format"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": [PROMPT] * 4, "n": 64, "prompt_logprobs": NUM_TOP}, "prompt_logprobs"),
        (TEXT, {"prompt": [PROMPT] * 5, "n": 64, "echo": True, "logprobs": NUM_TOP}, "logprobs"),
        (NATIVE, {**NATIVE_BODY, "input_ids": [PROMPT] * 251}, "logprob_start_len"),
    ],
    ids=["choices", "echo", "native"],
)
async def test_the_scores_of_prompts_in_a_reply_are_bounded(
    scoring: Server, path: str, body: dict[str, Any], param: str
) -> None:
    call = await scoring.post(path, body)
    assert call.status == 400, call.text[:300]
    assert call.json["error"]["param"] == param
    assert f"the most is {MAX_PROMPT_SCORES}" in call.text
    assert not scoring.engine.seen, "no prompt is computed in vain"
