"""Several streams as one: the choices of a reply, as their pieces arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

# Choices of one reply in the engine at once; deltas that wait for a slow reader.
MAX_AT_ONCE = 256
MAX_WAITING = 16
_T = TypeVar("_T")


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
