"""``/generate`` in SGLang's form: text or token ids in, and a stream whose every event holds the whole text so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from hiserve.core.plan import Int32Array
from hiserve.server.auth import caller_of, namespace_of, tag_of
from hiserve.server.bodies import Bodies
from hiserve.server.choices import each_choice, merge
from hiserve.server.fields import check_model
from hiserve.server.gate import Gate
from hiserve.server.generation import Generation, Piece, Terms
from hiserve.server.metrics import Meter, Metrics
from hiserve.server.native_fields import NativeRequest, fitted, parse_native
from hiserve.server.native_shape import NativeShape
from hiserve.server.shapes import ServedModel, json_response
from hiserve.server.sse import DONE, EventStream, event, unless_gone
from hiserve.text.detokenizer import Spelling
from hiserve.text.output import Output
from hiserve.text.prompts import Prompts


class NativeRoutes:
    """Handler of ``/generate``.

    Args:
        gate: Where the engine is.
        bodies: Reads what requests say.
        prompts: Encodes texts.
        spelling: Of the model's tokens.
        metrics: Where requests are counted.
        model: The served model.
        is_strict: Refuse fields that are not known.
    """

    def __init__(
        self,
        gate: Gate,
        bodies: Bodies,
        prompts: Prompts,
        spelling: Spelling,
        metrics: Metrics,
        model: ServedModel,
        *,
        is_strict: bool,
    ) -> None:
        self._gate = gate
        self._bodies = bodies
        self._prompts = prompts
        self._spelling = spelling
        self._metrics = metrics
        self._model = model
        self._is_strict = is_strict

    def router(self) -> APIRouter:
        """Returns the route."""
        router = APIRouter()
        router.add_api_route("/generate", self.generate, methods=["POST"])
        return router

    async def generate(self, request: Request) -> Response:
        """Continues texts or lists of token ids."""
        arrived = time.monotonic()
        body = await self._bodies.read(request)
        check_model(body, self._model.name)
        asked = parse_native(
            body,
            self._model.defaults,
            vocab_size=self._model.vocab_size,
            spec_steps=self._model.spec_steps,
            is_strict=self._is_strict,
        )
        engine = self._gate.require()
        encoded = await unless_gone(
            request.receive, self._encode(asked, engine.max_model_len, caller_of(request).number)
        )
        shapes: list[NativeShape] = []
        streams: list[AsyncGenerator[Piece, None]] = []
        for i, (one, prompt) in enumerate(zip(asked.prompts, encoded, strict=True)):
            terms = Terms(
                namespace_of(request, asked.salt),
                asked.priority,
                caller_of(request).number,
                tag_of(request, one.rid),
            )
            name = one.rid or request.state.request_id + (f"-{i}" if len(encoded) > 1 else "")
            sampling = fitted(one, len(prompt), engine.max_model_len)
            scorer: Generation | None = None
            for seat, of_choice in enumerate(each_choice(sampling)):
                generation = Generation(
                    name,
                    prompt,
                    of_choice,
                    output=Output(self._spelling, of_choice),
                    meter=Meter(self._metrics, num_prompt=len(prompt), arrived=arrived),
                    choice=len(shapes),
                    seat=seat,
                    scorer=scorer,
                    keeps_tokens=one.keeps_tokens,
                )
                scorer = scorer or generation
                streams.append(generation.run(engine, terms))
                shape = NativeShape(
                    generation,
                    first_scored=one.first_scored,
                    spell=self._spelling.piece if asked.has_texts else None,
                    name=name,
                    version=self._model.fingerprint,
                    arrived=arrived,
                )
                shapes.append(shape)
        pieces = streams[0] if len(streams) == 1 else merge(streams)
        if asked.is_stream:
            return EventStream(_events(pieces, shapes, has_index=asked.is_list))
        await unless_gone(request.receive, _exhaust(pieces, shapes))
        replies = [shape.reply() for shape in shapes]
        return json_response(replies if asked.is_list else replies[0])

    async def _encode(self, asked: NativeRequest, max_model_len: int, caller: int) -> list[Int32Array]:
        prompts = []
        for one in asked.prompts:
            prompt = one.prompt
            if isinstance(prompt, str):
                prompt = await self._prompts.encode_text(prompt, max_tokens=max_model_len, param="text", caller=caller)
                await asyncio.sleep(0)  # other requests come in between
            prompts.append(prompt)
        return prompts


async def _events(
    pieces: AsyncGenerator[Piece, None], shapes: list[NativeShape], *, has_index: bool
) -> AsyncGenerator[bytes, None]:
    """Yields an event a piece, each with the whole of its choice so far."""
    async with aclosing(pieces):
        async for piece in pieces:
            shapes[piece.choice].take(piece)
            yield event(shapes[piece.choice].reply() | ({"index": piece.choice} if has_index else {}))
    yield DONE


async def _exhaust(pieces: AsyncGenerator[Piece, None], shapes: list[NativeShape]) -> None:
    async with aclosing(pieces):
        async for piece in pieces:
            shapes[piece.choice].take(piece)
