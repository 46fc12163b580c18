"""The host cache from its segment to the planner: what is adopted, what is refused, what waits."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.attention.backends import open_attention
from hiserve.attention.base import Attention, AttentionShape
from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.host_segment import open_segment
from hiserve.cache.storage.inventory import delete_named_cache, store_in
from hiserve.cache.storage.prefault import Populate
from hiserve.cache.storage.segment import Segment, SegmentLayout
from hiserve.config.options import make_options
from hiserve.core.request import MAX_RETAIN_S
from hiserve.core.startup_measurements import NO_MEASUREMENTS
from hiserve.core.transfers import CopyAck, PageCopy, TailImage
from hiserve.engine import runner_factory, worker
from hiserve.engine.build import build_engine, recover_host_pages
from hiserve.engine.tier_transfers import TierTransfers
from hiserve.errors import ConfigError
from hiserve.models.model_config import find_model
from tests.helpers.host import NAMESPACE, PAGE_SIZE, fill, make_layout, make_run, told
from tests.helpers.settings import identified, settings_of
from tests.helpers.transfers import GROUPS, PAGE_BYTES

NUM_PAGES = 12
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 128,
    "kv_pages": 40,
    "max_running_requests": 2,
    "max_batched_tokens": 64,
    "overlap": 0,
    "cpu_threads": 1,
    "host_cache_gib": 0.01,
}


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.anonymous(make_layout(NUM_PAGES, PAGE_BYTES))
    yield made
    made.close()


def write(pool: HostPool, segment: Segment, pages: Sequence[int]) -> None:
    """Writes one prefix to some pages."""
    run = make_run(list(pages), [10 + page for page in pages])
    pool.begin(run)
    fill(segment.pages, run)
    pool.finish(run.pages)


def leave(segment: Segment, pages: Sequence[int]) -> None:
    """What a process does that dies with some pages VALID and sealed."""
    pool = HostPool(segment, GROUPS)
    pool.clear()
    write(pool, segment, pages)
    assert pool.wait_checksums(10)
    pool.close()


@pytest.mark.parametrize("kept", ["nothing", "segment", "store"])
def test_only_who_leaves_pages_behind_finishes_copies_at_the_end(kept: str, tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    given: dict[str, dict[str, Any]] = {
        "nothing": {},
        "segment": {"host_cache_name": "left"},
        "store": {"store": f"file:{tmp_path}/store"},
    }
    config = identified(make_options(**SMALL, spec="off", graphs="off", **given[kept]), tmp_path / "shm")
    identity = config.cache_identity
    layout = SegmentLayout(identity.namespace, config.cache.page_size, identity.page_bytes, NUM_PAGES)
    segment = Segment.anonymous(layout)
    engine = build_engine(config, segment)
    engine.close()
    segment.close()
    assert engine._has_persistent_tiers == (kept != "nothing")


def new_cache() -> PrefixCache:
    return PrefixCache(
        num_pages=8,
        page_size=PAGE_SIZE,
        namespace=NAMESPACE,
        num_host_pages=NUM_PAGES,
        num_ready_host_pages=1,
    )


def test_what_a_process_left_is_findable(segment: Segment) -> None:
    leave(segment, [3, 5])
    host, cache = HostPool(segment, GROUPS), new_cache()
    assert recover_host_pages(host, cache) == 2
    assert cache.host.pages.num_ready == NUM_PAGES
    assert cache.host.pages.num_free == NUM_PAGES - 3
    host.close()


@pytest.mark.parametrize(("recorded_s", "until_s"), [(900, 900), (1000 + MAX_RETAIN_S + 5, 1000 + MAX_RETAIN_S), (2**62, 1000 + MAX_RETAIN_S)])  # fmt: skip
def test_no_record_retains_pages_longer_than_a_request_can_ask(segment: Segment, recorded_s: int, until_s: int) -> None:
    leave(segment, [3, 5])
    segment.records["retained_until_s"][[3, 5]] = recorded_s
    host, cache = HostPool(segment, GROUPS), new_cache()
    assert recover_host_pages(host, cache, lambda: 1000.0) == 2
    assert {node.retained_until_s for node in cache.tree.nodes()} == {until_s}
    cache.expire(until_s)
    assert not cache.is_retaining
    host.close()


def test_frames_of_tails_behind_their_history_are_waited_for(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(segment, [3, 5])
    frames = np.array([9, 10], dtype=np.int32)
    asked: list[int] = []
    host, cache = HostPool(segment, GROUPS), new_cache()
    monkeypatch.setattr(HostPool, "tails", lambda self: [TailImage(frames, NAMESPACE, b"?" * 16)])
    monkeypatch.setattr(host.prefault, "wait", lambda num_pages, timeout_s: asked.append(num_pages))
    recover_host_pages(host, cache)
    assert asked == [11]
    host.close()


def test_nothing_is_adopted_whose_memory_cannot_be_had(
    segment: Segment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave(segment, [3, 5])

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(Populate, "__call__", refuse)
    with caplog.at_level(logging.WARNING):
        host, cache = HostPool(segment, GROUPS), new_cache()
        assert recover_host_pages(host, cache) == 0
    assert cache.host.pages.num_ready == 1
    assert told(host.recover()) == {}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("the host cache stays at 0 pages: ")
    assert "Lower --host-cache-gib" in warning
    host.close()


class NoTransfers:
    """Copies nothing."""

    def start(self, copy: PageCopy, *, by_layer: bool = False) -> None:
        raise AssertionError(copy)

    def launch_begins(self) -> None:
        pass

    def launch_ends(self) -> None:
        pass

    def forward_done(self, step_id: int) -> None:
        pass

    def poll(self, wait_s: float = 0.0) -> list[CopyAck]:
        return []

    def wait(self, op: int, layer: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


def test_pages_that_outlive_the_server_get_their_checksums_at_the_end(segment: Segment) -> None:
    host = HostPool(segment, GROUPS, max_checksum_bytes_per_s=PAGE_BYTES / 0.1)
    host.clear()
    write(host, segment, [1, 2, 3])
    TierTransfers(NoTransfers(), host, linger_s=10.0).close()
    after = HostPool(segment, GROUPS)
    assert sum(run.pages.size for run in after.recover()) == 3
    after.close()


@pytest.mark.parametrize("change", ["config.json", "weights", "nothing"])
def test_files_that_changed_since_the_server_started_are_refused(tmp_path: Path, change: str) -> None:
    """A worker that starts again must not serve other weights from the pages that its predecessor left."""
    folder = tmp_path / "model"
    shutil.copytree(find_model("hiserve-nano"), folder)
    config = identified(make_options(**SMALL, model=str(folder), spec="off", graphs="off"))
    if change == "config.json":
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3}))
    elif change == "weights":
        os.utime(folder / "model.safetensors")
    segment = open_segment(config, 0)
    assert segment is not None
    if change == "nothing":
        build_engine(config, segment).close()
    else:
        with pytest.raises(ConfigError, match=r"the files of .* have changed since the server started"):
            build_engine(config, segment)
    segment.close()


def test_a_start_that_fails_leaves_no_thread_and_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever mends a setting and starts again in the same process finds the host cache and the store unused."""
    monkeypatch.setattr(runner_factory, "make_runners", lambda *_, **__: pytest.fail("no memory for graphs"))
    name = f"failed-{os.getpid()}"
    options = SMALL | {"in_process": True, "host_cache_name": name, "store": f"file:{tmp_path}"}
    before = set(threading.enumerate())
    try:
        with pytest.raises(pytest.fail.Exception, match="no memory for graphs"):
            LLM(**options)
        assert not set(threading.enumerate()) - before
        assert not store_in(tmp_path).is_used
        monkeypatch.undo()
        LLM(**options).close()
    finally:
        delete_named_cache(name)


def test_a_host_that_is_made_ready_late_takes_what_was_published_before(monkeypatch: pytest.MonkeyPatch) -> None:
    may_touch = threading.Event()
    populate = Populate.__call__

    def late(self: Populate, *args: int) -> None:
        may_touch.wait()
        populate(self, *args)

    monkeypatch.setattr(Populate, "__call__", late)
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    prompts = [np.random.default_rng(seed).integers(7, 4096, 65).tolist() for seed in range(2)]
    with LLM(in_process=True, **SMALL) as llm:
        engine = llm._backend.engine  # type: ignore[attr-defined]
        host = engine._executor._tier_transfers._host
        llm.generate(prompts[:1], greedy)
        assert engine.stats().cache.offloads.num_wanted == 0
        may_touch.set()
        assert host.prefault.wait(host.num_pages, 10)
        llm.generate(prompts[1:], greedy)
        while engine.has_work:
            engine.step()
        assert engine.stats().cache.offloads.num_fulfilled == 8


@pytest.mark.parametrize("waits", [False, True])
def test_attention_changes_after_the_start_at_the_earliest_and_only_where_nothing_waits_for_compilers(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    asked: list[Callable[[], bool] | None] = []
    during: list[bool] = []

    def open_with(
        name: str,
        shape: AttentionShape,
        device: torch.device,
        *,
        has_drafts: bool,
        has_trees: bool,
        is_serving: Callable[[], bool] | None,
    ) -> Attention:
        assert not has_drafts and not has_trees
        asked.append(is_serving)
        if is_serving is not None:
            during.append(is_serving())
        return open_attention(name, shape, device)

    monkeypatch.setattr(runner_factory, "open_attention", open_with)
    config = identified(make_options(**SMALL | {"host_cache_gib": 0}, spec="off", graphs="off"))
    build_engine(config, waits_for_compilers=waits).close()
    (is_serving,) = asked
    assert (is_serving is None) == waits
    assert during == ([] if waits else [False])
    assert is_serving is None or is_serving()


def test_a_worker_of_a_server_waits_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(worker, "build_engine", lambda *_, **named: given.update(named))
    worker.build(settings_of(), -1, 0, NO_MEASUREMENTS)
    assert given == {"waits_for_compilers": False, "ends_process": True}
