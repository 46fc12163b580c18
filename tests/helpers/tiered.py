"""Hands on the tiers of an engine in this process: until they are at rest, what leaves them, what garbles them, what their pages hold."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hiserve import LLM
from hiserve.cache.index.nodes import Node
from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.cache.storage.host import HostPool
from hiserve.core.forward import LayerKV
from hiserve.engine.loop import Engine
from hiserve.ipc.cache_stats import CacheStats
from tests.helpers.small_model import small_model
from tests.helpers.tiers import squeeze, squeeze_host
from tests.helpers.waiting import PATIENCE_S

PAGE = 16
SMALL: dict[str, Any] = {
    "model": small_model(),
    "in_process": True,
    "dtype": "float64",
    "page_size": PAGE,
    "max_model_len": 512,
    "kv_pages": 60,
    "host_cache_gib": 0.1,
    "max_running_requests": 4,
    "max_batched_tokens": 64,
    "spec_steps": 2,
    "cpu_threads": 1,
    "log_level": "warning",
}


def engine_of(llm: LLM) -> Engine:
    engine: Engine = llm._backend.engine  # type: ignore[attr-defined]
    return engine


def cache_of(llm: LLM) -> PrefixCache:
    return engine_of(llm)._planner._cache


def counts_of(llm: LLM) -> CacheStats:
    return engine_of(llm).stats().cache


def transfers_of(llm: LLM) -> Any:
    return engine_of(llm)._executor._tier_transfers._transfers  # type: ignore[attr-defined]


def host_of(llm: LLM) -> HostPool:
    host: HostPool = engine_of(llm)._executor._tier_transfers._host  # type: ignore[attr-defined]
    return host


def rest(llm: LLM) -> None:
    """Steps until the host, whose memory is made ready meanwhile, has all it is to have, and no copy is under way."""
    engine, cache = engine_of(llm), cache_of(llm)
    has_host = engine._executor._tier_transfers is not None  # type: ignore[attr-defined]
    end = time.monotonic() + PATIENCE_S
    while (
        engine.has_work
        or len(cache.ops)
        or (has_host and cache.host.pages.num_ready < host_of(llm).num_pages)
        or cache.transfers.has_offloads
    ):
        assert time.monotonic() < end, f"no rest after {PATIENCE_S} s: {engine.stats()}"
        engine.step()


def seal(llm: LLM) -> None:
    """Waits until every page of the host has its checksum."""
    rest(llm)
    assert host_of(llm).wait_checksums(PATIENCE_S)


def leave_device(llm: LLM) -> None:
    """Evicts everything from the device; the host keeps what it has."""
    rest(llm)
    squeeze(cache_of(llm))


def garble_host(llm: LLM) -> None:
    """Changes the highest byte of each number of eight bytes that the host holds."""
    host_of(llm).span(1, host_of(llm).num_pages)[:, 7::8] ^= 0x80


def check_whole(llm: LLM) -> None:
    """At rest nothing is held, each page of each tier can be had, and each wanted page is accounted for.

    Empties both tiers.
    """
    rest(llm)
    cache, counts = cache_of(llm), counts_of(llm)
    assert not cache.locks.prefix_locks
    assert counts.device.num_free + counts.device.num_evictable == counts.device.num_pages, counts.device
    for copies in (counts.loads, counts.offloads, counts.prefetches, counts.uploads):
        assert copies.num_in_flight == 0, copies
        assert copies.num_wanted == copies.num_fulfilled + sum(copies.unfulfilled.values()), copies
    squeeze(cache)
    squeeze_host(cache)
    assert cache.device.pages.num_free == cache.device.pages.num_pages - 1
    assert cache.host.pages.num_free == cache.host.pages.num_ready - 1
    assert not cache.tree.roots
    cache.flush()  # heaps forget what they name and nobody has any more


Prefix = tuple[int, ...]
Pages = dict[Prefix, bytes]


def target_pages(llm: LLM) -> Pages:
    """Returns keys and values of the model, of every page that the index has on the device."""
    return _pages(llm, [plane for layer in _runners(llm)._eager._layers for plane in _planes(layer, llm)])


def draft_pages(llm: LLM) -> Pages:
    """Returns what the head keeps: its keys and values, and what the model showed of each page's last token."""
    pool = _runners(llm)._proposer._pool
    planes = [plane for layer in pool.layers for plane in _planes(layer, llm)]
    return _pages(llm, [*planes, pool.page_hidden.numpy()])


def _runners(llm: LLM) -> Any:
    return engine_of(llm)._executor._runners  # type: ignore[attr-defined]


def _planes(layer: LayerKV, llm: LLM) -> list[np.ndarray]:
    return [each.reshape(-1, llm.settings.cache.page_size, *each.shape[1:]).numpy() for each in (layer.k, layer.v)]


def _pages(llm: LLM, planes: list[np.ndarray]) -> Pages:
    found: Pages = {}
    for node in cache_of(llm).tree.nodes():
        tokens = _tokens(node)
        start = len(tokens) - node.num_pages * llm.settings.cache.page_size
        for index, page in enumerate(node.pages.tolist()):
            end = start + (index + 1) * llm.settings.cache.page_size
            held = b"".join(plane[page].tobytes() for plane in planes)
            assert found.setdefault(tokens[:end], held) == held, f"two pages of {tokens[:end]} differ"
    return found


def _tokens(node: Node) -> Prefix:
    key = b""
    step: Node | None = node
    while step is not None:
        key, step = step.key + key, step.parent
    return tuple(np.frombuffer(key, dtype=np.int32).tolist())
