"""The choices of one reply, their sampling parameters and their deltas in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from hiserve.core.plan import Int32Array
from hiserve.core.request import Retain, SamplingParams
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.scheduler.client import EngineClient
from hiserve.server.metrics.registry import Metrics, RequestTimer
from hiserve.server.reply.generation import (
    QUICK_SCORE_BYTES,
    Generation,
    Locate,
    OutputDelta,
    Remember,
    RequestContext,
)
from hiserve.text.prompt.parts import Place
from hiserve.text.reader.output import ReplyOutput, TextOutput
from hiserve.text.tokens.detokenizer import TokenBytes

QUICK_CHOICES = 64
# Choices of one reply in the engine at once; deltas that wait for a slow reader.
MAX_AT_ONCE = 256
MAX_WAITING = 16
_T = TypeVar("_T")


def each_choice(sampling: SamplingParams) -> list[SamplingParams]:
    """Returns the sampling parameters of each of the n choices of a prompt.

    They differ in their random numbers by the choice's index, not by their seed, so that the whole
    reply can be had again with one seed. The first alone scores the prompt: a score needs the token before it
    computed, so that each further one would compute the whole prompt again.
    """
    if sampling.n == 1:
        return [sampling]
    assert sampling.seed is not None, "the choices would draw seeds of their own"
    first = msgspec.structs.replace(sampling, n=1)
    return [first] + (sampling.n - 1) * [msgspec.structs.replace(first, prompt_logprobs=None)]


def generations(
    name: str,
    prompt: Int32Array,
    sampling: SamplingParams,
    context: RequestContext,
    *,
    token_bytes: TokenBytes,
    metrics: Metrics,
    arrived: float,
    draw_seed: Callable[[int], int],
    output: Callable[[SamplingParams], ReplyOutput] | None = None,
    first: int = 0,
    keeps_tokens: bool = True,
    locate: Locate | None = None,
    remember: Remember | None = None,
) -> list[Generation]:
    """Returns the n choices of one prompt.

    Args:
        name: As for ``Generation``, like the arguments that are not named here.
        prompt: int32 ``[n]``.
        sampling: With ``n``, and fitted to the context.
        context: Caller and priority.
        token_bytes: Of the model's tokens.
        metrics: Counts the request.
        arrived: ``time.monotonic()`` at arrival.
        draw_seed: Returns the seed of a prompt without one, by the index of its first choice.
        output: Makes the output of a choice; None makes plain text.
        first: Index of the first choice in the reply.
        keeps_tokens: False drops generated tokens.
        locate: Returns the part of the conversation at which the cached prefix ends.
        remember: Called with each reply.
    """
    if sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=draw_seed(first))
    made: list[Generation] = []
    for index, of_choice in enumerate(each_choice(sampling)):
        generation = Generation(
            name,
            prompt,
            of_choice,
            context,
            output=output(of_choice) if output else TextOutput(token_bytes, of_choice),
            timer=RequestTimer(metrics, num_prompt=len(prompt), arrived=arrived),
            choice=first + index,
            choice_index=index,
            scorer=made[0] if made else None,
            keeps_tokens=keeps_tokens,
            locate=None if made else locate,
            remember=remember,
        )
        made.append(generation)
    return made


class Choices:
    """The choices of one reply: each prompt's first, second, ... together, prompt after prompt.

    Args:
        generations: One a choice, in order.
        num_per_prompt: Choices of each prompt.
    """

    def __init__(self, generations: Sequence[Generation], num_per_prompt: int = 1) -> None:
        assert generations and len(generations) % num_per_prompt == 0, (len(generations), num_per_prompt)
        self.generations = generations
        self._firsts = generations[::num_per_prompt]

    @property
    def num_prompt(self) -> int:
        """Prompt tokens; each prompt counts once."""
        return sum(len(first.prompt) for first in self._firsts)

    @property
    def cached(self) -> CacheUse:
        """Cached tokens of all prompts, each counted once; the miss is the first prompt's."""
        first, *others = self._firsts
        return sum((other.cached for other in others), first.cached)

    @property
    def miss_place(self) -> Place | None:
        """Where in the conversation the cached prefix of the first prompt ends."""
        return self._firsts[0].miss_place

    @property
    def retain(self) -> Retain:
        """Prefixes of the first prompt that the cache evicts last."""
        return self._firsts[0].context.retain

    @property
    def drafts(self) -> DraftUse | None:
        """All drafts so far, of all choices together; None without speculation."""
        known = [generation.facts.drafts for generation in self.generations if generation.facts.drafts is not None]
        return sum(known, DraftUse()) if known else None

    @property
    def num_generated(self) -> int:
        """Generated tokens so far, all choices together."""
        return sum(len(generation.tokens) for generation in self.generations)

    @property
    def is_large(self) -> bool:
        """Whether formatting the reply takes long."""
        num_bytes = sum(len(each.scores) + len(each.scorer.prompt_scores) for each in self.generations)
        return len(self.generations) > QUICK_CHOICES or num_bytes > QUICK_SCORE_BYTES

    def run(self, engine: EngineClient) -> AsyncGenerator[OutputDelta, None]:
        """Yields the deltas of all choices that are not over, as they arrive. Closing the generator aborts all choices.

        Raises:
            HiserveError: The engine refused or failed one of them; the others are aborted.
        """
        streams = [each.run(engine) for each in self.generations if not each.is_over]
        return streams[0] if len(streams) == 1 else merge(streams)


async def merge(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """Yields the items of several streams as they arrive; at most ``MAX_AT_ONCE`` streams are open.

    A slow reader delays the streams: at most ``MAX_WAITING`` items wait for it. Closing this generator closes all streams.

    Raises:
        Exception: The first that one of the streams raised; the others are closed.
    """
    arrived: asyncio.Queue[_T | _End] = asyncio.Queue(MAX_WAITING)
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def pump(stream: AsyncGenerator[_T, None]) -> None:
        try:
            async with places, aclosing(stream):
                async for item in stream:
                    await arrived.put(item)
        except Exception as error:
            await arrived.put(_End(error))
            raise
        await arrived.put(_End(None))

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            item = await arrived.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    """A stream has ended, with or without an error."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
