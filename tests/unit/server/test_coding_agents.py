"""Requests that three coding agents sent to a live server (``tests/clients``), their texts replaced by others of equal length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hiserve.core.plan import Int32Array
from tests.helpers.coding_agents import SEAL_KEY, head_of, read
from tests.helpers.reply_formats import TEMPLATES
from tests.unit.server.conftest import TOKENIZER, Server
from tests.unit.server.tool_replies import script, serving

RECORDS = Path(__file__).parents[2] / "data" / "coding_agents"
ENDS = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/messages": "event: message_stop",
    "/v1/responses": "event: response.completed",
}
PAGE = 16


def shared(one: list[int], other: list[int]) -> int:
    """Tokens in the whole pages that two prompts share."""
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same // PAGE * PAGE


async def replay(server: Server, entry: dict[str, Any]) -> list[int]:
    """Sends a request, whose reply is the recorded one; returns prompt and reply, without the end token."""

    def reply(_: Int32Array) -> list[list[int]]:
        return script(entry["reply"], 3)

    server.engine.script = reply
    path = entry["path"] + (f"?{entry['query']}" if entry["query"] else "")
    headers = {name.replace("-", "_"): value for name, value in entry["headers"].items() if name != "content-type"}
    call = await server.call("POST", path, entry["body"] | {"model": "tiny"}, **headers).end()
    assert call.status == 200, call.text
    assert ENDS[entry["path"]] in call.text
    return [
        *server.engine.seen[-1].prompt.tolist(),
        *(token for delta in script(entry["reply"], 3) for token in delta),
    ][:-1]


@pytest.mark.parametrize("name", ["claude_code", "codex", "opencode"])
async def test_recorded_sessions_are_answered_and_share_their_prefixes(name: str) -> None:
    entries = read(RECORDS / f"{name}.jsonl.xz")
    template = (TEMPLATES / "hermes.jinja").read_text()
    async with serving("", template=template, reply_format="hermes", seal_key=SEAL_KEY) as server:
        server.engine.max_model_len = 200_000
        steps = [(entry, await replay(server, entry), server.engine.seen[-1].prompt.tolist()) for entry in entries]
        assert await server.metric("hiserve:ignored_request_parts_total", part="thought") == 0
        loops = [step for step in steps if step[0]["body"].get("tools")]
        assert ["<tool_call>" in entry["reply"] for entry, *_ in loops] == [True, False] * 2
        for (_, known, _), (_, _, prompt) in (loops[:2], loops[2:]):
            computed = len(prompt) - shared(known, prompt)
            assert computed <= len(prompt) - len(known) + 2 * PAGE
            rest = TOKENIZER.decode(prompt[len(known) :], skip_hidden=False)
            assert "hiserve-said-so" in rest, "the tool's result is what is new"
        (_, known, _), (first, _, prompt) = loops[1:3]
        path, body = head_of(first)
        told = (await server.post(path, body)).json
        assert shared(known, prompt) >= 0.95 * (told.get("input_tokens") or told["count"])
    bodies = json.dumps([entry["body"] for entry in entries])
    assert 0 < bodies.count("hiserve-said-so") < 12
