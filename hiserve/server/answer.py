"""Runs the choices of a reply and sends what they become: one JSON object, or events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hiserve.server.choices import Choices
from hiserve.server.engine_handle import EngineConnection
from hiserve.server.generation import Generation, OutputDelta, RequestContext
from hiserve.server.reply_format import ReplyFormatter, json_response, usage
from hiserve.server.request_options import RequestOptions
from hiserve.server.sse import DONE, EventHead, EventStream, cancel_on_disconnect
from hiserve.text.fair_threads import FairThreads

Word = Callable[[Callable[[], dict[str, Any] | None]], Awaitable[dict[str, Any] | None]]


async def answer(
    request: Request,
    engine: EngineConnection,
    choices: Choices,
    formatter: ReplyFormatter,
    options: RequestOptions,
    context: RequestContext,
    words: FairThreads,
) -> Response:
    """Returns the response: whole when all choices have ended, or a stream that is about to begin.

    Args:
        request: What is answered; its body must have been read.
        engine: Where the choices run.
        choices: All of them.
        formatter: Words the reply.
        options: Stream or not, and with what usage.
        context: For whom they run, and when.
        words: Where large replies are worded.

    Raises:
        HiserveError: The engine refused or failed a choice; not for a stream, which ends with the error.
        ClientDisconnect: The client went away; all choices are aborted.
    """
    pieces = choices.run(engine, context)
    if options.is_stream:
        return EventStream(_events(pieces, choices, formatter, options, partial(words.do, caller=context.caller)))
    await cancel_on_disconnect(request.receive, _exhaust(pieces))
    if choices.is_large:
        return await words.do(lambda: json_response(formatter.whole(choices)), context.caller)
    return json_response(formatter.whole(choices))


async def _events(
    pieces: AsyncGenerator[OutputDelta, None],
    choices: Choices,
    formatter: ReplyFormatter,
    options: RequestOptions,
    word: Word,
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a reply, those of one piece together."""
    unopened = {generation.choice: generation for generation in choices.generations}
    head = EventHead(formatter.chunk_head)
    so_far: dict[str, Any] = {"usage": None} if options.has_usage else {}
    async with aclosing(pieces):
        async for output_delta in pieces:
            generation = unopened.pop(output_delta.choice, None)
            opening = await _opening(formatter, generation, word) if generation else None
            shown = formatter.piece(output_delta)
            if options.has_usage and options.has_running_usage:
                so_far = {"usage": usage(choices)}
            events = head.event({**opening, **so_far}) if opening else b""
            if shown:
                events += head.event({**shown, **so_far})
            if events:
                yield events
    yield (head.event({"choices": [], "usage": usage(choices)}) if options.has_usage else b"") + DONE


async def _opening(formatter: ReplyFormatter, generation: Generation, word: Word) -> dict[str, Any] | None:
    opening = partial(formatter.opening, generation)
    return await word(opening) if generation.scorer.has_many_prompt_scores else opening()


async def _exhaust(pieces: AsyncGenerator[OutputDelta, None]) -> None:
    async with aclosing(pieces):
        async for _ in pieces:
            pass
