"""Runs the choices of a reply and sends what they become: one JSON object, or events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hiserve.server.choices import Choices
from hiserve.server.gate import Engine
from hiserve.server.generation import Generation, Piece, Terms
from hiserve.server.options import Options
from hiserve.server.shapes import Shape, json_response, usage
from hiserve.server.sse import DONE, EventHead, EventStream, unless_gone
from hiserve.text.fair_threads import FairThreads

Word = Callable[[Callable[[], dict[str, Any] | None]], Awaitable[dict[str, Any] | None]]


async def answer(
    request: Request,
    engine: Engine,
    choices: Choices,
    shape: Shape,
    options: Options,
    terms: Terms,
    words: FairThreads,
) -> Response:
    """Returns the response: whole when all choices have ended, or a stream that is about to begin.

    Args:
        request: What is answered; its body must have been read.
        engine: Where the choices run.
        choices: All of them.
        shape: Words the reply.
        options: Stream or not, and with what usage.
        terms: For whom they run, and when.
        words: Where large replies are worded.

    Raises:
        HiserveError: The engine refused or failed a choice; not for a stream, which ends with the error.
        ClientDisconnect: The client went away; all choices are aborted.
    """
    pieces = choices.run(engine, terms)
    if options.is_stream:
        return EventStream(_events(pieces, choices, shape, options, partial(words.do, caller=terms.caller)))
    await unless_gone(request.receive, _exhaust(pieces))
    if choices.is_large:
        return await words.do(lambda: json_response(shape.whole(choices)), terms.caller)
    return json_response(shape.whole(choices))


async def _events(
    pieces: AsyncGenerator[Piece, None], choices: Choices, shape: Shape, options: Options, word: Word
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a reply, those of one piece together."""
    unopened = {generation.choice: generation for generation in choices.generations}
    head = EventHead(shape.chunk_head)
    so_far: dict[str, Any] = {"usage": None} if options.has_usage else {}
    async with aclosing(pieces):
        async for piece in pieces:
            generation = unopened.pop(piece.choice, None)
            opening = await _opening(shape, generation, word) if generation else None
            shown = shape.piece(piece)
            if options.has_usage and options.has_running_usage:
                so_far = {"usage": usage(choices)}
            events = head.event({**opening, **so_far}) if opening else b""
            if shown:
                events += head.event({**shown, **so_far})
            if events:
                yield events
    yield (head.event({"choices": [], "usage": usage(choices)}) if options.has_usage else b"") + DONE


async def _opening(shape: Shape, generation: Generation, word: Word) -> dict[str, Any] | None:
    opening = partial(shape.opening, generation)
    return await word(opening) if generation.scorer.has_many_prompt_scores else opening()


async def _exhaust(pieces: AsyncGenerator[Piece, None]) -> None:
    async with aclosing(pieces):
        async for _ in pieces:
            pass
