"""Runs each step with the runner that the gate chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from hiserve.attention.base import Attention
from hiserve.core.drafts import Proposer, propose
from hiserve.core.forward import ForwardInputs, ForwardOutputs, LayerKV
from hiserve.core.plan import BatchPlan
from hiserve.models.loading import AnyDecoder
from hiserve.runners.canary import Canary
from hiserve.runners.capture import Graph
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.gate import Action, Coverage, Decision, Reason, StepFacts
from hiserve.runners.graph import GraphRunner
from hiserve.runners.inputs import build_inputs
from hiserve.runners.mixed import MixedRunner
from hiserve.runners.piecewise import PiecewiseRunner
from hiserve.runners.step_output import Draw, LaunchedStep, LogitsHead, draft_step, finish_step
from hiserve.sampling.params import Drawing

# Waits on the device for one layer's part of the step's loads, or for all of them (None).
Wait = Callable[[int | None], None]


class EagerRunner:
    """Runs any batch."""

    def __init__(self, model: AnyDecoder, layers: Sequence[LayerKV], attention: Attention) -> None:
        self._model = model
        self._layers = layers
        self._attention = attention

    @property
    def needs_host_lengths(self) -> bool:
        """Whether attention plans with lengths that the host must know exactly."""
        return self._attention.needs_host_lengths

    def run(self, inputs: ForwardInputs) -> ForwardOutputs:
        """Plans attention and computes the step."""
        self._attention.plan(inputs)
        return self._model.forward(inputs, self._layers, self._attention)


class Dispatch:
    """The runners of one device.

    Args:
        full: Graphs of whole steps, by tokens per row.
        mixed: Graphs of rows that decode and a few prompts, if there are any.
        piecewise: Graphs between attentions, likewise.
        head: Computes the logits after either.
        is_strict: No graph is replayed while any load is open, or after a live row's page moved.
        canary: Checks the pages of rows; None unless debugging.
        proposer: Drafts after each step; None for plain decoding.
    """

    def __init__(
        self,
        rows: DeviceRows,
        eager: EagerRunner,
        *,
        full: Mapping[int, GraphRunner] = MappingProxyType({}),
        mixed: MixedRunner | None = None,
        piecewise: PiecewiseRunner | None = None,
        head: LogitsHead | None = None,
        is_strict: bool = False,
        canary: Canary | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self._rows = rows
        self._eager = eager
        self._full = full
        self._mixed = mixed
        self._piecewise = piecewise
        self._head = head
        self._canary = canary
        self._proposer = proposer
        assert canary is None or not self._captured, "graphs read pages that no canary has checked"
        self.coverage = Coverage(is_strict=is_strict)  # the captured graphs, for the gate

    def capture(self) -> None:
        """Captures all graphs; until it ends ``coverage`` has none."""
        for runner in self._captured:
            runner.capture()
        self.coverage = replace(
            self.coverage,
            full={width: covered for width, runner in self._full.items() if (covered := runner.coverage).buckets},
            mixed=None if self._mixed is None else self._mixed.coverage,
            piecewise=None if self._piecewise is None else self._piecewise.coverage,
        )

    def close(self) -> None:
        """Frees the graphs and their memory, when no step is in flight. Nothing runs afterwards."""
        for runner in self._captured:
            runner.close()

    @property
    def num_nodes(self) -> int:
        """Nodes of all graphs."""
        return sum(graph.num_nodes for graph in set[Graph]().union(*(runner.graphs for runner in self._captured)))

    @property
    def _captured(self) -> tuple[GraphRunner | MixedRunner | PiecewiseRunner, ...]:
        """The runners that have graphs, in the order of their captures."""
        partial = tuple(runner for runner in (self._piecewise, self._mixed) if runner is not None)
        return (*partial, *self._full.values())

    @property
    def needs_host_lengths(self) -> bool:
        """Whether the model's attention plans with lengths that the host must know exactly."""
        return self._eager.needs_host_lengths

    def facts(self, plan: BatchPlan) -> StepFacts:
        """Returns the facts that the gate compares with the coverage; graphs compute no scores."""
        sampling, rows = self._rows.sampling, plan.rows[plan.samples]
        drawing = sampling.drawing(rows) if sampling.num_top(rows) is None else Drawing.ANY
        return StepFacts.of(plan, sampling=drawing.value)

    def num_logits(self, count: int) -> int:
        """Returns the rows of logits that a replay up to the last attention computes for so many."""
        return count if self._head is None else self._head.padded(count)

    def replays_drafts(self, plan: BatchPlan, decision: Decision) -> bool:
        """Whether the drafts after a step are computed for all rows of its graph."""
        return decision.is_whole and self._full[int(plan.num_new[0])].has_drafts(decision.bucket)

    def note(self, plan: BatchPlan) -> None:
        """Passes an applied plan to the canary, also if its step does not run."""
        if self._canary is not None:
            self._canary.note(plan)

    def run(
        self, plan: BatchPlan, decision: Decision, wait: Wait | None = None, *, is_masked: bool = False
    ) -> LaunchedStep:
        """Computes a whole step: ``forward``, and its draw."""
        return self.forward(plan, decision, wait)(is_masked)

    def forward(self, plan: BatchPlan, decision: Decision, wait: Wait | None = None) -> Draw:
        """Launches the forward of a step of at least one row on the current stream; returns its draw.

        Nothing else of the runners may be launched before the draw: graphs share their memory.

        Args:
            plan: Applied to the rows; the next one is applied after the draw.
            decision: The gate's, not to defer.
            wait: For the loads that the step reads; None without any.
        """
        states = self._rows.states
        if states is not None and states.waits(plan):
            if wait is not None:
                wait(None)  # a snapshot may be on its way
                wait = None
            states.restore(plan)
        if wait is not None and (decision.is_whole or decision.reason is Reason.MIXED):
            wait(None)  # the gate replays no mixed step that waits, but another rank's load may have ended later
            wait = None
        if decision.is_whole:
            return self._full[int(plan.num_new[0])].forward(plan, decision.bucket, Drawing(decision.sampling))
        inputs = build_inputs(plan, self._rows)
        forward = inputs.forward
        if self._canary is not None:
            if wait is not None:
                wait(None)  # the canary reads pages before the first layer
            self._canary.verify(plan, inputs)
            self._canary.write(forward)
        elif wait is not None:
            forward = replace(forward, before_layer=wait)
        if decision.action is Action.REPLAY:
            graphs = self._mixed if decision.reason is Reason.MIXED else self._piecewise
            assert graphs is not None, f"step {plan.step_id} goes to graphs that are not there"
            outputs = graphs.run(forward, decision.bucket)
        else:
            outputs = self._eager.run(forward)

        def draw_tokens(is_masked: bool) -> LaunchedStep:
            output = finish_step(plan, inputs, outputs.logits, self._rows, is_masked=is_masked)
            return LaunchedStep(output, inputs, outputs.hidden_states, decision.sampling == Drawing.GREEDY.value)

        return draw_tokens

    def propose(self, plan: BatchPlan, launched_step: LaunchedStep) -> None:
        """Drafts after a step, on the current stream: after the copy of its outcome, which waits for no draft."""
        if self._proposer is None or plan.is_cold:
            return
        if launched_step.drafts is not None:
            launched_step.drafts.propose(plan.num_propose, is_greedy=launched_step.is_greedy)
        else:
            propose(self._proposer, draft_step(plan, launched_step))
