"""The composition root: settings become an engine."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from msgspec.structs import replace

from hiserve.cache.index.prefix_cache import HostAdmission, PrefixCache, TailSizes
from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.segment import Segment
from hiserve.config.settings import Settings
from hiserve.core.digest import chain_of
from hiserve.core.machine import free_cuda_bytes
from hiserve.core.request import MAX_RETAIN_S
from hiserve.core.startup_measurements import NO_MEASUREMENTS, StartupMeasurements
from hiserve.core.window_pool import WindowLimits
from hiserve.engine.draft_costs import measure_drafts
from hiserve.engine.executing_half import LoadedHalf, load_half, phase
from hiserve.engine.executor import Executor
from hiserve.engine.grammars import GrammarRows
from hiserve.engine.group_facts import facts_of
from hiserve.engine.host_adoption import find_pages
from hiserve.engine.kv_event_sender import KvEventSender, open_kv_events
from hiserve.engine.loop import Engine, EngineFacts
from hiserve.engine.planner import Planner
from hiserve.engine.ranks import Ranks, end_process
from hiserve.engine.runner_factory import MakeProposer, open_proposer, prepare_runners
from hiserve.engine.startup import await_memory
from hiserve.engine.step_exchanges import StepExchanges
from hiserve.engine.tier_transfers import TierTransfers, linger_s, make_host_pool, make_transfers, open_beyond
from hiserve.errors import ConfigError
from hiserve.grammar.matcher import Vocabulary
from hiserve.models.model_config import ModelConfig
from hiserve.runners.dispatch import Dispatch
from hiserve.spec.adaptive import DraftController
from hiserve.spec.history import ReplyHistory

logger = logging.getLogger(__name__)

WARM_TOKENS = 16  # of a row: a cold head attends to so many before its drafts are tried
UPLOAD_SHARE = 4  # of the host pages, one in so many may be kept for uploads


def build_engine(
    settings: Settings,
    segment: Segment | None = None,
    replica: int = 0,
    measurements: StartupMeasurements = NO_MEASUREMENTS,
    *,
    waits_for_compilers: bool = True,
    ends_process: bool = False,
    make_proposer: MakeProposer = open_proposer,
) -> Engine:
    """Loads the model, allocates pool and rows, and joins both halves.

    Args:
        settings: With the cache's identity.
        segment: Holds the host cache; the pages of a former process are recovered. None is no host cache.
        replica: Which worker this is.
        measurements: Of the worker before it, whose memory is waited for.
        waits_for_compilers: Otherwise prompts are computed by Triton until FlashInfer's kernels are compiled.
        ends_process: The process ends if another rank of its group does, whatever it waits for then.
        make_proposer: Makes what drafts, of the settings.

    Raises:
        ConfigError: The model's files have changed since the identity was computed, or a group has drafts of another kind.
        ModelError: The model cannot be used.
        ResourceError: The device's memory does not suffice, or an address for KV events is in use.
    """
    if settings.parallel.tp > 1 and make_proposer is not open_proposer:
        raise ConfigError(
            f"--tp is {settings.parallel.tp}, but rehearsed drafts are of one process. Leave --tp out.", param="tp"
        )
    kv_events = open_kv_events(settings, replica)  # first: an address in use costs no time
    with ExitStack() as undo:
        if kv_events is not None:
            undo.callback(kv_events.close)
        engine = _compose(
            settings,
            segment,
            replica,
            kv_events,
            measurements,
            make_proposer,
            undo,
            waits_for_compilers=waits_for_compilers,
            ends_process=ends_process,
        )
        undo.pop_all()
    return engine


def _compose(
    settings: Settings,
    segment: Segment | None,
    replica: int,
    kv_events: KvEventSender | None,
    measurements: StartupMeasurements,
    make_proposer: MakeProposer,
    undo: ExitStack,
    *,
    waits_for_compilers: bool,
    ends_process: bool,
) -> Engine:
    """Makes the engine; ``undo`` gets a callback for each started thread, in case a later part fails."""
    startup_s: dict[str, float] = {}
    if settings.model.device == "cuda":
        with phase(startup_s, "await memory"):
            await_memory(measurements.free_bytes, free_cuda_bytes)
            measurements = replace(measurements, free_bytes=max(measurements.free_bytes, free_cuda_bytes()))
    ranks = None
    if settings.parallel.tp > 1:
        ranks = _start_ranks(settings, replica, measurements, ends_process=ends_process, undo=undo)
    half = load_half(settings, startup_s, None if ranks is None else ranks.exchange)
    pool, rows = half.pool, half.rows
    if ranks is not None:
        ranks.agree(facts_of(settings, half))
    namespace = settings.cache_identity.namespace
    host = None if segment is None else make_host_pool(settings, segment, half.groups)
    cache = _cache(settings, namespace, half.config.tail_window, host, kv_events)
    tier_transfers = None if host is None else _tier_transfers(settings, host, cache, pool, ranks, startup_s, undo)
    with phase(startup_s, "prepare runners"):
        proposer = make_proposer(settings, half.draft, half.head, pool, rows)
        serving = threading.Event()
        waits = waits_for_compilers or ranks is not None  # all ranks have one backend
        runners = prepare_runners(settings, half, proposer, None if waits else serving.is_set)
        controller = _controller(settings, runners, half, measurements)
        if ranks is not None:
            runners.coverage = ranks.await_ready(runners.coverage)
        serving.set()
    depth = _depth(settings, runners)
    facts = EngineFacts(
        max_running=settings.scheduler.max_running_requests,
        max_len=settings.model.max_model_len,
        num_pages=settings.cache.kv_pages - 1,
        page_size=settings.cache.page_size,
        namespace=namespace,
        startup_s=startup_s,
        measurements=measurements if controller is None else replace(measurements, draft_costs=controller.costs),
    )
    return Engine(
        _planner(settings, cache, half.folder, half.config, controller),
        _executor(runners, half, tier_transfers, ranks, threaded=depth > 0),
        depth,
        facts,
        shares_prefixes=not settings.cache.disable_prefix_cache,
        kv_events=kv_events,
        has_persistent_tiers=settings.cache.store is not None or settings.cache.host_cache_name is not None,
    )


def _executor(
    runners: Dispatch, half: LoadedHalf, tier_transfers: TierTransfers | None, ranks: Ranks | None, *, threaded: bool
) -> Executor:
    shares = half.rows.shares
    exchanges = None if shares is None else StepExchanges(shares, half.model, half.head, runners)
    return Executor(
        runners, half.rows, threaded=threaded, tier_transfers=tier_transfers, group=ranks, exchanges=exchanges
    )


def _start_ranks(
    settings: Settings, replica: int, measurements: StartupMeasurements, *, ends_process: bool, undo: ExitStack
) -> Ranks:
    """Starts the other ranks of a group and meets them."""
    ranks = Ranks(settings, measurements, end_process if ends_process else lambda: None, replica)
    undo.callback(ranks.close)
    ranks.join(torch.device(settings.model.device))
    return ranks


def _window_limits(settings: Settings, model: ModelConfig) -> WindowLimits | None:
    """Returns the limits of tails; None where each boundary is a resume point."""
    plan = model.cache_plan(settings.model.dtype, frees_windows=settings.cache.frees_windows)
    if not plan.window and not plan.has_snapshots:
        return None
    return WindowLimits(
        window=plan.window,
        page_size=settings.cache.page_size,
        num_draft=settings.spec.tiers[-1],
        depth=settings.runner.overlap,
        max_batched_tokens=settings.scheduler.max_batched_tokens,
        tail_every=settings.cache.tail_every,
        has_snapshots=plan.has_snapshots,
    )


def _depth(settings: Settings, runners: Dispatch) -> int:
    """Returns how many steps are planned ahead: none where attention plans with the lengths of rows that verify drafts.

    While such a step runs, the host has only bounds of these lengths, because the number of accepted drafts is unknown.
    """
    depth = settings.runner.overlap
    if depth and settings.spec.tiers[-1] and runners.needs_host_lengths:
        logger.warning(
            "no step is planned ahead: the attention backend %s needs lengths from the host, which knows only after each "
            "step how many drafts were accepted. Use --attention-backend auto, or --spec off",
            settings.runner.attention_backend,
        )
        return 0
    return depth


def _controller(
    settings: Settings,
    runners: Dispatch,
    half: LoadedHalf,
    measurements: StartupMeasurements,
) -> DraftController | None:
    """Measures the costs of drafts, where their number is chosen, unless an earlier worker has."""
    tiers = settings.spec.tiers
    if len(tiers) == 1:
        return None
    warm_steps = (
        WARM_TOKENS + settings.cache.page_size if half.head is not None else None
    )  # it attends from the next page on
    costs = measurements.draft_costs
    if costs is None:
        costs = measure_drafts(settings, runners, half)
    return DraftController(costs, warm_steps)


def _planner(
    settings: Settings, cache: PrefixCache, folder: Path, model: ModelConfig, controller: DraftController | None
) -> Planner:
    ends = [token for token in model.eos_token_ids if token < model.vocab_size]
    return Planner(
        cache=cache,
        max_rows=settings.scheduler.max_running_requests,
        max_len=settings.model.max_model_len,
        max_batched_tokens=settings.scheduler.max_batched_tokens,
        eos_token_ids=model.eos_token_ids,
        num_draft=settings.spec.tiers[-1],
        controller=controller,
        history=_history(settings),
        # A canary is read when a row starts: its load must have arrived, and not failed, by then.
        overlaps_loads=settings.model.device == "cuda" and not settings.cache.kv_canary,
        store_prefetch=None if settings.cache.store is None else settings.cache.store_prefetch,
        store_timeout_s=settings.cache.store_prefetch_timeout_s,
        grammars=GrammarRows(
            lambda: Vocabulary.load(folder, model.vocab_size, ends), num_threads=settings.runner.grammar_threads
        ),
        windows=_window_limits(settings, model),
        max_depth=settings.spec.max_depth,
    )


def _history(settings: Settings) -> ReplyHistory | None:
    """Returns where replies are kept; None unless drafts come from them, and where requests share nothing."""
    spec = settings.spec
    if spec.spec != "ngram" or not spec.spec_history or settings.cache.disable_prefix_cache:
        return None
    return ReplyHistory(spec.spec_history)


def _cache(
    settings: Settings, namespace: bytes, window: int, host: HostPool | None, kv_events: KvEventSender | None
) -> PrefixCache:
    num_host_pages = 0 if host is None else host.num_pages
    return PrefixCache(
        num_pages=settings.cache.kv_pages,
        page_size=settings.cache.page_size,
        namespace=namespace,
        eviction=settings.cache.eviction,
        num_host_pages=num_host_pages,
        num_ready_host_pages=None if host is None else 1,
        tails=TailSizes(
            window_pages=settings.cache.window_pages,
            frames_per_page=0 if host is None else host.frames_per_page,
            snapshot_slots=settings.cache.snapshot_slots,
            frames_per_snapshot=0 if host is None else host.frames_per_snapshot,
            window=window,
        ),
        max_upload_pages=0 if settings.cache.store is None else max(1, num_host_pages // UPLOAD_SHARE),
        host_admission=HostAdmission(settings.cache.host_admission),
        listener=kv_events,
        link=chain_of(is_strong=settings.cache.store is not None),
    )


def _tier_transfers(
    settings: Settings,
    host: HostPool,
    cache: PrefixCache,
    pool: DevicePool,
    ranks: Ranks | None,
    startup_s: dict[str, float],
    undo: ExitStack,
) -> TierTransfers:
    """Recovers the host pages of a former process, and opens the store."""
    undo.callback(host.close)
    with phase(startup_s, "adopt host cache"):
        if ranks is not None:
            ranks.adopt(host)
        recover_host_pages(host, cache)
    transfers = make_transfers(settings.model.device, pool, host)
    undo.callback(transfers.close)
    with phase(startup_s, "open store"):
        if (beyond := open_beyond(settings, host, transfers)) is not None:
            undo.callback(beyond.close)
    return TierTransfers(transfers, host, beyond, linger_s=linger_s(settings))


def recover_host_pages(host: HostPool, cache: PrefixCache, clock: Callable[[], float] = time.monotonic) -> int:
    """Inserts the valid pages of the segment into the index, once their memory is ready; other pages may follow later.

    Args:
        host: Just made; its records must not have been used.
        cache: Just made, with no host page ready.
        clock: Of ``Retainer``. Pages that a record retains longer than any request can ask are retained so long.

    Returns:
        Recovered pages; none where their memory cannot be had any more.
    """
    runs, tails = find_pages(host)
    cache.grow_host(max(1, host.num_ready_pages))
    latest_s = math.ceil(clock() + MAX_RETAIN_S)
    num_pages = cache.recover(
        dataclasses.replace(run, retained_until_s=min(run.retained_until_s, latest_s)) for run in runs
    )
    if cache.tails is not None:  # none of them is retained longer than its history
        num_pages += cache.tails.recover(tails)
    logger.info("adopted %d of %d pages of the host cache", num_pages, host.num_pages - 1)
    return num_pages
