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
from hiserve.server.body_fields import check_model
from hiserve.server.body_reader import BodyReader
from hiserve.server.choices import QUICK_CHOICES, each_choice, merge
from hiserve.server.engine_handle import EngineConnection, EngineHandle
from hiserve.server.generation import Generation, OutputDelta, RequestContext
from hiserve.server.logprobs import check_prompt_scores
from hiserve.server.metrics import Metrics, RequestTimer
from hiserve.server.native_fields import NativeRequest, fitted, num_prompt_scores, parse_native
from hiserve.server.native_format import NativeFormatter
from hiserve.server.reply_format import ServedModel, json_response
from hiserve.server.sse import DONE, EventStream, cancel_on_disconnect, event
from hiserve.text.detokenizer import TokenBytes
from hiserve.text.fair_threads import FairThreads
from hiserve.text.output import TextOutput
from hiserve.text.prompt_encoder import PromptEncoder

Word = Callable[[Callable[[], dict[str, Any]]], Awaitable[dict[str, Any]]]


class NativeRoutes:
    """Handler of ``/generate``.

    Args:
        handle: Where the engine is.
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
        handle: EngineHandle,
        bodies: BodyReader,
        encoder: PromptEncoder,
        words: FairThreads,
        token_bytes: TokenBytes,
        metrics: Metrics,
        model: ServedModel,
        *,
        is_strict: bool,
    ) -> None:
        self._handle = handle
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
        engine = self._handle.require()
        encoded = await cancel_on_disconnect(
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
        await cancel_on_disconnect(request.receive, _exhaust(pieces, shapes))

        def worded() -> Response:
            replies = [formatter.reply() for formatter in shapes]
            return json_response(replies if asked.is_list else replies[0])

        if len(shapes) > QUICK_CHOICES or any(formatter.is_large for formatter in shapes):
            return await self._words.do(worded, caller_of(request).number)
        return worded()

    def _choices(
        self,
        request: Request,
        asked: NativeRequest,
        encoded: list[Int32Array],
        engine: EngineConnection,
        arrived: float,
    ) -> tuple[list[AsyncGenerator[OutputDelta, None]], list[NativeFormatter]]:
        """Returns a stream and a shape for each choice of each prompt."""
        shapes: list[NativeFormatter] = []
        streams: list[AsyncGenerator[OutputDelta, None]] = []
        for i, (one, prompt) in enumerate(zip(asked.prompts, encoded, strict=True)):
            context = RequestContext(
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
                    timer=RequestTimer(self._metrics, num_prompt=len(prompt), arrived=arrived),
                    choice=len(shapes),
                    seat=seat,
                    scorer=scorer,
                    keeps_tokens=one.keeps_tokens,
                )
                scorer = scorer or generation
                streams.append(generation.run(engine, context))
                formatter = NativeFormatter(
                    generation,
                    first_scored=one.first_scored,
                    spell=self._token_bytes.bytes_of if asked.has_texts else None,
                    name=name,
                    version=self._model.fingerprint,
                    arrived=arrived,
                )
                shapes.append(formatter)
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
    pieces: AsyncGenerator[OutputDelta, None], shapes: list[NativeFormatter], word: Word, *, has_index: bool
) -> AsyncGenerator[bytes, None]:
    """Yields an event a piece, each with the whole of its choice so far."""
    async with aclosing(pieces):
        async for output_delta in pieces:
            formatter = shapes[output_delta.choice]
            formatter.take(output_delta)
            reply = await word(formatter.reply) if formatter.is_large else formatter.reply()
            yield event(reply | ({"index": output_delta.choice} if has_index else {}))
    yield DONE


async def _exhaust(pieces: AsyncGenerator[OutputDelta, None], shapes: list[NativeFormatter]) -> None:
    async with aclosing(pieces):
        async for output_delta in pieces:
            shapes[output_delta.choice].take(output_delta)
