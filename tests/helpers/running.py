"""``serve`` in this process: the engine is a fake, sockets and HTTP are real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from typing import Any

import httpx

from hiserve.commands import serve
from tests.helpers.waiting import PATIENCE_S


class Running:
    """``serve`` in this process, over a real socket."""

    def __init__(self, made: Any, drain_timeout_s: float = 3600) -> None:
        self.server = made
        self.hold = asyncio.Event()
        self.listener: socket.socket = serve.bind("127.0.0.1", 0)
        self.task = asyncio.create_task(
            serve.serve(made.app, made.handle, self.listener, drain_timeout_s=drain_timeout_s)
        )
        self.client = httpx.AsyncClient(base_url=serve.url_of(self.listener), timeout=PATIENCE_S)

    async def ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(httpx.ConnectError):
                    if (await self.client.get("/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.01)

    async def open_stream(self) -> asyncio.Task[str]:
        """Opens a chat stream that waits before its second token."""

        async def step(index: int) -> None:
            if index == 1:
                await self.hold.wait()

        self.server.engine.step = step
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        begun = asyncio.Event()

        async def read() -> str:
            text = ""
            async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for chunk in response.aiter_text():
                    text += chunk
                    begun.set()
            return text

        task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        return task

    async def say(self, raw: bytes) -> bytes:
        """Sends bytes and reads until the server closes."""
        reader, writer = await asyncio.open_connection(*self.listener.getsockname())
        writer.write(raw)
        try:
            return await asyncio.wait_for(reader.read(), PATIENCE_S)
        finally:
            writer.close()

    async def stop(self) -> None:
        """Ends the server."""
        await self.client.aclose()
        if not self.task.done():
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(self.task, PATIENCE_S)
        self.listener.close()
