"""A headless Chromium, and pages whose console and policy must stay silent."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
import uvicorn

VIOLATIONS = "window.violations = []; addEventListener('securitypolicyviolation', e => violations.push(e.blockedURI))"


@dataclass
class Browser:
    """Opens pages.

    Attributes:
        told: Messages of the console, and errors that no code caught.
        requests: (method, URL, ``Authorization``) of all pages.
    """

    chromium: Any
    told: list[str] = field(default_factory=list)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    pages: list[Any] = field(default_factory=list)

    async def open(self, url: str, width: int = 1280, scheme: str = "light") -> Any:
        """Opens a page in a context of its own."""
        context = await self.chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = await context.new_page()
        await page.add_init_script(VIOLATIONS)
        page.on("console", lambda message: self.told.append(message.text))
        page.on("pageerror", lambda error: self.told.append(str(error)))
        page.on("request", lambda it: self.requests.append((it.method, it.url, it.headers.get("authorization", ""))))
        await page.goto(url)
        self.pages.append(page)
        return page

    async def close(self, page: Any) -> None:
        """Closes a page, which must have broken no rule of its policy."""
        self.pages.remove(page)
        assert not await page.evaluate("violations")
        await page.close()

    @asynccontextmanager
    async def listening(self, app: Any) -> AsyncIterator[str]:
        """Serves an application on a free port; yields its URL. Closes all pages before it stops: it would refuse them."""
        config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        (socket,) = server.servers[0].sockets
        try:
            yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        finally:
            for page in list(self.pages):
                await self.close(page)
            server.should_exit = True
            await serving


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Browser]:
    from playwright.async_api import async_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("there is no chromium. Install it (Debian: apt install chromium).")
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        made = Browser(chromium)
        yield made
        for page in list(made.pages):
            await made.close(page)
        await chromium.close()
    assert not made.told, made.told
