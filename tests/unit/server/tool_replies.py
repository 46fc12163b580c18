"""Servers whose model replies with thoughts and calls, and OpenAI's client of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai

from hiserve.core.request import Grammar
from hiserve.models.model_config import find_model
from hiserve.text.template.chat_template import ChatTemplate
from tests.helpers import tiny_text
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import TOKENIZER, Server, make_server

NANO = find_model("hiserve-nano")
TEMPLATE = ChatTemplate.load(NANO)
assert TEMPLATE is not None
SOURCE = TEMPLATE.sources.source
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}},
}
USER = {"role": "user", "content": "Hi"}
ARGUMENTS = '{"where":  "</tool_call> \\"é\\""}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO = f"<think>\nso\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


def script(text: str, size: int) -> list[list[int]]:
    """A reply and its end token, so many tokens a delta."""
    ids = [*TOKENIZER.encode(text, add_special_tokens=False).tolist(), tiny_text.END]
    return [ids[at : at + size] for at in range(0, len(ids), size)]


@asynccontextmanager
async def serving(text: str, size: int = 1, **settings: Any) -> AsyncIterator[Server]:
    """A server whose model replies with a text."""
    template = settings.pop("template", SOURCE + "{#- <think></think> -#}")
    made = make_server(FakeEngineClient(script=lambda _: script(text, size)), template=template, **settings)
    made.engine.max_model_len = 4096
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        yield made
    assert made.engine.num_inflight == 0, "a request never ended"


def client_of(server: Server) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(server.app))
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http)


class Trusting:
    """Vetting that lets every grammar pass.

    Attributes:
        asked: Each grammar and its field.
        trials: None was tried.
    """

    def __init__(self) -> None:
        self.trials: dict[str, int] = {}
        self.asked: list[tuple[Grammar, str]] = []

    async def check(self, grammar: Grammar, param: str, **_: Any) -> tuple[Grammar, list[str]]:
        self.asked.append((grammar, param))
        return grammar, []

    async def close(self) -> None:
        pass
