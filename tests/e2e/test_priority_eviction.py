"""What requests of higher priority used stays in the cache for longer, if the server was told to look at it."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.e2e.live import Live, serve
from tests.helpers.widening import some

PAGE = 16
NUM_PAGES = 40
SEED = 21
FLAGS = (
    *("--page-size", str(PAGE), "--kv-pages", str(NUM_PAGES + 1), "--max-model-len", "256", "--cpu-threads", "1"),
    *("--max-running-requests", "1", "--host-cache-gib", "0", "--log-level", "warning"),
)


def num_cached(live: Live, prompt: list[int], priority: int) -> int:
    body = {"model": "hiserve-nano", "prompt": prompt, "max_tokens": 1, "priority": priority}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("policy", some(["lru", "priority"], "priority"))
def test_a_prefix_of_high_priority_outlives_newer_ones_under_the_policy_that_says_so(
    policy: str, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(7, 4096, 10 * PAGE + 1).tolist() for _ in range(7)]
    with serve(tmp_path, *FLAGS, "--eviction", policy) as live:
        assert num_cached(live, prompts[0], priority=5) == 0
        for prompt in prompts[1:]:
            assert num_cached(live, prompt, priority=0) == 0
        (worker,) = live.wait_idle()["workers"]
        assert worker["stats"]["evicted_pages"] > 0
        assert num_cached(live, prompts[0], priority=0) == (10 * PAGE if policy == "priority" else 0)
