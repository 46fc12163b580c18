"""All choices of one reply: they run side by side, and fail or finish as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from hiserve.core.cache_usage import CacheUse
from hiserve.core.draft_use import DraftUse
from hiserve.core.request import SamplingParams
from hiserve.server.engine_handle import EngineConnection
from hiserve.server.generation import QUICK_SCORE_BYTES, Generation, OutputDelta, RequestContext

# Choices of one reply that are in the engine at once, and pieces that wait for a slow reader.
MAX_AT_ONCE = 256
MAX_WAITING = 16
QUICK_CHOICES = 64
_T = TypeVar("_T")


def each_choice(sampling: SamplingParams) -> list[SamplingParams]:
    """Returns the sampling parameters of each of the n choices of a prompt.

    They differ in their random numbers by the choice's index, not by their seed, so that the whole
    reply can be had again with one seed. The first alone scores the prompt: a score needs the token before it
    computed, so that each further one would compute the whole prompt again.
    """
    if sampling.n == 1:
        return [sampling]
    first = msgspec.structs.replace(sampling.seeded(), n=1)
    return [first] + (sampling.n - 1) * [msgspec.structs.replace(first, prompt_logprobs=None)]


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
        """What came from the cache when each prompt was first computed, all together; the miss is the first prompt's."""
        first, *others = self._firsts
        return sum((other.cached for other in others), first.cached)

    @property
    def drafts(self) -> DraftUse | None:
        """All drafts so far, of all choices together; None without speculation."""
        known = [generation.drafts for generation in self.generations if generation.drafts is not None]
        return sum(known, DraftUse()) if known else None

    @property
    def num_generated(self) -> int:
        """Generated tokens so far, all choices together."""
        return sum(len(generation.tokens) for generation in self.generations)

    @property
    def is_large(self) -> bool:
        """Whether it takes long to word the reply."""
        num_bytes = sum(len(each.scores) + len(each.scorer.prompt_scores) for each in self.generations)
        return len(self.generations) > QUICK_CHOICES or num_bytes > QUICK_SCORE_BYTES

    def run(self, engine: EngineConnection, context: RequestContext) -> AsyncGenerator[OutputDelta, None]:
        """Yields pieces of all choices as they arrive. Closing the generator aborts them all.

        Raises:
            HiserveError: The engine refused or failed one of them; the others are aborted.
        """
        streams = [each.run(engine, context) for each in self.generations]
        return streams[0] if len(streams) == 1 else merge(streams)


async def merge(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """Yields the items of several streams as they arrive; at most ``MAX_AT_ONCE`` streams are open.

    A reader that is slow holds the streams up: few items wait for it, whatever the number of streams.
    Closing this generator closes them all.

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
