"""``/generate`` in SGLang's form: text or token ids in, and a stream whose every event holds the whole text so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from hiserve.core.plan import Int32Array
from hiserve.server.auth import caller_of, namespace_of, tag_of
from hiserve.server.bodies import Bodies
from hiserve.server.choices import QUICK_CHOICES, each_choice, merge
from hiserve.server.fields import check_model
from hiserve.server.gate import Engine, Gate
from hiserve.server.generation import Generation, Piece, Terms
from hiserve.server.logprobs import check_prompt_scores
from hiserve.server.metrics import Meter, Metrics
from hiserve.server.native_fields import NativeRequest, fitted, num_prompt_scores, parse_native
from hiserve.server.native_shape import NativeShape
from hiserve.server.shapes import ServedModel, json_response
from hiserve.server.sse import DONE, EventStream, event, unless_gone
from hiserve.text.detokenizer import TokenBytes
from hiserve.text.fair_threads import FairThreads
from hiserve.text.output import TextOutput
from hiserve.text.prompt_encoder import PromptEncoder

Word = Callable[[Callable[[], dict[str, Any]]], Awaitable[dict[str, Any]]]


class NativeRoutes:
    """Handler of ``/generate``.

    Args:
        gate: Where the engine is.
        bodies: Reads what requests say.
        encoder: Encodes texts.
        words: Where large replies are worded.
        token_bytes: Of the model's tokens.
        metrics: Where requests are counted.
        model: The served model.
        is_strict: Refuse fields that are not known.
    """

    def __init__(
        self,
        gate: Gate,
        bodies: Bodies,
        encoder: PromptEncoder,
        words: FairThreads,
        token_bytes: TokenBytes,
        metrics: Metrics,
        model: ServedModel,
        *,
        is_strict: bool,
    ) -> None:
        self._gate = gate
        self._bodies = bodies
        self._encoder = encoder
        self._words = words
        self._token_bytes = token_bytes
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
        num_scores = sum(
            num_prompt_scores(one, len(prompt)) for one, prompt in zip(asked.prompts, encoded, strict=True)
        )
        check_prompt_scores(num_scores, "logprob_start_len")
        streams, shapes = self._choices(request, asked, encoded, engine, arrived)
        pieces = streams[0] if len(streams) == 1 else merge(streams)
        if asked.is_stream:
            word = partial(self._words.do, caller=caller_of(request).number)
            return EventStream(_events(pieces, shapes, word, has_index=asked.is_list))
        await unless_gone(request.receive, _exhaust(pieces, shapes))

        def worded() -> Response:
            replies = [shape.reply() for shape in shapes]
            return json_response(replies if asked.is_list else replies[0])

        if len(shapes) > QUICK_CHOICES or any(shape.is_large for shape in shapes):
            return await self._words.do(worded, caller_of(request).number)
        return worded()

    def _choices(
        self, request: Request, asked: NativeRequest, encoded: list[Int32Array], engine: Engine, arrived: float
    ) -> tuple[list[AsyncGenerator[Piece, None]], list[NativeShape]]:
        """Returns a stream and a shape for each choice of each prompt."""
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
                    output=TextOutput(self._token_bytes, of_choice),
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
                    spell=self._token_bytes.bytes_of if asked.has_texts else None,
                    name=name,
                    version=self._model.fingerprint,
                    arrived=arrived,
                )
                shapes.append(shape)
        return streams, shapes

    async def _encode(self, asked: NativeRequest, max_model_len: int, caller: int) -> list[Int32Array]:
        prompts = []
        for one in asked.prompts:
            prompt = one.prompt
            if isinstance(prompt, str):
                prompt = await self._encoder.encode_text(prompt, max_tokens=max_model_len, param="text", caller=caller)
                await asyncio.sleep(0)  # other requests come in between
            prompts.append(prompt)
        return prompts


async def _events(
    pieces: AsyncGenerator[Piece, None], shapes: list[NativeShape], word: Word, *, has_index: bool
) -> AsyncGenerator[bytes, None]:
    """Yields an event a piece, each with the whole of its choice so far."""
    async with aclosing(pieces):
        async for piece in pieces:
            shape = shapes[piece.choice]
            shape.take(piece)
            reply = await word(shape.reply) if shape.is_large else shape.reply()
            yield event(reply | ({"index": piece.choice} if has_index else {}))
    yield DONE


async def _exhaust(pieces: AsyncGenerator[Piece, None], shapes: list[NativeShape]) -> None:
    async with aclosing(pieces):
        async for piece in pieces:
            shapes[piece.choice].take(piece)
