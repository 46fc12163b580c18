"""Whole steps as CUDA graphs: every row computes the same number of tokens and samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.forward import LayerKV
from hiserve.core.plan import BatchPlan
from hiserve.kernels.step_ops import StepInputs
from hiserve.models.loading import AnyDecoder
from hiserve.runners.capture import Capture, Graph
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.draft_graphs import NUM_WARMUP_DRAFTS, DraftCapture, DraftGraphs
from hiserve.runners.gate import FullGraphs
from hiserve.runners.inputs import fill_inputs, uniform_inputs
from hiserve.runners.step_output import DeviceOutput, Draw, LaunchedStep, draw, finish_step, record
from hiserve.sampling.params import Drawing

logger = logging.getLogger(__name__)

# Variants that graphs draw; the others run eagerly on the logits.
DRAWINGS = (Drawing.GREEDY, Drawing.FREE)


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedStep:
    """Graphs of one bucket, and the tensors that they read and write."""

    varying: Tensor  # int64 ``[2, rows]``: written before each replay; see ``uniform_inputs``
    inputs: StepInputs  # with views of it; filled by the first graph
    logits: Tensor  # ``[rows * width, vocab_size]``, likewise; of a rank of a group those of its tokens
    hidden_states: Tensor | None  # ``[rows * width, n]``, likewise; None without ``aux_layers``
    forward: Graph  # from rows and plan to the logits
    # Ways of drawing, each a graph from the logits to the words, and these, int32.
    draws: dict[Drawing, tuple[Graph, Tensor]]
    attention: Attention  # of the first graph
    # The proposer's work after them; None without a proposer, or where graphs cannot hold it.
    drafts: DraftGraphs | None


class GraphRunner:
    """Replays decode steps, or steps that verify the same number of drafts in every row.

    A graph holds addresses, widths and grids; it reads slots and lengths from the rows in each replay. Pages may
    therefore move between replays. Padding rows are row 0, which the check sends to the padding page.

    Args:
        width: Tokens of each row: 1, and its drafts.
        max_len: Longest row of a replay, in tokens: page tables and grids are as large.
        buckets: Rows of each graph, ascending; those that attention cannot capture are left out.
        drafts: Captures the proposer's work after each step; None for plain decoding.
    """

    def __init__(
        self,
        model: AnyDecoder,
        layers: Sequence[LayerKV],
        attention: Attention,
        rows: DeviceRows,
        capture: Capture,
        *,
        width: int,
        max_len: int,
        buckets: tuple[int, ...],
        drafts: DraftCapture | None = None,
    ) -> None:
        assert max_len <= rows.max_len, f"graphs of rows of {max_len} tokens; a row holds {rows.max_len}"
        self._model = model
        self._layers = layers
        self._attention = attention
        self._rows = rows
        self._capture = capture
        self._width = width
        self._max_len = max_len
        self._buckets = buckets
        self._drafts = drafts
        self._captured: dict[int, _CapturedStep] = {}
        self.failed: set[int] = set()  # rows of captures that failed

    @property
    def coverage(self) -> FullGraphs:
        """The captured graphs, for the gate."""
        return FullGraphs(
            buckets=tuple(sorted(self._captured.keys() | self.failed)),
            max_len=self._max_len,
            failed=frozenset(self.failed),
        )

    def has_drafts(self, bucket: int) -> bool:
        """Whether graphs draft after steps of a bucket."""
        return self._captured[bucket].drafts is not None

    @property
    def graphs(self) -> set[Graph]:
        """All graphs; runners of other widths share those of drafts."""
        graphs = {each.forward for each in self._captured.values()}
        for each in self._captured.values():
            graphs.update(graph for graph, _ in each.draws.values())
            if each.drafts is not None:
                graphs.update(each.drafts.graphs)
        return graphs

    def close(self) -> None:
        """Frees the graphs and their memory."""
        self._captured.clear()
        if self._drafts is not None:
            self._drafts.clear()

    def capture(self) -> None:
        """Captures every bucket, the largest first, so that smaller ones reuse its memory.

        No request has a row or a page yet. A failure is logged and remembered; its steps run eagerly.
        """
        with self._capture.on_stream(), torch.inference_mode():
            for num_rows in reversed(self._buckets):
                try:
                    captured = self._capture_bucket(num_rows)
                    if captured is not None:
                        self._captured[num_rows] = captured
                except RuntimeError as error:
                    self._capture.check_failure(error)
                    self.failed.add(num_rows)
                    logger.warning(
                        "steps of %d rows with %d tokens each run without a graph: %s",
                        num_rows,
                        self._width,
                        str(error).splitlines()[0],
                    )
            self._rows.forget()
        if not self.coverage.buckets:
            logger.warning(
                "steps of %d tokens a row run without a graph: their attention cannot be captured", self._width
            )

    def _capture_bucket(self, num_rows: int) -> _CapturedStep | None:
        rows = self._rows
        numbers = torch.arange(1, num_rows + 1, device=rows.device)
        numbers.masked_fill_(numbers >= rows.known_len.shape[0], 0)
        varying = torch.stack((numbers, torch.full_like(numbers, self._width)))
        attention = self._attention.captured(num_rows, self._width)
        if attention is None:
            return None
        inputs = uniform_inputs(varying, self._width, self._max_len, rows)
        fill_inputs(inputs, rows)
        # Attention keeps these tensors, so all steps write into them. No row has stored anything yet: ``q_lens`` are exact.
        bounds = inputs.forward.q_lens if attention.needs_host_lengths else inputs.forward.kv_bounds
        attention.plan(replace(inputs.forward, kv_bounds=bounds))
        made: dict[str, Tensor] = {}
        # All rows are free outside a draw with masks, so one graph serves steps with and without grammars.
        masks = rows.masks.of(num_rows * self._width)

        def forward() -> None:
            fill_inputs(inputs, rows)
            outputs = self._model.forward(inputs.forward, self._layers, attention)
            made["logits"] = outputs.logits
            if outputs.hidden_states is not None:
                made["hidden_states"] = outputs.hidden_states

        def finish(drawing: Drawing) -> None:
            drawn = draw(inputs, made["logits"], rows, drawing, rows.draw_ops, masks)
            made["words"] = record(inputs, drawn.view(num_rows, self._width), rows)

        def reset_rows() -> None:
            # After this step's tokens come the one that is drawn and its drafts.
            rows.warm_up(self._width + 1 + max(NUM_WARMUP_DRAFTS, 0 if rows.state.trees is None else rows.max_draft))

        reset_rows()
        forward()
        expected, words = {name: tensor.clone() for name, tensor in made.items()}, {}
        for drawing in DRAWINGS:
            reset_rows()
            finish(drawing)
            words[drawing] = made["words"]
        forward_graph = self._capture.record(forward)
        draws = {}
        for drawing in DRAWINGS:
            graph = self._capture.record(partial(finish, drawing))
            draws[drawing] = graph, made["words"]
        for name, tensor in expected.items():
            reset_rows()
            _check_replay(forward_graph, made[name], tensor)
        for drawing, (graph, drawn) in draws.items():
            reset_rows()
            _check_replay(graph, drawn, words[drawing])
        hidden_states = made.get("hidden_states")
        drafts = None if self._drafts is None else self._drafts.after(inputs, hidden_states)
        return _CapturedStep(varying, inputs, made["logits"], hidden_states, forward_graph, draws, attention, drafts)

    def forward(self, plan: BatchPlan, bucket: int, drawing: Drawing) -> Draw:
        """Replays the forward of a bucket on the current stream; returns the draw, before which no graph may be replayed.

        Args:
            plan: Of at most ``bucket`` rows, as the coverage says.
            bucket: Whose capture did not fail.
            drawing: How its tokens are drawn; ``ANY`` runs eagerly after the forward.
        """
        captured = self._captured[bucket]
        self._fill(captured, plan)
        captured.forward.replay()

        def draw_tokens(is_masked: bool) -> LaunchedStep:
            if drawing in captured.draws:
                graph, words = captured.draws[drawing]
                graph.replay()
                output = DeviceOutput(words, bucket, bucket, captured.inputs.num_emitted)
            else:
                logits = captured.logits[: plan.rows.size * self._width]
                output = finish_step(plan, _of_plan(captured.inputs, plan), logits, self._rows, is_masked=is_masked)
            is_greedy = drawing is Drawing.GREEDY
            return LaunchedStep(output, captured.inputs, captured.hidden_states, is_greedy, captured.drafts)

        return draw_tokens

    def _fill(self, captured: _CapturedStep, plan: BatchPlan) -> None:
        """Writes the columns that change; the rows that pad the batch are row 0, of any length."""
        is_cuda = self._rows.device.type == "cuda"
        staging = torch.empty(captured.varying.shape, dtype=torch.int64, pin_memory=is_cuda)
        host, num_rows = staging.numpy(), plan.rows.size
        host[0, :num_rows], host[0, num_rows:] = plan.rows, 0
        host[1, :num_rows], host[1, num_rows:] = plan.max_len, self._width
        captured.varying.copy_(staging, non_blocking=True)
        if captured.attention.needs_host_lengths:
            kv_bounds = host[1].astype(np.int32)
            captured.attention.plan(replace(captured.inputs.forward, kv_bounds=kv_bounds))


def _of_plan(inputs: StepInputs, plan: BatchPlan) -> StepInputs:
    """Returns the inputs of the plan's rows alone, as far as ``finish_step`` reads them."""
    num_rows, forward = plan.rows.size, inputs.forward
    return replace(
        inputs,
        forward=replace(forward, kv_lens=forward.kv_lens[:num_rows], max_kv_len=int(plan.max_len.max())),
        rows=inputs.rows[:num_rows],
        legal=inputs.legal[:num_rows],
        num_draft=inputs.num_draft[:num_rows],
        sampling=inputs.sampling[:num_rows],
        path=None if inputs.path is None else inputs.path[:num_rows],  # the proposer's graphs read it
    )


def _check_replay(graph: Graph, made: Tensor, expected: Tensor) -> None:
    """Replays a graph once over poisoned outputs: the results must be those of the eager step.

    Raises:
        RuntimeError: It does not.
    """
    made.fill_(torch.nan if made.is_floating_point() else -1)
    graph.replay()
    if not torch.equal(made, expected):
        raise RuntimeError("its replay differs from the eager step")
