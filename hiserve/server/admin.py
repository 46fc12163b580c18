"""Endpoints for the server's operator: information, load, ending requests."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hiserve import __version__
from hiserve.config.options import without_secrets
from hiserve.core.resolve import Resolved
from hiserve.errors import RequestError, UnavailableError
from hiserve.ipc.messages import Status, WorkerFacts
from hiserve.server.admin_types import AbortRequest
from hiserve.server.auth import Auth, tag_of
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.reply_format import ServedModel, json_response
from hiserve.server.request_body import BodyReader
from hiserve.server.routes import Endpoint
from hiserve.text.request_json import decode

STATUS_TIMEOUT_S = 10.0
INFO_TIMEOUT_S = 2.0  # short, because an outage is when it is read


class AdminRoutes:
    """Handlers outside ``/v1``, under the names that SGLang's and vLLM's clients call.

    Args:
        handle: Of the engine.
        bodies: Reads request bodies.
        auth: Checks keys.
        model: The served model.
        resolved: The configuration in force.
        startup_s: Seconds per start-up phase of the API process, the engine not included.
    """

    def __init__(
        self,
        handle: EngineHandle,
        bodies: BodyReader,
        auth: Auth,
        model: ServedModel,
        resolved: Resolved,
        startup_s: dict[str, float],
    ) -> None:
        self._handle = handle
        self._bodies = bodies
        self._auth = auth
        self._model = model
        self._resolved = resolved
        self._startup_s = startup_s

    def routes(self) -> list[Endpoint]:
        """Returns the routes."""
        return [
            Endpoint("/server_info", self.server_info, "GET"),
            Endpoint("/get_server_info", self.server_info, "GET"),
            Endpoint("/model_info", self.model_info, "GET"),
            Endpoint("/get_model_info", self.model_info, "GET"),
            Endpoint("/get_load", self.load, "GET"),
            Endpoint("/v1/loads", self.loads, "GET"),
            Endpoint("/abort_request", self.abort_request, "POST"),
        ]

    async def server_info(self, request: Request) -> Response:
        """Returns version, configuration, start-up times, processes and the workers' counters. Needs the admin key.

        If the engine does not answer, its last known state is returned, with its age and the error.
        """
        self._auth.require_admin(request)
        engine, error = self._handle.engine, None
        if engine is not None:
            try:
                await self._handle.status(INFO_TIMEOUT_S)
            except UnavailableError as failure:
                error = failure.message
        status, crash = self._handle.last_status, self._handle.crash
        known = status.workers if status else engine.started.workers if engine else []
        workers = [_facts(worker) for worker in known]
        startup = {"api": {**self._startup_s, "engine": self._handle.startup_s}}
        startup |= {f"worker {worker['replica']}": worker["startup_s"] for worker in workers}
        processes = {
            "api": os.getpid(),
            "scheduler": engine.started.scheduler_pid if engine else None,
            "workers": [{key: worker[key] for key in ("replica", "pid", "incarnation")} for worker in workers],
        }
        info = {
            "version": __version__,
            "not_ready_because": self._handle.reason,
            "engine_error": error,
            "state_age_s": round(time.monotonic() - self._handle.last_status_s, 3) if status else None,
            "config": msgspec.to_builtins(without_secrets(self._resolved.settings)),
            "decisions": self._resolved.decisions,
            "memory_bytes": self._resolved.memory.parts,
            "host_memory_bytes": self._resolved.memory.host_parts,
            "startup_s": startup,
            "processes": processes,
            "num_inflight": engine.num_inflight if engine else 0,
            "num_queued": status.queued if status else 0,
            "workers": workers,
            "replays": msgspec.to_builtins(status.replays) if status else None,
            "num_worker_restarts": self._handle.num_restarts,
            "crash": msgspec.to_builtins(crash) if crash else None,
            "recovery": msgspec.to_builtins(status.recovery) if status else None,
            **self._identity(),
            "internal_states": [worker["stats"] for worker in workers],
        }
        return json_response(info)

    async def model_info(self, _: Request) -> Response:
        """Describes the model to routers and benchmarks."""
        engine = self._handle.engine
        info = {
            **self._identity(),
            "tokenizer_path": self._model.root,
            "is_generation": True,
            "max_model_len": engine.max_model_len if engine else None,
            "vocab_size": self._model.vocab_size,
            "device": self._resolved.settings.model.device,
            "page_size": self._resolved.settings.cache.page_size,
            "weight_version": self._model.fingerprint,
        }
        return json_response(info)

    async def load(self, _: Request) -> Response:
        """Returns the load of all workers together, in the form of SGLang's ``/get_load``."""
        load = self._load(await self._handle.status(STATUS_TIMEOUT_S))
        entry = {"dp_rank": 0, "num_reqs": load["num_total_reqs"], "num_waiting_reqs": load["num_waiting_reqs"]}
        return json_response([{**entry, "num_tokens": load["num_used_tokens"]}])

    async def loads(self, _: Request) -> Response:
        """Returns the same in the form of SGLang's ``/v1/loads``."""
        load = self._load(await self._handle.status(STATUS_TIMEOUT_S))
        info = {"timestamp": time.time(), "version": __version__, "dp_rank_count": 1, "loads": [{"dp_rank": 0, **load}]}
        return json_response(info)

    async def abort_request(self, request: Request) -> Response:
        """Ends requests; each is answered with its tokens so far and ``finish_reason`` abort.

        ``rid`` names the caller's own (its ``x-request-id``, or its body's ``rid``). With the admin key it names
        anyone's, and ``abort_all`` ends all requests.
        """
        asked = decode(await self._bodies.read(request), AbortRequest)
        rid = asked.rid or ""
        if asked.abort_all:
            self._auth.require_admin(request)
        elif not rid:
            raise RequestError("rid is missing; name a request, or set abort_all.", param="rid")
        engine = self._handle.require()
        if asked.abort_all:
            return json_response({"aborted": engine.abort()})
        tags = self._auth.tags(rid) if self._auth.is_admin(request) else [tag_of(request, rid)]
        return json_response({"aborted": sum(engine.abort(tag) for tag in tags)})

    def _identity(self) -> dict[str, Any]:
        """Returns the fields from which sglang-router takes a worker's model. To it, this server is one rank."""
        name, root = self._model.name, self._model.root
        return {"served_model_name": name, "model_path": root, "tp_size": 1, "dp_size": 1}

    def _load(self, status: Status) -> dict[str, Any]:
        page_size = self._resolved.settings.cache.page_size
        stats = [worker.stats for worker in status.workers]
        num_pages = sum(worker.num_pages for worker in status.workers)
        num_used = num_pages - sum(stat.free_pages + stat.evictable_pages for stat in stats)
        running = sum(stat.running for stat in stats)
        waiting = status.queued + sum(stat.waiting for stat in stats)
        return {
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_used_tokens": num_used * page_size,
            "max_total_num_tokens": num_pages * page_size,
            "token_usage": num_used / num_pages if num_pages else 0.0,
        }


def _facts(worker: WorkerFacts) -> dict[str, Any]:
    """Returns a worker as JSON, with its drafts in the form of ``usage``."""
    facts: dict[str, Any] = msgspec.to_builtins(worker)
    by_source = worker.stats.drafts.by_source
    facts["stats"]["drafts"]["by_source"] = {source: use.shown() for source, use in by_source.items()}
    return facts
