"""Executes plans in submission order: rows, copies, gate, runner, result."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from hiserve.core.copies import CopyAck
from hiserve.core.plan import BatchPlan, StepResult
from hiserve.messages.cache import StoreStats
from hiserve.messages.types import GateCounts
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.gate import Action, Loads, Reason, admit
from hiserve.runners.rows import DeviceRows
from hiserve.runners.step import Outcome, Ran, read_outcome
from hiserve.worker.copier import Copier


class Executor:
    """Turns each ``BatchPlan`` into a future ``StepResult``.

    On CUDA a step is launched by the caller on a stream of the executor's, without a host sync, and a thread waits for
    the copy of its outcome. On CPU a step runs inside ``submit``, or, when ``threaded``, in one thread of its own.

    Args:
        runners: Compute the steps.
        rows: The permanent rows.
        threaded: On CPU, compute in a thread, so that the caller can plan meanwhile.
        copier: Copies pages between tiers; None with one tier. Closed at the end.
    """

    def __init__(
        self,
        runners: Dispatch,
        rows: DeviceRows,
        *,
        threaded: bool = False,
        copier: Copier | None = None,
    ) -> None:
        self._runners = runners
        self._rows = rows
        self._copier = copier
        self._stream: torch.cuda.Stream | None = None
        if rows.device.type == "cuda":
            self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(rows.device))  # weights, pool and rows were made there
        needs_thread = threaded or self._stream is not None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hiserve-executor") if needs_thread else None
        self._verdicts: Counter[tuple[Action, Reason]] = Counter()

    def submit(self, plan: BatchPlan) -> Future[StepResult]:
        """Runs or launches a step after those submitted before. An exception inside it is raised by ``result()``."""
        if self._thread is not None and self._stream is None:
            return self._thread.submit(self._run, plan)
        done: Future[StepResult] = Future()
        try:
            if self._thread is not None:
                return self._thread.submit(_collect, plan, *self._launch(plan))
            done.set_result(self._run(plan))
        except Exception as error:  # noqa: BLE001 - the future carries it to whoever asks for the result
            done.set_exception(error)
        return done

    def take_acks(self, wait_s: float = 0.0) -> list[CopyAck]:
        """Returns the copies that have ended since the last call.

        Args:
            wait_s: How long to wait for one if none has.
        """
        return [] if self._copier is None else self._copier.take_acks(wait_s)

    def take_found(self) -> list[tuple[int, int]]:
        """Returns (uid, pages) of the lookups in the store that were answered since the last call."""
        return [] if self._copier is None else self._copier.take_found()

    def store_stats(self) -> StoreStats | None:
        """Returns the counts of the store beyond the host; None without one."""
        return None if self._copier is None else self._copier.store_stats()

    def gate_counts(self) -> GateCounts:
        """Returns the gate's verdicts until now: verdict -> reason -> steps."""
        counts: GateCounts = {}
        for (action, reason), count in dict(self._verdicts).items():  # a copy: steps may run in another thread
            counts.setdefault(action.value, {})[reason.value] = count
        return counts

    def clear_store(self) -> None:
        """Begins to empty the store beyond the host; there must be one."""
        assert self._copier is not None, "there is no store to empty"
        self._copier.clear_store()

    @property
    def num_ready_host_pages(self) -> int:
        """Host pages below this may be copied to and from; it grows while their memory is made ready."""
        return 0 if self._copier is None else self._copier.num_ready_host_pages

    def close(self) -> None:
        """Finishes the submitted steps and ends the threads."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._runners.close()
        if self._copier is not None:
            self._copier.close()

    def _run(self, plan: BatchPlan) -> StepResult:
        with torch.inference_mode():
            outcome, ran = self._step(plan)
            self._finish(plan, ran)
        return read_outcome(plan, outcome, outcome.words.numpy())

    def _launch(self, plan: BatchPlan) -> tuple[Outcome, Tensor, torch.cuda.Event]:
        """Enqueues the step and the copy of its outcome."""
        with torch.cuda.device(self._rows.device), torch.cuda.stream(self._stream), torch.inference_mode():
            outcome, ran = self._step(plan)
            host = torch.empty(outcome.words.shape, dtype=torch.int32, pin_memory=True)
            host.copy_(outcome.words, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
            self._finish(plan, ran)  # behind the copy: the host waits for no draft
        return outcome, host, copied

    def _step(self, plan: BatchPlan) -> tuple[Outcome, Ran | None]:
        self._rows.apply(plan)
        self._runners.note(plan)
        if self._copier is not None:
            self._copier.start(plan)
        else:
            assert not plan.copies, f"copy {plan.copies[0].op} with one tier"
        return self._pass_gate(plan) if plan.rows.size else self._nothing("")

    def _finish(self, plan: BatchPlan, ran: Ran | None) -> None:
        """Drafts what follows; then all that the step writes to pages is on the stream."""
        if ran is not None:
            self._runners.propose(plan, ran)
        if self._copier is not None:
            self._copier.forward_done(plan.step_id)

    def _pass_gate(self, plan: BatchPlan) -> tuple[Outcome, Ran | None]:
        """Does what the gate says to a step."""
        runners, copier = self._runners, self._copier
        loads = Loads() if copier is None else copier.loads
        verdict = admit(plan, self._rows.version, loads, runners.coverage, runners.facts(plan))
        self._verdicts[verdict.action, verdict.reason] += 1
        if verdict.action is Action.DEFER:
            return self._nothing(verdict.reason.value)
        wait = None
        if verdict.loads:
            assert copier is not None, f"loads {verdict.loads} with one tier"
            wait = partial(copier.wait, verdict.loads)
        ran = runners.run(plan, verdict, wait)
        return ran.outcome, ran

    def _nothing(self, deferred: str) -> tuple[Outcome, None]:
        """The outcome of a plan of which nothing was computed."""
        return Outcome(torch.empty(0, dtype=torch.int32, device=self._rows.device), 0, 0, deferred=deferred), None


def _collect(plan: BatchPlan, outcome: Outcome, host: Tensor, copied: torch.cuda.Event) -> StepResult:
    copied.synchronize()
    return read_outcome(plan, outcome, host.numpy())
