"""Which prefixes the host keeps, as ``--host-admission`` says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from tests.helpers.small_model import small_model

SETTINGS: dict[str, Any] = {
    "model": small_model(),
    "in_process": True,
    "max_model_len": 128,
    "kv_pages": 60,
    "host_cache_gib": 0.05,
    "cpu_threads": 1,
    "log_level": "warning",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.mark.parametrize(
    ("admission", "after_one", "after_two"), [("write_through", 4, 4), ("write_through_selective", 0, 4)]
)
def test_a_prefix_is_stored_when_it_is_published_or_when_it_is_used_again(
    admission: str, after_one: int, after_two: int
) -> None:
    prompt = np.random.default_rng(3).integers(7, 4096, 64).tolist()
    with LLM(host_admission=admission, **SETTINGS) as llm:
        host = llm._backend.engine._executor._tier_transfers._host  # type: ignore[attr-defined]
        assert host.prefault.wait(host.num_pages, 30.0)
        stored = []
        for last in (8, 9):
            llm.generate([[*prompt, last]], GREEDY)
            stored.append(llm._backend.engine.stats().cache.offloads.num_fulfilled)  # type: ignore[attr-defined]
    assert stored == [after_one, after_two]
