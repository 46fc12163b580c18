"""Cached tokens of a real conversation trace, against a set of prefixes that knows nothing of the index."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.core.request import SamplingParams
from hiserve.engine.loop import Engine, EngineFacts
from hiserve.engine.planner import Planner
from hiserve.ipc.messages import Admit
from tests.helpers.copying import FILLER, CopyingExecutor
from tests.invariants.conversation_trace import MAX_LEN, PAGE, requests

NUM_PAGES = 16_384  # more than prompts and replies fill together


class PrefixOracle:
    """Remembers every whole-page prefix ever computed, byte for byte; an endless cache."""

    def __init__(self) -> None:
        self.prefixes: set[bytes] = set()

    def num_cached(self, prompt: np.ndarray) -> int:
        """Tokens found; the last token of a prompt is always computed."""
        best = 0
        for end in range(PAGE, prompt.size, PAGE):
            if prompt[:end].tobytes() not in self.prefixes:
                break
            best = end
        return best

    def remember(self, computed: np.ndarray) -> None:
        for end in range(PAGE, computed.size + 1, PAGE):
            self.prefixes.add(computed[:end].tobytes())


@pytest.mark.parametrize("depth", [0, 1])
def test_cached_tokens_of_a_trace_equal_an_endless_prefix_set(depth: int) -> None:
    cache = PrefixCache(num_pages=NUM_PAGES, page_size=PAGE, namespace=b"trace")
    planner = Planner(cache=cache, max_rows=2, max_len=MAX_LEN, max_batched_tokens=1024, eos_token_ids=())
    engine = Engine(
        planner, CopyingExecutor(num_host_pages=0), depth, EngineFacts(2, MAX_LEN, NUM_PAGES - 1, PAGE, b"trace", {})
    )
    oracle = PrefixOracle()
    wanted, got = [], []
    for uid, (prompt, num_new) in enumerate(requests()):
        engine.add(Admit(uid, prompt.size, SamplingParams(seed=0, max_tokens=num_new), b"", 0), prompt)
        told: list[int] = []
        while engine.has_work:
            updates = engine.step()
            if updates is not None:
                told += [cached.num_tokens for cached in updates.cached if cached is not None]
        assert len(told) == 1, f"request {uid} was told its cached tokens {len(told)} times"
        got += told
        wanted.append(oracle.num_cached(prompt))
        oracle.remember(np.concatenate((prompt, np.full(num_new - 1, FILLER, dtype=np.int32))))
    assert got == wanted
    stats = engine.stats()
    assert len(got) == 500 and stats.cached_tokens == sum(got)
    assert sum(got) > 0.15 * stats.prompt_tokens  # the trace does repeat itself
    assert stats.evicted_pages == 0
