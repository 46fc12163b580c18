"""Ray Serve applications: ``serve run hiserve.ray_app:direct`` and ``hiserve.ray_app:gateway``. Needs the extra ray.

``direct``: Serve's proxy spreads requests over replicas, each a whole engine with its API.
``gateway``: processes without a device send the turns of a conversation to one engine, and go on with a stream at another when its
engine dies.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
from ray import serve
from ray.exceptions import RayError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hiserve.cache.storage.breaker import Breaker
from hiserve.commands.serve import MAX_UNREAD_BYTES, assemble
from hiserve.config.options import make_options
from hiserve.fleet.affinity import Affinity, conversation_key
from hiserve.fleet.resuming import Resumption, resumed
from hiserve.fleet.stream_events import NativeEvents
from hiserve.server.http.errors import error_body

Head = tuple[int, list[tuple[str, str]]]
FAILURES = (RayError, ConnectionError)
BUSY = (429, 500, 502, 503)  # statuses after which another engine is asked
MAX_ONGOING = 1024
START_TIMEOUT_S = 900.0  # of an engine, which loads its model
HOP_HEADERS = frozenset({"connection", "content-length", "transfer-encoding", "host", "keep-alive"})


class Engine:
    """A whole engine with its API, in a replica's actor; its processes end with the actor.

    Args:
        settings: As of ``hiserve serve``, by name.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._app, self._handle, _ = assemble(make_options(**settings), MAX_UNREAD_BYTES)
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._has_begun = False

    async def begin(self) -> None:
        """Starts the engine, once, and waits for it."""
        if not self._has_begun:
            self._has_begun = True
            await self._lifespan.__aenter__()
        await self._handle.wait_open()

    async def check_health(self) -> None:
        """Starts the engine at the first call; raises if it cannot serve: Serve then replaces the replica."""
        await self.begin()
        if self._handle.reason is not None and "started again" not in self._handle.reason:
            raise RuntimeError(self._handle.reason)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Answers a request of Serve's proxy."""
        body = await request.body()
        answer = self.answer(request.method, _target(request), _headers(request), body)
        head = await anext(answer)
        assert isinstance(head, tuple), "an answer begins with its head"
        return StreamingResponse(answer, status_code=head[0], headers=dict(head[1]))  # type: ignore[arg-type]

    async def answer(
        self, method: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[Head | bytes, None]:
        """Yields status and headers of the API's answer to a request, then its bytes as they come."""
        await self.begin()
        path, _, query = target.partition("?")
        parts: asyncio.Queue[Head | bytes | None] = asyncio.Queue(64)
        gone, is_sent = asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                pairs = [(name.decode(), value.decode()) for name, value in message["headers"]]
                await parts.put((message["status"], pairs))
            elif data := message.get("body"):
                await parts.put(data)

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
            "headers": [(name.encode(), value.encode()) for name, value in headers],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
        }

        async def work() -> None:
            try:
                await self._app(scope, receive, send)
            finally:
                await parts.put(None)

        working = asyncio.create_task(work())
        try:
            while (part := await parts.get()) is not None:
                yield part
            await working
        finally:
            gone.set()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


class Gateway:
    """Sends requests to engines by their conversations; a stream whose engine dies goes on at another.

    Args:
        handles: Of the engines' deployments, each with one replica; all gateways have the same in one order.
    """

    def __init__(self, *handles: Any) -> None:
        self._handles = handles
        self._loads = np.zeros(len(handles), dtype=np.int64)
        self._affinity = Affinity([f"engine-{index}" for index in range(len(handles))])
        self._breakers = [Breaker() for _ in handles]

    async def __call__(self, request: Request) -> Response:
        """Answers a request of Serve's proxy."""
        raw = await request.body()
        resumption = Resumption.of(_path(request), raw) or PlainReply(raw)
        heads: list[Head] = []
        # All engines that are tried get one id: without a seed in the request each draws by it.
        headers = [pair for pair in _headers(request) if pair[0] != "x-request-id"]
        headers.append(("x-request-id", request.headers.get("x-request-id") or secrets.token_hex(16)))

        async def opens(engine: int, body: bytes) -> AsyncGenerator[bytes, None]:
            self._loads[engine] += 1
            try:
                answer = self._handles[engine].options(stream=True).answer
                async for part in answer.remote(request.method, _target(request), headers, body):
                    if isinstance(part, bytes):
                        yield part
                        continue
                    if part[0] in BUSY or (heads and part[0] != heads[0][0]):
                        raise ConnectionError(f"the engine answered {part[0]}")
                    resumption.is_plain = resumption.is_plain or part[0] != 200
                    heads.append(part)
                self._breakers[engine].succeeded()
            except FAILURES:
                self._breakers[engine].failed()
                raise
            finally:
                self._loads[engine] -= 1

        stream = resumed(resumption, self._order(request, raw), opens, FAILURES)
        try:
            first = await anext(stream, b"")
        except FAILURES as error:
            message = f"no engine answers ({type(error).__name__}: {error}); try again later."
            body = error_body(503, message[:500], code="unavailable")
            return Response(body, 503, {"retry-after": "1"}, "application/json")
        status, pairs = heads[-1]
        return StreamingResponse(_after(first, stream), status_code=status, headers=dict(pairs))

    def _order(self, request: Request, raw: bytes) -> list[int]:
        """Returns the engines to try: the conversation's, then its other homes, then all others; those that fail come last."""
        try:
            body = msgspec.json.decode(raw or b"{}")
        except (msgspec.DecodeError, RecursionError):
            body = {}
        key = conversation_key(request.headers.get("authorization", ""), body if isinstance(body, dict) else {})
        rest = [*self._affinity.homes(key), *np.argsort(self._loads, kind="stable").tolist()]
        order = list(dict.fromkeys([self._affinity.choose(key, self._loads), *rest]))
        return sorted(order, key=lambda engine: self._breakers[engine].is_paused)


def direct(settings: dict[str, str]) -> serve.Application:
    """Builds replicas behind Serve's proxy.

    Args:
        settings: As of ``hiserve serve``, by name; and those of ``_take_own``.
    """
    own = _take_own(settings)
    engine = _engine(own).options(num_replicas=own["engines"])
    return engine.bind(settings)


def gateway(settings: dict[str, str]) -> serve.Application:
    """Builds engines behind gateways; as ``direct``, and ``gateways``, their number."""
    own = _take_own(settings)
    engines = [
        _engine(own).options(name=f"engine-{index}", num_replicas=1).bind(settings) for index in range(own["engines"])
    ]
    made = serve.deployment(Gateway, num_replicas=own["gateways"], max_ongoing_requests=MAX_ONGOING)
    return made.bind(*engines)


def _take_own(settings: dict[str, str]) -> dict[str, int]:
    """Takes out what the engine does not know: ``engines``, ``gateways``, and ``num_gpus`` of each engine."""
    return {
        name: int(settings.pop(name, default))
        for name, default in (("engines", "1"), ("gateways", "1"), ("num_gpus", "0"))
    }


def _engine(own: dict[str, int]) -> Any:
    return serve.deployment(
        Engine,
        ray_actor_options={"num_gpus": own["num_gpus"]},
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=5,
        health_check_timeout_s=START_TIMEOUT_S,
        graceful_shutdown_timeout_s=30,
    )


class PlainReply(Resumption):
    """A reply that is tried anew at the next engine as long as nothing of it has come."""

    def __init__(self, raw: bytes) -> None:
        super().__init__({}, NativeEvents({}))
        self._raw = raw
        self.is_plain = True

    @property
    def body(self) -> bytes:
        """The request as it came."""
        return self._raw


async def _after(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for data in rest:
            yield data


def _path(request: Request) -> str:
    """Returns the path behind the application's ``route_prefix``."""
    return request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"


def _target(request: Request) -> str:
    return _path(request) + (f"?{request.url.query}" if request.url.query else "")


def _headers(request: Request) -> list[tuple[str, str]]:
    return [(name, value) for name, value in request.headers.items() if name not in HOP_HEADERS]
