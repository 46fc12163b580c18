"""OpenAI's endpoints: chat completions, text completions, models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from hiserve.core.plan import Int32Array
from hiserve.core.request import SamplingParams
from hiserve.errors import ContextLengthError, NotFoundError
from hiserve.server.fields import Options, check_model, parse_body, parse_options, parse_prompt
from hiserve.server.gate import Engine, Gate
from hiserve.server.generation import Generation, Piece
from hiserve.server.metrics import Meter, Metrics
from hiserve.server.shapes import ServedModel, Shape, json_response, usage
from hiserve.server.sse import DONE, EventStream, event, unless_gone
from hiserve.text.chat import Message, parse_messages
from hiserve.text.detokenizer import Spelling
from hiserve.text.prompts import Prompts

# One tenant until requests carry keys.
NAMESPACE = b""
DEFAULT_COMPLETION_TOKENS = 16


class OpenAIRoutes:
    """Handlers of ``/v1``.

    Args:
        gate: Where the engine is.
        prompts: Encodes prompts and remembers replies.
        spelling: Makes a detokenizer for each stream.
        metrics: Where requests are counted.
        model: The served model.
    """

    def __init__(self, gate: Gate, prompts: Prompts, spelling: Spelling, metrics: Metrics, model: ServedModel) -> None:
        self._gate = gate
        self._prompts = prompts
        self._spelling = spelling
        self._metrics = metrics
        self._model = model

    def router(self) -> APIRouter:
        """Returns the routes."""
        router = APIRouter(prefix="/v1")
        router.add_api_route("/chat/completions", self.chat, methods=["POST"])
        router.add_api_route("/completions", self.completions, methods=["POST"])
        router.add_api_route("/models", self.models, methods=["GET"])
        router.add_api_route("/models/{name:path}", self.one_model, methods=["GET"])
        return router

    async def chat(self, request: Request) -> Response:
        """Answers a conversation."""
        arrived = time.monotonic()
        body = parse_body(await request.body())
        check_model(body, self._model.name)
        options = parse_options(body)
        messages = parse_messages(body.get("messages"))
        engine = self._gate.require()
        encoding = self._prompts.encode_chat(messages, namespace=NAMESPACE, max_tokens=engine.max_model_len)
        prompt = await unless_gone(request.receive, encoding)
        return await self._answer(request, engine, prompt, options, messages=messages, arrived=arrived)

    async def completions(self, request: Request) -> Response:
        """Continues a text or a list of token ids."""
        arrived = time.monotonic()
        body = parse_body(await request.body())
        check_model(body, self._model.name)
        options = parse_options(body)
        prompt = parse_prompt(body, vocab_size=self._model.vocab_size)
        engine = self._gate.require()
        if isinstance(prompt, str):
            encoding = self._prompts.encode_text(prompt, max_tokens=engine.max_model_len)
            prompt = await unless_gone(request.receive, encoding)
        return await self._answer(request, engine, prompt, options, messages=None, arrived=arrived)

    async def models(self) -> Response:
        """Lists the one served model."""
        return json_response({"object": "list", "data": [self._card()]})

    async def one_model(self, name: str) -> Response:
        """Describes the served model.

        Raises:
            NotFoundError: ``name`` is another one.
        """
        if name != self._model.name:
            raise NotFoundError(f"there is no model {name[:100]!r} here; this server serves {self._model.name!r}.")
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        engine = self._gate.engine
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "hiserve",
            "root": self._model.root,
            "parent": None,
            "max_model_len": engine.max_model_len if engine else None,
        }

    async def _answer(
        self,
        request: Request,
        engine: Engine,
        prompt: Int32Array,
        options: Options,
        *,
        messages: list[Message] | None,
        arrived: float,
    ) -> Response:
        """Generates; ``messages`` are what a chat reply answers."""
        is_chat = messages is not None
        sampling = fit_context(len(prompt), options, engine.max_model_len, is_chat=is_chat)
        shape = Shape(self._model, is_chat=is_chat, has_token_ids=options.has_token_ids)
        generation = Generation(
            shape.name,
            prompt,
            sampling,
            detokenizer=self._spelling.detokenizer(),
            meter=Meter(self._metrics, num_prompt=len(prompt), arrived=arrived),
            remember=None if messages is None else partial(self._prompts.remember, NAMESPACE, messages),
        )
        pieces = generation.run(engine, namespace=NAMESPACE)
        if options.is_stream:
            return EventStream(_events(pieces, generation, shape, options))
        await unless_gone(request.receive, _exhaust(pieces))
        return json_response(shape.whole(generation))


def fit_context(num_prompt: int, options: Options, max_model_len: int, *, is_chat: bool) -> SamplingParams:
    """Checks that prompt and reply fit the context.

    Returns:
        The sampling parameters; a text completion without a limit gets OpenAI's default of 16 tokens.

    Raises:
        ContextLengthError: They do not fit; the message says what would.
    """
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens; the context is {max_model_len}, reply included. Shorten the prompt.",
            param="messages" if is_chat else "prompt",
        )
    max_tokens = options.sampling.max_tokens
    if max_tokens is None and not is_chat:
        return msgspec.structs.replace(options.sampling, max_tokens=min(DEFAULT_COMPLETION_TOKENS, room))
    if max_tokens is not None and max_tokens > room:
        name = options.limit_field
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and {name} is {max_tokens}; the context is {max_model_len} in all. "
            f"Shorten the prompt or lower {name} to {room}.",
            param=name,
        )
    return options.sampling


async def _events(
    pieces: AsyncGenerator[Piece, None], generation: Generation, shape: Shape, options: Options
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a reply, those of one delta together."""
    opening = shape.opening(generation)
    async with aclosing(pieces):
        async for piece in pieces:
            chunks = [chunk for chunk in (opening, shape.piece(piece)) if chunk]
            opening = None
            if options.has_usage:
                so_far = usage(generation) if options.has_running_usage else None
                chunks = [{**chunk, "usage": so_far} for chunk in chunks]
            if chunks:
                yield b"".join(map(event, chunks))
    yield (event(shape.closing(generation)) if options.has_usage else b"") + DONE


async def _exhaust(pieces: AsyncGenerator[Piece, None]) -> None:
    async with aclosing(pieces):
        async for _ in pieces:
            pass
