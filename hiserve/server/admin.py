"""Endpoints for whoever runs the server: health, readiness, metrics, information, flushing."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from hiserve import __version__
from hiserve.core.resolve import Resolved
from hiserve.errors import HiserveError, UnavailableError
from hiserve.messages.types import Status
from hiserve.server.failures import error_response
from hiserve.server.gate import Gate
from hiserve.server.metrics import Metrics
from hiserve.server.shapes import json_response

METRICS_TIMEOUT_S = 1.0
STATUS_TIMEOUT_S = 10.0


class AdminRoutes:
    """Handlers outside ``/v1``.

    Args:
        gate: Where the engine is.
        metrics: What ``/metrics`` shows.
        resolved: The configuration in force.
        startup_s: Seconds per start-up phase of the API process, the engine not included.
    """

    def __init__(self, gate: Gate, metrics: Metrics, resolved: Resolved, startup_s: dict[str, float]) -> None:
        self._gate = gate
        self._metrics = metrics
        self._resolved = resolved
        self._startup_s = startup_s

    def router(self) -> APIRouter:
        """Returns the routes."""
        router = APIRouter()
        router.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        router.add_api_route("/ready", self.ready, methods=["GET", "HEAD"])
        router.add_api_route("/metrics", self.metrics, methods=["GET", "HEAD"])
        router.add_api_route("/server_info", self.server_info, methods=["GET"])
        router.add_api_route("/flush_cache", self.flush_cache, methods=["GET", "POST"])
        return router

    async def health(self) -> Response:
        """Says that this process and its event loop live. Constant time."""
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        """Says whether a request would be served now; if not, 503 and why."""
        if self._gate.reason is not None:
            return error_response(503, self._gate.reason, code="unavailable")
        return json_response({"status": "ready"})

    async def metrics(self) -> Response:
        """Shows all metrics; the engine's gauges are as old as its last answer."""
        try:
            self._metrics.observe(await self._status(METRICS_TIMEOUT_S))
        except HiserveError:
            self._metrics.observe(None)
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def server_info(self) -> Response:
        """Shows version, configuration, start-up times, processes and the workers' counters."""
        engine = self._gate.engine
        status = await self._status(STATUS_TIMEOUT_S) if engine else None
        workers: list[dict[str, Any]] = msgspec.to_builtins(status.workers) if status else []
        startup = {"api": {**self._startup_s, "engine": self._gate.startup_s}}
        startup |= {f"worker {worker['replica']}": worker["startup_s"] for worker in workers}
        processes = {
            "api": os.getpid(),
            "scheduler": engine.started.scheduler_pid if engine else None,
            "workers": [{key: worker[key] for key in ("replica", "pid", "incarnation")} for worker in workers],
        }
        info = {
            "version": __version__,
            "not_ready_because": self._gate.reason,
            "config": msgspec.to_builtins(self._resolved.config),
            "decisions": self._resolved.decisions,
            "memory_bytes": self._resolved.memory,
            "startup_s": startup,
            "processes": processes,
            "num_inflight": engine.num_inflight if engine else 0,
            "num_queued": status.queued if status else 0,
            "workers": workers,
        }
        return json_response(info)

    async def flush_cache(self) -> Response:
        """Empties the prefix caches; pages in use by running requests stay."""
        return json_response({"flushed_pages": await self._gate.require().flush()})

    async def _status(self, timeout_s: float) -> Status:
        engine = self._gate.engine
        if engine is None:
            raise UnavailableError(f"{self._gate.reason}; try again later.")
        try:
            async with asyncio.timeout(timeout_s):
                return await engine.status()
        except TimeoutError:
            raise UnavailableError(f"the engine did not answer within {timeout_s:g} s.") from None
