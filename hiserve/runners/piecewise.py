"""Steps of any kind, with CUDA graphs of the parts between attentions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.core.forward import ForwardInputs, ForwardOutputs, LayerKV
from hiserve.models.decoder import Decoder
from hiserve.runners.capture import Capture, Graph, capture_sizes
from hiserve.runners.gate import PiecewiseGraphs
from hiserve.runners.inputs import put_tokens
from hiserve.runners.step_output import LogitsHead


class _AttentionSplit:
    """An attention that copies its arguments to buffers and returns another buffer; the runner attends between them.

    During a capture it ends one piece and begins the next, if there is another layer.

    Attributes:
        q: ``[T, num_heads, head_dim]``; a bucket uses the first of the T tokens.
        k: ``[T, num_kv_heads, head_dim]``.
        v: Like ``k``.
        out: Like ``q``.
        pieces: Captured so far.

    Args:
        num_tokens: T, of the largest bucket.
    """

    needs_host_lengths = False

    def __init__(self, capture: Capture, shape: AttentionShape, num_tokens: int, device: torch.device) -> None:
        self._capture = capture
        self._num_layers = shape.num_layers
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
        self.q, self.k, self.v, self.out = (
            torch.zeros((num_tokens, count, shape.head_dim), dtype=shape.dtype, device=device) for count in heads
        )
        self.pieces: list[Graph] = []

    def captured(self, num_rows: int, width: int) -> Attention:
        """Returns itself."""
        return self

    def ragged(self) -> Attention:
        """Likewise."""
        return self

    def plan(self, inputs: ForwardInputs) -> None:
        """Does nothing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Copies the arguments. The model, which calls it, passes no ``out``: the runner writes to this one."""
        for buffer, made in ((self.q, q), (self.k, k), (self.v, v)):
            buffer[: made.shape[0]].copy_(made)
        if self._capture.is_active:
            self.pieces.append(self._capture.end())
            if layer + 1 < self._num_layers:
                self._capture.begin()
        return self.out[: q.shape[0]]


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedPieces:
    """The pieces of one bucket of T tokens: up to the first attention, then from one to the next."""

    inputs: ForwardInputs  # whose token ids, positions and slots the first piece reads
    pieces: tuple[Graph, ...]  # one for each layer
    residual: Tensor  # ``[T, hidden_size]``, the residual stream before the last attention
    hidden_states: Tensor | None  # ``[T, n]``, of ``aux_layers``; None without them


class PiecewiseRunner:
    """Computes any batch of up to so many tokens. Lengths, page tables, masks and waits for layers stay eager.

    Padding tokens go to the padding page.

    Args:
        buckets: Tokens of each set of pieces, ascending.
        head: Computes the part after the last attention.
        has_windows: Whether layers with a window have pages of their own.
    """

    def __init__(
        self,
        model: Decoder,
        layers: Sequence[LayerKV],
        attention: Attention,
        shape: AttentionShape,
        capture: Capture,
        *,
        buckets: tuple[int, ...],
        head: LogitsHead,
        has_windows: bool = False,
    ) -> None:
        self._model = model
        self._head = head
        self._layers = layers
        self._attention = attention
        self._capture = capture
        self._buckets = buckets
        self._has_windows = has_windows
        self._split = _AttentionSplit(capture, shape, buckets[-1], layers[0].k.device)
        # Its own: torch's cannot be used outside graphs once a capture has failed.
        self._noise = torch.Generator(layers[0].k.device)
        self._captured: dict[int, _CapturedPieces] = {}
        self.failed: set[int] = set()  # buckets whose capture failed

    @property
    def coverage(self) -> PiecewiseGraphs:
        """The captured graphs, for the gate."""
        return PiecewiseGraphs(self._buckets, frozenset(self.failed))

    @property
    def graphs(self) -> set[Graph]:
        """All pieces."""
        return {piece for each in self._captured.values() for piece in each.pieces}

    def close(self) -> None:
        """Frees the graphs and their memory."""
        self._captured.clear()
        self._split.pieces.clear()  # of the bucket that was captured last

    def capture(self) -> None:
        """Captures every bucket, the largest first. A failure is logged and remembered; its steps run eagerly."""
        message = "steps of up to %d tokens run without graphs: %s"
        self._captured = capture_sizes(self._capture, self._buckets, self._capture_bucket, message)
        self.failed = set(self._buckets) - self._captured.keys()

    def _capture_bucket(self, num_tokens: int) -> _CapturedPieces:
        inputs = _padding(num_tokens, self._split.q.device, has_windows=self._has_windows)
        split = self._split
        split.out.normal_(generator=self._noise)
        hidden_states = self._model.new_hidden_states(num_tokens)
        # Those of layers up to the last attention; ``LogitsHead`` writes the others.
        aux = () if hidden_states is None else (hidden_states.zero_(),)
        _, residual = self._model.trunk(inputs, self._layers, split, hidden_states)
        expected = [each.clone() for each in (residual, split.q[:num_tokens], *aux)]
        split.pieces = []
        self._capture.begin()
        with ExitStack() as undo:
            undo.callback(self._capture.abandon)
            _, residual = self._model.trunk(inputs, self._layers, split, hidden_states)
            undo.pop_all()
        made = residual, split.q[:num_tokens], *aux
        for each in made[:2]:
            each.fill_(torch.nan)
        for each in aux:
            each.zero_()
        for piece in split.pieces:
            piece.replay()
        if not all(torch.equal(*both) for both in zip(made, expected, strict=True)):
            raise RuntimeError("its replay differs from the eager step")
        return _CapturedPieces(inputs, tuple(split.pieces), residual, hidden_states)

    def run(self, inputs: ForwardInputs, bucket: int) -> ForwardOutputs:
        """Plans attention and computes a step within the coverage; the capture of its bucket has not failed."""
        captured, split = self._captured[bucket], self._split
        num_tokens, static = inputs.input_ids.shape[0], captured.inputs
        put_tokens(inputs, static, bucket)
        self._attention.plan(inputs)
        q, k, v, out = (each[:num_tokens] for each in (split.q, split.k, split.v, split.out))
        for layer, (kv, piece) in enumerate(zip(self._layers, captured.pieces, strict=True)):
            piece.replay()
            if inputs.before_layer is not None:
                inputs.before_layer(layer)
            self._attention.forward(q, k, v, kv, layer, out)
        return self._head.finish((out.flatten(1), captured.residual), inputs, captured.hidden_states)


def _padding(num_tokens: int, device: torch.device, *, has_windows: bool) -> ForwardInputs:
    """Returns padding tokens, each of which overwrites the first slot of the padding page."""
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    lengths = np.ones(num_tokens, dtype=np.int32)
    return ForwardInputs(
        input_ids=zeros.to(torch.int32),
        positions=zeros.clone(),
        slots=zeros.clone(),
        window_slots=zeros.clone() if has_windows else None,
        token_rows=zeros,
        qo_indptr=torch.arange(num_tokens + 1, dtype=torch.int32, device=device),
        kv_lens=zeros + 1,
        page_table=zeros[:, None].to(torch.int32),
        logits_rows=zeros[:0],
        q_lens=lengths,
        kv_bounds=lengths,
        max_kv_len=1,
    )
