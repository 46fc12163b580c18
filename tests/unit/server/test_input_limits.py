"""No field takes whatever is sent: each has a value that is too much for it, and an answer that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.core.request import MAX_STOP_CHARS
from hiserve.grammar.bounds import MAX_REGEX_BYTES, MAX_RULES
from hiserve.grammar.bounds import MAX_VALUES as MAX_GRAMMAR_VALUES
from hiserve.server.openai.tokenize import MAX_TOKENS
from hiserve.server.request.body import MAX_CHARS
from hiserve.server.request.sampling_fields import MAX_NAME_CHARS
from hiserve.text.body.chat import MAX_FIELDS, MAX_MESSAGES, MAX_PARTS
from hiserve.text.body.json import MAX_VALUES
from hiserve.text.body.tools import MAX_TOOLS
from tests.unit.server.conftest import KNOWN, NATIVE_SAMPLING, Server

LONG = "x" * 200_000
HUGE = 10**30
HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TOO_MUCH: dict[str, Any] = {
    "add_generation_prompt": LONG,
    "add_special_tokens": LONG,
    "best_of": HUGE,
    "context_management": {"edits": LONG},
    "cache_control": {"type": "ephemeral", "ttl": "1d"},
    "prompt_cache_key": "x" * (MAX_NAME_CHARS + 1),
    "prompt_cache_retention": "48h",
    "prompt_cache_options": {"mode": "implicit", "ttl": "48h"},
    "cache_salt": "x" * (MAX_NAME_CHARS + 1),
    "chat_template_kwargs": {"a": [0] * MAX_VALUES},
    "continue_final_message": LONG,
    "documents": [{"a": "b"}] * MAX_VALUES,
    "ebnf": 'a ::= "b"\n' * (MAX_RULES + 1),
    "echo": LONG,
    "frequency_penalty": 2.1,
    "guided_choice": [LONG, LONG],
    "guided_grammar": 'a: "b"\n' * (MAX_RULES + 1),
    "guided_json": {"enum": [LONG, LONG]},
    "guided_regex": LONG,
    "ignore_eos": LONG,
    "include_stop_str_in_output": LONG,
    "input_ids": [5] * 100_000,
    "json_schema": {"enum": [LONG, LONG]},
    "logit_bias": {str(token): 1 for token in range(1025)},
    "logprob_start_len": HUGE,
    "logprobs": HUGE,
    "max_completion_tokens": HUGE,
    "max_new_tokens": HUGE,
    "max_tokens": HUGE,
    "messages": [HI] * (MAX_MESSAGES + 1),
    "min_new_tokens": HUGE,
    "min_p": 1.1,
    "min_tokens": HUGE,
    "model": LONG,
    "n": 65,
    "no_stop_trim": LONG,
    "output_config": {"effort": "x" * (MAX_NAME_CHARS + 1)},
    "presence_penalty": 2.1,
    "priority": HUGE,
    "prompt": "x" * (MAX_CHARS + 1),
    "prompt_logprobs": 21,
    "reasoning_effort": "x" * (MAX_NAME_CHARS + 1),
    "regex": "x" * (MAX_REGEX_BYTES + 1),
    "repetition_penalty": 100.1,
    "resume_token_ids": [5] * 300,
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [0] * MAX_GRAMMAR_VALUES}}},
    "return_logprob": LONG,
    "return_text_in_logprobs": LONG,
    "return_token_ids": LONG,
    "return_token_strs": LONG,
    "parallel_tool_calls": LONG,
    "rid": "x" * (MAX_NAME_CHARS + 1),
    "sampling_params": [{}] * 1025,
    "sampling_seed": HUGE,
    "seed": HUGE,
    "skip_special_tokens": LONG,
    "spec": {"num_steps": HUGE},
    "stop": ["x" * (MAX_STOP_CHARS + 1)],
    "stop_sequences": ["x"] * 17,
    "stop_token_ids": [5] * 65,
    "stream": LONG,
    "stream_options": {"include_usage": LONG},
    "structured_outputs": {"json": {"enum": [0] * MAX_GRAMMAR_VALUES}},
    "system": {"text": LONG},
    "temperature": 100.1,
    "text": ["x"] * 1025,
    "thinking": {"type": "enabled", "budget_tokens": HUGE},
    "thinking_budget": HUGE,
    "thinking_token_budget": HUGE,
    "thread": {"type": "create"},
    "tokens": [5] * (MAX_TOKENS + 1),
    "tool_choice": {"type": LONG},
    "tools": [TOOL] * (MAX_TOOLS + 1),
    "top_k": HUGE,
    "top_logprobs": 21,
    "top_logprobs_num": 21,
    "top_p": 1.1,
    "truncate_prompt_tokens": HUGE,
}
ROUTES: dict[str, tuple[frozenset[str], dict[str, Any]]] = {
    "/v1/chat/completions": (KNOWN["ChatCompletionRequest"], {"messages": [HI]}),
    "/v1/completions": (KNOWN["CompletionRequest"], {"prompt": "Hi"}),
    "/generate": (KNOWN["GenerateRequest"], {"text": "Hi"}),
    "/tokenize": (KNOWN["TokenizeRequest"], {"prompt": "Hi"}),
    "/detokenize": (KNOWN["DetokenizeRequest"], {"tokens": [5]}),
    "/v1/messages": (KNOWN["MessagesRequest"], {"messages": [HI], "max_tokens": 9}),
}
CASES = [(path, field) for path, (fields, _) in ROUTES.items() for field in sorted(fields)]


def test_every_field_has_a_value_that_is_too_much() -> None:
    assert set(TOO_MUCH) == frozenset[str]().union(NATIVE_SAMPLING, *(fields for fields, _ in ROUTES.values()))


@pytest.mark.parametrize(("path", "field"), CASES)
async def test_too_much_is_refused_by_the_name_of_its_field(server: Server, path: str, field: str) -> None:
    body = {**ROUTES[path][1], field: TOO_MUCH[field]}
    if field in ("messages", "input_ids") and path not in ("/v1/chat/completions", "/v1/messages"):
        del body["prompt" if path == "/tokenize" else "text"]
    elif path == "/tokenize" and field in OF_CHATS:
        body = {"messages": [HI], field: TOO_MUCH[field]}
    call = await server.post(path, body)
    assert call.status in (400, 404), call.text[:300]
    error = call.json["error"]
    param = error.get("param") or error["message"].partition(" ")[0]  # Anthropic's errors have no field for it
    assert param.split(".")[0].split("[")[0] == field or (field == "model" and "there is no model" in error["message"])
    assert len(call.text) < 1000
    assert server.engine.seen == []


OF_CHATS = (
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "tool_choice",
    "documents",
    "chat_template_kwargs",
    "cache_salt",
)


@pytest.mark.parametrize("field", sorted(NATIVE_SAMPLING))
async def test_so_is_too_much_in_sampling_params(server: Server, field: str) -> None:
    call = await server.post("/generate", {"text": "Hi", "sampling_params": {field: TOO_MUCH[field]}})
    assert call.status == 400
    assert call.json["error"]["param"].startswith(f"sampling_params.{field}")


@pytest.mark.parametrize(
    "message",
    [
        HI | {f"field{number}": "x" for number in range(MAX_FIELDS)},
        {"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_PARTS + 1)},
        {"role": "user", "content": LONG},
        {"role": LONG, "content": "Hi"},
    ],
    ids=["fields", "parts", "text", "role"],
)
async def test_so_is_too_much_in_a_message(server: Server, message: dict[str, Any]) -> None:
    call = await server.post("/v1/chat/completions", {"messages": [message]})
    assert call.status == 400
    assert call.json["error"]["param"].startswith("messages")
    assert len(call.text) < 1000


async def test_what_is_just_not_too_much_is_taken(server: Server) -> None:
    body = {"stop": ["x" * MAX_STOP_CHARS], "rid": "x" * MAX_NAME_CHARS, "cache_salt": "x" * MAX_NAME_CHARS}
    assert (await server.post("/v1/completions", {"prompt": "Hi", **body})).status == 200
