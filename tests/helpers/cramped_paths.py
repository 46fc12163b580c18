"""More paths that prompts take: in chunks, through preemptions, through a pool that holds hardly more than one of them."""

from __future__ import annotations

from pathlib import Path

from hiserve import LLM
from tests.helpers.cache_paths import HOST, SETTINGS, Work, ask, pool
from tests.helpers.tiered import check_whole, counts_of, engine_of, rest


def chunks(work: Work, folder: Path, page_size: int, **settings: object) -> None:
    """Prompts are computed in many small steps, beside rows that verify drafts."""
    options = SETTINGS | pool(page_size) | {"max_batched_tokens": 16, "host_cache_gib": 0} | settings
    with LLM(**options) as llm:
        ask(llm, work)
        assert engine_of(llm).stats().steps > sum(map(len, work.prompts)) // 16
        check_whole(llm)


def preemption(work: Work, folder: Path, page_size: int, **settings: object) -> None:
    """Fewer pages than the rows want: some lose theirs, and start over."""
    num_tokens = max(map(len, work.prompts)) + max(sampling.max_tokens or 0 for sampling in work.sampling) + 16
    options = SETTINGS | pool(page_size, 2 * num_tokens) | {"host_cache_gib": 0} | settings
    with LLM(**options) as llm:
        ask(llm, work)
        check_whole(llm)


def storm(work: Work, folder: Path, page_size: int, **settings: object) -> None:
    """The device holds one row and a half: pages leave it and come back all the time."""
    with LLM(**SETTINGS | pool(page_size, 192) | HOST | settings) as llm:
        for backwards in (False, True, False):
            ask(llm, work, backwards=backwards)
            rest(llm)
        counts = counts_of(llm)
        assert counts.device.num_evicted > 0 and counts.loads.num_fulfilled > 0
        check_whole(llm)
