"""The composition root: settings become an engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from hiserve.cache.index.prefix_cache import HostAdmission, PrefixCache, TailSizes
from hiserve.cache.storage.cache_identity import check_unchanged
from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.file_store import open_store
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.segment import Segment
from hiserve.cache.storage.store_transfers import StoreTransfers
from hiserve.config.settings import Settings
from hiserve.core.digest import chain_of
from hiserve.core.kv_groups import CacheGroupSpec
from hiserve.core.machine import free_cuda_bytes
from hiserve.core.row_shapes import PACKED_CAPABILITY
from hiserve.core.startup_measurements import NO_MEASUREMENTS, StartupMeasurements
from hiserve.core.windows import WindowLimits
from hiserve.engine.draft_costs import DraftTimer
from hiserve.engine.executor import Executor
from hiserve.engine.grammars import GrammarRows
from hiserve.engine.kv_event_sender import KvEventSender, open_kv_events
from hiserve.engine.loop import Engine, EngineFacts
from hiserve.engine.planner import Planner
from hiserve.engine.runner_factory import MakeProposer, open_proposer, prepare_runners
from hiserve.engine.startup import await_memory
from hiserve.engine.tier_transfers import TierTransfers, make_registrar, make_transfers, recover_host_pages
from hiserve.errors import ConfigError, ResourceError
from hiserve.grammar.matcher import Vocabulary
from hiserve.models.builtin_shapes import read_model
from hiserve.models.draft_config import DraftConfig, page_groups, read_draft
from hiserve.models.draft_heads import DraftHead, load_draft
from hiserve.models.loading import AnyDecoder, load_decoder
from hiserve.models.model_config import ModelConfig
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.dispatch import Dispatch
from hiserve.spec.adaptive import DraftController
from hiserve.spec.history import ReplyHistory

logger = logging.getLogger(__name__)

LINGER_S = 1.5  # for checksums at the end, where pages outlive the server; a supervisor waits longer
WARM_TOKENS = 16  # of a row: a cold head attends to so many before its drafts are tried
UPLOAD_SHARE = 4  # of the host pages, one in so many may be kept for uploads


def build_engine(
    settings: Settings,
    segment: Segment | None = None,
    replica: int = 0,
    measurements: StartupMeasurements = NO_MEASUREMENTS,
    *,
    waits_for_compilers: bool = True,
    make_proposer: MakeProposer = open_proposer,
) -> Engine:
    """Loads the model, allocates pool and rows, and joins both halves.

    Args:
        settings: With the cache's identity.
        segment: Holds the host cache; the pages of a former process are recovered. None is no host cache.
        replica: Which worker this is.
        measurements: Of the worker before it, whose memory is waited for.
        waits_for_compilers: Otherwise prompts are computed by Triton until FlashInfer's kernels are compiled.
        make_proposer: Makes what drafts, of the settings.

    Raises:
        ConfigError: The model's files have changed since the identity was computed.
        ModelError: The model cannot be used.
        ResourceError: The device's memory does not suffice, or an address for KV events is in use.
    """
    kv_events = open_kv_events(settings, replica)  # first: an address in use costs no time
    with ExitStack() as undo:
        if kv_events is not None:
            undo.callback(kv_events.close)
        engine = _compose(settings, segment, kv_events, measurements, waits_for_compilers, make_proposer, undo)
        undo.pop_all()
    return engine


def _compose(
    settings: Settings,
    segment: Segment | None,
    kv_events: KvEventSender | None,
    measurements: StartupMeasurements,
    waits_for_compilers: bool,
    make_proposer: MakeProposer,
    undo: ExitStack,
) -> Engine:
    """Makes the engine; ``undo`` gets a callback for each started thread, in case a later part fails."""
    startup_s: dict[str, float] = {}
    if settings.model.device == "cuda":
        with _phase(startup_s, "await memory"):
            await_memory(measurements.free_bytes, free_cuda_bytes)
            measurements = replace(measurements, free_bytes=max(measurements.free_bytes, free_cuda_bytes()))
    torch.set_num_threads(settings.runner.cpu_threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    folder, model_config = read_model(settings.model)
    max_len = settings.model.max_model_len
    max_rows = settings.scheduler.max_running_requests
    num_pages, page_size = settings.cache.kv_pages, settings.cache.page_size
    draft = read_draft(settings, folder, model_config)
    groups = page_groups(settings, model_config, draft, frees_windows=settings.cache.frees_windows)
    with _phase(startup_s, "load weights"):
        model, head = _load(settings, folder, model_config, draft)
    with _phase(startup_s, "allocate pool"), _memory_error_as_advice(num_pages):
        sizes = settings.cache.window_pages, max_rows + 1, max(1, settings.cache.snapshot_slots)
        pool = DevicePool(groups, num_pages, page_size, settings.model.device, *sizes)
        rows = _device_rows(settings, model_config, pool)
    check_unchanged(settings, folder, model_config, draft)
    namespace = settings.cache_identity.namespace
    host = None if segment is None else _host_pool(settings, segment, groups, namespace)
    cache = _cache(settings, namespace, model_config.tail_window, host, kv_events)
    tier_transfers = None if host is None else _tier_transfers(settings, host, cache, pool, startup_s, undo)
    with _phase(startup_s, "prepare runners"):
        proposer = make_proposer(settings, draft, head, pool, rows)
        serving = threading.Event()
        runners = prepare_runners(
            settings, model, model_config, draft, pool, rows, proposer, None if waits_for_compilers else serving.is_set
        )
        controller = _controller(settings, runners, rows, pool, measurements, model_config, has_head=head is not None)
        serving.set()
    depth = _depth(settings, runners)
    facts = EngineFacts(
        max_running=max_rows,
        max_len=max_len,
        num_pages=num_pages - 1,
        page_size=page_size,
        namespace=namespace,
        startup_s=startup_s,
        measurements=measurements if controller is None else replace(measurements, draft_costs=controller.costs),
    )
    return Engine(
        _planner(settings, cache, folder, model_config, controller),
        Executor(runners, rows, threaded=depth > 0, tier_transfers=tier_transfers),
        depth,
        facts,
        shares_prefixes=not settings.cache.disable_prefix_cache,
        kv_events=kv_events,
        has_persistent_tiers=settings.cache.store is not None or settings.cache.host_cache_name is not None,
    )


def _check_capability(settings: Settings, capability: tuple[int, int]) -> None:
    if settings.cache.packs_rows and capability < PACKED_CAPABILITY:
        least, found = (".".join(map(str, each)) for each in (PACKED_CAPABILITY, capability))
        raise ConfigError(
            f"--kv-dtype is fp8, which takes a GPU of compute capability {least} or later, but this one has {found}. Use --kv-dtype bf16.",
            param="kv_dtype",
        )


def _device_rows(settings: Settings, model_config: ModelConfig, pool: DevicePool) -> DeviceRows:
    return DeviceRows(
        settings.scheduler.max_running_requests,
        settings.model.max_model_len,
        settings.cache.page_size,
        settings.cache.kv_pages,
        settings.model.device,
        eos_token_ids=[token for token in model_config.eos_token_ids if token < model_config.vocab_size],
        vocab_size=model_config.vocab_size,
        max_draft=settings.spec.tiers[-1],
        window=model_config.tail_window,
        num_window_pages=settings.cache.window_pages,
        carried=tuple(pool.carried.values()),
    )


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


def _load(
    settings: Settings, folder: Path, model_config: ModelConfig, draft: DraftConfig | None
) -> tuple[AnyDecoder, DraftHead | None]:
    """Reads the weights of the model and of the draft head."""
    if settings.model.device == "cuda":
        _check_capability(settings, torch.cuda.get_device_capability())
    max_len = settings.model.max_model_len
    loading: dict[str, Any] = {name: getattr(settings.model, name) for name in ("dtype", "device", "load_format")}
    aux_layers = () if draft is None else draft.aux_layers
    model = load_decoder(folder, model_config, max_len=max_len, aux_layers=aux_layers, **loading)
    return model, None if draft is None else load_draft(draft, model, max_len=max_len, **loading)


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
    rows: DeviceRows,
    pool: DevicePool,
    measurements: StartupMeasurements,
    model: ModelConfig,
    *,
    has_head: bool,
) -> DraftController | None:
    """Measures the costs of drafts, where their number is chosen, unless an earlier worker has."""
    tiers = settings.spec.tiers
    if len(tiers) == 1:
        return None
    warm_steps = WARM_TOKENS + settings.cache.page_size if has_head else None  # it attends from the next page on
    costs = measurements.draft_costs
    if costs is None:
        with torch.inference_mode():
            timer = DraftTimer(runners, rows, pool, model.vocab_size)
            costs = timer.measure(tiers, settings.scheduler.max_running_requests)
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
    startup_s: dict[str, float],
    undo: ExitStack,
) -> TierTransfers:
    """Recovers the host pages of a former process, and opens the store."""
    undo.callback(host.close)
    with _phase(startup_s, "adopt host cache"):
        recover_host_pages(host, cache)
    transfers = make_transfers(settings.model.device, pool, host)
    undo.callback(transfers.close)
    beyond = None
    with _phase(startup_s, "open store"):
        if (store := open_store(settings.cache)) is not None:
            beyond = StoreTransfers(store, host, wake=transfers.wake)
            undo.callback(beyond.close)
    return TierTransfers(transfers, host, beyond, linger_s=0.0 if settings.cache.host_cache_name is None else LINGER_S)


def _host_pool(settings: Settings, segment: Segment, groups: Sequence[CacheGroupSpec], namespace: bytes) -> HostPool:
    assert segment.layout.namespace == namespace, "the segment of another identity was handed to a worker"
    registrar = make_registrar(settings.model.device)
    link = chain_of(is_strong=settings.cache.store is not None)
    return HostPool(segment, groups, registrar=registrar, verify=settings.cache.cache_verify, link=link)


@contextmanager
def _phase(startup_s: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    startup_s[name] = round(time.perf_counter() - start, 3)


@contextmanager
def _memory_error_as_advice(num_pages: int) -> Iterator[None]:
    """Turns an allocation failure into an error that names the settings to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error) and "out of memory" not in str(error):
            raise
        raise ResourceError(
            f"no memory for {num_pages} KV pages: {str(error).splitlines()[0]}. "
            "Lower --kv-pages, --max-running-requests or --max-model-len.",
            param="kv_pages",
        ) from None
