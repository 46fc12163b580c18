"""Steps with drafts: what each row is to do, by a model that looks at one row at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.core.plan import BatchPlan, StepResult
from hiserve.core.request import FinishReason, SamplingParams, SpecParams
from hiserve.core.usage import DraftUse
from hiserve.engine.planner import Planner
from hiserve.engine.queue import Request
from hiserve.spec.history import ReplyHistory
from tests.helpers.widening import usual

EOS = 9
PAGE = 4


@dataclass(eq=False)
class Row:
    """One tenancy: lengths that are certain, and what steps in flight may add."""

    uid: int
    limit: int
    known: int
    computed: int
    max_draft: int
    drafted: int = 0
    flying: list[tuple[int, int, bool]] = field(default_factory=list)

    @property
    def most_known(self) -> int:
        return self.known + sum(1 + num_draft for _, num_draft, samples in self.flying if samples)

    @property
    def most_computed(self) -> int:
        return self.computed + sum(num_new for num_new, _, _ in self.flying)

    def wants(self, max_len: int) -> tuple[int, int]:
        """(known tokens to compute, drafts) with all the budget there is."""
        if self.most_known >= self.limit:
            return 0, 0
        behind = self.most_known - self.most_computed
        return behind, min(self.drafted, max_len - self.most_known - 1) if behind == 1 else 0


class Model:
    """Drives a planner and foretells each of its plans; accepts a random number of drafts.

    Args:
        depth: Steps in flight while the next is planned.
        num_draft: Drafts per row and step.
        budget: Tokens of a step.
        num_pages: Pages; few make it preempt.
        seed: Of everything that is random.
    """

    def __init__(self, *, depth: int, num_draft: int, budget: int, num_pages: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.max_len, self.num_draft, self.budget, self.depth = 40, num_draft, budget, depth
        cache = PrefixCache(num_pages=num_pages, page_size=PAGE, namespace=b"model")
        self.planner = Planner(
            cache=cache,
            max_rows=4,
            max_len=self.max_len,
            max_batched_tokens=budget,
            eos_token_ids=(EOS,),
            num_draft=num_draft,
            history=ReplyHistory(500) if num_draft else None,
        )
        self.rows: dict[int, Row] = {}  # longest tenancy first
        self.limits: dict[int, int] = {}
        self.said: dict[int, list[int]] = {}
        self.heard: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.told_ends: dict[int, FinishReason] = {}
        self.flying: deque[tuple[BatchPlan, list[Row]]] = deque()
        self.max_drafts: dict[int, int] = {}
        self.used: dict[int, DraftUse] = {}
        self.told_use: dict[int, DraftUse | None] = {}
        self.num_drawing: dict[int, int] = {}
        self.num_continued = self.num_accepted = self.num_cut = self.num_preempted = self.num_mixed = 0

    def add(self, uid: int) -> None:
        prompt = self.rng.integers(10, 200, int(self.rng.integers(1, 24))).astype(np.int32)
        max_tokens = int(self.rng.integers(1, 25))
        self.limits[uid] = min(prompt.size + max_tokens, self.max_len)
        self.said[uid], self.heard[uid] = [], []
        own = [None, None, 0, 1, 2][int(self.rng.integers(5))]
        self.max_drafts[uid] = self.num_draft if own is None else min(own, self.num_draft)
        self.used[uid], self.num_drawing[uid] = DraftUse(0, 0, (0,) * self.num_draft), 0
        sampling = SamplingParams(seed=0, max_tokens=max_tokens, spec=SpecParams(num_steps=own))
        self.planner.add(Request(uid, prompt, prompt.size, sampling, b"", choice=0))

    def run(self) -> None:
        for _ in range(2_000):
            plan = self.planner.plan()
            if plan is not None:
                self.check(plan)
            elif not self.flying and not self.planner.has_work:
                return
            else:
                self.forget(self.planner._rows._released)  # to be told with the next plan
            if self.flying and (plan is None or len(self.flying) > self.depth):
                self.commit()
        raise AssertionError("the requests do not end")

    def forget(self, released: list[int]) -> None:
        for number in released:
            self.num_preempted += self.rows.pop(number, None) is not None

    def check(self, plan: BatchPlan) -> None:
        """The plan is what the rows want, one by one, and the rows have room and pages for it."""
        self.forget(plan.release.tolist())
        expected: dict[int, tuple[int, int, bool]] = {}
        left = self.budget
        wants = {number: row.wants(self.max_len) for number, row in self.rows.items()}
        for number in sorted(wants, key=lambda number: wants[number][0] > 1):
            behind, drafts = wants[number]
            num_new = min(left, behind + drafts)
            left -= num_new
            if num_new:
                expected[number] = num_new, max(0, num_new - behind), num_new >= behind
        for admit in plan.admit:
            uid = int(self.planner._rows.uid[admit.row])
            row = self.rows[admit.row] = Row(
                uid, self.limits[uid], admit.tokens.size, admit.num_computed, self.max_drafts[uid]
            )
            num_new = min(left, row.known - row.computed)
            left -= num_new
            expected[admit.row] = num_new, 0, num_new == row.known - row.computed
        numbers = plan.rows.tolist()
        columns = (plan.num_new.tolist(), plan.num_draft.tolist(), plan.samples.tolist())
        assert dict(zip(numbers, zip(*columns, strict=True), strict=True)) == expected
        is_long = [num_new - num_draft > 1 for num_new, num_draft in zip(*columns[:2], strict=True)]
        assert is_long == sorted(is_long), "rows with one token before their drafts come first"
        self.num_mixed += len(set(is_long)) > 1
        for number, max_len in zip(numbers, plan.max_len.tolist(), strict=True):
            row = self.rows[number]
            row.flying.append(expected[number])
            row.drafted = row.max_draft if expected[number][2] else row.drafted
            assert max_len == row.most_computed < self.max_len
            end = min(max_len + self.num_draft, self.max_len)  # of what it proposes, too
            assert (self.planner._rows.tables.pages[number, : -(-end // PAGE)] > 0).all()
        is_wanted = any(samples and self.rows[number].max_draft for number, (_, _, samples) in expected.items())
        assert plan.num_propose == (self.num_draft if is_wanted else 0)
        self.check_continuations(plan)
        self.flying.append((plan, [self.rows[number] for number in numbers]))

    def check_continuations(self, plan: BatchPlan) -> None:
        """They begin where the host's knowledge ends, and reach as far as drafts may."""
        if plan.continuations is None:
            assert not (plan.num_propose and self.ends), "replies are kept and drafts wanted"
            return
        sampling = plan.rows[plan.samples]
        ahead = max(self.rows[number].most_known - self.rows[number].known for number in sampling.tolist())
        assert plan.continuations.shape == (sampling.size, 2 + ahead + plan.num_propose)
        assert plan.continuations[:, 0].tolist() == [self.rows[number].known for number in sampling.tolist()]
        self.num_continued += 1

    def commit(self) -> None:
        plan, rows = self.flying.popleft()
        width = 1 + int(plan.num_draft.max())
        counts, runs, finished = [], [], []
        for number, row, num_draft, samples in zip(plan.rows, rows, plan.num_draft, plan.samples, strict=True):
            count = int(self.rng.integers(1, num_draft + 2)) if samples else 0
            run = self.rng.integers(10, 200, count)
            run[self.rng.random(count) < 0.02] = EOS
            if samples:
                counts.append(count)
                runs.append(np.pad(run, (0, width - count), constant_values=EOS))
            if self.rows.get(int(number)) is not row:
                continue  # it lost its place meanwhile: nothing of this counts
            num_new, _, _ = row.flying.pop(0)
            row.computed += num_new - (num_draft + 1 - count if samples else 0)
            self.num_accepted += max(0, count - 1)
            before = row.known
            for token in run.tolist():
                row.known += 1
                self.said[row.uid].append(token)
                if token == EOS or row.known == row.limit:
                    self.ends[row.uid] = FinishReason.STOP if token == EOS else FinishReason.LENGTH
                    self.num_cut += len(run) > 1 and token == EOS
                    finished.append(int(number))
                    break
            self.num_drawing[row.uid] += bool(samples)
            if num_draft:
                positions = tuple(int(row.known - before > 1 + i) for i in range(self.num_draft))
                self.used[row.uid] += DraftUse(1, int(num_draft), positions)
        tokens = np.array(runs, dtype=np.int32).reshape(-1, width)
        self.planner.commit(StepResult(plan.step_id, np.array(counts, dtype=np.int32), tokens))
        for number in finished:
            del self.rows[number]
        for number, row in self.rows.items():
            state = self.planner._rows
            theirs = (state.known, state.settled, state.computed, state.pending)
            ours = row.known, row.computed, row.most_computed, row.most_known - row.known
            assert tuple(int(column[number]) for column in theirs) == ours, f"row {number}"
        self.listen()

    def check_counts(self) -> None:
        """What is told of drafts is what became of them, of each request whatever rows it had, and of all."""
        assert self.told_use == self.used
        for uid, use in self.used.items():
            assert len(self.said[uid]) == self.num_drawing[uid] + use.accepted, (
                "a step gives one token, drafts the others"
            )
        stats = self.planner.stats().drafts
        assert sum(stats.by_source.values(), DraftUse()) == sum(self.used.values(), DraftUse())

    def listen(self) -> None:
        updates = self.planner.take_report()
        if updates is None:
            return
        ends = np.cumsum(updates.counts)
        columns = updates.uids, updates.counts, ends, updates.finishes, updates.drafts
        for uid, count, end, finish, use in zip(*columns, strict=True):
            self.told_use[uid] = use or self.told_use.get(uid)
            self.heard[uid] += updates.tokens[end - count : end].tolist()
            if finish:
                self.told_ends[uid] = FinishReason(finish)


@pytest.mark.parametrize("case", usual(product((0, 1, 3), ((64, 60), (11, 60), (7, 13), (64, 13)), (0, 1, 2))))
def test_every_plan_is_what_its_rows_want_one_by_one(case: tuple[int, tuple[int, int], int]) -> None:
    num_draft, (budget, num_pages), depth = case
    accepted = cut = preempted = mixed = continued = 0
    for seed in range(6):
        model = Model(depth=depth, num_draft=num_draft, budget=budget, num_pages=num_pages, seed=seed)
        for uid in range(9):
            model.add(uid)
        model.run()
        assert (model.heard, model.told_ends) == (model.said, model.ends), f"seed {seed}"
        assert len(model.ends) == 9
        if num_draft:
            model.check_counts()
        else:
            assert set(model.told_use.values()) == {None}
        accepted, cut = accepted + model.num_accepted, cut + model.num_cut
        preempted, mixed = preempted + model.num_preempted, mixed + model.num_mixed
        continued += model.num_continued
    assert mixed, "no step had both prompts and decoding rows"
    assert bool(accepted) == bool(continued) == bool(num_draft)
    assert cut or not num_draft, "no reply ended inside an accepted run"
    assert bool(preempted) == (num_pages == 13)
