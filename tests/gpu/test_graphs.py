"""Graphs on CUDA: what is replayed equals what runs eagerly, bit by bit, at every edge of a bucket and of a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiserve.core.request import SamplingParams
from tests.helpers.cuda import (
    BUCKETS,
    FREE,
    MAX_LEN,
    MAX_ROWS,
    NUM_PAGES,
    PAGE,
    SAMPLED,
    decisions,
    generate,
    graph_engine,
    news,
    prompts_of,
    wait_for_stream,
)
from tests.helpers.models import Engine
from tests.helpers.plans import GREEDY, HandPlanner
from tests.helpers.scripted import verify

pytestmark = pytest.mark.gpu

WIDTHS = (2, 4)
AROUND_BUCKETS = sorted({bucket + offset for bucket in BUCKETS for offset in (-1, 0, 1)} & set(range(1, MAX_ROWS + 1)))


@pytest.fixture(scope="module")
def replayed(nano: Path) -> Iterator[Engine]:
    subject = graph_engine(nano, "decode", widths=(1, *WIDTHS))
    yield subject
    subject.executor.close()


@pytest.mark.parametrize("num_rows", AROUND_BUCKETS)
def test_replays_equal_eager_steps_around_every_bucket(replayed: Engine, eager: Engine, num_rows: int) -> None:
    """In float32: a padded batch is another shape, whose roundings in bfloat16 may choose another token."""
    before = decisions(replayed).get("replay/decode", 0)
    prompts = prompts_of([17 + 3 * row % 60 for row in range(num_rows)], seed=num_rows)
    tokens = generate(replayed, prompts, 6)
    assert decisions(replayed)["replay/decode"] - before == 5
    assert tokens == generate(eager, prompts, 6)


@pytest.fixture(scope="module")
def in_bfloat16(nano: Path) -> Iterator[list[Engine]]:
    """Without graphs and with them."""
    subjects = [graph_engine(nano, graphs, "bfloat16") for graphs in ("off", "decode")]
    yield subjects
    for subject in subjects:
        subject.executor.close()


@pytest.mark.parametrize("num_rows", BUCKETS)
def test_replays_of_full_buckets_equal_eager_steps_bit_by_bit_in_bfloat16(
    in_bfloat16: list[Engine], num_rows: int
) -> None:
    prompts = prompts_of([17 + 3 * row % 60 for row in range(num_rows)], seed=num_rows)
    sampling = SAMPLED if num_rows == 4 else GREEDY
    before = decisions(in_bfloat16[1])
    tokens = [generate(subject, prompts, 20, sampling) for subject in in_bfloat16]
    assert tokens[0] == tokens[1]
    assert news(before, decisions(in_bfloat16[1]))["replay/decode"] == 19


@pytest.mark.parametrize("sampling", [GREEDY, FREE, SAMPLED], ids=["greedy", "free", "filtered"])
@pytest.mark.parametrize("length", [PAGE * 3 - 1, PAGE * 3, PAGE * 3 + 1, MAX_LEN - 20])
def test_replays_equal_eager_steps_across_pages(
    replayed: Engine, eager: Engine, length: int, sampling: SamplingParams
) -> None:
    prompts = prompts_of([length] * 4, seed=length)
    assert generate(replayed, prompts, 20, sampling) == generate(eager, prompts, 20, sampling)


def test_padding_rows_write_only_the_sink(replayed: Engine) -> None:
    generate(replayed, prompts_of([20, 30, 40]), 2)
    storage = replayed.pool.storage("kv")
    storage.zero_()  # NaN is not equal to itself
    wait_for_stream()
    planner = HandPlanner(PAGE, NUM_PAGES)
    prompts = prompts_of([20, 30, 40], seed=5)
    for row, prompt in prompts.items():
        planner.admit(row, prompt)
    replayed.executor.submit(planner.step({row: len(prompt) for row, prompt in prompts.items()})).result()
    before = storage.clone()
    plan = planner.step(dict.fromkeys(prompts, 1))
    replayed.executor.submit(plan).result()
    pages = {page for owned in planner.pages.values() for page in owned} | {0}
    changed = (storage != before).flatten(3).any(-1).nonzero()
    slots = set((changed[:, 2]).unique().tolist())
    assert {slot // PAGE for slot in slots} <= pages
    own = {planner.pages[row][(len(prompt)) // PAGE] * PAGE + len(prompt) % PAGE for row, prompt in prompts.items()}
    assert {slot for slot in slots if slot >= PAGE} == own


@pytest.fixture(scope="module")
def pieces(nano: Path) -> Iterator[Engine]:
    subject = graph_engine(nano, "all")
    subject.runners.coverage = dataclasses.replace(subject.runners.coverage, mixed=None)
    yield subject
    subject.executor.close()


@pytest.mark.parametrize("lengths", [[64], [32], [31, 33], [100, 28], [256], [8]])
def test_pieces_of_full_buckets_equal_the_eager_prefill(pieces: Engine, eager: Engine, lengths: list[int]) -> None:
    before = decisions(pieces).get("replay/piecewise", 0)
    prompts = prompts_of(lengths, seed=sum(lengths))
    assert generate(pieces, prompts, 1, chunk=256) == generate(eager, prompts, 1, chunk=256)
    assert decisions(pieces)["replay/piecewise"] == before + 1


def test_pieces_of_padded_buckets_and_mixed_steps_keep_float64_tokens(nano: Path) -> None:
    prompts = prompts_of([3, 17, 50, 129, 200], seed=4)
    tokens = []
    for graphs in ("off", "all"):
        subject = graph_engine(nano, graphs, "float64", attention="reference", max_rows=8)
        tokens.append(generate(subject, prompts, 6, chunk=70))
        counts = decisions(subject)
        subject.executor.close()
    assert tokens[0] == tokens[1]
    assert set(counts) == {"replay/piecewise"}  # the reference cannot be captured


@pytest.mark.parametrize("width", WIDTHS)
def test_verify_steps_accept_the_drafts_that_plain_decoding_would_emit(
    replayed: Engine, eager: Engine, width: int
) -> None:
    """A proposer that knows the answer, and spoils every third draft."""
    prompts = prompts_of([20, 45, 33], seed=width)
    expected = generate(eager, prompts, 24)
    before = decisions(replayed)
    assert verify(replayed, prompts, expected, width) == expected
    assert news(before, decisions(replayed))["replay/verify"] > 0
