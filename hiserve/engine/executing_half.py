"""The executing half before its runners: the weights, the pool and the rows, of a model or of a rank's share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hiserve.cache.storage.cache_identity import check_unchanged
from hiserve.cache.storage.device import DevicePool
from hiserve.config.settings import Settings
from hiserve.core.kv_groups import CacheGroupSpec, debug_groups
from hiserve.core.row_shapes import PACKED_CAPABILITY
from hiserve.distributed.exchange import Exchange
from hiserve.distributed.shard import WHOLE
from hiserve.errors import ConfigError, ResourceError
from hiserve.models.builtin_shapes import read_model
from hiserve.models.draft_config import DraftConfig, page_groups, read_draft
from hiserve.models.draft_heads import DraftHead, load_draft
from hiserve.models.loading import AnyDecoder, load_decoder
from hiserve.models.model_config import ModelConfig
from hiserve.models.shards import local_config
from hiserve.runners.device_rows import DeviceRows


@dataclass(frozen=True, slots=True, eq=False)
class LoadedHalf:
    """What a device holds.

    Attributes:
        folder: The model's.
        config: The model's shape, or that of a rank's share.
        draft: Likewise of the draft head or model; None without.
        groups: Of the pool.
        model: The weights.
        head: Of the draft.
        pool: The device's pages.
        rows: The requests' places.
    """

    folder: Path
    config: ModelConfig
    draft: DraftConfig | None
    groups: tuple[CacheGroupSpec, ...]
    model: AnyDecoder
    head: DraftHead | None
    pool: DevicePool
    rows: DeviceRows


def load_half(settings: Settings, startup_s: dict[str, float], exchange: Exchange | None = None) -> LoadedHalf:
    """Loads the weights, and allocates pool and rows.

    Args:
        settings: With the cache's identity.
        startup_s: Gets the seconds of each phase.
        exchange: Of a rank of a group, which loads its share; None loads all.

    Raises:
        ConfigError: The model's files have changed since the identity was computed.
        ModelError: The model cannot be used.
        ResourceError: The device's memory does not suffice.
    """
    torch.set_num_threads(settings.runner.cpu_threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    folder, whole = read_model(settings.model)
    whole_draft = read_draft(settings, folder, whole)
    with phase(startup_s, "load weights"):
        model, head = _load(settings, folder, whole, whole_draft, exchange)
    shard = WHOLE if exchange is None else exchange.shard
    config, draft = local_config(whole, shard), None if whole_draft is None else whole_draft.local(shard)
    groups = page_groups(settings, config, draft, frees_windows=settings.cache.frees_windows)
    num_pages, page_size = settings.cache.kv_pages, settings.cache.page_size
    max_rows = settings.scheduler.max_running_requests
    with phase(startup_s, "allocate pool"), _memory_error_as_advice(num_pages):
        sizes = settings.cache.window_pages, max_rows + 1, max(1, settings.cache.snapshot_slots)
        pool = DevicePool(groups, num_pages, page_size, settings.model.device, *sizes)
        rows = _device_rows(settings, config, pool, exchange)
    check_unchanged(settings, folder, whole, whole_draft)
    return LoadedHalf(folder, config, draft, groups, model, head, pool, rows)


def _check_capability(settings: Settings, capability: tuple[int, int]) -> None:
    if settings.cache.packs_rows and capability < PACKED_CAPABILITY:
        least, found = (".".join(map(str, each)) for each in (PACKED_CAPABILITY, capability))
        raise ConfigError(
            f"--kv-dtype is fp8, which takes a GPU of compute capability {least} or later, but this one has {found}. Use --kv-dtype bf16.",
            param="kv_dtype",
        )


def _device_rows(
    settings: Settings, model_config: ModelConfig, pool: DevicePool, exchange: Exchange | None
) -> DeviceRows:
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
        max_depth=settings.spec.max_depth,
        storages=_moved_storages(settings, model_config, pool),
        exchange=exchange,
    )


def _moved_storages(settings: Settings, model_config: ModelConfig, pool: DevicePool) -> list[torch.Tensor]:
    """Returns the memory in which accepted nodes of trees are moved: the head computes its own part of a page after each step."""
    if not settings.spec.trees:
        return []
    frees_windows, packs_rows = settings.cache.frees_windows, settings.cache.packs_rows
    plan = model_config.cache_plan(settings.model.dtype, frees_windows=frees_windows, packs_rows=packs_rows)
    return [pool.storage(group.name) for group in (*plan.groups, *debug_groups(settings.cache))]


def _load(
    settings: Settings, folder: Path, model_config: ModelConfig, draft: DraftConfig | None, exchange: Exchange | None
) -> tuple[AnyDecoder, DraftHead | None]:
    """Reads the weights of the model and of the draft head."""
    if settings.model.device == "cuda":
        _check_capability(settings, torch.cuda.get_device_capability())
    max_len = settings.model.max_model_len
    loading: dict[str, Any] = {name: getattr(settings.model, name) for name in ("dtype", "device", "load_format")}
    aux_layers = () if draft is None else draft.aux_layers
    is_exact = settings.runner.exact
    model = load_decoder(
        folder, model_config, max_len=max_len, aux_layers=aux_layers, exchange=exchange, is_exact=is_exact, **loading
    )
    return model, None if draft is None else load_draft(draft, model, max_len=max_len, **loading)


@contextmanager
def phase(startup_s: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds that its block takes."""
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
