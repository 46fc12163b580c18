"""Executes plans in submission order: rows, inputs, model, sampler, result."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from hiserve.core.plan import BatchPlan, StepResult
from hiserve.runners.eager import EagerRunner
from hiserve.runners.inputs import build_inputs
from hiserve.runners.rows import DeviceRows
from hiserve.sampling.sampler import sample


class Executor:
    """Turns each ``BatchPlan`` into a future ``StepResult``.

    On CUDA a step is launched by the caller without a host sync, and a thread waits for the copy of its tokens.
    On CPU a step runs inside ``submit``, or, when ``threaded``, in one thread of its own.

    Args:
        runner: Computes logits.
        rows: The permanent rows.
        threaded: On CPU, compute in a thread, so that the caller can plan meanwhile.
    """

    def __init__(self, runner: EagerRunner, rows: DeviceRows, *, threaded: bool = False) -> None:
        self._runner = runner
        self._rows = rows
        self._on_cuda = rows.device.type == "cuda"
        needs_thread = threaded or self._on_cuda
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hiserve-executor") if needs_thread else None

    def submit(self, plan: BatchPlan) -> Future[StepResult]:
        """Runs or launches a step after those submitted before. An exception inside it is raised by ``result()``."""
        if self._thread is not None and not self._on_cuda:
            return self._thread.submit(self._run, plan)
        done: Future[StepResult] = Future()
        try:
            if self._thread is not None:
                return self._thread.submit(_collect, plan, *self._launch(plan))
            done.set_result(self._run(plan))
        except Exception as error:  # noqa: BLE001 - the future carries it to whoever asks for the result
            done.set_exception(error)
        return done

    def close(self) -> None:
        """Finishes the submitted steps and ends the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _run(self, plan: BatchPlan) -> StepResult:
        return _result(plan, self._step(plan).numpy())

    def _launch(self, plan: BatchPlan) -> tuple[Tensor, torch.cuda.Event]:
        """Enqueues the step and the copy of its outcome."""
        outcome = self._step(plan)
        host = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True)
        host.copy_(outcome, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record()
        return host, copied

    @torch.inference_mode()
    def _step(self, plan: BatchPlan) -> Tensor:
        """Returns the outcome on the device: int32 ``[B + S]``, legal flags, then sampled tokens."""
        self._rows.apply(plan)
        inputs = build_inputs(plan, self._rows)
        outputs = self._runner.run(inputs.forward)
        position = inputs.forward.kv_lens.index_select(0, inputs.sampling)
        sampling_rows = inputs.rows.index_select(0, inputs.sampling)
        batch = self._rows.sampling.gather(inputs.host_sampling_rows, sampling_rows, position)
        tokens = sample(outputs.logits, batch)
        self._rows.advance(inputs.rows, inputs.forward.kv_lens, inputs.legal, inputs.sampling, tokens)
        return torch.cat((inputs.legal.to(torch.int32), tokens.to(torch.int32)))


def _collect(plan: BatchPlan, host: Tensor, copied: torch.cuda.Event) -> StepResult:
    copied.synchronize()
    return _result(plan, host.numpy())


def _result(plan: BatchPlan, outcome: np.ndarray) -> StepResult:
    legal, tokens = outcome[: plan.rows.size] != 0, outcome[plan.rows.size :]
    return StepResult(
        step_id=plan.step_id,
        counts=legal[plan.samples].astype(np.int32),
        tokens=tokens[:, None],
        faults=plan.rows[~legal],
    )
