"""A corpus of malformed requests: what each says, and the one answer it must get. Its HTTP itself is sound."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

# Of the server that the corpus is made for; the rest is the embedded model's.
MAX_REQUEST_BYTES = 400_000
MAX_MODEL_LEN = 1024
VOCAB_SIZE = 4096

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
TOKENIZE, DETOKENIZE, ABORT = "/tokenize", "/detokenize", "/abort_request"
RESPONSES, INPUT_TOKENS = "/v1/responses", "/v1/responses/input_tokens"
MESSAGES_ROUTE, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
ANTHROPICS = (MESSAGES_ROUTE, COUNT_TOKENS)
POST_ROUTES = (CHAT, TEXT, NATIVE, TOKENIZE, DETOKENIZE, ABORT, RESPONSES, *ANTHROPICS)
NAN, INF, HUGE, LONE = float("nan"), float("inf"), 10**4000, "\ud800"
HI = [{"role": "user", "content": "Hi"}]
CALL = {"type": "function", "function": {"name": "f"}}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": "Hi"},
    NATIVE: {"text": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES_ROUTE: {"messages": HI, "max_tokens": 5},
}


class Answer(NamedTuple):
    """What the client is told.

    Attributes:
        status: Of HTTP.
        code: Of the error; of Anthropic's form its type.
        param: Of the error; of Anthropic's form the start of its message.
    """

    status: int
    code: str
    param: str | None = None


NOT_KEPT = Answer(404, "previous_response_not_found", "previous_response_id")


class Bad(NamedTuple):
    """One malformed request.

    Attributes:
        path: With its query.
        body: Sent as it is when bytes, else as JSON.
        answer: What it must get.
        method: Of HTTP.
        headers: Lines beside those that every request has.
    """

    path: str
    body: Any
    answer: Answer
    method: str = "POST"
    headers: tuple[bytes, ...] = ()

    @property
    def name(self) -> str:
        """A short description for a failure's message."""
        shown = self.body if isinstance(self.body, bytes) else ascii(self.body)
        return f"{self.method} {self.path[:40]} {shown[:90]!r} {b' '.join(self.headers)[:60].decode('latin-1')}"

    def raw(self) -> bytes:
        """Returns the bytes to send."""
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        lines = (b"host: x", b"connection: close", b"content-length: %d" % len(body), *self.headers)
        return b"%b %b HTTP/1.1\r\n%b\r\n\r\n" % (self.method.encode(), self.path.encode(), b"\r\n".join(lines)) + body


# Fields of sampling, bad wherever they are read: field, values.
SAMPLING: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.5, NAN, INF, -INF, HUGE, "1", "", True, [1], {}],
    "top_p": [0, -1, 1.1, NAN, "0.5", [], False],
    "top_k": [-2, 1.5, 10**30, -HUGE, False, "5"],
    "min_p": [-0.1, 1.1, NAN, "0"],
    "repetition_penalty": [0, -1, 100.5, INF, "1"],
    "presence_penalty": [-2.1, 2.1, NAN, []],
    "frequency_penalty": [-2.1, 2.1, INF, {}],
    "n": [0, -1, 65, 10**9, HUGE, 1.5, True, "2", [1]],
    "min_tokens": [-1, 1.5, "1", True, 2**31, HUGE],
    "stop": [5, True, {"a": "b"}, [1], [["a"]], [None], "", [""], ["x", ""], ["x"] * 17, LONE, ["a", "b" + LONE]],
    "stop_token_ids": [1, "1", ["1"], [1.0], [True], [-1], [VOCAB_SIZE], [2**70], [HUGE], [1] * 65, {"1": 1}],
    "logit_bias": [
        *([5], "x", {"a": 1}, {"-1": 1}, {"1.0": 1}, {" 1": 1}, {"٣": 1}, {"9" * 5000: 1}, {LONE: 1}),
        *({str(VOCAB_SIZE): 1}, {"5": 101}, {"5": -101}, {"5": "1"}, {"5": NAN}, {"5": None}, {"5": HUGE}),
        {str(token): 1 for token in range(1025)},
    ],
    "ignore_eos": [1, "no", []],
    "skip_special_tokens": [0, "yes"],
    "include_stop_str_in_output": [1, {}],
    "no_stop_trim": ["true"],
    "regex": [5, LONE, "x" * 8193],
    "ebnf": [5, LONE, 'a ::= "b"\n' * 1001],
    "json_schema": [5, "{", [], "[]"],
    "structural_tag": [{}],
    "spec": [5, True, "on", [], [{}], {"steps": 1}, {LONE: 1}, {"num_steps": 1, "k": 1}],
}
# Bad in both of OpenAI's endpoints.
OPENAI: dict[str, list[Any]] = {
    **SAMPLING,
    "seed": [-(2**63) - 1, 2**63, HUGE, 1.5, "1", True, NAN],
    "max_tokens": [0, -1, 2**31, HUGE, 1.5, "5", True, NAN, []],
    "max_completion_tokens": [0, -5, 2**40, 1.5, "5"],
    "model": [5, ["hiserve-nano"], {}, LONE],
    "stream": [1, "true", []],
    "stream_options": [[], "x", 5, True],
    "best_of": [2, "1", 1.5, HUGE],
    "logprobs": [-1, 21, "1", 1.5, [], HUGE],
    "prompt_logprobs": [-1, 21, True, "1", HUGE],
    "truncate_prompt_tokens": [0, -2, 1.5, "5", HUGE],
    "cache_salt": [5, LONE, ["a"]],
    "rid": [5, LONE, []],
    "priority": [1.5, "1", 2**31, -HUGE],
    "return_token_ids": [1, "no"],
    "resume_token_ids": [5, "x", [], [[5]], [1.5], [-1], [VOCAB_SIZE], [HUGE], [5]],
    "response_format": ["text", 5],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}, 5],
    "suffix": ["x"],
    "bad_words": [["x"]],
    "lora_path": ["x"],
    "use_beam_search": [True],
    "chat_template": ["{{ 1 }}", 5],
    "functions": [[{}]],
    "function_call": [{"name": "f"}],
    "guided_json": [5, "{", False, LONE],
    "guided_regex": [5, LONE],
    "guided_choice": ["a", []],
    "guided_grammar": [5],
    "structured_outputs": [5],
    "modalities": [["audio"]],
    "return_hidden_states": [True],
}
# Bad grammars: fields, the one at fault, the code.
GRAMMARS: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "["}, "regex", "invalid_grammar"),
    ({"regex": "(?=a)b"}, "regex", "invalid_grammar"),
    ({"regex": r"(a)\1"}, "regex", "invalid_grammar"),
    ({"regex": "(.{1,1000}){1,1000}"}, "regex", "grammar_too_complex"),
    ({"ebnf": "root ::= x"}, "ebnf", "invalid_grammar"),
    ({"guided_json": {"type": "objekt"}}, "guided_json", "invalid_grammar"),
    ({"guided_json": {"$ref": "http://example.org"}}, "guided_json", "invalid_grammar"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "invalid_grammar"),
    ({"guided_json": {"minLength": 2, "maxLength": 1, "type": "string"}}, "guided_json", "invalid_grammar"),
    ({"guided_choice": [""]}, "guided_choice", "invalid_request"),
    ({"guided_grammar": "start: other"}, "guided_grammar", "invalid_grammar"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "invalid_grammar"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "invalid_request"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "invalid_request"),
    ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs.whitespace_pattern", "invalid_request"),
    ({"regex": "a", "guided_regex": "a"}, "guided_regex", "invalid_request"),
    ({"response_format": {}}, "response_format.type", "invalid_request"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "invalid_request"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_request"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}, "strict": True}}},
        "response_format.json_schema.schema",
        "invalid_grammar",
    ),
]
# Bad in a request for a response.
OF_RESPONSES: dict[str, list[Any]] = {
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "n", "stop", "logit_bias")},
    "input": [5, {}, LONE],
    "instructions": [5, [], LONE],
    "previous_response_id": [5, LONE, "x" * 2000],
    "tools": [5, "x", [{"type": LONE}], [{"type": "function", "name": LONE}]],
    "tool_choice": [5, "some", [], {"type": "web_search"}, {"type": LONE}],
    "text": [5, []],
    "reasoning": [5, "high", {"effort": LONE}],
    "include": [5, "x", [5], ["x"] * 33],
    "metadata": [5, [], {"a": 5}, {"a": "x" * 513}, {"x" * 65: "a"}, {str(i): "a" for i in range(17)}, {LONE: "a"}],
    "max_output_tokens": [0, -1, 2**31, HUGE, 1.5, "5", True, NAN, []],
    "truncation": [5, "some", True],
    "stream": [1, "true", []],
    "store": [1, "true"],
    "background": [True, 1],
    "conversation": ["conv_1", {"id": "x"}, 5],
    "prompt": ["x", {"id": "x"}],
    "top_logprobs": [1, "x", -1, 21],
    "parallel_tool_calls": [1, "x"],
    "user": [5, LONE],
    "prompt_cache_key": [5, "x" * 2000],
}
OF_RESPONSES_INNER: list[tuple[dict[str, Any], str]] = [
    *(({"tools": [tool]}, "tools[0].type") for tool in (5, {}, {"type": 5}, [])),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0]"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
    ({"tool_choice": {}}, "tool_choice.type"),
    ({"text": {"format": 5}}, "text.format"),
    *(({"text": {"format": form}}, "text.format.type") for form in ({}, {"type": "xml"})),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": LONE, "schema": {}}}}, "text.format.name"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
]
CALLED = {"type": "function_call", "call_id": "c", "name": "f"}
ITEMS: list[tuple[Any, str]] = [
    (5, "input[0].type"),
    ({}, "input[0].role"),
    ({"type": "item_reference"}, "input[0].id"),
    ({"type": "item_reference", "id": LONE}, "input[0].id"),
    ({"type": "web_search_call"}, "input[0].type"),
    ({"type": 5}, "input[0].type"),
    ({"role": "robot", "content": "x"}, "input[0].role"),
    ({"role": "user"}, "input[0].content"),
    ({"role": "user", "content": 5}, "input[0].content"),
    ({"role": "user", "content": LONE}, "input[0].content"),
    ({"role": "user", "content": [{"type": "input_text", "text": LONE}]}, "input[0].content"),
    ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
    ({"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}, "input[0].content[0].refusal"),
    ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0].type"),
    ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input[0].content[0].type"),
    ({"role": "user", "content": "x", "id": LONE}, "input[0].id"),
    ({**CALLED, "name": ""}, "input[0].name"),
    ({**CALLED, "call_id": None}, "input[0].call_id"),
    ({**CALLED, "arguments": {}}, "input[0].arguments"),
    ({**CALLED, "arguments": '{"a": "\\ud800"}'}, "input[0].arguments"),
    ({**CALLED, "arguments": '{"a":' * 100 + "1" + "}" * 100}, "input[0].arguments"),
    ({**CALLED, "arguments": '{"a": [' + "1," * 40_000 + "1]}"}, "input[0].arguments"),
    ({**CALLED, "type": "custom_tool_call", "input": 5}, "input[0].input"),
    ({"type": "function_call_output", "call_id": "c"}, "input[0].output"),
    ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
    ({"type": "reasoning", "encrypted_content": 5}, "input[0].encrypted_content"),
]
# Bad in a message; and, up to ``max_tokens``, where its tokens are counted.
OF_MESSAGES: dict[str, list[Any]] = {
    "messages": [None, [], {}, "Hi", 5],
    "system": [5, {}, LONE, [5], [{"type": "text", "text": LONE}], [{"type": "image"}]],
    "tools": [5, "x", [5], [{"name": "x"}], [{"name": 5, "input_schema": {}}], [{"name": "x", "input_schema": []}]],
    "tool_choice": [5, "auto", {}, {"type": "tool"}, {"type": "x"}],
    "thinking": [5, {}, {"type": "x"}, {"type": "enabled", "budget_tokens": HUGE}, {"type": "enabled", "display": 5}],
    "output_config": [5, {"effort": 5}, {"effort": "x" * 2000}, {"format": {"type": "x"}}, {"format": 5}],
    "context_management": [5, {"edits": 5}, {"edits": [{}]}],
    "thread": [{"type": "create"}, {"type": "continue", "previous_message_id": "x"}, 5],
    "container": ["x", {}],
    "mcp_servers": [[{}], "x"],
    "compaction": [{}],
    "cache_salt": [5, LONE],
    "max_tokens": [None, -1, 2**31, HUGE, 1.5, "5", True, NAN],
    "resume_token_ids": [5, "x", [], [[5]], [-1], [VOCAB_SIZE], [5]],
    "stop_sequences": [5, "x", [5], [""], ["x"] * 17, [LONE]],
    "stream": [1, "true"],
    "priority": [1.5, 2**31],
    "rid": [5, LONE],
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "stop", "logit_bias", "stop_token_ids")},
    "n": [0, 2, 65, "2"],
    "regex": [5, "["],
}
USED = {"type": "tool_use", "id": "1", "name": "x", "input": {}}
RETURNED = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
BLOCKS: list[tuple[Any, str]] = [
    *((block, "[0].type") for block in (5, None, {}, {"type": 5}, {"type": "image"}, {"type": "x" * 5000})),
    *(({"type": "text", "text": value}, "[0].text") for value in (5, None, [])),
    ({"type": "text", "text": LONE}, ""),
    ({**RETURNED, "tool_use_id": ""}, "[0].tool_use_id"),
    ({**RETURNED, "content": 5}, "[0].content"),
    ({**RETURNED, "content": LONE}, "[0].content"),
    ({**RETURNED, "content": [{"type": "image"}]}, "[0].content[0].type"),
    ({**RETURNED, "is_error": "x"}, "[0].is_error"),
    (USED, "[0]"),
    ({"type": "thinking", "signature": "x"}, "[0]"),
    ({"type": "thinking", "thinking": "x"}, "[0].signature"),
    ({**USED, "input": {"a": LONE}}, "[0]"),
    ({**USED, "input": "{}"}, "[0].input"),
]
OF_SPEC: dict[str, list[Any]] = {
    "enabled": [1, 0, "yes", [], NAN],
    "num_steps": [-1, 16, 2**31, HUGE, 1.5, 1.0, "1", True, NAN, [1], {}],
}
OF_STREAM_OPTIONS: dict[str, list[Any]] = {"include_usage": [1, "yes"], "continuous_usage_stats": [0, []]}
TEXT_ONLY: dict[str, list[Any]] = {
    "prompt": [
        *(None, "", [], [[]], [""], 5, 1.5, {}, True, LONE, [LONE], ["a", ""], ["a", 5], ["a", None], [[1], []]),
        *(
            [-1],
            [5, -1],
            [VOCAB_SIZE],
            [2**31],
            [2**63],
            [2**70],
            [HUGE],
            [1.0],
            [1.5],
            [True],
            [1, "a"],
            [1, [2]],
            [None],
        ),
        *([NAN], [[1], [VOCAB_SIZE]], [[[1]]], [{}], ["a"] * 1025),
    ],
    "echo": ["yes", 1],
    "logprobs": [True],
    "add_special_tokens": [1, "no"],
    "top_logprobs": [2],
    "tools": [[CALL]],
    "continue_final_message": [True],
}
CHAT_ONLY: dict[str, list[Any]] = {
    "messages": [None, [], {}, "Hi", 5, True],
    "logprobs": [1, 0, "yes"],
    "top_logprobs": [2, 21, -1, "2", HUGE],
    "echo": [True],
    "tools": [{}, "x", 5],
    "documents": ["x", ["x"], {}, [1]],
    "chat_template_kwargs": ["x", [], 5, {"a": LONE}, {"a": [0] * 100_001}],
    "add_generation_prompt": [1, "no"],
    "continue_final_message": [1, "yes"],
}
CHAT_ONLY["chat_template_kwargs"].append({"a": json.loads("[" * 40 + "]" * 40)})
# Messages, and the part at fault.
MESSAGES: list[tuple[Any, str]] = [
    ("x", "messages[0]"),
    (None, "messages[0]"),
    ([], "messages[0]"),
    ({}, "messages[0].role"),
    ({"content": "x"}, "messages[0].role"),
    ({"role": "robot", "content": "x"}, "messages[0].role"),
    ({"role": ["user"], "content": "x"}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": []}, "messages[0].content"),
    ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
    ({"role": "user", "content": LONE}, "messages[0].content"),
    ({"role": "user", "content": ["x"]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "x" * 5000}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
    ({"role": "user", "content": "x", "audio": {"id": "x"}}, "messages[0].audio"),
    ({"role": "user", "content": "x", "x" * 5000: LONE}, "messages[0]." + "x" * 100),
    ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
    ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[0].tool_call_id"),
    ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
    ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls[0].type"),
    ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0].custom"),
    ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, "messages[0].tool_calls[0].function.name"),
    ({"role": "assistant", "tool_calls": [CALL | {"id": 5}]}, "messages[0].tool_calls[0].id"),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]
TOOLS: list[tuple[Any, str]] = [
    (5, "tools[0].type"),
    ({}, "tools[0].type"),
    ({"type": "web_search"}, "tools[0].type"),
    ({"type": "function"}, "tools[0].function"),
    ({"type": "custom"}, "tools[0].custom"),
    ({"type": "custom", "custom": {"name": ""}}, "tools[0].custom.name"),
    ({"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}, "tools[0].custom.format.grammar"),
    (
        {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "x"}}}},
        "tools[0].custom.format.grammar.syntax",
    ),
    ({"type": "function", "function": {"name": 5}}, "tools[0].function.name"),
    ({"type": "function", "function": {"name": "f", "parameters": []}}, "tools[0].function.parameters"),
    ({"type": "function", "function": {"name": "f", "description": 5}}, "tools[0].function.description"),
    ({"type": "function", "function": {"name": "f", "x": LONE}}, "tools"),
]
# Whole bodies of the other endpoints, and the field at fault.
WHOLE: list[tuple[str, Any, str]] = [
    (NATIVE, {}, "text"),
    (NATIVE, {"text": "a", "input_ids": [1]}, "text"),
    *((NATIVE, {"text": value}, "text") for value in (5, "", [], [""], ["a", 5], {}, True, LONE, ["a"] * 1025)),
    *((NATIVE, {"input_ids": value}, "input_ids") for value in ("a", 5, [], [[]], ["a"], [-1], [VOCAB_SIZE], [1.5])),
    (NATIVE, {"input_ids": [[1], [HUGE]]}, "input_ids"),
    (NATIVE, {"text": "a", "sampling_params": 5}, "sampling_params"),
    (NATIVE, {"text": "a", "sampling_params": [{}]}, "sampling_params"),
    (NATIVE, {"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params"),
    (NATIVE, {"text": ["a"], "sampling_params": ["x"]}, "sampling_params"),
    (NATIVE, {"text": ["a"] * 100, "sampling_params": {"n": 64}}, "sampling_params.n"),
    (NATIVE, {"text": ["a", "b"], "rid": ["x"]}, "rid"),
    (NATIVE, {"text": "a", "rid": 5}, "rid"),
    (NATIVE, {"text": "a", "stream": "x"}, "stream"),
    (NATIVE, {"text": "a", "return_logprob": 1}, "return_logprob"),
    (NATIVE, {"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
    (NATIVE, {"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
    (NATIVE, {"text": "a", "lora_path": "x"}, "lora_path"),
    (NATIVE, {"text": "a", "priority": HUGE}, "priority"),
    (TEXT, {"prompt": ["a"] * 100, "n": 64}, "n"),
    (TEXT, {"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    (TEXT, {"prompt": "a", "echo": True, "max_tokens": -1}, "max_tokens"),
    (CHAT, {"messages": HI, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    *((TOKENIZE, body, "prompt") for body in ({}, {"prompt": 5}, {"prompt": LONE}, {"prompt": [1]}, {"prompt": None})),
    (TOKENIZE, {"messages": [{}]}, "messages[0].role"),
    (TOKENIZE, {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    (TOKENIZE, {"prompt": "a", "return_token_strs": "x"}, "return_token_strs"),
    *(
        (DETOKENIZE, {"tokens": value}, "tokens")
        for value in (None, 5, "a", {}, ["a"], [1.5], [-1], [VOCAB_SIZE], [HUGE])
    ),
    *((ABORT, body, "rid") for body in ({}, {"rid": ""}, {"rid": 5}, {"rid": LONE}, {"abort_all": False})),
    (ABORT, {"rid": "x", "abort_all": 1}, "abort_all"),
]
TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
    (TEXT, {"prompt": [5] * 60_000}, "prompt"),
    (TEXT, {"prompt": "x " * 50_000, "stream": True}, "prompt"),
    (TEXT, {"prompt": [[5], [5] * 2000]}, "prompt"),
    (TEXT, {"prompt": "Hi", "max_tokens": MAX_MODEL_LEN}, "max_tokens"),
    (TEXT, {"prompt": "Hi", "min_tokens": 2**31 - 1}, "min_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 50_000}]}, "messages"),
    (CHAT, {"messages": 500 * HI}, "messages"),
    (CHAT, {"messages": HI, "max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens"),
    (RESPONSES, {"input": "x " * 50_000, "max_output_tokens": 5}, "input"),
    (RESPONSES, {"input": 500 * HI, "stream": True}, "input"),
    (NATIVE, {"input_ids": [5] * MAX_MODEL_LEN}, "input_ids"),
    (NATIVE, {"text": "x " * 50_000}, "text"),
    (NATIVE, {"text": "Hi", "sampling_params": {"max_new_tokens": 2**31 - 1}}, "sampling_params.max_new_tokens"),
]
NOT_JSON = (
    *(
        b"",
        b" ",
        b"{",
        b"}",
        b"hello",
        b"[]",
        b"[{}]",
        b"null",
        b"5",
        b'"text"',
        b"NaN",
        b"{'prompt': 'a'}",
        b'{"a": 1,}',
    ),
    *(
        b'{"a" 1}',
        b'{"prompt": "\xff"}',
        b'{"\xc3\x28": 1}',
        b'{"prompt": "a\nb"}',
        b'{"prompt": "\\x41"}',
        b"\x00",
        b"{}\x00",
    ),
    *(
        b"\x1f\x8b\x08\x00\x00",
        b"\xff\xfe\xfa",
        b"{} {}",
        b"--x\r\ncontent-disposition: form-data\r\n\r\n",
        b"prompt=Hi",
    ),
    *(b"[" * 100_000, b'{"messages": ' + b"[" * 50_000, b'{"a":' * 20_000, b'{"seed": ' + b"9" * 10_000 + b"}"),
)
NO_ROUTE: list[tuple[str, str, int]] = [
    *((method, path, 405) for path in POST_ROUTES for method in ("GET", "PUT", "DELETE", "OPTIONS")),
    *(
        ("POST", path, 405)
        for path in ("/health", "/metrics", "/v1/models", "/server_info", "/debug/rows", "/debug/steps")
    ),
    *(
        ("PATCH", "/flush_cache", 405),
        ("GET", "/flush_cache", 405),
        ("DELETE", "/reset_prefix_cache", 405),
        ("GET", "/reset_prefix_cache", 405),
    ),
    *(
        ("POST", path, 404)
        for path in ("/none", "/v1", "/v1/", "/v1/completions/", "//v1/completions", "/v1/embeddings")
    ),
    *(("POST", path, 404) for path in ("/V1/completions", "/v1/%00", "/v1/%ff%fe", "/v1/completions%2f", "/a" * 5000)),
    *(
        ("GET", path, 404)
        for path in ("/docs/none", "/v1/../../etc/passwd", "/%2e%2e/etc/passwd", "/none?a=" + "b" * 5000)
    ),
]


def _grammars() -> Iterator[Bad]:
    for path in (CHAT, TEXT):
        for fields, param, code in GRAMMARS:
            yield Bad(path, {**GOOD[path], **fields}, Answer(400, code, param))
    for fields, param, code in GRAMMARS[:5]:
        yield Bad(NATIVE, {**GOOD[NATIVE], "sampling_params": fields}, Answer(400, code, f"sampling_params.{param}"))


def _responses() -> Iterator[Bad]:
    for name, values in OF_RESPONSES.items():
        for value in values:
            yield _wrong(RESPONSES, {**GOOD[RESPONSES], name: value}, name)
    for fields, param in OF_RESPONSES_INNER:
        yield _wrong(RESPONSES, {**GOOD[RESPONSES], **fields}, param)
    for item, param in ITEMS:
        for path in (RESPONSES, INPUT_TOKENS):
            yield _wrong(path, {"input": [item]}, param)
    yield Bad(RESPONSES, {**GOOD[RESPONSES], "previous_response_id": "resp_x"}, NOT_KEPT)
    for method, end in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        yield Bad(f"{RESPONSES}/resp_x{end}", b"", Answer(404, "response_not_found"), method=method)


def _messages() -> Iterator[Bad]:
    names = list(OF_MESSAGES)
    for name, values in OF_MESSAGES.items():
        for path in ANTHROPICS[: 1 + (name in names[: names.index("max_tokens")])]:
            for value in values:
                yield _wrong(path, {**GOOD[MESSAGES_ROUTE], name: value}, name)
    for block, where in BLOCKS:
        for path in ANTHROPICS:
            body = {**GOOD[MESSAGES_ROUTE], "messages": [{"role": "user", "content": [block]}]}
            yield _wrong(path, body, f"messages[0].content{where}")
    called = {"role": "assistant", "content": [{**USED, "input": {"a": json.loads("[" * 40 + "]" * 40)}}]}
    for messages, param in (
        ([called, *HI], "messages[0].content[0]"),
        ([*HI, {"role": "assistant", "content": [USED]}], "messages[1]"),
    ):
        yield _wrong(MESSAGES_ROUTE, {"messages": messages, "max_tokens": 5}, param)
    yield _wrong(
        MESSAGES_ROUTE,
        {"messages": [{"role": "user", "content": "x " * 50_000}], "max_tokens": 5},
        "prompt is too long: ",
    )
    yield _wrong(MESSAGES_ROUTE, {"messages": 500 * HI, "max_tokens": 5, "stream": True}, "prompt is too long: ")


def corpus() -> Iterator[Bad]:
    """Yields all of them."""
    for bad in _corpus():
        yield in_its_form(bad)


def in_its_form(bad: Bad) -> Bad:
    """A request whose answer is in the form of its route."""
    return bad._replace(answer=_anthropics(bad.answer)) if bad.path in ANTHROPICS else bad


def _anthropics(answer: Answer) -> Answer:
    types = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    param = "there is no model" if answer.code == "model_not_found" else answer.param
    return Answer(answer.status, types.get(answer.status, "invalid_request_error"), param)


def _corpus() -> Iterator[Bad]:
    yield from _fields()
    yield from _grammars()
    for message, param in MESSAGES:
        yield _wrong(CHAT, {"messages": [message]}, param)
    yield _wrong(CHAT, {"messages": [*HI, {"role": "robot"}]}, "messages[1].role")
    yield _wrong(CHAT, {"messages": ["x"] * 16_385}, "messages")
    for tool, param in TOOLS:
        yield _wrong(CHAT, {"messages": HI, "tools": [tool]}, param)
    for path, body, param in WHOLE:
        yield _wrong(path, body, param)
    yield from _responses()
    yield from _messages()
    for path, body, param in TOO_LONG:
        yield Bad(path, body, Answer(400, "context_length_exceeded", param))
    for path in (CHAT, TEXT, NATIVE, TOKENIZE, DETOKENIZE, RESPONSES, *ANTHROPICS):
        for model in ("", "gpt-x", "x" * 5000, "\x00", "../../etc/passwd"):
            yield Bad(path, {**GOOD.get(path, {}), "model": model}, Answer(404, "model_not_found", "model"))
    yield Bad("/v1/models/" + "x" * 5000, b"", Answer(404, "model_not_found"), method="GET")
    for path in POST_ROUTES:
        for body in NOT_JSON:
            yield Bad(path, body, Answer(400, "invalid_json"))
    for path in (*POST_ROUTES, "/flush_cache", "/reset_prefix_cache", "/nowhere"):
        yield Bad(path, b"x" * (MAX_REQUEST_BYTES + 1), Answer(413, "request_too_large"))
    yield Bad(TEXT, b"\x1f\x8b\x08", Answer(400, "invalid_json"), headers=(b"content-encoding: gzip",))
    yield Bad(TEXT, b"{", Answer(400, "invalid_json"), headers=(b"expect: 100-continue",))
    yield Bad(TEXT, b"{", Answer(400, "invalid_json"), headers=(b"x-request-id: \xff\xfe", b"authorization: \xff"))
    yield Bad(TEXT, b"{", Answer(400, "invalid_json"), headers=(b"content-type: text/html; charset=\xff",))
    yield Bad(TEXT, b"{", Answer(400, "invalid_json"), headers=(b"x: " + b"a" * 60_000,))
    for method, path, status in NO_ROUTE:
        code = "method_not_allowed" if status == 405 else "not_found"
        yield Bad(path, b"", Answer(status, code), method=method)


def _fields() -> Iterator[Bad]:
    """Yields sound requests with one field gone wrong."""
    for path, table in ((CHAT, OPENAI | CHAT_ONLY), (TEXT, OPENAI | TEXT_ONLY)):
        for name, values in table.items():
            for value in (*OPENAI.get(name, ()), *values) if table[name] is not OPENAI.get(name) else values:
                yield _wrong(path, {**GOOD[path], name: value}, name)
        for outer, inner in (("stream_options", OF_STREAM_OPTIONS), ("spec", OF_SPEC)):
            for name, values in inner.items():
                for value in values:
                    yield _wrong(path, {**GOOD[path], outer: {name: value}}, f"{outer}.{name}")
    of_native = {"sampling_seed": OPENAI["seed"], "max_new_tokens": [-1, 2**31, HUGE, 1.5, "5", True, NAN, []]}
    for name, values in (SAMPLING | of_native).items():
        name = "min_new_tokens" if name == "min_tokens" else name
        for value in values:
            yield _wrong(NATIVE, {**GOOD[NATIVE], "sampling_params": {name: value}}, f"sampling_params.{name}")


def _wrong(path: str, body: Any, param: str) -> Bad:
    return Bad(path, body, Answer(400, "invalid_request", param))
