"""Recurrent states under an executor, in float64: drafts of any accept pattern, snapshots, rows that change hands."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hiserve.core.plan import BatchPlan, SnapshotWrites
from tests.helpers.models import Engine, save_family
from tests.helpers.plans import HandPlanner, int32
from tests.helpers.widening import some

PAGE, NUM_PAGES, NUM_SLOTS = 4, 120, 4
NUM_NEW = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_family("qwen3_5_text", tmp_path_factory.mktemp("states"))


class Rows:
    """An engine of two rows whose unowned memory is NaN."""

    def __init__(self, folder: Path, graphs: str = "off") -> None:
        self.engine = Engine(
            folder,
            dtype="float64",
            page_size=PAGE,
            num_pages=NUM_PAGES,
            num_snapshots=NUM_SLOTS,
            attention="reference",
        )
        self.planner = HandPlanner(PAGE, NUM_PAGES, shuffle_seed=4)
        for memory in self.engine.pool.carried.values():
            memory.rows.fill_(torch.nan)
            memory.snapshots.fill_(torch.nan)

    def run(self, plan: BatchPlan) -> list[list[int]]:
        """Returns the tokens that each row of the step emits."""
        result = self.engine.executor.submit(plan).result()
        assert not result.faults.size
        return [tokens[:count].tolist() for tokens, count in zip(result.tokens, result.counts, strict=True)]

    def start(self, row: int, prompt: list[int], chunk: int, wants: tuple[int, int] = (0, 0)) -> list[int]:
        """Computes a prompt in chunks, and returns its first token; ``wants`` a snapshot at a boundary, in a slot."""
        self.planner.admit(row, prompt)
        return self.go_on(row, len(prompt), chunk, wants)

    def go_on(self, row: int, num_tokens: int, chunk: int, wants: tuple[int, int] = (0, 0)) -> list[int]:
        tokens: list[list[int]] = []
        boundary, slot = wants
        while left := num_tokens - self.planner.computed[row]:
            plan = self.planner.step({row: min(chunk, left)})
            if slot:
                wanted, slot = SnapshotWrites(int32([row]), int32([boundary]), int32([slot])), 0
                plan = dataclasses.replace(plan, snapshots=wanted)
            tokens += self.run(plan)
        return tokens[-1]

    def decode(self, row: int, drafts: list[int]) -> list[int]:
        """Verifies drafts, and returns what was emitted."""
        known = self.planner.known[row]
        self.engine.rows.tokens[row, known : known + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        (emitted,) = self.run(self.planner.draft_step({row: len(drafts)}))
        self.planner.settle(row, len(emitted))
        return emitted

    def state(self, row: int) -> Tensor:
        return self.engine.pool.carried["delta_state"].rows[:, row].clone()

    def state_len(self, row: int) -> int:
        states = self.engine.rows.states
        assert states is not None
        return int(states.tensors.lens[row])


def prompt_of(length: int, seed: int = 3) -> list[int]:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain(folder: Path, prompt: list[int]) -> tuple[list[int], dict[int, Tensor]]:
    """Tokens of decoding one by one, and the state by the tokens that it covers."""
    rows = Rows(folder)
    tokens, states = rows.start(1, prompt, len(prompt)), {len(prompt): rows.state(1)}
    while len(tokens) < NUM_NEW + 8:
        tokens += rows.decode(1, [])
        states[rows.state_len(1)] = rows.state(1)
    rows.engine.executor.close()
    return tokens, states


@pytest.mark.parametrize("length", some([1, 2, 3, 4, 5, 9, 23], 1, 4, 9, 23))
def test_hb_11_after_any_accept_pattern_the_state_is_that_of_plain_decoding(folder: Path, length: int) -> None:
    """H6: drafts are right up to a random place, and rejected behind it."""
    prompt = prompt_of(length)
    expected, states = plain(folder, prompt)
    rng = np.random.default_rng(length)
    rows = Rows(folder)
    tokens = rows.start(1, prompt, int(rng.integers(1, length + 1)))
    seen = set()
    while len(tokens) < NUM_NEW:
        num_draft = int(rng.integers(0, 7))
        right = int(rng.integers(0, num_draft + 1))
        drafts = expected[len(tokens) : len(tokens) + num_draft]
        drafts[right:] = [(token + 1) % 320 for token in drafts[right:]]
        computed, known = rows.planner.computed[1], rows.planner.known[1]
        emitted = rows.decode(1, drafts)
        seen.add((num_draft, len(emitted) - 1))
        assert len(emitted) == right + 1
        tokens += emitted
        covered = rows.state_len(1)
        assert covered == known == computed + 1  # no draft, were it right or not
        torch.testing.assert_close(rows.state(1), states[covered], rtol=0, atol=1e-12)
    assert tokens == expected[: len(tokens)]
    assert len(seen) > 2
    rows.engine.executor.close()


@pytest.mark.parametrize("chunk", some([1, 3, 4, 7, 64], 3, 4, 64))
def test_a_snapshot_is_the_state_of_a_cold_run_and_a_row_goes_on_from_it(folder: Path, chunk: int) -> None:
    """H7, and H5 of one hit, in another row, whose last tenant was someone else."""
    prompt, boundary = prompt_of(22), 12
    expected, states = plain(folder, prompt)
    _, cold = plain(folder, prompt[:boundary])
    rows = Rows(folder)
    rows.start(2, prompt_of(17, seed=9), 5)  # leaves a state and inputs behind
    rows.planner.release(2)
    assert rows.start(1, prompt, chunk, wants=(boundary, 3)) == expected[:1]
    snapshots = rows.engine.pool.carried["delta_state"].snapshots
    torch.testing.assert_close(snapshots[:, 3], cold[boundary], rtol=0, atol=1e-12)
    assert not snapshots[:, 1].isfinite().any(), "another slot was written"
    shared = rows.planner.pages[1][: boundary // PAGE]
    rows.planner.admit(2, prompt, cached=shared, restore_slot=3)
    tokens = rows.go_on(2, len(prompt), chunk)
    while len(tokens) < NUM_NEW:
        tokens += rows.decode(2, [(expected[len(tokens)] + 1) % 320, 5])
    assert tokens == expected[: len(tokens)]
    torch.testing.assert_close(rows.state(2), states[rows.state_len(2)], rtol=0, atol=1e-12)
    rows.engine.executor.close()


def test_a_decoding_row_stores_the_boundary_that_its_certain_tokens_pass(folder: Path) -> None:
    """Drafts behind the boundary are in the batch that passes it, some of them wrong; then another row goes on there."""
    prompt, boundary = prompt_of(10), 16
    expected, states = plain(folder, prompt)
    for num_right in range(4):
        rows = Rows(folder)
        tokens = rows.start(1, prompt, 10, wants=(boundary, 2))
        while rows.state_len(1) < boundary:
            drafts = expected[len(tokens) : len(tokens) + 4]
            tokens += rows.decode(1, [*drafts[:num_right], *((each + 1) % 320 for each in drafts[num_right:])])
        snapshot = rows.engine.pool.carried["delta_state"].snapshots[:, 2]
        torch.testing.assert_close(snapshot, states[boundary], rtol=0, atol=1e-12)
        known = [*prompt, *expected[: boundary - len(prompt) + 2]]
        rows.planner.admit(2, known, cached=rows.planner.pages[1][: boundary // PAGE], restore_slot=2)
        assert rows.go_on(2, len(known), 64) == expected[boundary - len(prompt) + 2 :][:1]
        rows.engine.executor.close()
