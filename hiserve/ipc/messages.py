"""Messages between processes: typed structs.

Directions: client -> scheduler ``Generate Abort Flush Inspect Watch Query Stop``; scheduler -> client
``Started StartFailed RequestUpdates Failed WorkerLost WorkerBack Halted Flushed Inspected Watched Status``; scheduler -> worker
``Configure Admit Abort Flush Inspect Watch Stop``; worker -> scheduler ``Ready WorkerFailed StepReport CacheFlushed CacheInspected
EngineWatched``. The scheduler passes ``Flush Inspect Watch`` on to the ready workers, and joins their answers. The tokens of ``Generate``
and ``Admit`` travel in a second frame; output travels as ``ipc.updates.RequestUpdates``.
"""

from __future__ import annotations

import msgspec

from hiserve.config.settings import Settings
from hiserve.core.request import Retain, SamplingParams
from hiserve.core.startup_measurements import NO_MEASUREMENTS, StartupMeasurements
from hiserve.core.usage import DraftStats, GrammarStats
from hiserve.ipc.cache_stats import CacheStats, NodeFacts, TierName, TreeFacts
from hiserve.ipc.lifecycle import Crash, CrashSnapshot, Recovery, ReplayStats
from hiserve.ipc.updates import RequestUpdates
from hiserve.ipc.watching import RowFacts, StepRecord, Subject, WorkerView

# --- client -> scheduler ------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request. Frames: tokens int32 ``[n]``, prompt then generated."""

    uid: int  # unique within the client's life, positive
    sampling: SamplingParams  # as requested; the seed may be None
    namespace: bytes = b""  # digest that separates tenants; empty for the default tenant
    choice: int = 0  # index among the request's n choices
    priority: int = 0  # larger is sooner, under the priority policy
    caller: int = 0  # number of its API key, for fair queueing; 0 without keys
    session: bytes = b""  # digest; chooses a worker where no prefix does; empty without one
    retain: Retain = ()
    num_resumed: int = 0  # tokens at the end that another engine generated for the same request


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stop these requests; each still ends once, with finish ``abort``."""

    uids: list[int]


class Flush(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Empty these tiers of the prefix cache. Answered by ``CacheFlushed`` of each worker, then by ``Flushed``."""

    ticket: int
    tiers: tuple[TierName, ...]


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Return the upper levels of the radix tree, ``depth`` below the roots. Answered by ``CacheInspected``, then ``Inspected``."""

    ticket: int
    depth: int


class Watch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Return the rows, or the steps; workers then record steps for ``LEASE_S``. Answered by ``EngineWatched``, then ``Watched``."""

    ticket: int
    subject: Subject
    since_s: float = 0.0  # steps that ended later, by ``time.monotonic``


class Query(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Return the state of scheduler and workers. Answered by ``Status``."""

    ticket: int


# --- scheduler -> client ------------------------------------------------------------------


GateCounts = dict[str, dict[str, int]]  # of runners/gate.py: decision -> reason -> steps


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
    grammars: GrammarStats = GrammarStats()


class WorkerFacts(msgspec.Struct, frozen=True):
    """One worker as ``/server_info`` shows it."""

    replica: int
    pid: int
    incarnation: int  # starts at 1; grows with each restart
    startup_s: dict[str, float]  # seconds per start-up phase, in order
    num_pages: int  # KV pages, without the padding page
    stats: WorkerStats  # gauges and counters of the last report (see ``WorkerStats``)
    step_age_s: float = 0.0  # seconds since it last ended a step, or had no work


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
    """A request ended with an error. Terminal."""

    uid: int
    status: int
    code: str
    message: str
    retry_after_s: int | None = None  # suggested delay of a retry; None if unknown


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


class Watched(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to ``Watch``: the views of the ready workers, by replica."""

    ticket: int
    views: list[WorkerView]


class Status(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to ``Query``."""

    ticket: int
    queued: int  # requests without a worker
    queued_tokens: int  # tokens of their prompts
    workers: list[WorkerFacts]  # living workers, by replica
    stale_messages: int = 0  # of dead incarnations, ignored
    malformed_messages: int = 0
    replays: ReplayStats = ReplayStats()  # requests that continued on another worker
    crash: Crash | None = None
    recovery: Recovery | None = None


# --- scheduler -> worker ------------------------------------------------------------------


class Configure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First message to a worker."""

    settings: Settings
    replica: int
    incarnation: int  # starts at 1; part of every message of the worker
    host_fd: int = -1  # descriptor number of the host segment in the worker; -1 without a host cache
    measurements: StartupMeasurements = NO_MEASUREMENTS  # of the first incarnation; empty for the first


class Admit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request for this worker. Frames: tokens int32 ``[n]``, prompt then generated."""

    uid: int
    num_prompt: int  # leading tokens that are the prompt; the rest was generated before a restart
    sampling: SamplingParams  # with a seed; ``max_tokens`` counts from the end of the prompt
    namespace: bytes
    choice: int
    priority: int = 0  # pages of a larger priority are evicted later, under ``--eviction priority``
    num_scored: int = 0  # prompt tokens whose scores were sent before a restart
    caller: int = 0  # number of its API key, whose share of the cache it uses; 0 without keys
    retain: Retain = ()


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Exit with status 0. Also from the client to the scheduler. A second ``Stop`` ends the grace period of the first."""

    copy_s: float = 0.0  # grace period for copies of pages to the host and the store, in seconds


# --- worker -> scheduler ------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker can take requests."""

    incarnation: int
    pid: int
    max_running: int  # rows
    max_len: int  # longest prompt plus output, in tokens
    num_pages: int  # KV pages, without the padding page
    page_size: int  # tokens per page
    namespace: bytes  # digest of everything that separates caches, but for tenants
    startup_s: dict[str, float]  # seconds per start-up phase
    measurements: StartupMeasurements = NO_MEASUREMENTS  # for its successors


class WorkerFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start-up failed, or a fatal error; the worker exits after this."""

    incarnation: int
    message: str
    code: str
    trace: str
    fault_s: float  # time, by ``time.monotonic``
    snapshot: CrashSnapshot | None = None  # state of its engine; None without an engine


class StepReport(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The changes of one or more steps."""

    incarnation: int
    updates: RequestUpdates  # output of requests, and pages of the cache
    stats: WorkerStats  # gauges and counters after the step


class CacheFlushed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to ``Flush``."""

    incarnation: int
    ticket: int
    pages: int


class CacheInspected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to ``Inspect``: nodes as ``TreeFacts`` has them."""

    incarnation: int
    ticket: int
    nodes: list[NodeFacts]


class EngineWatched(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to ``Watch``: as ``WorkerView`` has them."""

    incarnation: int
    ticket: int
    until_s: float
    rows: list[RowFacts]
    steps: list[StepRecord]


ToScheduler = Generate | Abort | Flush | Inspect | Watch | Query | Stop
ToClient = (
    Started
    | StartFailed
    | RequestUpdates
    | Failed
    | WorkerLost
    | WorkerBack
    | Halted
    | Flushed
    | Inspected
    | Watched
    | Status
)
ToWorker = Configure | Admit | Abort | Flush | Inspect | Watch | Stop
FromWorker = Ready | WorkerFailed | StepReport | CacheFlushed | CacheInspected | EngineWatched


class StepCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The check of a step of one kind."""

    kind: str  # prefill, decode, verify or mixed
    ran: str  # the gate's decision and reason
    allocations: float  # of device memory, per step after warm-up; of a whole graph, calls of the allocator
    difference: float  # of its keys and values from those of an eager step, as a share of the largest
    problems: list[str]  # one sentence each; empty if the check passed


class GraphReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of ``hiserve.engine.graph_check`` to ``hiserve doctor --graphs``: the checks of a device."""

    device: str
    num_nodes: int  # nodes of all graphs captured for the check
    checks: list[StepCheck]  # eager steps, then replayed ones
