"""Tokenizing and detokenizing: the ids that a completion would be given, and back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import tiny_text
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import TOKENIZER, Server, make_server, reply_script

MESSAGES = [{"role": "user", "content": "Hi 🙂"}]


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_text_becomes_the_ids_that_a_completion_is_given(server: Server, prefix: str) -> None:
    reply = (await server.post(f"{prefix}/tokenize", {"prompt": "the token 🙂", "model": "tiny"})).json
    await server.complete("the token 🙂")
    assert reply["tokens"] == server.engine.seen[0].prompt.tolist()
    assert reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == 256
    assert reply["token_strs"] is None
    text = (await server.post(f"{prefix}/detokenize", {"tokens": reply["tokens"]})).json
    assert text == {"prompt": "the token 🙂"}


@pytest.mark.parametrize("fields", [{}, {"continue_final_message": True, "add_generation_prompt": False}])
async def test_a_conversation_becomes_the_ids_that_a_chat_is_given(server: Server, fields: dict[str, Any]) -> None:
    reply = (await server.post("/tokenize", {"messages": MESSAGES, **fields})).json
    await server.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert reply["tokens"] == server.engine.seen[0].prompt.tolist()


async def test_a_conversation_with_a_generated_reply_shows_the_ids_it_will_have(server: Server) -> None:
    spelt = [*tiny_text.spell_in_bytes(TOKENIZER, "the token"), tiny_text.END]
    server.engine.script = lambda prompt: [[index] for index in spelt]
    await server.chat("Hi")
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "the token"},
        {"role": "user", "content": "go on"},
    ]
    reply = (await server.post("/tokenize", {"messages": messages})).json
    await server.chat("Hi", "the token", "go on")
    assert reply["tokens"] == server.engine.seen[-1].prompt.tolist()
    assert spelt[0] in reply["tokens"]


async def test_tokens_are_shown_as_they_are_spelled(server: Server) -> None:
    reply = (await server.post("/tokenize", {"prompt": "<|end|>the 🙃", "return_token_strs": True})).json
    assert len(reply["token_strs"]) == reply["count"]
    assert reply["token_strs"][:2] == ["<|end|>", "the"]
    assert (await server.post("/detokenize", {"tokens": [1, *reply["tokens"]]})).json[
        "prompt"
    ] == "<|end|><|end|>the 🙃"


async def test_counting_needs_no_engine_and_goes_beyond_the_context() -> None:
    made = make_server(FakeEngineClient(script=lambda prompt: reply_script()))
    reply = (await made.post("/tokenize", {"prompt": "the token " * 1000})).json
    assert reply["count"] > reply["max_model_len"] == 256
    assert (await made.post("/detokenize", {"tokens": []})).json == {"prompt": ""}
    assert (await made.get("/tokenizer_info")).json == {"tokenizer_class": "Tiny"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5, "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [500]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [[1]]}, "tokens"),
    ],
)
async def test_a_bad_field_is_a_400_that_names_it(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    call = await server.post(path, body)
    assert (call.status, call.json["error"]["param"]) == (400, param)


async def test_another_model_is_a_404(server: Server) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        assert (await server.post(path, {**body, "model": "gpt-x"})).status == 404


async def test_unknown_fields_are_refused_only_if_the_server_is_strict() -> None:
    for is_strict, status in ((False, 200), (True, 400)):
        made = make_server(FakeEngineClient(script=lambda prompt: reply_script()), strict_fields=is_strict)
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
            assert (await made.post(path, {**body, "made_up": 1})).status == status
