"""The whole application around a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest_asyncio

from hiserve.config.options import make_options
from hiserve.core.machine import Machine
from hiserve.core.request import SamplingParams
from hiserve.core.resolve import Resolved, resolve
from hiserve.core.step_memory import ModelFacts, StepShape
from hiserve.grammar.vet import Vetting
from hiserve.server.app import create_app
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.management.admin import ABORT
from hiserve.server.messages.routes import COUNT, MESSAGES
from hiserve.server.metrics.registry import Metrics
from hiserve.server.openai.routes import CHAT, COMPLETION
from hiserve.server.openai.tokenize import DETOKENIZE, TOKENIZE
from hiserve.server.reply.format import ServedModel
from hiserve.server.request.known_fields import known_to
from hiserve.server.responses.routes import INPUT_TOKENS, RESPONSES
from hiserve.server.sglang.routes import GENERATE
from hiserve.server.sglang.types import NativeSampling
from hiserve.text.abilities import Abilities
from hiserve.text.prompt.encoder import PromptEncoder
from hiserve.text.prompt.reply_tokens import ReplyTokenCache
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.tokens.detokenizer import TokenBytes
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.helpers import tiny_text
from tests.helpers.asgi import Call
from tests.helpers.fake_engine_client import FakeEngineClient

TOKENIZER = tiny_text.byte_level()
REPLY = "the token 🙂"
# Fields of each body, by the name of its schema.
BODIES = (CHAT, COMPLETION, GENERATE, TOKENIZE, DETOKENIZE, ABORT, RESPONSES, INPUT_TOKENS, MESSAGES, COUNT)
KNOWN = {body.name: known_to(*body.types) for body in BODIES}
NATIVE_SAMPLING = known_to(NativeSampling)


def reply_script(text: str = REPLY, *, end: bool = True) -> list[list[int]]:
    """One delta a token, spelled the tokenizer's way, and the end token."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).tolist() + [tiny_text.END] * end
    return [[index] for index in ids]


NUM_STEPS = len(reply_script())


def on_device(num_tokens: int) -> dict[str, Any]:
    """``prompt_tokens_details`` of a prompt that had this many tokens on the device, nobody having asked why no more."""
    by_tier = {"device": num_tokens, "host": 0, "store": 0}
    return {"cached_tokens": num_tokens, "cached_tokens_details": by_tier, "cache_miss": None}


@cache
def read_once(
    tokenizer: Tokenizer, template: str, reply_format: str, keeps_thoughts: bool
) -> tuple[ChatTemplate, TokenBytes, Abilities]:
    """Compiles a template, spells tokens and asks for abilities once for all servers: no request changes them, and each time takes 15 ms of CPU."""
    chat_template, token_bytes = ChatTemplate(template, {"bos_token": "<|bos|>"}), TokenBytes(tokenizer)
    abilities = Abilities(tokenizer, token_bytes, chat_template, reply_format, keeps_thoughts=keeps_thoughts)
    return chat_template, token_bytes, abilities


def resolved(**settings: Any) -> Resolved:
    step = StepShape(
        num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=32, mlp_elements=24, vocab_size=500
    )
    facts = ModelFacts(context_length=256, checkpoint_dtype="float32", num_params=1000, slot_elements=64, step=step)
    return resolve(make_options(**settings), facts, Machine(cores=2, memory_bytes=2**33, cuda_memory_bytes=()))


@dataclass
class Server:
    """The application and what stands behind it."""

    app: Any
    engine: FakeEngineClient
    handle: EngineHandle
    reply_cache: ReplyTokenCache
    vetting: Any

    def call(self, method: str, path: str, body: bytes | dict[str, Any] = b"", **headers: str) -> Call:
        return Call(self.app, method, path, body, **headers)

    async def get(self, path: str) -> Call:
        return await self.call("GET", path).end()

    async def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> Call:
        return await self.call("POST", path, body, **headers).end()

    async def chat(self, *messages: str, **fields: Any) -> Call:
        """Posts a chat of alternating user and assistant messages."""
        roles = ["user", "assistant"] * len(messages)
        listed = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
        return await self.post("/v1/chat/completions", {"messages": listed, **fields})

    async def complete(self, prompt: Any, **fields: Any) -> Call:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    async def metric(self, name: str, **labels: str) -> float:
        """Reads one value from ``/metrics``."""
        wanted = {"model_name": "tiny", **labels}
        for line in (await self.get("/metrics")).text.splitlines():
            if line.startswith(name + "{") and all(f'{key}="{value}"' for key, value in wanted.items()):
                found = dict(part.split("=") for part in line[len(name) + 1 : line.index("}")].split(","))
                if all(found.get(key) == f'"{value}"' for key, value in wanted.items()):
                    return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} {wanted}")


def make_server(
    engine: FakeEngineClient,
    start: Any = None,
    compat: str = "none",
    template: str = tiny_text.TEMPLATE,
    defaults: SamplingParams | None = None,
    spec_steps: int = 0,
    tokenizer: Tokenizer = TOKENIZER,
    reply_format: str = "auto",
    vetting: Any = None,
    keeps_thoughts: bool = False,
    **settings: Any,
) -> Server:
    async def started() -> FakeEngineClient:
        return engine

    handle = EngineHandle(start or started)
    vetting = vetting or Vetting(Path("/models/tiny"), 500, ())
    reply_cache = ReplyTokenCache()
    chat_template, token_bytes, abilities = read_once(tokenizer, template, reply_format, keeps_thoughts)
    app = create_app(
        handle=handle,
        encoder=PromptEncoder(tokenizer, chat_template, reply_cache),
        token_bytes=token_bytes,
        abilities=abilities,
        vetting=vetting,
        metrics=Metrics("tiny", page_size=16, compat=compat),
        model=ServedModel(
            name="tiny",
            root="/models/tiny",
            vocab_size=500,
            created=1,
            fingerprint="fp",
            defaults=defaults or SamplingParams(),
            spec_steps=spec_steps,
            page_size=16,
            end_token_ids=(tiny_text.END,),
        ),
        resolved=resolved(**settings),
        tokenizer_info=b'{"tokenizer_class": "Tiny"}',
        startup_s={"tokenizer": 0.1},
    )
    return Server(app, engine, handle, reply_cache, vetting)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    made = make_server(FakeEngineClient(script=lambda prompt: reply_script()))
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        yield made
    assert made.engine.num_inflight == 0, "a request never ended"
