"""The metrics of the engine, one row each. A metric is added here, and nowhere else.

At rest ``cache_wanted_tokens == cache_fulfilled_tokens + sum over reasons of cache_unfulfilled_tokens`` for each kind of
copy; while copies run, ``cache_in_flight_tokens`` is the difference. The cache is counted in tokens, to compare with prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from hiserve.core.usage import DraftUse
from hiserve.ipc.cache_stats import StoreStats, TierStats
from hiserve.ipc.lifecycle import ReplayStats
from hiserve.ipc.messages import Status, WorkerStats

# Value of the ``copy`` label -> its field in ``CacheStats``.
COPIES = {"load": "loads", "offload": "offloads", "prefetch": "prefetches", "upload": "uploads"}
NO_STORE, NO_DRAFTS = StoreStats(), DraftUse()

T = TypeVar("T")
Labels = tuple[str, ...]
Values = float | Mapping[str, float] | Mapping[Labels, float]


class EngineState(NamedTuple):
    """The state of the engine in the API process.

    Attributes:
        status: The last one; without workers before the first.
        page_size: Tokens per KV page.
        is_up: The engine answered the last question for its state.
        num_restarts: Workers started again, whichever scheduler started them.
        num_slow_readers: Streams ended because too much of them was not read, in all engines.
    """

    status: Status
    page_size: int
    is_up: bool = False
    num_restarts: int = 0
    num_slow_readers: int = 0


class Row(NamedTuple, Generic[T]):
    """One metric, read when it is scraped.

    Attributes:
        kind: Type for Prometheus.
        name: Without ``hiserve:``, and of a counter without ``_total``.
        labels: Names of the labels, ``model_name`` not included.
        read: Returns the value, or the values by label.
        help: Shown to Prometheus.
        in_pages: ``read`` counts pages; the metric counts tokens.
        is_public: Shown without a key. Hits, lengths and latencies are not: by these, one tenant could infer the prompts of another.
    """

    kind: Literal["counter", "gauge"]
    name: str
    labels: Labels
    read: Callable[[T], Values]
    help: str
    in_pages: bool = False
    is_public: bool = False

    def values(self, source: T, page_size: int) -> dict[Labels, float]:
        """Returns the values by label values."""
        found, scale = self.read(source), page_size if self.in_pages else 1
        if not isinstance(found, Mapping):
            return {(): found * scale}
        return {key if isinstance(key, tuple) else (key,): value * scale for key, value in found.items()}


def _pages(it: WorkerStats) -> Mapping[Labels, float]:
    found: dict[Labels, float] = {}
    for tier, pages in (("device", it.cache.device), ("host", it.cache.host)):
        held = pages.num_pages - pages.num_free - pages.num_evictable
        found |= {(tier, "free"): pages.num_free, (tier, "evictable"): pages.num_evictable, (tier, "held"): held}
    return found


def _tail_pages(pages: TierStats) -> Mapping[str, float]:
    held = pages.num_pages - pages.num_free - pages.num_evictable
    return {"free": pages.num_free, "evictable": pages.num_evictable, "held": held}


def _evicted(it: WorkerStats) -> Mapping[str, float]:
    store = it.cache.store or NO_STORE
    return {"device": it.cache.device.num_evicted, "host": it.cache.host.num_evicted, "store": store.num_evicted}


def _copies(field: str) -> Callable[[WorkerStats], Mapping[str, float]]:
    return lambda it: {copy: getattr(getattr(it.cache, kind), field) for copy, kind in COPIES.items()}


def _unfulfilled(it: WorkerStats) -> Mapping[Labels, float]:
    reasons = {copy: getattr(it.cache, kind).unfulfilled for copy, kind in COPIES.items()}
    return {(copy, reason): count for copy, counts in reasons.items() for reason, count in counts.items()}


def _store_results(it: WorkerStats) -> Mapping[str, float]:
    store = it.cache.store or NO_STORE
    return {
        "hit": store.num_hits,
        "miss": store.num_misses,
        "stored": store.num_stored,
        "refused": store.num_refused,
        "corrupt": store.num_corrupt,
    }


def _gate(it: WorkerStats) -> Mapping[Labels, float]:
    return {(decision, reason): count for decision, counts in it.graph_gate.items() for reason, count in counts.items()}


def _drafts(field: str) -> Callable[[WorkerStats], Mapping[str, float]]:
    return lambda it: {source: getattr(use, field) for source, use in it.drafts.by_source.items()}


def _accepted_per_position(it: WorkerStats) -> Mapping[str, float]:
    use = sum(it.drafts.by_source.values(), NO_DRAFTS)
    return {str(position): count for position, count in enumerate(use.accepted_per_position)}


def _accept_length(it: EngineState) -> Mapping[str, float]:
    uses: dict[str, DraftUse] = {}
    for stats in (worker.stats.drafts for worker in it.status.workers):
        for source, use in stats.by_source.items():
            uses[source] = uses.get(source, NO_DRAFTS) + use
            uses["all"] = uses.get("all", NO_DRAFTS) + use
    return {source: use.accept_length for source, use in uses.items()}


def _store_size(field: str) -> Callable[[EngineState], float]:
    """Returns the largest: all workers have the same store, and each has listed some of the others' pages."""
    return lambda it: max((getattr(one.stats.cache.store or NO_STORE, field) for one in it.status.workers), default=0)


def _waiting(it: EngineState) -> float:
    return it.status.queued + sum(worker.stats.waiting for worker in it.status.workers)


def _usage(it: EngineState) -> float:
    num_pages = sum(worker.num_pages for worker in it.status.workers)
    num_idle = sum(worker.stats.free_pages + worker.stats.evictable_pages for worker in it.status.workers)
    return (num_pages - num_idle) / num_pages if num_pages else 0.0


def _sizes(it: EngineState) -> Mapping[Labels, float]:
    num_pages = sum(worker.num_pages for worker in it.status.workers)
    return {(str(it.page_size), str(num_pages)): 1} if num_pages else {}


# fmt: off
# Sums over the living workers.
WORKER_GAUGES: tuple[Row[WorkerStats], ...] = (
    Row("gauge", "num_requests_running", (), lambda it: it.running,
        "Requests in the workers' batches.", is_public=True),
    Row("gauge", "cache_pages", ("tier", "state"), _pages, "Pages of a tier: free, evictable or held."),
    Row("gauge", "cache_window_pages", ("state",), lambda it: _tail_pages(it.cache.windows),
        "Pages of layers with a window: free, evictable (of tails alone) or held by requests."),
    Row("gauge", "cache_snapshot_slots", ("state",), lambda it: _tail_pages(it.cache.snapshots),
        "Slots of snapshots of recurrent states: free, evictable (of tails alone) or held by requests."),
    Row("gauge", "cache_tails", (), lambda it: max(it.cache.windows.num_tails, it.cache.snapshots.num_tails),
        "Ends of prefixes whose window pages or snapshots are kept: requests can be resumed there."),
    Row("gauge", "hicache_host_used_tokens", (), lambda it: it.cache.host.num_pages - it.cache.host.num_free,
        "Tokens in the host tier.", in_pages=True),
    Row("gauge", "hicache_host_total_tokens", (), lambda it: it.cache.host.num_pages,
        "Tokens that the host tier has room for now.", in_pages=True),
    Row("gauge", "cache_retained_tokens", (), lambda it: it.cache.num_retained,
        "Tokens that are evicted last, as requests asked.", in_pages=True),
    Row("gauge", "cache_in_flight_tokens", ("copy",), _copies("num_in_flight"), "Those on their way.", in_pages=True),
)
# Sums over the workers and their earlier incarnations.
WORKER_COUNTERS: tuple[Row[WorkerStats], ...] = (
    Row("counter", "engine_steps", (), lambda it: it.steps, "Steps that the workers ended."),
    Row("counter", "num_preemptions", (), lambda it: it.preemptions, "Requests preempted for lack of pages."),
    Row("counter", "dropped_event_batches", (), lambda it: it.dropped_event_batches,
        "Batches of KV events dropped: routers were too slow."),
    Row("counter", "graph_gate", ("decision", "reason"), _gate,
        "Steps that were replayed as a CUDA graph, run eagerly or deferred, and why."),
    Row("counter", "step_faults", ("kind",), lambda it: it.step_faults,
        "Steps given up because memory ran out, and requests whose load from the host failed: all tried again."),
    Row("counter", "evicted_tokens", ("tier",), _evicted, "Tokens evicted, by the tier they left.", in_pages=True),
    Row("counter", "evicted_tails", (),
        lambda it: it.cache.windows.num_evicted_tails + it.cache.snapshots.num_evicted_tails,
        "Tails that gave their window pages or snapshots to requests; misses by no_tail follow."),
    Row("counter", "cache_unbacked_tokens", (), lambda it: it.cache.num_unbacked,
        "Tokens evicted from the device that were nowhere else.", in_pages=True),
    Row("counter", "cache_not_retained_tokens", (), lambda it: it.cache.num_not_retained,
        "Tokens that requests asked to retain beyond the share of their caller.", in_pages=True),
    Row("counter", "cache_wanted_tokens", ("copy",), _copies("num_wanted"),
        "Tokens that a copy was wanted for: hits, or to keep.", in_pages=True),
    Row("counter", "cache_fulfilled_tokens", ("copy",), _copies("num_fulfilled"),
        "Of them, those that arrived.", in_pages=True),
    Row("counter", "cache_unfulfilled_tokens", ("copy", "reason"), _unfulfilled,
        "Those that did not, by reason.", in_pages=True),
    Row("counter", "kv_offload_total_bytes", ("copy",), _copies("num_bytes"), "Bytes copied."),
    Row("counter", "kv_offload_total_time", ("copy",), _copies("seconds"), "Seconds spent on it."),
    Row("counter", "cache_misses", ("reason",), lambda it: it.cache.misses,
        "Requests, by why no more of the prompt was cached."),
    Row("counter", "store_tokens", ("result",), _store_results,
        "Tokens asked of the store or given to it.", in_pages=True),
    Row("counter", "store_errors", (), lambda it: (it.cache.store or NO_STORE).num_errors,
        "Reads, writes and removals of the store that failed."),
    Row("counter", "store_timeouts", (), lambda it: (it.cache.store or NO_STORE).num_timeouts,
        "Of these, those that took longer than --store-timeout-s."),
    Row("counter", "store_paused_calls", (), lambda it: (it.cache.store or NO_STORE).num_paused,
        "Calls of the store that were not made, because those before them failed."),
    Row("counter", "spec_decode_num_drafts", ("cache_source",), _drafts("verify_steps"),
        "Steps of a row that verified drafts, by where its prompt came from."),
    Row("counter", "spec_decode_num_draft_tokens", ("cache_source",), _drafts("proposed"),
        "Drafts that they verified."),
    Row("counter", "spec_decode_num_accepted_tokens", ("cache_source",), _drafts("accepted"),
        "Of them, those accepted."),
    Row("counter", "spec_decode_num_accepted_tokens_per_pos", ("position",), _accepted_per_position,
        "Drafts accepted at each position, from 0."),
    Row("counter", "spec_decode_chosen_steps", ("num_steps",), lambda it: it.drafts.chosen_steps,
        "Steps, by how many drafts were to follow each token drawn."),
    Row("counter", "spec_decode_reply_searches", ("result",), lambda it: it.drafts.reply_searches,
        "Rows of steps before n-gram drafts, by whether the kept replies have their last tokens."),
    Row("counter", "grammar_masks", (), lambda it: it.grammars.masks,
        "Masks computed: of each place at which a token was drawn under a grammar."),
    Row("counter", "grammar_refused_drafts", (), lambda it: it.grammars.refused_drafts,
        "Drafts that a grammar refused, and those after them."),
    Row("counter", "grammar_mask_seconds", (), lambda it: it.grammars.mask_seconds,
        "Seconds that draws waited for masks, after the step before was known."),
)
# Sums over all schedulers, of which one runs.
SCHEDULER_COUNTERS: tuple[Row[ReplayStats], ...] = (
    Row("counter", "replayed_requests", (), lambda it: it.requests,
        "Requests that went on with another worker after theirs died."),
    Row("counter", "replayed_tokens", (), lambda it: it.tokens, "Tokens known of them then."),
    Row("counter", "replayed_cached_tokens", ("cache_source",), lambda it: it.cached,
        "Of these tokens, those that the other worker had, by tier."),
)
# The engine as a whole. These counters never start again.
ENGINE_ROWS: tuple[Row[EngineState], ...] = (
    Row("gauge", "num_requests_waiting", (), _waiting, "Requests that wait for a place in a batch.", is_public=True),
    Row("gauge", "num_queued_tokens", (), lambda it: it.status.queued_tokens,
        "Prompt tokens of requests that no worker has yet."),
    Row("gauge", "kv_cache_usage_perc", (), _usage,  # routers need it
        "Share of KV pages held by running requests, 0 to 1.", is_public=True),
    Row("gauge", "engine_up", (), lambda it: it.is_up,
        "1 when the engine answered the last question for its state.", is_public=True),
    Row("gauge", "last_step_age_seconds", (), lambda it: max((one.step_age_s for one in it.status.workers), default=0),
        "Since a worker with requests last ended a step; 0 idle.", is_public=True),
    Row("gauge", "cache_config_info", ("page_size", "num_pages"), _sizes, "Size of the KV pools.", is_public=True),
    Row("counter", "slow_readers", (), lambda it: it.num_slow_readers,
        "Streams ended: too much of them was not read."),
    Row("counter", "worker_restarts", (), lambda it: it.num_restarts,
        "Workers started again after one died, or their scheduler.", is_public=True),
    Row("gauge", "recovery_seconds", ("phase",), lambda it: it.status.recovery.phases if it.status.recovery else {},
        "Of the latest death of a worker: from the fault to news of its requests, by phase.", is_public=True),
    Row("gauge", "store_pages", (), _store_size("num_pages"), "Pages in the store, which workers may share."),
    Row("gauge", "store_bytes", (), _store_size("num_bytes"), "Bytes that they take."),
    Row("gauge", "spec_accept_length", ("cache_source",), _accept_length,
        "Tokens that a verifying step gave on average, since the workers started; all is of all sources."),
)
# fmt: on
ROWS: tuple[Row[Any], ...] = (*WORKER_GAUGES, *WORKER_COUNTERS, *SCHEDULER_COUNTERS, *ENGINE_ROWS)
