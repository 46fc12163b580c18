"""Endpoints that show the prefix cache, tier by tier, and empty it."""

from __future__ import annotations

import re

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from hiserve.config.settings import CacheSettings
from hiserve.errors import RequestError
from hiserve.ipc.cache_stats import LOCAL_TIERS, CopyStats, StoreStats, TierName, TierStats, TreeFacts, WindowStats
from hiserve.ipc.messages import WorkerFacts
from hiserve.server.engine_handle import ANSWER_TIMEOUT_S, EngineHandle
from hiserve.server.http.auth import Auth
from hiserve.server.reply.format import json_response
from hiserve.server.routes import Endpoint

DEFAULT_DEPTH, MAX_DEPTH = 3, 32
# Value of ``tier`` -> the tiers that are emptied. Without it a store keeps its pages: other servers may share them.
FLUSHED: dict[str, tuple[TierName, ...]] = {
    "device": ("device",),
    "host": ("host",),
    "store": ("store",),
    "all": (*LOCAL_TIERS, "store"),
}
_WHOLE_NUMBER = re.compile("[0-9]{1,9}")


class Tiers(msgspec.Struct):
    """The tiers of one worker, without those that it does not have. Workers may share a store.

    ``windows`` and ``snapshots`` are on the device too: the pages of layers with a window, where they have pages of their
    own, and the slots of snapshots of recurrent states.
    """

    device: TierStats
    windows: WindowStats | UnsetType = UNSET
    snapshots: WindowStats | UnsetType = UNSET
    host: TierStats | UnsetType = UNSET
    store: StoreStats | UnsetType = UNSET


class ReplicaCache(msgspec.Struct):
    """The cache of one worker in ``/cache/stats``; counts of pages, but for ``cached_tokens`` and ``misses``."""

    replica: int
    incarnation: int
    tiers: Tiers
    loads: CopyStats
    offloads: CopyStats
    prefetches: CopyStats
    uploads: CopyStats
    cached_tokens: dict[str, int]
    misses: dict[str, int]
    num_unbacked: int
    num_retained: int
    num_not_retained: int


class Caches(msgspec.Struct):
    """Reply of ``/cache/stats``."""

    page_size: int
    replicas: list[ReplicaCache]


class Trees(msgspec.Struct):
    """Reply of ``/cache/tree``."""

    page_size: int
    replicas: list[TreeFacts]


class Flushed(msgspec.Struct):
    """Reply of ``/flush_cache``."""

    flushed_pages: int


class CacheRoutes:
    """Handlers of the cache. A flush has SGLang's and vLLM's path; it does not answer GET, because it changes state.

    Args:
        handle: Of the engine.
        auth: Checks keys.
        cache: The configuration in force.
    """

    def __init__(self, handle: EngineHandle, auth: Auth, cache: CacheSettings) -> None:
        self._handle = handle
        self._auth = auth
        self._page_size = cache.page_size
        self._tiers: list[TierName] = ["device"]
        if cache.host_cache_gib:
            self._tiers.append("host")
        if cache.store is not None:
            self._tiers.append("store")

    def routes(self) -> list[Endpoint]:
        """Returns the routes."""
        depth = {"type": "integer", "minimum": 1, "maximum": MAX_DEPTH, "default": DEFAULT_DEPTH}
        tier = {"type": "string", "enum": list(FLUSHED)}
        return [
            Endpoint("/cache/stats", self.stats, "GET", reply=Caches),
            Endpoint("/cache/tree", self.tree, "GET", reply=Trees, query={"depth": depth}),
            Endpoint("/flush_cache", self.flush, "POST", reply=Flushed, query={"tier": tier}),
            Endpoint("/reset_prefix_cache", self.flush, "POST", reply=Flushed, query={"tier": tier}),
        ]

    async def stats(self, request: Request) -> Response:
        """Returns pages by tier, copies between tiers and misses by reason, of each worker. Needs the admin key."""
        self._auth.require_admin(request)
        status = await self._handle.status(ANSWER_TIMEOUT_S)
        replicas = [self._replica(worker) for worker in status.workers]
        return json_response(Caches(self._page_size, replicas))

    async def tree(self, request: Request) -> Response:
        """Returns the radix tree of each worker down to ``depth``, without tokens. Needs the admin key."""
        self._auth.require_admin(request)
        depth = _depth(request)
        trees = await self._handle.ask(lambda engine: engine.inspect(depth))
        return json_response(Trees(self._page_size, trees))

    async def flush(self, request: Request) -> Response:
        """Empties the prefix caches, or one ``tier``; pages in use by running requests stay. Needs the admin key.

        Without ``tier`` device and host are emptied; ``all`` adds the store, whose pages are not counted.
        """
        self._auth.require_admin(request)
        return json_response(Flushed(await self._handle.require().flush(self._to_flush(request))))

    def _to_flush(self, request: Request) -> tuple[TierName, ...]:
        name = request.query_params.get("tier")
        if name is None:
            return LOCAL_TIERS
        if name not in FLUSHED:
            raise RequestError(f"tier must be one of {', '.join(FLUSHED)}.", param="tier")
        tiers = tuple(tier for tier in FLUSHED[name] if tier in self._tiers)
        if not tiers:
            raise RequestError(f"this server has no {name}; its tiers are {', '.join(self._tiers)}.", param="tier")
        return tiers

    def _replica(self, worker: WorkerFacts) -> ReplicaCache:
        cache = worker.stats.cache
        host = cache.host if "host" in self._tiers else UNSET
        store = cache.store if "store" in self._tiers and cache.store is not None else UNSET
        return ReplicaCache(
            replica=worker.replica,
            incarnation=worker.incarnation,
            tiers=Tiers(cache.device, _given(cache.windows), _given(cache.snapshots), host, store),
            loads=cache.loads,
            offloads=cache.offloads,
            prefetches=cache.prefetches,
            uploads=cache.uploads,
            cached_tokens=cache.cached_tokens,
            misses=cache.misses,
            num_unbacked=cache.num_unbacked,
            num_retained=cache.num_retained,
            num_not_retained=cache.num_not_retained,
        )


def _depth(request: Request) -> int:
    text = request.query_params.get("depth", str(DEFAULT_DEPTH))
    depth = int(text) if _WHOLE_NUMBER.fullmatch(text) else 0
    if not 1 <= depth <= MAX_DEPTH:
        raise RequestError(f"depth must be a whole number between 1 and {MAX_DEPTH}.", param="depth")
    return depth


def _given(pages: WindowStats) -> WindowStats | UnsetType:
    """Returns the counts of a pool, if there is one."""
    return pages if pages.num_pages else UNSET
