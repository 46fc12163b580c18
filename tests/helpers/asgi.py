"""One HTTP request straight into an ASGI application, with the connection in the test's hands."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.helpers.waiting import PATIENCE_S


class Call:
    """A request in flight. Chunks of the body arrive in ``chunks`` as they are sent."""

    def __init__(self, app: Any, method: str, path: str, body: bytes | dict[str, Any] = b"", **headers: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._is_body_sent = False
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        self._task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._is_body_sent:
            self._is_body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message.get("body"):
            self.chunks.append(message["body"])
        self._news.set()

    def disconnect(self) -> None:
        """Closes the client's side."""
        self._gone.set()

    async def until(self, text: str) -> None:
        """Waits until the body contains ``text``."""
        while text not in self.text:
            await asyncio.wait_for(self._news.wait(), PATIENCE_S)
            self._news.clear()

    async def end(self) -> Call:
        """Waits until the application is done with the request."""
        await asyncio.wait_for(self._task, PATIENCE_S)
        return self

    @property
    def text(self) -> str:
        """The body so far."""
        return b"".join(self.chunks).decode()

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The data of each event so far; ``[DONE]`` stays text."""
        assert not self.text or self.text.endswith("\n\n")
        datas = [event.removeprefix("data: ") for event in self.text.split("\n\n")[:-1]]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]
