"""Executes plans in the order of their submission: rows, copies, gate, forward; draw, drafts, result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from hiserve.core.plan import BatchPlan, Int32Array, MaskPlan, StepFault, StepResult
from hiserve.core.step_faults import fault_of, first_line
from hiserve.core.transfers import CopyAck, StoreEnds
from hiserve.engine.step_exchanges import StepExchanges
from hiserve.engine.step_group import StepGroup
from hiserve.engine.tier_transfers import TierTransfers
from hiserve.errors import EngineError
from hiserve.ipc.cache_stats import StoreStats
from hiserve.ipc.messages import GateCounts
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.gate import Action, Decision, DecisionLog, PendingLoads, admit
from hiserve.runners.step_output import DeviceOutput, Draw, LaunchedStep, read_output

MAX_IN_FLIGHT = 4  # more steps than are ever between their submission and the commit of their results

T = TypeVar("T")
# A step that passed the gate: launched whole, or up to its draw; or its outcome, where nothing was launched.
_Begun = LaunchedStep | Draw | DeviceOutput
# The work of a launched step on CUDA: its outcome, the host memory that gets a copy, and the event after the copy.
_Launched = tuple[DeviceOutput, Tensor, torch.cuda.Event]
_Outcome = _Launched | StepResult


@dataclass(frozen=True, slots=True, eq=False)
class _Undrawn:
    """A step whose forward was launched."""

    plan: BatchPlan
    forward: Future[StepResult | None]  # None unless the step is over already
    done: Future[StepResult]


class Executor:
    """Turns each ``BatchPlan`` into a future ``StepResult``.

    On CUDA the caller launches a step on the executor's stream, without a host sync, and a thread waits for the copy of
    its outcome. On CPU a step runs inside ``submit``, or, when ``threaded``, in the thread.

    A step that ``awaits_masks`` is launched in two halves, ``submit`` and ``draw``. Between them no other plan is submitted,
    so nothing that the draw and the drafts after it read can change: rows, page tables and page owners are written by
    ``DeviceRows.apply``, loads and moves of pages are started by ``TierTransfers.start``, and copies that come after the step
    begin with ``forward_done``. The first two need the next plan, the last the second half. Loads that the step reads were
    waited for in the first half, on the same stream.

    The result of a step that runs out of memory has the fault; any other exception is raised by ``result()``.

    Args:
        threaded: On CPU, compute in a thread, so that the caller can plan meanwhile.
        tier_transfers: Copies pages between tiers; None with one tier. Closed at the end.
        group: The other ranks that execute the same plans; None without.
        exchanges: Those with them.
    """

    def __init__(
        self,
        runners: Dispatch,
        rows: DeviceRows,
        *,
        threaded: bool = False,
        tier_transfers: TierTransfers | None = None,
        group: StepGroup | None = None,
        exchanges: StepExchanges | None = None,
    ) -> None:
        self._runners = runners
        self._group, self._exchanges = group, exchanges
        self._rows = rows
        self._tier_transfers = tier_transfers
        self._stream: torch.cuda.Stream | None = None
        if rows.device.type == "cuda":
            self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(rows.device))  # weights, pool and rows were made there
        needs_thread = threaded or self._stream is not None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hiserve-executor") if needs_thread else None
        self._undrawn: _Undrawn | None = None
        self._half: _Begun | None = None  # of that step, in the thread that executes it
        size = rows.known_len.shape[0], rows.max_draft
        self._drafts = torch.empty(size, dtype=torch.int32, pin_memory=self._stream is not None)
        self._are_copied = None if self._stream is None else torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._decisions = DecisionLog(MAX_IN_FLIGHT)
        self._is_replay = False  # of the step that is launched now

    def submit(self, plan: BatchPlan) -> Future[StepResult]:
        """Runs or launches a step, or its first half, after those submitted before; ``result()`` raises an exception inside it."""
        assert self._undrawn is None, f"step {plan.step_id} was submitted before the draw of the step before it"
        if not plan.awaits_masks:
            return self._collect(plan, self._execute(plan, self._launch))
        self._undrawn = _Undrawn(plan, self._execute(plan, self._launch_forward), Future())
        return self._undrawn.done

    def lend_masks(self, num_entries: int, num_masks: int) -> tuple[Int32Array, Int32Array]:
        """Lends the arrays of a ``MaskPlan`` for ``draw``, once the result of the step before is known; see ``MaskBuffers``."""
        return self._rows.masks.lend(num_entries, num_masks)

    def draw(self, masks: MaskPlan | None) -> None:
        """Runs or launches the second half of a step that awaits ``masks``, which are in lent arrays; None leaves all tokens free."""
        undrawn, self._undrawn = self._undrawn, None
        assert undrawn is not None, "there is no step to draw"
        plan = undrawn.plan
        assert masks is None or masks.step_id == plan.step_id, f"masks of another step than {plan.step_id}"
        drawn = self._collect(plan, self._execute(plan, partial(self._launch_draw, undrawn.forward, masks)))
        drawn.add_done_callback(partial(_pass_on, undrawn.done))

    def drafts(self) -> Int32Array:
        """Returns the drafts of every row, int32 ``[R, max_draft]``, as of the last step that awaited masks and drafted.

        That step's result is known; on CUDA the copy of its drafts is waited for. After a row's last draft, tokens are
        meaningless. The array is written again after the next ``draw``.
        """
        if self._are_copied is not None:
            self._are_copied.synchronize()
        return self._drafts.numpy()

    def take_acks(self, wait_s: float = 0.0) -> list[CopyAck]:
        """Returns the copies that have ended since the last call; waits up to ``wait_s`` seconds for one if none has."""
        acks = [] if self._tier_transfers is None else self._tier_transfers.take_acks(wait_s)
        return acks if self._group is None else self._group.join_acks(acks)

    def take_found(self) -> list[StoreEnds]:
        return [] if self._tier_transfers is None else self._tier_transfers.take_found()

    def store_stats(self) -> StoreStats | None:
        """Returns the counts of the store beyond the host; None without one."""
        return None if self._tier_transfers is None else self._tier_transfers.store_stats()

    def gate_counts(self) -> GateCounts:
        return self._decisions.counts()

    def last_decision(self) -> tuple[int, str]:
        return self._decisions.last()

    def decision_of(self, step_id: int) -> tuple[str, str]:
        """Returns the gate's decision on one of the latest steps, and the reason; empty strings for any other."""
        return self._decisions.of(step_id)

    def clear_store(self) -> None:
        assert self._tier_transfers is not None, "there is no store to empty"
        self._tier_transfers.clear_store()

    @property
    def num_ready_host_pages(self) -> int:
        """Host pages below this may be copied to and from; it grows while their memory is made ready."""
        ready = 0 if self._tier_transfers is None else self._tier_transfers.num_ready_host_pages
        return ready if self._group is None else min(ready, self._group.num_ready_host_pages)

    def close(self) -> None:
        """Finishes the submitted steps and ends the threads."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._stream is not None and self._group is not None:
            self._stream.synchronize()  # drafts after the last result, which exchange too
        self._runners.close()  # before the group: NCCL waits for the end of graphs that hold its exchanges
        if self._group is not None:
            self._group.close()
        if self._tier_transfers is not None:
            self._tier_transfers.close()

    def _execute(self, plan: BatchPlan, work: Callable[[BatchPlan], T | StepResult]) -> Future[T | StepResult]:
        """Does a step, or a half of one: on CPU with a thread there, else now."""
        if self._thread is not None and self._stream is None:
            return self._thread.submit(self._catch_faults, plan, work)
        done: Future[T | StepResult] = Future()
        try:
            done.set_result(self._catch_faults(plan, work))
        except Exception as error:  # noqa: BLE001 - the future raises it from ``result()``
            done.set_exception(error)
        return done

    def _collect(self, plan: BatchPlan, launched: Future[_Launched | StepResult]) -> Future[StepResult]:
        """Returns the result of a step to come: on CUDA a thread waits for what was launched."""
        if self._stream is None or launched.exception() is not None or isinstance(launched.result(), StepResult):
            return cast("Future[StepResult]", launched)
        assert self._thread is not None, f"step {plan.step_id} was launched without a thread to wait for it"
        return self._thread.submit(self._read, plan, *cast("_Launched", launched.result()))

    def _catch_faults(self, plan: BatchPlan, work: Callable[[BatchPlan], T | StepResult]) -> T | StepResult:
        """Does a step, or a half of one. If memory runs out, frees the memory of the step; its rows must be admitted anew."""
        try:
            done = work(plan)
        except Exception as error:
            kind = fault_of(error)
            if not kind:
                if self._group is not None:
                    self._group.check()
                raise
            fault = StepFault(kind, first_line(error), self._is_replay)
        else:
            return self._join(plan, done) if isinstance(done, StepResult) else done
        # The error is gone, and with it the tensors of its frames. Launched work may still run: copies come after it.
        self._abandon(is_half=work == self._launch_forward)
        return self._failed(plan, fault)

    def _abandon(self, *, is_half: bool = False) -> None:
        """Issues the exchanges that are left of a step that failed here."""
        if self._exchanges is not None:
            with self._launching():
                self._free_memory()  # for them
                self._exchanges.abandon(is_half=is_half)

    def _join(self, plan: BatchPlan, result: StepResult) -> StepResult:
        """Returns the result of a step, or that it failed on another rank, where its rows are undefined then."""
        fault = None if self._group is None or not plan.rows.size else self._group.take_result(result)
        return result if fault is None else self._failed(plan, fault)

    def _failed(self, plan: BatchPlan, fault: StepFault) -> StepResult:
        if self._group is not None:
            self._group.void(plan.step_id)
        with self._on_stream():
            self._free_memory()
            self._step_done(plan)
        nothing = np.empty(0, dtype=np.int32)
        return StepResult(plan.step_id, counts=nothing, tokens=nothing[:, None], fault=fault)

    def _launch(self, plan: BatchPlan) -> _Outcome:
        """Computes a whole step; on CUDA launches it, and the copy of its outcome."""
        with self._launching():
            return self._finish(plan, *_drawn(self._begin(plan), is_masked=False))

    def _launch_forward(self, plan: BatchPlan) -> None:
        with self._launching():
            self._half = self._begin(plan)

    def _launch_draw(self, forward: Future[StepResult | None], masks: MaskPlan | None, plan: BatchPlan) -> _Outcome:
        if self._group is not None:
            self._group.draw(plan.step_id, masks)
        if (over := forward.result()) is not None:
            if over.fault is not None:
                self._abandon()
            return over
        half, self._half = self._half, None
        assert half is not None, f"step {plan.step_id} has no forward to draw from"
        if self._exchanges is not None and not isinstance(half, DeviceOutput):
            self._exchanges.begin_next()
        with self._launching():
            if masks is None:
                return self._finish(plan, *_drawn(half, is_masked=False))
            self._rows.masks.send(masks)
            try:
                drawn = _drawn(half, is_masked=True)
            finally:
                self._rows.masks.free()
            return self._finish(plan, *drawn)

    @contextmanager
    def _launching(self) -> Iterator[None]:
        """Launches on the executor's stream; on CUDA offloads pause meanwhile."""
        tier_transfers = None if self._stream is None else self._tier_transfers
        pausing = nullcontext() if tier_transfers is None else tier_transfers.launching()
        with pausing, self._on_stream(), torch.inference_mode():
            yield

    def _begin(self, plan: BatchPlan) -> _Begun:
        self._is_replay = False
        self._apply(plan)
        self._runners.note(plan)
        self._order_copies(plan)
        decision = self._decide(plan) if self._group is None else self._group.settle(plan, partial(self._decide, plan))
        return self._nothing() if decision is None else self._run(plan, decision)

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
            return
        with torch.cuda.device(self._rows.device), torch.cuda.stream(self._stream):
            yield

    def _free_memory(self) -> None:
        """Returns cached memory to the device, where it may be joined to larger pieces."""
        if self._stream is not None:
            torch.cuda.empty_cache()

    def _finish(self, plan: BatchPlan, output: DeviceOutput, launched_step: LaunchedStep | None) -> _Outcome:
        """Copies the outcome, then drafts: the host waits for no draft. Then all writes of the step to pages are on the stream."""
        if self._stream is None:
            self._propose(plan, launched_step)
            # A copy: a graph writes its next words into the same memory, and the result may not be read yet.
            return read_output(plan, output, output.words.numpy().copy())
        host = torch.empty(output.words.shape, dtype=torch.int32, pin_memory=True)
        host.copy_(output.words, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record()
        self._propose(plan, launched_step)
        return output, host, copied

    def _propose(self, plan: BatchPlan, launched_step: LaunchedStep | None) -> None:
        if launched_step is not None:
            if self._exchanges is not None:
                self._exchanges.begin_next()
            self._runners.propose(plan, launched_step)
            if plan.awaits_masks and plan.num_propose:  # the next masks of a row depend on its drafts
                self._rows.copy_drafts(self._drafts)
                if self._are_copied is not None:
                    self._are_copied.record()
        self._step_done(plan)

    def _read(self, plan: BatchPlan, output: DeviceOutput, host: Tensor, copied: torch.cuda.Event) -> StepResult:
        """Waits for the copy of an outcome."""
        copied.synchronize()
        return self._join(plan, read_output(plan, output, host.numpy()))

    def _step_done(self, plan: BatchPlan) -> None:
        """Lets copies begin that come after the step."""
        if self._tier_transfers is not None:
            self._tier_transfers.forward_done(plan.step_id)

    def _decide(self, plan: BatchPlan) -> Decision | None:
        """Returns the gate's decision on a step; None of a plan without rows."""
        if not plan.rows.size:
            return None
        loads = PendingLoads() if self._tier_transfers is None else self._tier_transfers.loads
        coverage, facts = self._runners.coverage, self._runners.facts(plan)
        return admit(plan, loads, coverage, facts, has_moved=self._rows.has_moved)

    def _run(self, plan: BatchPlan, decision: Decision) -> _Begun:
        """Runs the step or its first half, or defers it, as was decided."""
        runners, tier_transfers = self._runners, self._tier_transfers
        self._decisions.add(plan.step_id, decision)
        if decision.action is Action.DEFER:
            return self._nothing(deferred=decision.reason.value)
        self._is_replay = decision.action is Action.REPLAY
        if self._exchanges is not None:
            self._exchanges.begin(plan, decision)
        wait = None
        if decision.loads:
            assert tier_transfers is not None, f"loads {decision.loads} with one tier"
            wait = partial(tier_transfers.wait, decision.loads)
        return runners.forward(plan, decision, wait) if plan.awaits_masks else runners.run(plan, decision, wait)

    def _nothing(self, deferred: str = "") -> DeviceOutput:
        """Returns the outcome of a plan without a forward."""
        return DeviceOutput(torch.empty(0, dtype=torch.int32, device=self._rows.device), 0, 0, deferred=deferred)


def _drawn(begun: _Begun, *, is_masked: bool) -> tuple[DeviceOutput, LaunchedStep | None]:
    if isinstance(begun, DeviceOutput):
        return begun, None
    launched_step = begun if isinstance(begun, LaunchedStep) else begun(is_masked)
    return launched_step.output, launched_step


def _pass_on(done: Future[StepResult], drawn: Future[StepResult]) -> None:
    error = drawn.exception()
    if error is None:
        done.set_result(drawn.result())
    else:
        done.set_exception(error)
