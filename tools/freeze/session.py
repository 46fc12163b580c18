"""The scripted session: requests to every endpoint, good and bad ones, in the order in which they are sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

KEY, ADMIN = "alpha", "omega"
ENGINE = ("--device", "cpu", "--dtype", "float64", "--cpu-threads", "1", "--kv-pages", "1000", "--log-level", "error")
FLAGS = (
    *("--max-model-len", "1024", "--max-request-bytes", "20000", "--host-cache-gib", "0"),
    *("--spec", "ngram", "--spec-steps", "2", "--api-key", KEY, "--admin-api-key", ADMIN),
)
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
LONE = "\ud800"


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        method: Of HTTP.
        path: With its query.
        body: Sent as it is when bytes, as JSON when something else; None sends none.
        key: Sent as the bearer; empty sends none.
        shows: What of a good answer is kept: ``all``, ``shape`` (names and types), ``names`` (of metrics), ``routes``
            (of the schema) or ``kind`` (nothing of the body).
        raw: All bytes, whatever the other fields say.
    """

    method: str
    path: str
    body: Any = None
    key: str = KEY
    shows: str = "all"
    raw: bytes = b""

    @property
    def name(self) -> str:
        """The line that an answer is found by."""
        if self.raw:
            return f"RAW {self.raw[:70]!a}"
        shown = "" if self.body is None else f" {ascii(self.body)[:110]}"
        who = {KEY: "", ADMIN: " (admin)", "": " (no key)"}.get(self.key, " (wrong key)")
        return f"{self.method} {self.path}{who}{shown}"

    def bytes(self, number: int) -> bytes:
        """Returns the bytes of the request."""
        if self.raw:
            return self.raw
        body = (
            self.body if isinstance(self.body, bytes) else b"" if self.body is None else json.dumps(self.body).encode()
        )
        lines = [
            f"{self.method} {self.path} HTTP/1.1",
            "host: freeze",
            "connection: close",
            f"x-request-id: ask-{number}",
        ]
        lines += [f"authorization: Bearer {self.key}"] * bool(self.key)
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _post(path: str, body: Any, **more: Any) -> Ask:
    return Ask("POST", path, body, **more)


SYSTEM = {"role": "system", "content": "You help customers of a small coffee shop. Be short, polite and precise."}
HELLO = {"role": "user", "content": "Hello, I'd like to order two coffees, please."}
REPLY = {"role": "assistant", "content": "Sure! What size would you like?"}
MORE = {"role": "user", "content": "Two large ones with oat milk. What will that be?"}
TOOL = {"type": "function", "function": {"name": "order", "description": "Orders.", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "order", "arguments": "{}"}}
GREEDY = {"temperature": 0, "max_tokens": 12}
DRAWN = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 12}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
MODELS = (
    Ask("GET", "/v1/models"),
    Ask("GET", "/v1/models/hiserve-nano"),
    Ask("GET", "/v1/models/other"),
    Ask("GET", "/model_info", key=ADMIN),
    Ask("GET", "/get_model_info"),
)
GOOD = (
    _post(CHAT, {"messages": [SYSTEM, HELLO], **GREEDY}),
    _post(CHAT, {"messages": [SYSTEM, HELLO, REPLY, MORE], **GREEDY}),
    _post(CHAT, {"messages": [SYSTEM, HELLO], **GREEDY, **STREAM}),
    _post(CHAT, {"messages": [HELLO], **DRAWN, "n": 2, "logprobs": True, "top_logprobs": 2}),
    _post(CHAT, {"messages": [HELLO], **DRAWN, "n": 2, "logprobs": True, "top_logprobs": 1, **STREAM}),
    _post(CHAT, {"messages": [HELLO], **GREEDY, "return_token_ids": True, "rid": "mine", "cache_salt": "a"}),
    _post(CHAT, {"messages": [HELLO], **GREEDY, "tools": [TOOL], "tool_choice": "none"}),
    _post(
        CHAT,
        {"messages": [HELLO, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "ok"}], **GREEDY},
    ),
    _post(CHAT, {"messages": [HELLO, REPLY], "continue_final_message": True, "add_generation_prompt": False, **GREEDY}),
    _post(CHAT, {"messages": [HELLO], "max_completion_tokens": 5, "temperature": 0, "user": "u", "metadata": {}}),
    _post(TEXT, {"prompt": "Would you like", **GREEDY}),
    _post(TEXT, {"prompt": "Would you like", **GREEDY, **STREAM}),
    _post(TEXT, {"prompt": ["I need a ride", [300, 301, 302]], **DRAWN, "logprobs": 2, "echo": True}),
    # A stop text is found after the engine's next steps: no drafts, whose number it would change, and less than a page.
    _post(
        TEXT,
        {"prompt": "Two coffees", **DRAWN, "n": 3, "stop": [".", "?"], "include_stop_str_in_output": True}
        | {"max_tokens": 10, "spec": {"enabled": False}},
    ),
    _post(TEXT, {"prompt": "Two coffees", **DRAWN, "presence_penalty": 1, "logit_bias": {"300": -100}, "stream": True}),
    _post(TEXT, {"prompt": "Book a table", **GREEDY, "prompt_logprobs": 1, "logprobs": 0, "min_tokens": 4}),
    _post(TEXT, {"prompt": "Book a table", **GREEDY, "spec": {"enabled": False}, "ignore_eos": True}),
    _post(TEXT, {"prompt": "Book a table", **GREEDY, "spec": {"num_steps": 1}, "priority": 2, "best_of": 1}),
    _post(NATIVE, {"text": "Would you like", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}),
    _post(NATIVE, {"text": ["A film", "A play"], "sampling_params": {"temperature": 0, "max_new_tokens": 6, "n": 2}}),
    _post(NATIVE, {"text": "A film", "sampling_params": {"temperature": 0, "max_new_tokens": 6}, "stream": True}),
    _post(
        NATIVE,
        {
            "input_ids": [300, 301, 302],
            "sampling_params": {"temperature": 0.5, "sampling_seed": 3, "max_new_tokens": 6},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
        },
    ),
    _post("/tokenize", {"prompt": "Hello there", "return_token_strs": True}),
    _post("/v1/tokenize", {"messages": [HELLO], "add_generation_prompt": True}),
    _post("/detokenize", {"tokens": [300, 301, 302]}),
    _post("/v1/detokenize", {"tokens": []}),
    Ask("GET", "/tokenizer_info"),
    _post("/abort_request", {"rid": "nobody"}),
    _post("/abort_request", {"abort_all": True}, key=ADMIN),
)
ADMINISTRATION = (
    *(Ask(method, path, key="") for path in ("/health", "/ping", "/ready") for method in ("GET", "HEAD")),
    Ask("GET", "/health_generate"),
    Ask("GET", "/", key="", shows="kind"),
    Ask("GET", "/docs", shows="kind"),
    Ask("GET", "/openapi.json", shows="routes"),
    Ask("GET", "/metrics", key=ADMIN, shows="names"),
    Ask("GET", "/metrics", shows="names"),
    Ask("GET", "/metrics", key="wrong"),
    Ask("GET", "/server_info", key=ADMIN, shows="shape"),
    Ask("GET", "/get_server_info", key=ADMIN, shows="shape"),
    Ask("GET", "/get_load", shows="shape"),
    Ask("GET", "/v1/loads", shows="shape"),
    Ask("GET", "/cache/stats", key=ADMIN, shows="shape"),
    Ask("GET", "/cache/tree?depth=1", key=ADMIN, shows="shape"),
    Ask("GET", "/cache/tree?depth=x", key=ADMIN),
    Ask("GET", "/debug/rows", key=ADMIN, shows="shape"),
    Ask("GET", "/debug/steps", key=ADMIN, shows="shape"),
    Ask("GET", "/debug/steps?since=x", key=ADMIN),
    Ask("POST", "/flush_cache?tier=host", key=ADMIN),
    Ask("POST", "/flush_cache?tier=none", key=ADMIN),
    Ask("POST", "/flush_cache?tier=device", key=ADMIN),
    Ask("POST", "/reset_prefix_cache", key=ADMIN),
    _post(CHAT, {"messages": [SYSTEM, HELLO, REPLY, MORE], **GREEDY}),
    *(Ask("GET", path) for path in ("/server_info", "/cache/stats", "/cache/tree", "/debug/rows")),
    *(Ask("POST", path) for path in ("/flush_cache", "/reset_prefix_cache")),
    _post("/abort_request", {"abort_all": True}),
)
WRONG_PROMPTS: tuple[Any, ...] = (None, "", [], 5, [4096], [-1], LONE, [1] * 1024, ["a", 5])
WRONG_TEXT: tuple[dict[str, Any], ...] = (
    *({"temperature": value} for value in (-1, "1", True)),
    *({"top_p": 0}, {"n": 65}, {"n": 0}, {"max_tokens": 0}, {"max_tokens": 5000}, {"seed": -1}, {"seed": 2**63}),
    *({"stop": [""]}, {"stop": ["x"] * 17}, {"logit_bias": {"9999": 1}}, {"stop_token_ids": [4096]}),
    *({"logprobs": 21}, {"stream_options": 5}, {"suffix": "x"}, {"unknown": 1}, {"model": "other"}),
    *({"spec": {"num_steps": 9}}, {"spec": {"steps": 1}}, {"min_tokens": 9, "max_tokens": 8}),
)
WRONG_MESSAGES: tuple[Any, ...] = (None, [], "Hi", [{}], [{"role": "robot", "content": "x"}], [{"role": "user"}])
WRONG_CHAT: tuple[dict[str, Any], ...] = (
    *({"tools": [{}]}, {"top_logprobs": 2}, {"tool_choice": "required"}, {"echo": True}),
    {"response_format": {"type": "structural_tag"}},
)
BAD = (
    _post(TEXT, {"prompt": "Hi"}, key=""),
    _post(TEXT, {"prompt": "Hi"}, key="wrong"),
    Ask("GET", "/none"),
    Ask("GET", "/none", key=""),
    Ask("DELETE", TEXT),
    Ask("GET", CHAT),
    *(_post(TEXT, body) for body in (b"", b"{", b"[]", b'{"prompt": "\xff"}', b"x" * 30_000)),
    *(_post(TEXT, {"prompt": prompt}) for prompt in WRONG_PROMPTS),
    *(_post(TEXT, {"prompt": "Hi", **GREEDY, **wrong}) for wrong in WRONG_TEXT),
    *(_post(CHAT, {"messages": messages}) for messages in WRONG_MESSAGES),
    *(_post(CHAT, {"messages": [HELLO], **GREEDY, **wrong}) for wrong in WRONG_CHAT),
    _post(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    *(
        _post(NATIVE, body)
        for body in ({}, {"text": "a", "input_ids": [1]}, {"text": "a", "sampling_params": {"top_k": 1.5}})
    ),
    *(_post("/tokenize", body) for body in ({}, {"prompt": 5})),
    *(_post("/detokenize", body) for body in ({}, {"tokens": [4096]}, {"tokens": "a"})),
    *(_post("/abort_request", body) for body in ({}, {"rid": 5})),
    *(
        Ask("", "", raw=raw)
        for raw in (b"hello\r\n\r\n", b"post / HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n")
    ),
    Ask("", "", raw=b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: " + b"a" * 70_000 + b"\r\n\r\n"),
    Ask("", "", raw=b"POST /none HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{"),
    Ask("", "", raw=b"POST /none HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n{"),
)
SESSION = (*MODELS, *GOOD, *ADMINISTRATION, *BAD)
