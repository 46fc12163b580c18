"""Prompts of each endpoint, and an engine that goes on with a text where another one stopped."""

from __future__ import annotations

from typing import Any

import numpy as np

from hiserve.core.request import FinishReason
from tests.unit.server.conftest import Server, reply_script

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT: {"prompt": "Hi"},
    NATIVE: {"text": "Hi"},
}
CALLS = (
    '<think>so</think>\n\nwell <tool_call>\n{"name": "look", "arguments": {"at": "the 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "note", "arguments": {"input": "a \\"b\\""}}\n</tool_call>'
)


def scripted(server: Server, text: str, finish: FinishReason = FinishReason.STOP) -> list[int]:
    """Makes the engine generate a text, or what of it was not generated before; returns its tokens.

    The score of a token is its index.
    """
    ids = [index for tokens in reply_script(text, end=finish is FinishReason.STOP) for index in tokens]
    server.engine.finish = finish

    def script(_: Any) -> list[list[int]]:
        num_resumed = server.engine.seen[-1].num_resumed
        if server.engine.seen[-1].sampling.logprobs == 0:
            server.engine.scores = [np.float32(-at).tobytes() for at in range(num_resumed, len(ids))]
        return [[index] for index in ids[num_resumed:]]

    server.engine.script = script
    return ids
