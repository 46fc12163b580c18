"""Bodies and replies of the endpoints for whoever runs the server."""

from __future__ import annotations

from typing import Any

import msgspec

from hiserve.ipc.cache_stats import CopyStats, StoreStats, TierStats, TreeFacts
from hiserve.server.sampling_fields import Name


class AbortRequest(msgspec.Struct, frozen=True):
    """Body of ``/abort_request``: one of the caller's own requests, or all requests."""

    rid: Name | None = None
    abort_all: bool | None = None


class Aborted(msgspec.Struct):
    """Reply of ``/abort_request``."""

    aborted: int


class Flushed(msgspec.Struct):
    """Reply of ``/flush_cache``."""

    flushed_pages: int


class Tiers(msgspec.Struct):
    """What each tier of one worker holds; a tier that is not there is left out. A store may be shared by workers."""

    device: TierStats
    host: TierStats | msgspec.UnsetType = msgspec.UNSET
    store: StoreStats | msgspec.UnsetType = msgspec.UNSET


class ReplicaCache(msgspec.Struct):
    """The cache of one worker in ``/cache/stats``; counts of pages, but for ``cached_tokens`` and ``misses``."""

    replica: int
    incarnation: int
    tiers: Tiers
    loads: CopyStats
    stores: CopyStats
    prefetches: CopyStats
    uploads: CopyStats
    cached_tokens: dict[str, int]
    misses: dict[str, int]
    num_unbacked: int


class Caches(msgspec.Struct):
    """Reply of ``/cache/stats``."""

    page_size: int
    replicas: list[ReplicaCache]


class Trees(msgspec.Struct):
    """Reply of ``/cache/tree``."""

    page_size: int
    replicas: list[TreeFacts]


class Health(msgspec.Struct):
    """Reply of a server that is well."""

    status: str


class ModelInfo(msgspec.Struct):
    """Reply of ``/model_info``."""

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


class ServerInfo(msgspec.Struct):
    """Reply of ``/server_info``."""

    version: str
    not_ready_because: str | None
    engine_error: str | None
    config: dict[str, Any]
    served_model_name: str
    model_path: str
    num_inflight: int
    num_queued: int
    workers: list[dict[str, Any]]


class Load(msgspec.Struct):
    """An entry of ``/get_load``."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class Loads(msgspec.Struct):
    """Reply of ``/v1/loads``."""

    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[dict[str, Any]]
