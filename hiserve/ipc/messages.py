"""Messages between processes: typed structs.

Directions: client -> scheduler ``Generate Abort Flush Inspect Query Stop``; scheduler -> client
``Started StartFailed RequestUpdates Failed WorkerLost WorkerBack Halted Flushed Inspected Status``; scheduler -> worker
``Configure Admit Drop FlushCache InspectCache Stop``; worker -> scheduler ``Ready WorkerFailed StepReport CacheFlushed
CacheInspected``. The tokens of ``Generate`` and ``Admit`` travel in a second frame; output travels as
``ipc.updates.RequestUpdates``.
"""

from __future__ import annotations

import msgspec

from hiserve.config.settings import Settings
from hiserve.core.request import SamplingParams
from hiserve.core.startup_measurements import NO_MEASUREMENTS, StartupMeasurements
from hiserve.core.usage import DraftStats
from hiserve.ipc.cache_stats import CacheStats, NodeFacts, TierName, TreeFacts
from hiserve.ipc.lifecycle import Crash, CrashSnapshot, Recovery, ReplayStats
from hiserve.ipc.updates import RequestUpdates

# --- client -> scheduler ------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request. Frames: prompt int32 ``[n]``.

    Attributes:
        uid: Unique within the client's life, positive.
        sampling: As requested; the seed may be None.
        namespace: Digest that separates tenants; empty for the default tenant.
        choice: Index among the request's n choices.
        priority: Larger is sooner, under the priority policy.
        caller: Number of its API key, for fair queueing; 0 without keys.
    """

    uid: int
    sampling: SamplingParams
    namespace: bytes = b""
    choice: int = 0
    priority: int = 0
    caller: int = 0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stop these requests; each still ends with one terminal message (finish ``abort``)."""

    uids: list[int]


class Flush(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Empty these tiers of every prefix cache. Answered by ``Flushed``."""

    ticket: int
    tiers: tuple[TierName, ...]


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Return the upper levels of every radix tree, ``depth`` below the roots. Answered by ``Inspected``."""

    ticket: int
    depth: int


class Query(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Return the state of scheduler and workers. Answered by ``Status``."""

    ticket: int


# --- scheduler -> client ------------------------------------------------------------------


GateCounts = dict[str, dict[str, int]]  # verdicts of runners/gate.py: decision -> reason -> steps


class WorkerStats(msgspec.Struct, frozen=True):
    """A worker's gauges and counters, as of one step. Counters never decrease."""

    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    stale_rows: int = 0
    deferred_steps: int = 0
    dropped_event_batches: int = 0
    graph_gate: GateCounts = {}
    step_faults: dict[str, int] = {}
    cache: CacheStats = CacheStats()
    drafts: DraftStats = DraftStats()


class WorkerFacts(msgspec.Struct, frozen=True):
    """One worker as ``/server_info`` shows it.

    Attributes:
        replica: Index from 0.
        pid: Process id.
        incarnation: Starts at 1; grows with each restart.
        startup_s: Seconds per start-up phase, in order.
        num_pages: KV pages, without the padding page.
        stats: Gauges and counters of the last report (see ``WorkerStats``).
        step_age_s: Seconds since it last ended a step, or had no work.
    """

    replica: int
    pid: int
    incarnation: int
    startup_s: dict[str, float]
    num_pages: int
    stats: WorkerStats
    step_age_s: float = 0.0


class Started(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All workers are ready. Sent once."""

    scheduler_pid: int
    workers: list[WorkerFacts]


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start-up failed; the scheduler exits after this. ``trace`` is for ``--debug``."""

    message: str
    code: str
    trace: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request ended with an error. Terminal.

    Attributes:
        retry_after_s: Suggested delay of a retry; None if unknown.
    """

    uid: int
    status: int
    code: str
    message: str
    retry_after_s: int | None = None


class WorkerLost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker died. Sent at once, because the scheduler may die next."""

    crash: Crash


class WorkerBack(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker is ready again after one died."""

    replica: int
    incarnation: int


class Halted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No worker is left, and none will come; all requests are refused from now on."""

    reason: str


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to ``Flush``. ``pages`` were emptied; pages in use by running requests stay."""

    ticket: int
    pages: int


class Inspected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to ``Inspect``: the trees of the ready workers, by replica."""

    ticket: int
    trees: list[TreeFacts]


class Status(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to ``Query``.

    Attributes:
        queued: Requests without a worker.
        queued_tokens: Tokens of their prompts.
        workers: Living workers, by replica.
        stale_messages: Messages ignored because they were of a dead incarnation.
        malformed_messages: Messages that no hiserve process would send.
        replays: Requests that continued on another worker.
        crash: The latest death of a worker.
        recovery: The latest recovery.
    """

    ticket: int
    queued: int
    queued_tokens: int
    workers: list[WorkerFacts]
    stale_messages: int = 0
    malformed_messages: int = 0
    replays: ReplayStats = ReplayStats()
    crash: Crash | None = None
    recovery: Recovery | None = None


# --- scheduler -> worker ------------------------------------------------------------------


class Configure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First message to a worker.

    Attributes:
        settings: Of the server.
        replica: Index from 0.
        incarnation: Starts at 1; part of every message of the worker.
        host_fd: Descriptor number of the host segment in the worker; -1 without a host cache.
        measurements: Of the first incarnation; empty for that one.
    """

    settings: Settings
    replica: int
    incarnation: int
    host_fd: int = -1
    measurements: StartupMeasurements = NO_MEASUREMENTS


class Admit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request for this worker. Frames: tokens int32 ``[n]``, prompt then generated.

    Attributes:
        num_prompt: Leading tokens that are the prompt; the rest was generated before a restart.
        sampling: With a seed; ``max_tokens`` counts from the end of the prompt.
        priority: Pages of a larger priority are evicted later, under ``--eviction priority``.
        num_scored: Prompt tokens whose scores were sent before a restart.
        caller: Number of its API key, whose share of the cache it uses; 0 without keys.
    """

    uid: int
    num_prompt: int
    sampling: SamplingParams
    namespace: bytes
    choice: int
    priority: int = 0
    num_scored: int = 0
    caller: int = 0


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Abort these requests; each is answered once in a ``StepReport``."""

    uids: list[int]


class FlushCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Empty these tiers of this worker's prefix cache."""

    ticket: int
    tiers: tuple[TierName, ...]


class InspectCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Return the upper levels of this worker's radix tree, ``depth`` below the roots."""

    ticket: int
    depth: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Exit with status 0. Also from the client to the scheduler. A second ``Stop`` ends the grace period of the first.

    Attributes:
        copy_s: Grace period for copies of pages to the host and the store, in seconds.
    """

    copy_s: float = 0.0


# --- worker -> scheduler ------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker can take requests.

    Attributes:
        max_running: Rows.
        max_len: Longest prompt plus output, in tokens.
        num_pages: KV pages, without the padding page.
        page_size: Tokens per page.
        namespace: Digest of everything that separates caches, but for tenants.
        startup_s: Seconds per start-up phase.
        measurements: For its successors.
    """

    incarnation: int
    pid: int
    max_running: int
    max_len: int
    num_pages: int
    page_size: int
    namespace: bytes
    startup_s: dict[str, float]
    measurements: StartupMeasurements = NO_MEASUREMENTS


class WorkerFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start-up failed, or a fatal error; the worker exits after this.

    Attributes:
        fault_s: Time, by ``time.monotonic``.
        snapshot: State of its engine; None without an engine.
    """

    incarnation: int
    message: str
    code: str
    trace: str
    fault_s: float
    snapshot: CrashSnapshot | None = None


class StepReport(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The changes of one or more steps.

    Attributes:
        updates: Output of requests, and pages of the cache.
        stats: Gauges and counters after the step.
    """

    incarnation: int
    updates: RequestUpdates
    stats: WorkerStats


class CacheFlushed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to ``FlushCache``."""

    incarnation: int
    ticket: int
    pages: int


class CacheInspected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to ``InspectCache``: nodes as ``TreeFacts`` has them."""

    incarnation: int
    ticket: int
    nodes: list[NodeFacts]


ToScheduler = Generate | Abort | Flush | Inspect | Query | Stop
ToClient = (
    Started | StartFailed | RequestUpdates | Failed | WorkerLost | WorkerBack | Halted | Flushed | Inspected | Status
)
ToWorker = Configure | Admit | Drop | FlushCache | InspectCache | Stop
FromWorker = Ready | WorkerFailed | StepReport | CacheFlushed | CacheInspected
