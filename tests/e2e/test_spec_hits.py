"""Reported bugs of speculation over a hierarchical cache, by number: hits, lookups and pages.

TC-01 is in ``test_spec_sources.py``, TC-05 in ``tests/invariants/test_reported_bugs_drafts.py``.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import msgspec
import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from tests.helpers.cache_paths import HOST, PAGE, SETTINGS, SMALL_MODEL, answer, check, pool
from tests.helpers.dialogues import conversations, trained
from tests.helpers.small_model import small_model
from tests.helpers.tiered import check_whole, counts_of, leave_device, rest

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=12, ignore_eos=True)
DIALOGUES = 3  # so many in a turn
SHORT = ("eagle3", 4)
Hits = list[tuple[int, int]]


@lru_cache
def hits_of(spec: str, page_size: int) -> Hits:
    """Returns (device, host) tokens that three turns find: nothing, what was loaded, what is there."""
    found: Hits = []
    with LLM(**SMALL_MODEL | pool(page_size) | HOST, spec=spec, spec_steps=3) as llm:
        prompts = conversations(llm)[::7][:DIALOGUES]
        for turn in range(3):
            results = llm.generate(prompts, GREEDY)
            found += [(result.cached.device, result.cached.host) for result in results]
            replies = [result.outputs[0].token_ids for result in results]
            prompts = [[*prompt, *reply, *prompt[:9]] for prompt, reply in zip(prompts, replies, strict=True)]
            if not turn:
                leave_device(llm)
        check_whole(llm)
    return found


@pytest.mark.parametrize(
    ("spec", "page_size"),
    [
        pytest.param(*case, marks=() if case == SHORT else pytest.mark.long)
        for case in itertools.product(("eagle3", "mtp", "ngram", "draft_model"), (1, 4, 16))
    ],
)
def test_tc_07_speculation_does_not_defeat_prefix_reuse(spec: str, page_size: int) -> None:
    drafted, plain = hits_of(trained(spec, small_model()), page_size), hits_of("off", page_size)
    for ours, theirs in zip(drafted, plain, strict=True):
        assert sum(ours) >= sum(theirs) - page_size
    assert all(host for _, host in plain[DIALOGUES : 2 * DIALOGUES])
    assert all(device for device, _ in plain[2 * DIALOGUES :])


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.long), 5])
def test_tc_09_lookups_in_the_text_work_over_the_host_tier(steps: int) -> None:
    """A row that begins behind a loaded prefix is looked up in the whole of its text, as if it had been computed."""
    uses = []
    with LLM(**SETTINGS | pool(PAGE) | HOST, spec="ngram", spec_steps=steps, spec_history=0) as llm:
        prompts = [[*prompt, *prompt[1:], *prompt[1:14]] for prompt in conversations(llm)[::7][:2]]
        work = answer(prompts, [msgspec.structs.replace(GREEDY, max_tokens=30)] * 2)
        for order in (1, -1):  # each has another row, where another's text stood
            results = llm.generate(work.prompts[::order], work.sampling)[::order]
            for result, expected in zip(results, work.expected, strict=True):
                check(result.outputs[0], expected)
            uses.append([result.outputs[0].drafts for result in results])
            leave_device(llm)
        assert [result.cached.host for result in results] == work.num_full(PAGE)
        check_whole(llm)
    assert uses[0] == uses[1]
    assert sum(use.accepted for use in uses[1] if use) >= 4


@pytest.mark.parametrize(
    ("page_size", "num_requests"),
    [(16, 50), *[pytest.param(*case, marks=pytest.mark.long) for case in ((16, 10_000), (4, 2_000), (64, 2_000))]],
)
def test_tc_10_no_page_is_lost_to_rejected_tokens(page_size: int, num_requests: int) -> None:
    """Replies of any length: the last page of one may have been for drafts alone."""
    rng = np.random.default_rng(10)
    options = SMALL_MODEL | pool(page_size, 512) | HOST | {"dtype": "float32"}
    with LLM(**options, spec=trained("mtp", small_model()), spec_steps=3) as llm:
        prompts = conversations(llm)
        requests = [
            (
                prompts[rng.integers(len(prompts))][: rng.integers(1, 48)],
                SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=int(rng.integers(1, 17))),
            )
            for index in range(num_requests)
        ]
        rejected = 0
        for start in range(0, num_requests, 500):
            for result in llm.generate_each(requests[start : start + 500]):
                drafts = result.outputs[0].drafts
                rejected += 0 if drafts is None else drafts.proposed - drafts.accepted
            rest(llm)
            counts = counts_of(llm)
            assert counts.device.num_free + counts.device.num_evictable == counts.device.num_pages
        assert rejected > num_requests
        check_whole(llm)
