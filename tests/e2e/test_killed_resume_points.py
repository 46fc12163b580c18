"""A worker killed by SIGKILL leaves its resume points to its successor: history and tails, each whole, and the same tokens.

Tails have window pages, snapshots of recurrent states or of rings, or both. Exact, in float64, against an engine that keeps all pages of all
layers and reuses none.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.cache.storage.records import whole_tails
from hiserve.cache.storage.segment import Segment, segment_path
from hiserve.config.options import make_options
from hiserve.core.digest import chain, namespace_digest, pack_tokens
from hiserve.core.usage import CacheUse
from hiserve.models.model_config import NANO, find_model
from hiserve.scheduler.client import EngineClient
from tests.helpers.compressed_models import add_stream_head, save_compressed
from tests.helpers.forks import forked_engines
from tests.helpers.models import save_family
from tests.helpers.processes import wait_dead
from tests.helpers.segment_name import segment_name
from tests.helpers.settings import identified
from tests.helpers.state_models import save_with_head
from tests.helpers.waiting import until
from tests.helpers.widening import some
from tests.helpers.window_models import SETTINGS, VOCAB, WINDOW, add_mtp, save_windows

NUM_NEW = 14
LENGTHS = (11, 29, 40, 57)  # of prompts: shorter than the window, and longer than several
SAMPLING = [
    SamplingParams(temperature=0.9 * (row % 2), seed=row, max_tokens=NUM_NEW, ignore_eos=True)
    for row in range(len(LENGTHS))
]
HOST: dict[str, Any] = {"host_cache_gib": 0.01, "window_pages": 160, "log_level": "error"}
STATES = "snapshots, pages of one token, overlap"
CASES: dict[str, dict[str, Any]] = {
    # With 600 pages the tails of four rows, which have one boundary each at their prompts' ends too, take each other's slots.
    STATES: {"page_size": 1, "kv_pages": 2000, "overlap": 1, "window_pages": "auto"},
    "copied drafts, overlap": {"spec": "ngram", "spec_steps": 3, "overlap": 1},
    "a head's drafts, pages longer than the window": {"spec": "mtp", "spec_steps": 2, "page_size": 16},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Models with windows, and with recurrent states."""
    torch.set_num_threads(1)
    windows, states = (tmp_path_factory.mktemp(name) for name in ("windows", "states"))
    save_family("qwen3_5_text", states, vocab_size=VOCAB)
    shutil.copy(find_model(NANO) / "tokenizer.json", states)
    return add_mtp(save_windows(windows)), states


AMIDST: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"spec_steps": 3, "window_pages": "auto"},
    "deepseek_v4": {"spec_steps": 2, "window_pages": "auto", "page_size": 16},
}


@pytest.fixture
def name() -> Iterator[str]:
    with segment_name() as name:
        yield name


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(7, VOCAB, length).tolist() for length in LENGTHS]


def next_turns(first: list[list[int]]) -> list[list[int]]:
    return [[*prompt, *reply, 8, 9] for prompt, reply in zip(prompts(), first, strict=True)]


@lru_cache
def expected(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """First turns and next turns."""
    with LLM(model=str(folder), **SETTINGS | {"window_pages": 0, "disable_prefix_cache": True}) as llm:
        first = [list(each.outputs[0].token_ids) for each in llm.generate(prompts(), SAMPLING)]
        return first, [list(each.outputs[0].token_ids) for each in llm.generate(next_turns(first), SAMPLING)]


async def ask(
    client: EngineClient,
    asked: list[list[int]],
    sampling: list[SamplingParams] = SAMPLING,
    said: Callable[[int], object] = bool,
) -> tuple[list[list[int]], list[CacheUse]]:
    """Asks all at once; returns the tokens of each, and what came from where; ``said`` is told whenever a request says something."""

    async def one(number: int) -> tuple[list[int], CacheUse]:
        tokens, cached = list[int](), list[CacheUse]()
        async for delta in client.generate(np.array(asked[number], dtype=np.int32), sampling[number]):
            tokens += delta.tokens
            cached += [delta.cached] if delta.cached is not None else []
            said(number)
        return tokens, cached[0]

    replies = await asyncio.gather(*map(one, range(len(asked))))
    return [tokens for tokens, _ in replies], [cached for _, cached in replies]


async def until_backed(name: str, namespace: bytes, page_size: int, settled: list[list[int]]) -> None:
    """Waits until the host has the tail at the end of each of these token sequences, every frame with its checksum."""
    root = namespace_digest(namespace, b"")
    ends = {chain(root, pack_tokens(np.array(each, dtype=np.int32)), page_size)[-1] for each in settled}
    segment = Segment.attach(os.open(segment_path(name), os.O_RDWR | os.O_CLOEXEC))
    await until(lambda: len(whole_tails(segment.records, ends)) == len(ends))
    segment.close()


async def kill_while_asked(client: EngineClient, asked: list[list[int]]) -> tuple[list[list[int]], list[CacheUse]]:
    """Asks a worker that does nothing any more, and kills it: its successor answers everything."""
    (worker,) = (await client.status()).workers
    os.kill(worker.pid, signal.SIGSTOP)
    replies = asyncio.create_task(ask(client, asked))
    await until(lambda: client.num_inflight == len(asked))
    os.kill(worker.pid, signal.SIGKILL)
    return await replies


@asynccontextmanager
async def engine(**options: Any) -> AsyncIterator[tuple[EngineClient, bytes]]:
    """Starts processes; yields their client, and the namespace of their cache. No process is left."""
    given = SETTINGS | HOST | options
    del given["in_process"]
    settings = identified(make_options(**given))
    with forked_engines():
        client = await EngineClient.start(settings)
    try:
        yield client, settings.cache_identity.namespace
    finally:
        pid = client.started.scheduler_pid
        await client.stop()
        await asyncio.to_thread(wait_dead, [pid])


@pytest.mark.parametrize("case", some(CASES, STATES))
async def test_the_successor_of_a_killed_worker_goes_on_at_its_resume_points(
    case: str, folders: tuple[Path, Path], name: str
) -> None:
    """H5 and H10: every next turn has the whole pages of the turn that the dead worker computed, loaded from the host."""
    folder = folders[case == STATES]
    first, later = expected(folder)
    page_size = CASES[case].get("page_size", SETTINGS["page_size"])
    settled = [[*prompt, *reply[:-1]] for prompt, reply in zip(prompts(), first, strict=True)]
    async with engine(model=str(folder), host_cache_name=name, **CASES[case]) as (client, namespace):
        assert (await ask(client, prompts()))[0] == first
        await until_backed(name, namespace, page_size, settled)
        tokens, cached = await kill_while_asked(client, next_turns(first))
        assert tokens == later
        assert [each.host for each in cached] == [len(each) // page_size * page_size for each in settled]
        (worker,) = (await client.status()).workers
        loads = worker.stats.cache.loads
        num_seen = 1 if case == STATES else WINDOW - 1  # a snapshot takes a frame at least
        num_tail_pages = [min(len(each) // page_size, -(-num_seen // page_size)) for each in settled]
        assert worker.incarnation == 2 and loads.num_fulfilled == loads.num_wanted
        assert loads.num_fulfilled >= sum(each.host for each in cached) // page_size + sum(num_tail_pages)


@pytest.mark.wide  # as many seconds of CPU as three other cases, half of them for starts
@pytest.mark.parametrize("family", AMIDST)
async def test_a_worker_killed_amidst_drafts_and_snapshots_costs_no_token(family: str, tmp_path: Path) -> None:
    """H5, H14: each row has drafts in flight and has stored snapshots; its successor knows what was said, and no state."""
    torch.set_num_threads(1)
    if family == "deepseek_v4":
        add_stream_head(save_compressed(tmp_path, vocab_size=VOCAB))
    else:
        save_with_head(family, tmp_path, vocab_size=VOCAB)
        shutil.copy(find_model(NANO) / "tokenizer.json", tmp_path)
    sampling = [
        SamplingParams(temperature=0.9 * (row % 2), seed=row, max_tokens=48, ignore_eos=True)
        for row in range(len(LENGTHS))
    ]
    plain = SETTINGS | {"window_pages": 0, "disable_prefix_cache": True, "page_size": 16, "kv_pages": 60}
    with LLM(model=str(tmp_path), **plain) as llm:
        expected = [list(each.outputs[0].token_ids) for each in llm.generate(prompts(), sampling)]
    options = {"spec": f"mtp:{tmp_path}", "overlap": 1, "tail_every": 16, "tail_share": 0.6} | AMIDST[family]
    async with engine(model=str(tmp_path), **options) as (client, _):
        num_said = Counter[int]()
        replies = asyncio.create_task(ask(client, prompts(), sampling, lambda number: num_said.update([number])))
        await until(lambda: len(num_said) == len(LENGTHS) and min(num_said.values()) > 2)
        (worker,) = (await client.status()).workers
        assert client.num_inflight == len(LENGTHS)
        os.kill(worker.pid, signal.SIGKILL)
        assert (await replies)[0] == expected
        (worker,) = (await client.status()).workers
        assert worker.incarnation == 2
