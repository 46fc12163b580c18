"""An executor whose KV cache stores token ids, read back through the page table.

Any page bug becomes a wrong token: the next token is a function of the whole context as the
pages tell it, so a page that was handed out twice, evicted too early or mapped wrongly
changes what is generated.
"""

from __future__ import annotations

import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from hiserve.core.plan import BatchPlan, StepResult

VOCAB = 211
POISON = -7


def next_token(context: np.ndarray) -> int:
    """The oracle: the token that follows a context."""
    return zlib.crc32(np.ascontiguousarray(context, dtype=np.int32).tobytes()) % VOCAB


def oracle(prompt: np.ndarray, count: int) -> list[int]:
    context = prompt.astype(np.int32)
    for _ in range(count):
        context = np.append(context, np.int32(next_token(context)))
    return context[prompt.size :].tolist()


class EchoExecutor:
    """Keeps rows and a pool as the device would, in numpy; drafts are sometimes right.

    Args:
        step_s: Time a step takes; 0 runs it inside ``submit``, more runs it in a thread.
        stale_at: Steps in which a row's page table is corrupted, as a fault test wants it.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, max_rows: int, max_len: int, step_s: float = 0.0, seed: int = 0
    ) -> None:
        self.page_size = page_size
        self.pool = np.full(num_pages * page_size, POISON, dtype=np.int64)
        self.table = np.zeros((max_rows + 1, -(-max_len // page_size) + 1), dtype=np.int32)
        self.entry_owner = np.full_like(self.table, -1)
        self.page_owner = np.full(num_pages, -2, dtype=np.int32)
        self.tokens = np.zeros((max_rows + 1, max_len + 8), dtype=np.int32)
        self.known = np.zeros(max_rows + 1, dtype=np.int64)
        self.computed = np.zeros(max_rows + 1, dtype=np.int64)
        self.rng = np.random.default_rng(seed)
        self.num_accepted = 0
        self.num_drafted = 0
        self.stale_rows: set[int] = set()
        self._step_s = step_s
        self._thread = ThreadPoolExecutor(1) if step_s else None

    def submit(self, plan: BatchPlan) -> Future[StepResult]:
        if self._thread is not None:
            return self._thread.submit(self._run, plan)
        done: Future[StepResult] = Future()
        done.set_result(self._run(plan))
        return done

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, plan: BatchPlan) -> StepResult:
        if self._step_s:
            time.sleep(self._step_s)
        for row in plan.release:
            self.known[row] = self.computed[row] = 0
            self.entry_owner[row] = -1
        for admit in plan.admit:
            self.tokens[admit.row, : admit.tokens.size] = admit.tokens
            self.known[admit.row], self.computed[admit.row] = admit.tokens.size, admit.num_computed
        writes = plan.table
        self.table[writes.rows, writes.indices] = writes.pages
        self.entry_owner[writes.rows, writes.indices] = writes.owners
        self.page_owner[writes.pages] = writes.owners
        width = 1 + max([0, *plan.num_draft.tolist()])
        counts, tokens, faults = [], [], []
        for i, row in enumerate(plan.rows.tolist()):
            emitted = self._row(row, int(plan.num_new[i]), int(plan.num_draft[i]), bool(plan.samples[i]))
            if emitted is None:
                faults.append(row)
                emitted = []
            if plan.samples[i]:
                counts.append(len(emitted))
                tokens.append(emitted + [POISON] * (width - len(emitted)))
        return StepResult(
            step_id=plan.step_id,
            counts=np.array(counts, dtype=np.int32),
            tokens=np.array(tokens, dtype=np.int32).reshape(-1, width),
            faults=np.array(faults, dtype=np.int32),
        )

    def _row(self, row: int, num_new: int, num_draft: int, samples: bool) -> list[int] | None:
        start = int(self.computed[row])
        end = start + num_new
        pages = -(-end // self.page_size)
        held = self.table[row, :pages]
        is_forgotten = self.known[row] == 0  # it failed in a step before this one
        if row in self.stale_rows or is_forgotten or (self.page_owner[held] != self.entry_owner[row, :pages]).any():
            self.stale_rows.discard(row)
            self.known[row] = self.computed[row] = 0
            self.entry_owner[row] = -1
            return None
        assert (held > 0).all(), f"row {row} would touch the sink"
        context_end = end - num_draft
        inputs = self.tokens[row, start:context_end].tolist()
        truth: list[int] = []
        context = self.tokens[row, :context_end]
        for _ in range(num_draft):
            truth.append(next_token(np.append(context, np.array(truth, dtype=np.int32))))
        drafts = [t if self.rng.random() < 0.7 else (t + 1) % VOCAB for t in truth]
        slots = held[np.arange(start, end) // self.page_size].astype(np.int64) * self.page_size
        self.pool[slots + np.arange(start, end) % self.page_size] = inputs + drafts
        if not samples:
            self.computed[row] = end
            return []
        assert context_end == self.known[row], f"row {row} samples at {context_end} but knows {self.known[row]}"
        everything = np.arange(end)
        read = self.pool[
            held[everything // self.page_size].astype(np.int64) * self.page_size + everything % self.page_size
        ]
        emitted: list[int] = []
        for j in range(num_draft + 1):
            emitted.append(next_token(read[: context_end + j]))
            if j < num_draft and drafts[j] != emitted[-1]:
                break
        self.num_drafted += num_draft
        self.num_accepted += len(emitted) - 1
        self.tokens[row, context_end : context_end + len(emitted)] = emitted
        self.known[row] += len(emitted)
        self.computed[row] = context_end + len(emitted) - 1
        return emitted
