"""Steps of rows that decode and then a few prompts, each as one CUDA graph up to the last attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.core.forward import ForwardInputs, ForwardOutputs, LayerKV, StateRows
from hiserve.core.plan import Int32Array
from hiserve.core.upload import upload
from hiserve.models.loading import AnyDecoder
from hiserve.runners.capture import Capture, Graph, capture_sizes
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.gate import MixedGraphs
from hiserve.runners.inputs import no_states, put_tokens
from hiserve.runners.step_output import LogitsHead

MAX_DECODE = 64  # rows; a program is launched for each that a step does not have
MAX_PROMPTS = 2  # likewise, for each block of tokens of the bucket


class StaticInputs:
    """Inputs of fixed size for steps of any rows: first those that decode, then the prompts.

    At first no row has tokens, and all tokens are padding: of row 0, at position 0.

    Args:
        num_tokens: T, of the largest step.
        max_decode: D. Rows up to the last that decodes.
        max_prompts: Rows after them.
        table_width: Entries of a row's page table.
        has_windows: Whether layers with a window have pages of their own.
        has_states: Whether rows carry states along.
        has_trees: Whether their drafts are trees.

    Attributes:
        inputs: The tensors, ``[D + max_prompts]`` and ``[T]``.
    """

    def __init__(
        self,
        num_tokens: int,
        max_decode: int,
        max_prompts: int,
        table_width: int,
        device: torch.device,
        *,
        has_windows: bool = False,
        has_states: bool = False,
        has_trees: bool = False,
    ) -> None:
        num_rows = max_decode + max_prompts
        zeros, lengths = torch.zeros(num_tokens, dtype=torch.int64, device=device), np.zeros(num_rows, dtype=np.int32)
        table = torch.zeros((num_rows, table_width), dtype=torch.int32, device=device)
        self.inputs = ForwardInputs(
            input_ids=zeros.to(torch.int32),
            positions=zeros.clone(),
            slots=zeros.clone(),
            token_rows=zeros,
            qo_indptr=torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
            kv_lens=torch.ones(num_rows, dtype=torch.int64, device=device),
            page_table=table,
            window_slots=zeros.clone() if has_windows else None,
            window_table=table.clone() if has_windows else None,
            state=no_states(num_rows, device) if has_states else None,
            logits_rows=zeros[:0],
            q_lens=lengths,
            kv_bounds=lengths,
            max_kv_len=1,
            num_decode=max_decode,
            tree_mask=zeros.clone() if has_trees else None,
        )

    def bounded(self, num_tokens: int, max_width: int, max_len: int) -> ForwardInputs:
        """Returns the tensors of a bucket, with bounds for the host: one large prompt among rows that decode."""
        static = self.inputs
        q_lens = np.ones_like(static.q_lens)
        q_lens[: static.num_decode] = max_width
        q_lens[static.num_decode] = num_tokens
        return replace(
            static,
            input_ids=static.input_ids[:num_tokens],
            positions=static.positions[:num_tokens],
            slots=static.slots[:num_tokens],
            window_slots=None if static.window_slots is None else static.window_slots[:num_tokens],
            token_rows=static.token_rows[:num_tokens],
            tree_mask=None if static.tree_mask is None else static.tree_mask[:num_tokens],
            q_lens=q_lens,
            kv_bounds=np.full_like(q_lens, max_len),
            max_kv_len=max_len,
        )

    def fill(self, inputs: ForwardInputs, bucket: int) -> None:
        """Copies a step into a bucket; unused rows have no tokens, and padding tokens go to the padding page."""
        static, num_decode = self.inputs, inputs.num_decode
        num_tokens = inputs.input_ids.shape[0]
        put_tokens(inputs, static, bucket)
        static.positions[num_tokens:bucket].zero_()  # a row may have no page for another
        if static.tree_mask is not None:
            static.tree_mask[:bucket].zero_()
            if inputs.tree_mask is not None:
                static.tree_mask[:num_tokens].copy_(inputs.tree_mask)
        indptr = _spread(inputs.q_lens, num_decode, static.num_decode, static.qo_indptr.shape[0])
        token_rows = np.zeros(bucket, dtype=np.int64)
        token_rows[:num_tokens] = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
        new_indptr, new_rows = upload((indptr, token_rows), static.qo_indptr.device)
        static.qo_indptr.copy_(new_indptr)
        static.token_rows[:bucket].copy_(new_rows)
        static.kv_lens.fill_(1)
        states = _pairs(static.state, inputs.state)
        for target, _ in states:
            target.zero_()
        num_rows, width = inputs.page_table.shape
        tables = ((static.page_table, inputs.page_table), (static.window_table, inputs.window_table))
        for begin, end, place in ((0, num_decode, 0), (num_decode, num_rows, static.num_decode)):
            if begin < end:
                for target, source in ((static.kv_lens, inputs.kv_lens), *states):
                    target[place : place + end - begin].copy_(source[begin:end])
                for table, rows in tables:
                    if table is not None and rows is not None:
                        table[place : place + end - begin, :width].copy_(rows[begin:end])


def _pairs(static: StateRows | None, states: StateRows | None) -> list[tuple[Tensor, Tensor]]:
    """Returns the tensors of a graph's states with those of a step; none where rows carry nothing."""
    if static is None or states is None:
        return []
    return [(getattr(static, each.name), getattr(states, each.name)) for each in fields(static)]


class _FixedOutput:
    """An attention that always writes to one buffer, which it leaves as it was for padding tokens."""

    needs_host_lengths = False

    def __init__(self, attention: Attention, out: Tensor) -> None:
        self._attention = attention
        self._out = out

    def captured(self, num_rows: int, width: int) -> Attention | None:
        """Returns none: it is part of a graph already."""

    def ragged(self) -> Attention:
        """Returns itself."""
        return self

    def plan(self, inputs: ForwardInputs) -> None:
        """Plans."""
        self._attention.plan(inputs)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends. The model, which calls it, names no ``out``."""
        return self._attention.forward(q, k, v, kv, layer, self._out[: q.shape[0]])


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedMixed:
    """The graph of one bucket of T tokens."""

    graph: Graph  # from the inputs to the last attention
    reached: tuple[Tensor, ...]  # what the model's ``finish`` reads, each of T tokens
    hidden_states: Tensor | None  # ``[T, n]``, of ``aux_layers``; None without them, and where ``finish`` makes them


class MixedRunner:
    """Computes rows that decode, each up to so many tokens, and a few prompts or chunks of prompts.

    The device computes a step of some hundreds of tokens faster than the host launches its attentions one by one, above
    all beside a thread that loads pages. So attention is part of the graph: each of the two groups of rows has a fixed
    size, unused rows have no tokens, and lengths are read on the device. Padding tokens go to the padding page.

    Args:
        attention: A backend for graphs of ragged batches.
        buckets: Tokens of each graph, ascending.
        max_width: Most tokens of a row that decodes.
        max_len: Longest row of a replay, in tokens.
        head: Computes the part after the last attention.
    """

    def __init__(
        self,
        model: AnyDecoder,
        layers: Sequence[LayerKV],
        attention: Attention,
        shape: AttentionShape,
        rows: DeviceRows,
        capture: Capture,
        *,
        buckets: tuple[int, ...],
        max_width: int,
        max_len: int,
        head: LogitsHead,
    ) -> None:
        max_rows, table_width = rows.page_table.shape[0], -(-max_len // rows.page_size)
        self._model = model
        self._head = head
        self._layers = layers
        self._capture = capture
        self._coverage = MixedGraphs(buckets, min(MAX_DECODE, max_rows - 1), max_width, MAX_PROMPTS, max_len)
        self._max_len = max_len
        self._static = StaticInputs(
            buckets[-1],
            self._coverage.max_decode,
            MAX_PROMPTS,
            table_width,
            rows.device,
            has_windows=rows.windows is not None,
            has_states=rows.states is not None,
            has_trees=rows.state.trees is not None,
        )
        # Noise shows whether the replay wrote the output. It has its own generator: torch's cannot be used outside graphs
        # once a capture has failed.
        num_fixed = 0 if shape.computes_padding else buckets[-1]
        self._out = torch.empty((num_fixed, shape.num_heads, shape.out_dim), dtype=shape.dtype, device=rows.device)
        self._out.normal_(generator=torch.Generator(rows.device))
        self._attention = attention if shape.computes_padding else _FixedOutput(attention, self._out)
        self._captured: dict[int, _CapturedMixed] = {}
        self.failed: set[int] = set()  # buckets whose capture failed

    @property
    def coverage(self) -> MixedGraphs:
        """The captured graphs, for the gate."""
        return replace(self._coverage, failed=frozenset(self.failed))

    @property
    def graphs(self) -> set[Graph]:
        """All graphs."""
        return {each.graph for each in self._captured.values()}

    def close(self) -> None:
        """Frees the graphs and their memory."""
        self._captured.clear()

    def capture(self) -> None:
        """Captures every bucket, the largest first. A failure is logged and remembered."""
        message, buckets = "mixed steps of up to %d tokens are not one graph: %s", self._coverage.buckets
        self._captured = capture_sizes(self._capture, buckets, self._capture_bucket, message)
        self.failed = set(buckets) - self._captured.keys()

    def _capture_bucket(self, num_tokens: int) -> _CapturedMixed:
        """Captures a step in which all tokens are padding."""
        inputs = self._static.bounded(num_tokens, self._coverage.max_width, self._max_len)
        self._attention.plan(inputs)
        hidden_states = self._model.new_hidden_states(num_tokens)
        # Those of layers up to the last attention; ``LogitsHead`` writes the others.
        aux = () if hidden_states is None else (hidden_states.zero_(),)
        made: list[Tensor] = []

        def work() -> None:
            made[:] = self._model.trunk(inputs, self._layers, self._attention, hidden_states)

        work()
        expected = [each.clone() for each in (*made, *aux)]
        graph = self._capture.record(work)
        for each in made:
            if each.data_ptr() != self._out.data_ptr():  # whose padding a replay leaves as it was
                each.fill_(torch.nan)
        for each in aux:
            each.zero_()
        graph.replay()
        if not all(torch.equal(*both) for both in zip((*made, *aux), expected, strict=True)):
            raise RuntimeError("its replay differs from the eager step")
        return _CapturedMixed(graph, tuple(made), hidden_states)

    def run(self, inputs: ForwardInputs, bucket: int) -> ForwardOutputs:
        """Computes a step within the coverage on the current stream; the capture of its bucket has not failed."""
        assert inputs.before_layer is None, "a graph waits for no layer"
        captured = self._captured[bucket]
        self._static.fill(inputs, bucket)
        captured.graph.replay()
        return self._head.finish(captured.reached, inputs, captured.hidden_states)


def _spread(q_lens: Int32Array, num_decode: int, first: int, size: int) -> Int32Array:
    """Returns where the tokens of each row begin, int32 ``[size]``: rows that decode from 0 on, the others from ``first``."""
    ends = q_lens.cumsum(dtype=np.int32)
    indptr = np.full(size, ends[-1], dtype=np.int32)
    indptr[0] = 0
    indptr[1 : num_decode + 1] = ends[:num_decode]
    indptr[num_decode + 1 : first + 1] = ends[num_decode - 1] if num_decode else 0
    indptr[first + 1 : first + 1 + q_lens.size - num_decode] = ends[num_decode:]
    return indptr
