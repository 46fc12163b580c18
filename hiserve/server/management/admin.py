"""Endpoints for the server's operator: information, load, ending requests."""

from __future__ import annotations

import os
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hiserve import __version__
from hiserve.config.options import without_secrets
from hiserve.config.settings import Settings
from hiserve.core.resolve import Resolved
from hiserve.errors import RequestError, UnavailableError
from hiserve.ipc.lifecycle import Crash, Recovery, ReplayStats
from hiserve.ipc.messages import Status, WorkerFacts, WorkerStats
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.http.auth import Auth, tag_of
from hiserve.server.reply.format import ServedModel, SpecTokensDetails, draft_details, json_response
from hiserve.server.request.body import Body, BodyReader
from hiserve.server.request.sampling_fields import Name
from hiserve.server.routes import Endpoint
from hiserve.text.abilities import Abilities
from hiserve.text.body.json import decode
from hiserve.text.template.probes import TemplateAbilities

STATUS_TIMEOUT_S = 10.0
INFO_TIMEOUT_S = 2.0  # short, because an outage is when it is read


class AbortRequest(msgspec.Struct, frozen=True):
    """Body of ``/abort_request``: one of the caller's own requests, or all requests."""

    rid: Name | None = None
    abort_all: bool | None = None


class Aborted(msgspec.Struct):
    """Reply of ``/abort_request``: the number of requests that were ended."""

    aborted: int


class ModelInfo(msgspec.Struct):
    """Reply of ``/model_info``. sglang-router reads a worker's model from the first four; this server is one rank."""

    served_model_name: str
    model_path: str
    tp_size: int
    dp_size: int
    tokenizer_path: str
    is_generation: bool
    max_model_len: int | None
    vocab_size: int
    device: str
    page_size: int
    weight_version: str


class Process(msgspec.Struct):
    """A worker process."""

    replica: int
    pid: int
    incarnation: int


class Processes(msgspec.Struct):
    """Process ids; ``scheduler`` is null before the engine has started."""

    api: int
    scheduler: int | None
    workers: list[Process]


class DraftInfo(msgspec.Struct, frozen=True):
    """``DraftStats`` with each source in the form of ``usage``."""

    by_source: dict[str, SpecTokensDetails] = {}
    chosen_steps: dict[str, int] = {}
    reply_searches: dict[str, int] = {}
    kept_reply_tokens: int = 0


class WorkerCounters(WorkerStats, frozen=True):
    """``WorkerStats`` as ``/server_info`` shows it."""

    drafts: DraftInfo = DraftInfo()  # type: ignore[assignment]


class WorkerInfo(WorkerFacts, frozen=True):
    """``WorkerFacts`` as ``/server_info`` shows it."""

    stats: WorkerCounters


class ServerInfo(msgspec.Struct):
    """Reply of ``/server_info``; ``state_age_s`` is the age in seconds of all that the engine reports."""

    version: str
    not_ready_because: str | None
    engine_error: str | None
    state_age_s: float | None
    config: Settings
    decisions: tuple[str, ...]
    memory_bytes: dict[str, int]
    host_memory_bytes: dict[str, int]
    startup_s: dict[str, dict[str, float]]
    processes: Processes
    num_inflight: int
    num_queued: int
    workers: list[WorkerInfo]
    replays: ReplayStats | None
    num_worker_restarts: int
    crash: Crash | None
    recovery: Recovery | None
    served_model_name: str
    model_path: str
    chat_template: TemplateAbilities
    tp_size: int
    dp_size: int
    internal_states: list[WorkerCounters]


class Load(msgspec.Struct):
    """An entry of ``/get_load``."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class RankLoad(msgspec.Struct):
    """An entry of ``/v1/loads``."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float


class Loads(msgspec.Struct):
    """Reply of ``/v1/loads``."""

    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[RankLoad]


ABORT = Body("AbortRequest", (AbortRequest,), ignores_others=True)


class AdminRoutes:
    """Handlers outside ``/v1``, under the names that SGLang's and vLLM's clients call.

    Args:
        handle: Of the engine.
        bodies: Reads request bodies.
        auth: Checks keys.
        model: The served model.
        abilities: Of its chat template.
        resolved: The configuration in force.
        startup_s: Seconds per start-up phase of the API process, the engine not included.
    """

    def __init__(
        self,
        handle: EngineHandle,
        bodies: BodyReader,
        auth: Auth,
        model: ServedModel,
        abilities: Abilities,
        resolved: Resolved,
        startup_s: dict[str, float],
    ) -> None:
        self._handle = handle
        self._bodies = bodies
        self._auth = auth
        self._model = model
        self._abilities = abilities
        self._resolved = resolved
        self._startup_s = startup_s

    def routes(self) -> list[Endpoint]:
        """Returns the routes."""
        return [
            Endpoint("/server_info", self.server_info, "GET", reply=ServerInfo),
            Endpoint("/get_server_info", self.server_info, "GET", reply=ServerInfo),
            Endpoint("/model_info", self.model_info, "GET", reply=ModelInfo),
            Endpoint("/get_model_info", self.model_info, "GET", reply=ModelInfo),
            Endpoint("/get_load", self.load, "GET", reply=list[Load]),
            Endpoint("/v1/loads", self.loads, "GET", reply=Loads),
            Endpoint("/abort_request", self.abort_request, "POST", body=ABORT, reply=Aborted),
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
        workers = [_worker_info(worker) for worker in known]
        startup = {"api": {**self._startup_s, "engine": self._handle.startup_s}}
        startup |= {f"worker {worker.replica}": worker.startup_s for worker in workers}
        info = ServerInfo(
            version=__version__,
            not_ready_because=self._handle.reason,
            engine_error=error,
            state_age_s=round(time.monotonic() - self._handle.last_status_s, 3) if status else None,
            config=without_secrets(self._resolved.settings),
            decisions=self._resolved.decisions,
            memory_bytes=self._resolved.memory.parts,
            host_memory_bytes=self._resolved.memory.host_parts,
            startup_s=startup,
            processes=Processes(
                api=os.getpid(),
                scheduler=engine.started.scheduler_pid if engine else None,
                workers=[Process(worker.replica, worker.pid, worker.incarnation) for worker in workers],
            ),
            num_inflight=engine.num_inflight if engine else 0,
            num_queued=status.queued if status else 0,
            workers=workers,
            replays=status.replays if status else None,
            num_worker_restarts=self._handle.num_restarts,
            crash=crash,
            recovery=status.recovery if status else None,
            served_model_name=self._model.name,
            model_path=self._model.root,
            chat_template=self._abilities.template,
            tp_size=1,
            dp_size=1,
            internal_states=[worker.stats for worker in workers],
        )
        return json_response(info)

    async def model_info(self, _: Request) -> Response:
        """Describes the model to routers and benchmarks."""
        engine = self._handle.engine
        info = ModelInfo(
            served_model_name=self._model.name,
            model_path=self._model.root,
            tp_size=1,
            dp_size=1,
            tokenizer_path=self._model.root,
            is_generation=True,
            max_model_len=engine.max_model_len if engine else None,
            vocab_size=self._model.vocab_size,
            device=self._resolved.settings.model.device,
            page_size=self._resolved.settings.cache.page_size,
            weight_version=self._model.fingerprint,
        )
        return json_response(info)

    async def load(self, _: Request) -> Response:
        """Returns the load of all workers together, in the form of SGLang's ``/get_load``."""
        load = self._load(await self._handle.status(STATUS_TIMEOUT_S))
        return json_response([Load(load.dp_rank, load.num_total_reqs, load.num_waiting_reqs, load.num_used_tokens)])

    async def loads(self, _: Request) -> Response:
        """Returns the same in the form of SGLang's ``/v1/loads``."""
        load = self._load(await self._handle.status(STATUS_TIMEOUT_S))
        return json_response(Loads(timestamp=time.time(), version=__version__, dp_rank_count=1, loads=[load]))

    async def abort_request(self, request: Request) -> Response:
        """Ends requests; each is answered with its tokens so far and ``finish_reason`` abort.

        ``rid`` names the caller's own (its ``x-request-id``, or its body's ``rid``). With the admin key it names
        anyone's, and ``abort_all`` ends all requests.
        """
        fields = decode(await self._bodies.read(request, ABORT), AbortRequest)
        rid = fields.rid or ""
        if fields.abort_all:
            self._auth.require_admin(request)
        elif not rid:
            raise RequestError("rid is missing; name a request, or set abort_all.", param="rid")
        engine = self._handle.require()
        if fields.abort_all:
            return json_response(Aborted(engine.abort()))
        tags = self._auth.tags(rid) if self._auth.is_admin(request) else [tag_of(request, rid)]
        return json_response(Aborted(sum(engine.abort(tag) for tag in tags)))

    def _load(self, status: Status) -> RankLoad:
        page_size = self._resolved.settings.cache.page_size
        stats = [worker.stats for worker in status.workers]
        num_pages = sum(worker.num_pages for worker in status.workers)
        num_used = num_pages - sum(stat.free_pages + stat.evictable_pages for stat in stats)
        running = sum(stat.running for stat in stats)
        waiting = status.queued + sum(stat.waiting for stat in stats)
        return RankLoad(
            dp_rank=0,
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=num_used * page_size,
            max_total_num_tokens=num_pages * page_size,
            token_usage=num_used / num_pages if num_pages else 0.0,
        )


def _worker_info(worker: WorkerFacts) -> WorkerInfo:
    """Returns a worker with its drafts in the form of ``usage``."""
    stats = worker.stats
    by_source = {source: draft_details(use) for source, use in stats.drafts.by_source.items()}
    counts = stats.drafts
    drafts = DraftInfo(by_source, counts.chosen_steps, counts.reply_searches, counts.kept_reply_tokens)
    counters = WorkerCounters(**msgspec.structs.asdict(stats) | {"drafts": drafts})
    return WorkerInfo(**msgspec.structs.asdict(worker) | {"stats": counters})
