"""Endpoints for watchdogs and scrapers: liveness, readiness, progress, metrics."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from hiserve.core.digest import namespace_digest
from hiserve.core.request import SamplingParams
from hiserve.errors import HiserveError, OverloadedError, UnavailableError
from hiserve.scheduler.client import EngineClient
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.http.auth import Auth
from hiserve.server.http.errors import error_response
from hiserve.server.http.streaming import cancel_on_disconnect
from hiserve.server.metrics.registry import Metrics
from hiserve.server.reply.format import json_response
from hiserve.server.routes import Endpoint

METRICS_TIMEOUT_S = 1.0
PROBE_TIMEOUT_S = 20.0
PROBE_PERIOD_S = 0.1


class Health(msgspec.Struct):
    """Reply of a healthy server."""

    status: str


class HealthRoutes:
    """Three separate signals: ``/health`` alive, ``/ready`` able to serve, ``/health_generate`` making progress.

    Args:
        handle: Of the engine.
        auth: Checks keys.
        metrics: Shown by ``/metrics``.
    """

    def __init__(self, handle: EngineHandle, auth: Auth, metrics: Metrics) -> None:
        self._handle = handle
        self._auth = auth
        self._metrics = metrics

    def routes(self) -> list[Endpoint]:
        """Returns the routes."""
        return [
            Endpoint("/health", self.health, "GET", "HEAD", reply=Health, is_public=True),
            Endpoint("/ping", self.health, "GET", "HEAD", reply=Health, is_public=True),
            Endpoint("/ready", self.ready, "GET", "HEAD", reply=Health, is_public=True, errors=(503,)),
            Endpoint("/health_generate", self.health_generate, "GET", reply=Health),
            Endpoint("/metrics", self.metrics, "GET", "HEAD", media="text/plain", is_public=True),
        ]

    async def health(self, _: Request) -> Response:
        """Answers while this process and its event loop run. Constant time."""
        return json_response(Health("ok"))

    async def ready(self, request: Request) -> Response:
        """Answers 200 if a request would be served now, otherwise 503 and the reason.

        With API keys the reason leaves out the error's message, because this route needs no key.
        """
        reason = self._handle.reason if self._auth.is_admin(request) else self._handle.state
        if reason is not None:
            return error_response(503, reason, code="unavailable")
        return json_response(Health("ready"))

    async def health_generate(self, request: Request) -> Response:
        """Answers when tokens are produced: a worker ends a step, or a request of one token is answered.

        A long prefill is progress. The probe is not counted in the metrics of requests, has its own cache namespace,
        and is aborted when the client disconnects.
        """
        await request.body()
        await cancel_on_disconnect(request.receive, self._proof(self._handle.require()))
        return json_response(Health("ok"))

    async def metrics(self, request: Request) -> Response:
        """Returns the metrics; without the right key, the public ones. Gauges are as old as the engine's last status.

        Raises:
            AuthenticationError: The request has an unknown key.
        """
        is_whole = self._auth.sees_metrics(request)
        engine, status = self._handle.engine, None
        with suppress(HiserveError):
            status = await self._handle.status(METRICS_TIMEOUT_S)
        self._metrics.engine.observe(
            status,
            scheduler_pid=engine.started.scheduler_pid if engine else 0,
            num_restarts=self._handle.num_restarts,
            num_slow_readers=self._handle.num_slow_readers,
        )
        return Response(self._metrics.render(is_whole=is_whole), media_type=CONTENT_TYPE_LATEST)

    async def _proof(self, engine: EngineClient) -> None:
        """Returns after the first progress.

        Raises:
            UnavailableError: No progress within ``PROBE_TIMEOUT_S``.
            HiserveError: The probe failed.
        """
        tasks = asyncio.create_task(self._probe(engine)), asyncio.create_task(self._progress())
        try:
            done, _ = await asyncio.wait(tasks, timeout=PROBE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise UnavailableError(f"the engine produced nothing within {PROBE_TIMEOUT_S:g} s.")
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, engine: EngineClient) -> None:
        """Returns after the reply to a request of one token; if the queue is full, after a step."""
        sampling = SamplingParams(temperature=0, max_tokens=1)
        try:
            async for _ in engine.generate(np.zeros(1, np.int32), sampling, namespace=namespace_digest("probe")):
                pass
        except OverloadedError:
            await self._progress()

    async def _progress(self) -> None:
        """Returns after a worker has ended a step."""
        before = await self._steps()
        while await self._steps() == before:
            await asyncio.sleep(PROBE_PERIOD_S)

    async def _steps(self) -> list[tuple[int, int, int]]:
        status = await self._handle.status(PROBE_TIMEOUT_S)
        return [(worker.replica, worker.incarnation, worker.stats.steps) for worker in status.workers]
