"""What the host holds outlives the worker, and under a name the server: the same tokens, found and not computed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiserve import LLM
from hiserve.cache.storage.host_segment import open_segment, probe_segments
from hiserve.cache.storage.records import NO_CHECKSUM
from hiserve.cache.storage.segment import SHARED_MEMORY, Segment, segment_path, stored_layout
from hiserve.config.options import make_options
from hiserve.config.settings import Settings
from hiserve.core.machine import probe
from hiserve.core.request import Retain, SamplingParams
from hiserve.core.resolve import resolve
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.errors import ConfigError, EngineError, HiserveError, ResourceError
from hiserve.ipc.cache_stats import CopyStats
from hiserve.models.builtin_shapes import read_model
from hiserve.models.draft_config import model_facts
from hiserve.scheduler.client import EngineClient
from tests.helpers.forks import forked_engines
from tests.helpers.segment_name import segment_name
from tests.helpers.settings import identified
from tests.helpers.small_model import small_model
from tests.helpers.waiting import PATIENCE_S, until

PAGE = 16
SETTINGS: dict[str, Any] = {
    "model": small_model(),
    "device": "cpu",
    "dtype": "float64",
    "page_size": PAGE,
    "max_model_len": 256,
    "kv_pages": 60,
    "max_running_requests": 4,
    "max_batched_tokens": 64,
    "spec_steps": 2,
    "cpu_threads": 1,
    "host_cache_gib": 0.05,
    "log_level": "error",
}
SEED = 23
NUM_NEW = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=NUM_NEW, ignore_eos=True)
FULL = [size // PAGE * PAGE for size in (96, 111, 145)]  # whole pages of the prompts
PROMPTS = [np.random.default_rng(SEED + i).integers(7, 4096, size).tolist() for i, size in enumerate((97, 112, 146))]
SAMPLING = [GREEDY, DRAWN, DRAWN]


@pytest.fixture
def name() -> Iterator[str]:
    with segment_name() as name:
        yield name


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    print(f"seed {SEED}")
    with LLM(in_process=True, disable_prefix_cache=True, spec="off", **SETTINGS) as llm:
        tokens = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, SAMPLING)]
    assert len({token for each in tokens for token in each}) >= 20
    return tokens


class Life:
    """One engine in this process, from its start to its end.

    Attributes:
        tokens: Of each prompt's reply.
        cached: What of each prompt came from where.
        loads: From the host, after the last reply.
    """

    def __init__(self, **settings: Any) -> None:
        with LLM(in_process=True, **(SETTINGS | settings)) as llm:
            results = llm.generate(PROMPTS, SAMPLING)
            engine = llm._backend.engine  # type: ignore[attr-defined]
            self.loads: CopyStats = engine.stats().cache.loads
        self.tokens = [result.outputs[0].token_ids for result in results]
        self.cached = [result.cached for result in results]
        del llm, engine, results
        gc.collect()  # the mapping, and with it the lock of the name, goes with the last view of it


def resolved(**settings: Any) -> Settings:
    given = make_options(**(SETTINGS | settings))
    return identified(
        resolve(given, model_facts(given, *read_model(given.model)), probe_segments(given, probe())).settings
    )


def make_segment(name: str) -> None:
    """Makes the segment of a name, as a server would."""
    segment = open_segment(resolved(host_cache_name=name), 0)
    assert segment is not None
    segment.close()


def garble(name: str) -> int:
    """Turns every number of the pages that could be adopted into its negative; returns how many pages there are."""
    layout = stored_layout(name)
    assert layout is not None
    segment = Segment.named(name, layout)
    sealed = np.flatnonzero(segment.records["checksum"] != NO_CHECKSUM)
    segment.pages[sealed, 7::8] ^= 0x80
    segment.close()
    return sealed.size


def test_a_named_cache_survives_the_engine(name: str, expected: list[list[int]]) -> None:
    first = Life(host_cache_name=name)
    assert first.tokens == expected
    assert [each.host for each in first.cached] == [0, 0, 0]
    second = Life(host_cache_name=name)
    assert second.tokens == expected
    assert [each.host for each in second.cached] == FULL
    assert second.loads.unfulfilled == {}
    assert segment_path(name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("verify", ["store", "all"])
def test_garbled_pages_are_counted_and_computed_again(name: str, expected: list[list[int]], verify: str) -> None:
    Life(host_cache_name=name)
    assert garble(name) >= sum(FULL) // PAGE
    second = Life(host_cache_name=name, cache_verify=verify)
    assert second.tokens == expected
    assert second.loads.unfulfilled == {"checksum": second.loads.num_wanted}
    assert second.loads.num_wanted >= sum(FULL) // PAGE
    third = Life(host_cache_name=name)  # what was computed again took the place of what was garbled
    assert third.tokens == expected
    assert [each.host for each in third.cached] == FULL
    assert third.loads.unfulfilled == {}


def test_nobody_looks_when_told_not_to(name: str, expected: list[list[int]]) -> None:
    Life(host_cache_name=name)
    garble(name)
    second = Life(host_cache_name=name, cache_verify="off")
    assert second.loads.num_fulfilled == sum(FULL) // PAGE
    assert second.tokens != expected


def test_auto_keeps_the_size_that_a_name_has(name: str, expected: list[list[int]]) -> None:
    Life(host_cache_name=name, host_cache_gib=0.03)
    before = stored_layout(name)
    second = Life(host_cache_name=name, host_cache_gib="auto")
    assert stored_layout(name) == before
    assert [each.host for each in second.cached] == FULL


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_size": 8}, r"pages of 16 tokens, not 8 \(--page-size\)"),
        ({"dtype": "float32"}, "another --dtype"),
        ({"host_cache_gib": 0.04}, r"GiB, not .*--host-cache-gib"),
    ],
)
def test_a_cache_of_another_layout_is_refused_and_left_alone(name: str, settings: dict[str, Any], words: str) -> None:
    make_segment(name)
    before = segment_path(name).read_bytes()
    with pytest.raises(ConfigError, match=words) as refused:
        LLM(in_process=True, **(SETTINGS | {"host_cache_name": name} | settings))
    assert refused.value.param == "host_cache_name"
    assert str(segment_path(name)) in refused.value.message
    assert segment_path(name).read_bytes() == before


def test_a_cache_of_another_version_is_refused_and_left_alone(name: str) -> None:
    make_segment(name)
    path = segment_path(name)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x63")
    with pytest.raises(ConfigError, match="layout version 99, this server writes"):
        LLM(in_process=True, host_cache_name=name, **SETTINGS)
    assert path.read_bytes()[8] == 99


# --- with processes -----------------------------------------------------------------------------------


Answers = tuple[list[list[int]], list[CacheUse], list[DraftUse | None]]


async def ask(client: EngineClient, retain: Retain = ()) -> Answers:
    """Sends every prompt, one after the other; returns the tokens of each, what came from where, and its drafts."""
    tokens, cached, drafts = [], [], []
    for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True):
        replies = client.generate(np.array(prompt, dtype=np.int32), sampling, retain=retain)
        deltas = [delta async for delta in replies]
        tokens.append([token for delta in deltas for token in delta.tokens])
        assert deltas[0].cached is not None
        cached.append(deltas[0].cached)
        drafts.append(next((delta.drafts for delta in reversed(deltas) if delta.drafts is not None), None))
    return tokens, cached, drafts


async def until_sealed(client: EngineClient, num_retained: int) -> None:
    """Waits until what the prompts left is on the host, with its checksums and the times of retained pages."""
    folder = Path(f"/proc/{client.started.scheduler_pid}/fd")
    path = next(path for path in folder.iterdir() if "hiserve-host-cache" in os.readlink(path))
    segment = Segment.attach(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    await until(lambda: np.count_nonzero(segment.records["checksum"] != NO_CHECKSUM) >= sum(FULL) // PAGE)
    await until(lambda: np.count_nonzero(segment.records["retained_until_s"]) == num_retained)
    segment.close()


async def ask_again(client: EngineClient) -> Answers:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await ask(client)
            except EngineError:
                await asyncio.sleep(0.05)


async def test_a_killed_worker_leaves_its_host_cache_to_its_successor(expected: list[list[int]]) -> None:
    with forked_engines():
        client = await EngineClient.start(resolved())
    try:
        first, _, drafts = await ask(client, retain=((3 * PAGE, 3600),))
        assert first == expected
        await until_sealed(client, num_retained=3 * len(PROMPTS))
        os.kill(client.started.workers[0].pid, signal.SIGKILL)
        tokens, cached, drafts_again = await ask_again(client)
        assert tokens == expected
        assert drafts_again == drafts, "the drafts' part of pages was not handed on"
        assert any(used.verify_steps for used in drafts if used)
        assert [each.host for each in cached] == FULL
        [worker] = (await client.status()).workers
        assert worker.incarnation == 2
        assert worker.stats.cache.loads.num_fulfilled == sum(FULL) // PAGE
        assert worker.stats.cache.num_retained == 3 * len(PROMPTS)
        assert "adopt host cache" in worker.startup_s
    finally:
        await client.stop()


async def test_a_named_cache_survives_the_whole_server_and_has_one_owner(name: str, expected: list[list[int]]) -> None:
    config = resolved(host_cache_name=name)
    with forked_engines():
        client = await EngineClient.start(config)
    try:
        assert (await ask(client))[0] == expected
        with pytest.raises(HiserveError, match="another server uses") as refused:
            await EngineClient.start(config)
        assert refused.value.code == ResourceError.code
    finally:
        await client.stop()
    with forked_engines():
        client = await EngineClient.start(config)
    try:
        tokens, cached, _ = await ask(client)
        assert tokens == expected
        assert [each.host for each in cached] == FULL
    finally:
        await client.stop()


def test_nothing_of_an_unnamed_cache_is_a_file() -> None:
    with LLM(in_process=True, **SETTINGS) as llm:
        llm.generate(PROMPTS, SAMPLING)
        mapped = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
        opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert any("memfd:hiserve-host-cache" in path for path in mapped)
    # Semaphores of other tests' helpers may still be mapped in this process; they are no files of a cache.
    in_memory = {path for path in mapped + opened if path.startswith(f"{SHARED_MEMORY}/")}
    assert not {path for path in in_memory if not path.startswith(f"{SHARED_MEMORY}/sem.")}
