"""Wherever a prompt comes from, the model's pages and the head's are what they would be without, and drafts as good.

Bit by bit: float64 on the CPU, each token computed by itself.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hiserve import LLM, SamplingParams
from hiserve.core.usage import DraftUse
from hiserve.llm.outputs import RequestOutput
from tests.helpers.cache_paths import HOST, SMALL_MODEL, pool
from tests.helpers.dialogues import conversations, trained
from tests.helpers.segment_name import segment_name
from tests.helpers.small_model import small_model
from tests.helpers.tiered import Pages, counts_of, draft_pages, engine_of, leave_device, rest, seal, target_pages
from tests.helpers.tokenwise import tokenwise

STEPS, NUM_NEW, NUM_PROMPTS = 3, 13, 3
SAMPLING = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_NEW, ignore_eos=True)
    for seed, temperature in enumerate((0.0, 0.8, 0.0))
]
HEADS = ["eagle3", "mtp"]


@pytest.fixture(autouse=True, scope="module")
def exact() -> Iterator[None]:
    with tokenwise():
        yield


def settings(page_size: int, **others: Any) -> dict[str, Any]:
    return SMALL_MODEL | pool(page_size) | HOST | {"kv_canary": False, "spec": "off"} | others


def ask(llm: LLM, num_more: int = 0) -> list[RequestOutput]:
    sampling = [msgspec.structs.replace(each, max_tokens=NUM_NEW + num_more) for each in SAMPLING]
    return llm.generate(conversations(llm)[::7][:NUM_PROMPTS], sampling)


def use_of(results: list[RequestOutput]) -> list[DraftUse | None]:
    return [result.outputs[0].drafts for result in results]


def said(results: list[RequestOutput]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


class Cold:
    """A run of an engine that reuses nothing.

    Args:
        page_size: Tokens per page.
        num_more: Tokens that are generated beyond the usual number.
        **others: More settings.

    Attributes:
        prompts: What was asked.
        said: The replies.
        used: What became of their drafts.
        target: What the model left in pages.
        draft: What the head left in them.
    """

    def __init__(self, page_size: int, *, num_more: int = 0, **others: Any) -> None:
        with LLM(**settings(page_size, host_cache_gib=0, disable_prefix_cache=True, **others)) as llm:
            results = ask(llm, num_more)
            assert not any(result.cached.num_tokens for result in results)
            self.take(llm, results)

    def take(self, llm: LLM, results: list[RequestOutput]) -> None:
        rest(llm)
        self.prompts = [result.prompt_token_ids for result in results]
        self.said, self.used, self.target = said(results), use_of(results), target_pages(llm)
        self.draft: Pages = draft_pages(llm) if llm.settings.spec.spec in HEADS else {}


# --- what a prompt finds --------------------------------------------------------------------------------


@contextmanager
def device(folder: Path, **options: Any) -> Iterator[LLM]:
    with LLM(**settings(**options)) as llm:
        ask(llm)
        yield llm


@contextmanager
def host(folder: Path, **options: Any) -> Iterator[LLM]:
    with device(folder, **options) as llm:
        leave_device(llm)
        yield llm


@contextmanager
def store(folder: Path, **options: Any) -> Iterator[LLM]:
    with device(folder, store=f"file:{folder}", store_prefetch="wait", **options) as llm:
        rest(llm)
        engine_of(llm).flush()
        yield llm


@contextmanager
def adopted(folder: Path, **options: Any) -> Iterator[LLM]:
    """A host tier that another engine left."""
    with segment_name() as name:
        with device(folder, host_cache_name=name, **options) as llm:
            seal(llm)
        del llm
        gc.collect()  # the lock of the name goes with the last view of its memory
        with LLM(**settings(host_cache_name=name, **options)) as llm:
            yield llm


FOUND: dict[str, Callable[..., Any]] = {"device": device, "host": host, "store": store, "adopted": adopted}
SOURCES = {"device": "device", "host": "host", "store": "store", "adopted": "host"}


@pytest.fixture(scope="module")
def cold() -> Callable[[str], Cold]:
    return lru_cache(lambda kind: Cold(8, spec=trained(kind, small_model()), spec_steps=STEPS))


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *[pytest.param("eagle3", where) for where in FOUND],
        *[pytest.param("mtp", where, marks=pytest.mark.long) for where in FOUND],
    ],
)
def test_a_cached_prompt_has_the_bytes_and_the_acceptance_of_a_cold_one(
    cold: Callable[[str], Cold], kind: str, where: str, tmp_path: Path
) -> None:
    """The drafts' part of pages as well as the model's: those that were found, and those computed behind them."""
    with FOUND[where](tmp_path, page_size=8, spec=trained(kind, small_model()), spec_steps=STEPS) as llm:
        results = ask(llm)
        assert all(getattr(result.cached, SOURCES[where]) for result in results)
        rest(llm)
        expected = cold(kind)
        assert said(results) == expected.said
        assert use_of(results) == expected.used
        assert target_pages(llm) == expected.target
        assert draft_pages(llm) == expected.draft
    assert sum(used.accepted for used in expected.used if used) > 2 * NUM_PROMPTS


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=pytest.mark.long)])
def test_tc_01_what_was_evicted_to_the_host_and_loaded_keeps_its_drafts(kind: str) -> None:
    """Prompts in turns that push each other out of the device, against an engine that has room for all."""
    runs = []
    for num_tokens in (96, 2000):
        options = settings(
            4, spec=trained(kind, small_model()), spec_steps=STEPS, max_running_requests=1, max_model_len=96
        ) | pool(4, num_tokens)
        with LLM(**options) as llm:
            results = ask(llm) + ask(llm)
            rest(llm)
            runs.append((said(results), use_of(results), draft_pages(llm)))
            hits = sum(result.cached.host for result in results[NUM_PROMPTS:])
            is_small = num_tokens == 96
            assert (counts_of(llm).device.num_evicted > 0) == is_small
            assert (hits > 0) == is_small
    (tokens, used, pages), (expected_tokens, expected_used, expected_pages) = runs
    assert (tokens, used) == (expected_tokens, expected_used)
    assert len(pages) > 5
    assert pages.items() <= expected_pages.items()


# --- what steps with drafts leave -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "steps", "page_size", "depth"),
    [
        ("eagle3", 3, 1, 1),
        *[
            pytest.param(*case, marks=pytest.mark.long)
            for case in itertools.product(("eagle3", "mtp", "ngram"), (1, 3, 7), (1, 4, 16), (0, 1))
        ],
    ],
)
def test_pages_that_steps_with_drafts_publish_are_those_of_plain_decoding(
    spec: str, steps: int, page_size: int, depth: int
) -> None:
    proposer = trained(spec, small_model())
    drafted = Cold(page_size, overlap=depth, spec=proposer, spec_steps=steps)
    plain = Cold(page_size, overlap=depth, num_more=1)  # so that it computes the last tokens, too
    assert drafted.said == [each[:NUM_NEW] for each in plain.said]
    assert sum(used.accepted for used in drafted.used if used) > 0
    assert drafted.target.items() <= plain.target.items()
    ends = {(*prompt, *said) for prompt, said in zip(drafted.prompts, drafted.said, strict=True)}
    # A step may have computed the last token, or not.
    assert {end[: (len(end) - 1) // page_size * page_size] for end in ends} <= drafted.target.keys()


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=pytest.mark.long)])
def test_prompts_that_part_right_behind_a_page_keep_their_acceptance(kind: str) -> None:
    """What the model showed of the page's last token comes with the page: nothing of the other prompt does."""
    page_size = 4
    options = settings(page_size, host_cache_gib=0, spec=trained(kind, small_model()), spec_steps=STEPS)
    greedy = SAMPLING[0]
    with LLM(**options) as llm:
        one, other = conversations(llm)[0], conversations(llm)[7]
        shared = one[: 7 * page_size]
        asked = [[*shared, *other[size:]] for size in (30, 20)] + [[*shared, *one[28:]]]
        assert len({prompt[len(shared)] for prompt in asked}) == len(asked), "prompts that go on alike"
    results = []
    for is_shared in (True, False):
        with LLM(**options, disable_prefix_cache=not is_shared) as llm:
            done = [llm.generate([prompt], greedy)[0] for prompt in asked]
            rest(llm)
            results.append((said(done), use_of(done), draft_pages(llm)))
            hits = [result.cached.num_tokens for result in done]
            assert hits == ([0] + [len(shared)] * (len(asked) - 1) if is_shared else [0] * len(asked))
    assert results[0] == results[1]
    assert sum(used.accepted for used in results[0][1] if used) > 0
