"""Executes plans in the order of their submission: rows, copies, gate, runner, result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hiserve.core.plan import BatchPlan, Int32Array, MaskPlan, StepFault, StepResult
from hiserve.core.step_faults import fault_of, first_line
from hiserve.core.transfers import CopyAck
from hiserve.engine.tier_transfers import TierTransfers
from hiserve.errors import EngineError
from hiserve.ipc.cache_stats import StoreStats
from hiserve.ipc.messages import GateCounts
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.gate import Action, Decision, PendingLoads, Reason, admit
from hiserve.runners.step_output import DeviceOutput, LaunchedStep, read_output

T = TypeVar("T")


class Executor:
    """Turns each ``BatchPlan`` into a future ``StepResult``.

    On CUDA the caller launches a step on the executor's stream, without a host sync, and a thread waits for the copy of
    its outcome. On CPU a step runs inside ``submit``, or, when ``threaded``, in the thread.

    The result of a step that runs out of memory has the fault; any other exception is raised by ``result()``.

    Args:
        threaded: On CPU, compute in a thread, so that the caller can plan meanwhile.
        tier_transfers: Copies pages between tiers; None with one tier. Closed at the end.
    """

    def __init__(
        self,
        runners: Dispatch,
        rows: DeviceRows,
        *,
        threaded: bool = False,
        tier_transfers: TierTransfers | None = None,
    ) -> None:
        self._runners = runners
        self._rows = rows
        self._tier_transfers = tier_transfers
        self._stream: torch.cuda.Stream | None = None
        if rows.device.type == "cuda":
            self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(rows.device))  # weights, pool and rows were made there
        needs_thread = threaded or self._stream is not None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hiserve-executor") if needs_thread else None
        self._decisions: Counter[tuple[Action, Reason]] = Counter()
        self._is_replay = False  # of the step that is launched now
        self._last: tuple[int, Decision | None] = 0, None

    def submit(self, plan: BatchPlan, masks: MaskPlan | None = None) -> Future[StepResult]:
        """Runs or launches a step after those submitted before. An exception inside it is raised by ``result()``.

        Args:
            plan: The step.
            masks: Of the tokens that it draws; None leaves them free.
        """
        if self._thread is not None and self._stream is None:
            return self._thread.submit(self._run, plan, masks)
        done: Future[StepResult] = Future()
        try:
            launched = self._run(plan, masks) if self._thread is None else self._catch_faults(plan, masks, self._launch)
            if not isinstance(launched, StepResult):
                assert self._thread is not None, f"step {plan.step_id} was launched without a thread to wait for it"
                return self._thread.submit(_collect, plan, *launched)
            done.set_result(launched)
        except Exception as error:  # noqa: BLE001 - the future raises it from ``result()``
            done.set_exception(error)
        return done

    def drafts(self, rows: Int32Array, count: int) -> Int32Array:
        """Returns the first drafts of rows. Waits for the device; no step that drafts for these rows may be in flight.

        Args:
            rows: int32 ``[n]``.
            count: Drafts of each; after the last, tokens are meaningless.

        Returns:
            int32 ``[n, count]``.
        """
        with self._on_stream():
            drafts = self._rows.drafts(rows, count)
            if self._stream is None:
                return drafts.numpy()
            host = torch.empty(drafts.shape, dtype=torch.int32, pin_memory=True)
            host.copy_(drafts, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
            copied.synchronize()
            return host.numpy()

    def take_acks(self, wait_s: float = 0.0) -> list[CopyAck]:
        """Returns the copies that have ended since the last call.

        Args:
            wait_s: How long to wait for one if none has.
        """
        return [] if self._tier_transfers is None else self._tier_transfers.take_acks(wait_s)

    def take_found(self) -> list[tuple[int, int]]:
        """Returns (uid, pages) of the lookups in the store that were answered since the last call."""
        return [] if self._tier_transfers is None else self._tier_transfers.take_found()

    def store_stats(self) -> StoreStats | None:
        """Returns the counts of the store beyond the host; None without one."""
        return None if self._tier_transfers is None else self._tier_transfers.store_stats()

    def gate_counts(self) -> GateCounts:
        """Returns the gate's decisions until now: decision -> reason -> steps."""
        counts: GateCounts = {}
        for (action, reason), count in dict(self._decisions).items():  # a copy: steps may run in another thread
            counts.setdefault(action.value, {})[reason.value] = count
        return counts

    def last_decision(self) -> tuple[int, str]:
        """Returns the latest step that passed the gate, and the decision in words; touches no device."""
        step_id, decision = self._last
        if decision is None:
            return step_id, ""
        graph = f" of {decision.bucket}" if decision.bucket else ""
        loads = f" after loads {decision.loads}" if decision.loads else ""
        return step_id, f"{decision.action.value}{graph}: {decision.reason.value} {decision.sampling}{loads}".strip()

    def clear_store(self) -> None:
        """Begins to empty the store beyond the host; there must be one."""
        assert self._tier_transfers is not None, "there is no store to empty"
        self._tier_transfers.clear_store()

    @property
    def num_ready_host_pages(self) -> int:
        """Host pages below this may be copied to and from; it grows while their memory is made ready."""
        return 0 if self._tier_transfers is None else self._tier_transfers.num_ready_host_pages

    def close(self) -> None:
        """Finishes the submitted steps and ends the threads."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._runners.close()
        if self._tier_transfers is not None:
            self._tier_transfers.close()

    def _run(self, plan: BatchPlan, masks: MaskPlan | None) -> StepResult:
        return self._catch_faults(plan, masks, self._compute)

    def _catch_faults(
        self, plan: BatchPlan, masks: MaskPlan | None, work: Callable[[BatchPlan, MaskPlan | None], T]
    ) -> T | StepResult:
        """Does a step. If memory runs out, frees the memory of the step; its rows must be admitted anew."""
        self._is_replay = False
        try:
            return work(plan, masks)
        except Exception as error:
            kind = fault_of(error)
            if not kind:
                raise
            fault = StepFault(kind, first_line(error), self._is_replay)
        # The error is gone, and with it the tensors of its frames. Launched work may still run: copies come after it.
        with self._on_stream():
            self._free_memory()
            self._step_done(plan)
        nothing = np.empty(0, dtype=np.int32)
        return StepResult(plan.step_id, counts=nothing, tokens=nothing[:, None], fault=fault)

    def _compute(self, plan: BatchPlan, masks: MaskPlan | None) -> StepResult:
        with torch.inference_mode():
            output, launched_step = self._step(plan, masks)
            self._finish(plan, launched_step)
        # A copy: a graph writes the words of its next replay into the same memory, and the result may not be read yet.
        return read_output(plan, output, output.words.numpy().copy())

    def _launch(self, plan: BatchPlan, masks: MaskPlan | None) -> tuple[DeviceOutput, Tensor, torch.cuda.Event]:
        """Enqueues the step and the copy of its outcome."""
        launching = nullcontext() if self._tier_transfers is None else self._tier_transfers.launching()
        with launching, self._on_stream(), torch.inference_mode():
            output, launched_step = self._step(plan, masks)
            host = torch.empty(output.words.shape, dtype=torch.int32, pin_memory=True)
            host.copy_(output.words, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
            self._finish(plan, launched_step)  # after the copy: the host waits for no draft
        return output, host, copied

    def _step(self, plan: BatchPlan, masks: MaskPlan | None) -> tuple[DeviceOutput, LaunchedStep | None]:
        self._apply(plan)
        self._runners.note(plan)
        self._order_copies(plan)
        return self._pass_gate(plan, masks) if plan.rows.size else self._nothing()

    def _apply(self, plan: BatchPlan) -> None:
        """Applies the plan to the rows; again if memory ran out: each change is a final value, not an increment.

        Raises:
            EngineError: Memory ran out twice. The changes of the plan would be lost.
        """
        for is_last in (False, True):
            try:
                self._rows.apply(plan)
                return
            except Exception as error:
                if not fault_of(error):
                    raise
                if is_last:
                    raise EngineError(f"no memory for page tables, of kilobytes: {first_line(error)}") from error
            self._free_memory()

    def _order_copies(self, plan: BatchPlan) -> None:
        """Starts the plan's copies between tiers.

        Raises:
            EngineError: Memory ran out. Copies would be lost, and rows would wait for them without end.
        """
        if self._tier_transfers is None:
            assert not plan.copies, f"copy {plan.copies[0].op} with one tier"
            return
        try:
            self._tier_transfers.start(plan)
        except Exception as error:
            if not fault_of(error):
                raise
            raise EngineError(f"no memory for orders of copies, of kilobytes: {first_line(error)}") from error

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """On CUDA, makes the executor's stream the current one."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.device(self._rows.device), torch.cuda.stream(self._stream):
                yield

    def _free_memory(self) -> None:
        """Returns cached memory to the device, where it may be joined to larger pieces."""
        if self._stream is not None:
            torch.cuda.empty_cache()

    def _finish(self, plan: BatchPlan, launched_step: LaunchedStep | None) -> None:
        """Drafts; after that all writes of the step to pages are on the stream."""
        if launched_step is not None:
            self._runners.propose(plan, launched_step)
        self._step_done(plan)

    def _step_done(self, plan: BatchPlan) -> None:
        """Lets copies begin that come after the step."""
        if self._tier_transfers is not None:
            self._tier_transfers.forward_done(plan.step_id)

    def _pass_gate(self, plan: BatchPlan, masks: MaskPlan | None) -> tuple[DeviceOutput, LaunchedStep | None]:
        """Runs or defers the step, as the gate decides."""
        runners, tier_transfers = self._runners, self._tier_transfers
        loads = PendingLoads() if tier_transfers is None else tier_transfers.loads
        decision = admit(plan, loads, runners.coverage, runners.facts(plan), has_moved=self._rows.has_moved)
        self._decisions[decision.action, decision.reason] += 1
        self._last = plan.step_id, decision
        if decision.action is Action.DEFER:
            return self._nothing(deferred=decision.reason.value)
        self._is_replay = decision.action is Action.REPLAY
        wait = None
        if decision.loads:
            assert tier_transfers is not None, f"loads {decision.loads} with one tier"
            wait = partial(tier_transfers.wait, decision.loads)
        launched_step = runners.run(plan, decision, wait, None if masks is None else self._rows.upload_masks(masks))
        return launched_step.output, launched_step

    def _nothing(self, deferred: str = "") -> tuple[DeviceOutput, None]:
        """Returns the output of a plan without a forward."""
        return DeviceOutput(torch.empty(0, dtype=torch.int32, device=self._rows.device), 0, 0, deferred=deferred), None


def _collect(plan: BatchPlan, output: DeviceOutput, host: Tensor, copied: torch.cuda.Event) -> StepResult:
    copied.synchronize()
    return read_output(plan, output, host.numpy())
