"""What a graph reads is its own: garbage in all other memory, before its first replay and before every one, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import cuda
from tests.helpers.cuda import FREE, SAMPLED, TOKEN_BUCKETS, decisions, generate, news, prompts_of
from tests.helpers.models import Engine
from tests.helpers.plans import GREEDY
from tests.helpers.scripted import verify

pytestmark = pytest.mark.gpu

WIDTHS = (1, 2, 4)
MAX_ROWS, BUCKETS = 9, (1, 2, 4, 8, 9)
# Of prompts that fill buckets of tokens, and that do not.
PREFILLS = ((8,), (5,), (16,), (9,), (30, 2), (64,), (31, 20), (96,), (128,), (100, 92), (256,), (100, 99))


@pytest.fixture
def poisoned(nano: Path) -> Iterator[Engine]:
    subject = cuda.graph_engine(nano, "all", widths=WIDTHS, max_rows=MAX_ROWS)
    subject.poisoned = cuda.poison(subject)  # type: ignore[attr-defined]
    yield subject
    assert all(runner.num_replays for runner in subject.poisoned), "nothing was replayed"  # type: ignore[attr-defined]
    subject.executor.close()


def check_all(subject: Engine, eager: Engine) -> None:
    """Compares steps of all kinds, each with padding and without, with those of an engine without graphs."""
    for num_rows in (1, 3, 5, MAX_ROWS):
        prompts = prompts_of([17 + 7 * row % 40 for row in range(num_rows)], seed=num_rows)
        for sampling in (GREEDY, FREE, SAMPLED):
            expected = generate(eager, prompts, 6, sampling)
            assert generate(subject, prompts, 6, sampling) == expected, f"{num_rows} rows"
        if num_rows < MAX_ROWS:
            expected = generate(eager, prompts, 14)
            for width in WIDTHS[1:]:
                assert verify(subject, prompts, expected, width) == expected, f"{num_rows} rows, {width} tokens each"


def test_unused_rows_and_old_outputs_hold_garbage_before_each_replay(poisoned: Engine, eager: Engine) -> None:
    """Also the sink, and every slot that nobody has written."""
    before = decisions(poisoned)
    check_all(poisoned, eager)
    ran = news(before, decisions(poisoned))
    assert ran.keys() == {"replay/decode", "replay/verify", "replay/mixed", "replay/piecewise"}


def test_noise_in_freed_memory_before_the_first_replay_of_every_graph(nano: Path, eager: Engine) -> None:
    subject = cuda.graph_engine(nano, "all", widths=WIDTHS, max_rows=MAX_ROWS)
    cuda.fill_freed_memory(subject)
    for num_rows in BUCKETS:
        prompts = prompts_of([20 + row % 5 for row in range(num_rows)], seed=num_rows)
        expected = generate(eager, prompts, 12)
        assert generate(subject, prompts, 2) == {row: tokens[:2] for row, tokens in expected.items()}
        for width in WIDTHS[1:]:
            assert verify(subject, prompts, expected, width) == expected, f"{num_rows} rows, {width} tokens each"
    for lengths in PREFILLS:
        prompts = prompts_of(lengths, seed=sum(lengths))
        assert generate(subject, prompts, 1, chunk=256) == generate(eager, prompts, 1, chunk=256), lengths
    subject.executor.close()


def test_noise_in_freed_memory_between_replays(nano: Path, eager: Engine) -> None:
    subject = cuda.graph_engine(nano, "all", widths=WIDTHS, max_rows=MAX_ROWS)
    for _ in range(2):
        check_all(subject, eager)
        cuda.fill_freed_memory(subject)
    check_all(subject, eager)
    assert not [reason for reason in decisions(subject) if reason.startswith("eager")]
    subject.executor.close()


@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
def test_noise_changes_no_bit_of_what_the_engine_itself_replays(nano: Path, attention: str) -> None:
    """In bfloat16: the same graphs in the same batches, before the noise and after it."""
    subject = cuda.graph_engine(nano, "all", "bfloat16", attention=attention, widths=WIDTHS, max_rows=MAX_ROWS)
    cases = [prompts_of([17 + 7 * row % 40 for row in range(num_rows)], seed=num_rows) for num_rows in (1, 6, MAX_ROWS)]
    plain = [generate(subject, prompts, 10) for prompts in cases]
    cuda.fill_freed_memory(subject)
    assert [generate(subject, prompts, 10) for prompts in cases] == plain
    cuda.poison(subject)
    assert [generate(subject, prompts, 10) for prompts in cases] == plain
    assert len({token for tokens in plain[-1].values() for token in tokens}) >= 20
    subject.executor.close()


def test_every_bucket_of_tokens_is_tried() -> None:
    totals = {sum(lengths) for lengths in PREFILLS}
    assert {next(bucket for bucket in TOKEN_BUCKETS if bucket >= total) for total in totals} == set(TOKEN_BUCKETS)
