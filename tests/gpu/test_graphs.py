"""Graphs on CUDA: what is replayed equals what runs eagerly, bit by bit, at every edge of a bucket and of a page."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hiserve.core.request import SamplingParams
from hiserve.models.config import NANO, find_model
from tests.helpers.models import Engine
from tests.helpers.plans import GREEDY, HandPlanner
from tests.helpers.scripted import verify

pytestmark = pytest.mark.gpu

PAGE, NUM_PAGES, MAX_LEN, MAX_ROWS = 16, 600, 512, 40
BUCKETS = (1, 2, 4, 8, 16, 32, 40)
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=9)


@pytest.fixture(scope="module")
def nano() -> Path:
    return find_model(NANO)


def engine(folder: Path, graphs: str, dtype: str = "bfloat16", widths: tuple[int, ...] = (1,)) -> Engine:
    return Engine(
        folder,
        dtype=dtype,
        device="cuda",
        attention="triton",
        num_pages=NUM_PAGES,
        max_len=MAX_LEN,
        max_rows=MAX_ROWS,
        graphs=graphs,
        max_batched_tokens=256,
        widths=widths,
    )


@pytest.fixture(scope="module")
def replayed(nano: Path) -> Iterator[Engine]:
    subject = engine(nano, "decode", "float32")
    yield subject
    subject.executor.close()


@pytest.fixture(scope="module")
def eager(nano: Path) -> Iterator[Engine]:
    subject = engine(nano, "off", "float32")
    yield subject
    subject.executor.close()


def prompts_of(lengths: list[int], seed: int = 0) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        row: torch.randint(7, 4096, (length,), generator=generator).tolist()
        for row, length in enumerate(lengths, start=1)
    }


def generate(
    subject: Engine, prompts: dict[int, list[int]], num_new: int, sampling: SamplingParams = GREEDY, chunk: int = 100
) -> dict[int, list[int]]:
    """Chunked prefill of two rows at a time, then decoding with all; the next call admits over these rows."""
    planner = HandPlanner(PAGE, NUM_PAGES, shuffle_seed=1)
    for row, prompt in prompts.items():
        planner.admit(row, prompt, sampling)
    plans = []
    while left := {row: count for row, prompt in prompts.items() if (count := len(prompt) - planner.computed[row]) > 0}:
        plans.append(planner.step({row: min(chunk, count) for row, count in list(left.items())[:2]}))
    plans += [planner.step(dict.fromkeys(prompts, 1)) for _ in range(num_new - 1)]
    flying = [(plan, subject.executor.submit(plan)) for plan in plans]
    out: dict[int, list[int]] = {row: [] for row in prompts}
    for plan, future in flying:
        result = future.result()
        assert result.faults.size == 0
        for row, token in zip(plan.rows[plan.samples].tolist(), result.tokens[:, 0].tolist(), strict=True):
            out[row].append(token)
    return out


def verdicts(subject: Engine) -> dict[str, int]:
    counts = subject.executor.gate_counts()
    return {f"{action}/{reason}": count for action, reasons in counts.items() for reason, count in reasons.items()}


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_replays_equal_eager_steps_around_every_bucket(
    replayed: Engine, eager: Engine, bucket: int, offset: int
) -> None:
    """In float32: a padded batch is another shape, whose roundings in bfloat16 may choose another token."""
    num_rows = bucket + offset
    if not 1 <= num_rows <= MAX_ROWS:
        pytest.skip("no such batch")
    before = verdicts(replayed).get("replay/decode", 0)
    prompts = prompts_of([17 + 3 * row % 60 for row in range(num_rows)], seed=bucket)
    tokens = generate(replayed, prompts, 6)
    assert verdicts(replayed)["replay/decode"] - before == 5
    assert tokens == generate(eager, prompts, 6)


@pytest.mark.parametrize("num_rows", BUCKETS)
def test_replays_of_full_buckets_equal_eager_steps_bit_by_bit_in_bfloat16(nano: Path, num_rows: int) -> None:
    prompts = prompts_of([17 + 3 * row % 60 for row in range(num_rows)], seed=num_rows)
    tokens = []
    for graphs in ("off", "decode"):
        subject = engine(nano, graphs)
        tokens.append(generate(subject, prompts, 20, SAMPLED if num_rows == 4 else GREEDY))
        subject.executor.close()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [PAGE * 3 - 1, PAGE * 3, PAGE * 3 + 1, MAX_LEN - 20])
def test_replays_equal_eager_steps_across_pages(
    replayed: Engine, eager: Engine, length: int, sampling: SamplingParams
) -> None:
    prompts = prompts_of([length] * 4, seed=length)
    assert generate(replayed, prompts, 19, sampling) == generate(eager, prompts, 19, sampling)


def test_noise_in_freed_memory_between_replays_changes_nothing(replayed: Engine, eager: Engine) -> None:
    prompts = prompts_of([40, 41, 80, 15])
    expected = generate(eager, prompts, 8)
    for _ in range(3):
        gc.collect()
        torch.cuda.empty_cache()
        noise = [torch.full((1 << 24,), torch.nan, device="cuda") for _ in range(8)]
        assert generate(replayed, prompts, 8) == expected
        del noise


def test_padding_rows_write_only_the_sink(replayed: Engine) -> None:
    generate(replayed, prompts_of([20, 30, 40]), 2)
    torch.cuda.current_stream().synchronize()
    storage = replayed.pool.storage("kv")
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
    subject = engine(nano, "all", "float32")
    yield subject
    subject.executor.close()


@pytest.mark.parametrize("lengths", [[64], [32], [31, 33], [100, 28], [256], [8]])
def test_pieces_of_full_buckets_equal_the_eager_prefill(pieces: Engine, eager: Engine, lengths: list[int]) -> None:
    before = verdicts(pieces).get("replay/piecewise", 0)
    prompts = prompts_of(lengths, seed=sum(lengths))
    assert generate(pieces, prompts, 1, chunk=256) == generate(eager, prompts, 1, chunk=256)
    assert verdicts(pieces)["replay/piecewise"] == before + 1


def test_pieces_of_padded_buckets_and_mixed_steps_keep_float64_tokens(nano: Path) -> None:
    prompts = prompts_of([3, 17, 50, 129, 200], seed=4)
    tokens = []
    for graphs in ("off", "all"):
        subject = Engine(
            nano,
            dtype="float64",
            device="cuda",
            attention="reference",
            num_pages=NUM_PAGES,
            max_len=MAX_LEN,
            graphs=graphs,
            max_batched_tokens=256,
        )
        tokens.append(generate(subject, prompts, 6, chunk=70))
        subject.executor.close()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("width", [2, 4])
def test_verify_steps_accept_the_drafts_that_plain_decoding_would_emit(nano: Path, eager: Engine, width: int) -> None:
    """A proposer that knows the answer, and spoils every third draft."""
    subject = engine(nano, "decode", "float32", widths=(1, width))
    prompts = prompts_of([20, 45, 33], seed=width)
    expected = generate(eager, prompts, 24)
    assert verify(subject, prompts, expected, width) == expected
    counts = verdicts(subject)
    assert counts["replay/verify"] > 0
    subject.executor.close()
