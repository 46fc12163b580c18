"""Endpoints that show the running rows and the latest steps. A worker records steps only while one of them is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hiserve.errors import RequestError
from hiserve.ipc.watching import RowFacts, StepRecord, Subject, WorkerView
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.http.auth import Auth
from hiserve.server.reply.format import json_response
from hiserve.server.routes import Endpoint

FORMATS = ("json", "chrome")
_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,17})?")


class ReplicaRows(msgspec.Struct):
    """The rows of one worker."""

    replica: int
    incarnation: int
    rows: list[RowFacts]


class Rows(msgspec.Struct):
    """Reply of ``/debug/rows``."""

    replicas: list[ReplicaRows]


class ReplicaSteps(msgspec.Struct):
    """The steps of one worker, oldest first."""

    replica: int
    incarnation: int
    steps: list[StepRecord]


class Steps(msgspec.Struct):
    """Reply of ``/debug/steps``; ``until_s`` is the next ``since``: no step is left out or shown twice."""

    until_s: float
    replicas: list[ReplicaSteps]


class DebugRoutes:
    """Handlers of rows and steps.

    Args:
        handle: Of the engine.
        auth: Checks keys.
    """

    def __init__(self, handle: EngineHandle, auth: Auth) -> None:
        self._handle = handle
        self._auth = auth

    def routes(self) -> list[Endpoint]:
        """Returns the routes."""
        since = {"type": "number", "minimum": 0, "default": 0}
        form = {"type": "string", "enum": list(FORMATS), "default": "json"}
        return [
            Endpoint("/debug/rows", self.rows, "GET", reply=Rows),
            Endpoint("/debug/steps", self.steps, "GET", reply=Steps, query={"since": since, "format": form}),
        ]

    async def rows(self, request: Request) -> Response:
        """Returns the running rows of each worker, without tokens. Needs the admin key."""
        self._auth.require_admin(request)
        views = await self._watch("rows")
        return json_response(Rows([ReplicaRows(view.replica, view.incarnation, view.rows) for view in views]))

    async def steps(self, request: Request) -> Response:
        """Returns the steps that ended after ``since``, the last 4,096 at most; ``format=chrome`` as a trace of Chrome.

        Steps are recorded from the first question until 10 s after the last. Needs the admin key.
        """
        self._auth.require_admin(request)
        form = request.query_params.get("format", FORMATS[0])
        if form not in FORMATS:
            raise RequestError(f"format must be one of {', '.join(FORMATS)}.", param="format")
        views = await self._watch("steps", _since(request))
        if form == "chrome":
            return json_response({"traceEvents": list(_trace(views)), "displayTimeUnit": "ms"})
        # A worker that answered early may have ended steps since: they come with the next question.
        until_s = min((view.until_s for view in views), default=0.0)
        replicas = [
            ReplicaSteps(view.replica, view.incarnation, [step for step in view.steps if step.end_s <= until_s])
            for view in views
        ]
        return json_response(Steps(until_s, replicas))

    async def _watch(self, subject: Subject, since_s: float = 0.0) -> list[WorkerView]:
        return await self._handle.ask(lambda engine: engine.watch(subject, since_s))


def _since(request: Request) -> float:
    text = request.query_params.get("since", "0")
    if not _SECONDS.fullmatch(text):
        raise RequestError("since must be a number of seconds, the until_s of an earlier reply.", param="since")
    return float(text)


def _trace(views: list[WorkerView]) -> Iterator[dict[str, Any]]:
    """Yields the events of Chrome's trace format: a process for each worker, a slice for each step. Times are in microseconds."""
    for view in views:
        yield {"ph": "M", "name": "process_name", "pid": view.replica, "args": {"name": f"worker {view.replica}"}}
        for step in view.steps:
            begin_us = round(1e6 * step.begin_s, 1)
            yield {
                "ph": "X",
                "cat": "step",
                "name": f"{step.decision} {step.reason}".strip() or "copies",
                "pid": view.replica,
                "tid": 0,
                "ts": begin_us,
                "dur": round(1e6 * (step.end_s - step.begin_s), 1),
                "args": msgspec.structs.asdict(step),
            }
            yield {"ph": "C", "name": "rows", "pid": view.replica, "ts": begin_us, "args": {"rows": step.num_rows}}
