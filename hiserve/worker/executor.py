"""Executes plans in submission order: rows, inputs, model, sampler, result."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hiserve.core.copies import CopyAck
from hiserve.core.forward import ForwardInputs
from hiserve.core.plan import BatchPlan, Int32Array, Scores, StepResult
from hiserve.messages.cache import StoreStats
from hiserve.runners.canary import Canary
from hiserve.runners.eager import EagerRunner
from hiserve.runners.gate import Action, Coverage, Loads, Reason, StepFacts, admit
from hiserve.runners.inputs import build_inputs
from hiserve.runners.rows import DeviceRows
from hiserve.sampling.logprobs import pack_scores
from hiserve.sampling.sampler import sample
from hiserve.worker.copier import Copier


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """What a step leaves for the host.

    Attributes:
        words: int32, on the device: B legal flags, S tokens, then the packed scores of the tokens and of the
            prompt, if any.
        num_top: Likeliest tokens in each of the tokens' scores; None without scores.
        num_prompt_top: Likewise for the prompt's.
        deferred: Why the step did not run; empty if it did.
    """

    words: Tensor
    num_top: int | None
    num_prompt_top: int | None
    deferred: str = ""


class Executor:
    """Turns each ``BatchPlan`` into a future ``StepResult``.

    On CUDA a step is launched by the caller without a host sync, and a thread waits for the copy of its outcome.
    On CPU a step runs inside ``submit``, or, when ``threaded``, in one thread of its own.

    Args:
        runner: Computes logits.
        rows: The permanent rows.
        threaded: On CPU, compute in a thread, so that the caller can plan meanwhile.
        copier: Copies pages between tiers; None with one tier. Closed at the end.
        canary: Checks what rows find in pages; None unless debugging.
    """

    def __init__(
        self,
        runner: EagerRunner,
        rows: DeviceRows,
        *,
        threaded: bool = False,
        copier: Copier | None = None,
        canary: Canary | None = None,
    ) -> None:
        self._runner = runner
        self._rows = rows
        self._copier = copier
        self._canary = canary
        self._on_cuda = rows.device.type == "cuda"
        needs_thread = threaded or self._on_cuda
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hiserve-executor") if needs_thread else None
        self._verdicts: Counter[tuple[Action, Reason]] = Counter()

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

    def gate_counts(self) -> dict[str, dict[str, int]]:
        """Returns the gate's verdicts until now: verdict -> reason -> steps."""
        counts: dict[str, dict[str, int]] = {}
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
        if self._copier is not None:
            self._copier.close()

    def _run(self, plan: BatchPlan) -> StepResult:
        outcome = self._step(plan)
        return _result(plan, outcome, outcome.words.numpy())

    def _launch(self, plan: BatchPlan) -> tuple[_Outcome, Tensor, torch.cuda.Event]:
        """Enqueues the step and the copy of its outcome."""
        outcome = self._step(plan)
        host = torch.empty(outcome.words.shape, dtype=torch.int32, pin_memory=True)
        host.copy_(outcome.words, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record()
        return outcome, host, copied

    def _step(self, plan: BatchPlan) -> _Outcome:
        with torch.inference_mode():
            self._rows.apply(plan)
            if self._canary is not None:
                self._canary.note(plan)
            if self._copier is not None:
                self._copier.start(plan)
            else:
                assert not plan.copies, f"copy {plan.copies[0].op} with one tier"
            outcome = self._pass_gate(plan) if plan.rows.size else self._nothing("")
        if self._copier is not None:
            self._copier.forward_done(plan.step_id)
        return outcome

    def _pass_gate(self, plan: BatchPlan) -> _Outcome:
        """Does what the gate says to a step."""
        loads = Loads() if self._copier is None else self._copier.loads
        verdict = admit(plan, self._rows.version, loads, Coverage(), StepFacts.of(plan))
        self._verdicts[verdict.action, verdict.reason] += 1
        if verdict.action is Action.DEFER:
            return self._nothing(verdict.reason.value)
        return self._forward(plan, verdict.loads)

    def _nothing(self, deferred: str) -> _Outcome:
        """The outcome of a plan of which nothing was computed."""
        return _Outcome(torch.empty(0, dtype=torch.int32, device=self._rows.device), None, None, deferred)

    def _forward(self, plan: BatchPlan, loads: tuple[int, ...]) -> _Outcome:
        rows = self._rows
        inputs = build_inputs(plan, rows)
        forward = self._behind(loads, inputs.forward)
        if self._canary is not None:
            self._canary.verify(plan, inputs)
            self._canary.write(forward)
        logits = self._runner.run(forward).logits
        num_sampling = inputs.sampling.shape[0]
        sampled_logits, scored_logits = logits[:num_sampling], logits[num_sampling:]
        batch = rows.sampling.gather(
            host_rows=inputs.host_sampling_rows,
            rows=inputs.rows.index_select(0, inputs.sampling),
            position=forward.kv_lens.index_select(0, inputs.sampling),
            tokens=rows.tokens.narrow(1, 0, forward.max_kv_len),
        )
        tokens = sample(sampled_logits, batch)
        rows.advance(inputs.rows, forward.kv_lens, inputs.legal, inputs.sampling, tokens)
        words = [inputs.legal.to(torch.int32), tokens.to(torch.int32)]
        num_top = rows.sampling.num_top(inputs.host_sampling_rows)
        if num_top is not None:
            words.append(pack_scores(sampled_logits, tokens, num_top).view(-1))
        num_prompt_top = None
        if inputs.scored_tokens is not None:
            num_prompt_top = rows.sampling.num_prompt_top(plan.rows[plan.num_scored > 0])
            assert num_prompt_top is not None, f"step {plan.step_id} scores prompts of rows that want no scores"
            words.append(pack_scores(scored_logits, inputs.scored_tokens, num_prompt_top).view(-1))
        return _Outcome(torch.cat(words), num_top, num_prompt_top)

    def _behind(self, loads: tuple[int, ...], inputs: ForwardInputs) -> ForwardInputs:
        """Lets each layer wait for its part of the loads; a canary reads pages before the first, so it waits for all of them."""
        if not loads:
            return inputs
        assert self._copier is not None, f"loads {loads} with one tier"
        if self._canary is not None:
            self._copier.wait(loads)
            return inputs
        return replace(inputs, before_layer=partial(self._copier.wait, loads))


def _collect(plan: BatchPlan, outcome: _Outcome, host: Tensor, copied: torch.cuda.Event) -> StepResult:
    copied.synchronize()
    return _result(plan, outcome, host.numpy())


def _result(plan: BatchPlan, outcome: _Outcome, words: Int32Array) -> StepResult:
    """Takes the words apart, in the order in which ``_Outcome`` lists them."""
    if outcome.deferred:
        nothing = np.empty(0, dtype=np.int32)
        return StepResult(plan.step_id, counts=nothing, tokens=nothing[:, None], deferred=outcome.deferred)
    num_rows, num_sampling = plan.rows.size, int(plan.samples.sum())
    legal, tokens, rest = words[:num_rows] != 0, words[num_rows:][:num_sampling], words[num_rows + num_sampling :]
    scores = prompt_scores = None
    if outcome.num_top is not None:
        num_words = num_sampling * (1 + 2 * outcome.num_top)
        scores, rest = Scores.unpack(rest[:num_words].tobytes(), outcome.num_top), rest[num_words:]
    if outcome.num_prompt_top is not None:
        prompt_scores = Scores.unpack(rest.tobytes(), outcome.num_prompt_top)
    return StepResult(
        step_id=plan.step_id,
        counts=legal[plan.samples].astype(np.int32),
        tokens=tokens[:, None],
        scores=scores,
        prompt_scores=prompt_scores,
        faults=plan.rows[~legal],
    )
