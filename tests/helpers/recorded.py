"""Graphs without a GPU: the ops of a capture are remembered with their tensors, and a replay runs them again into these.

So what a graph holds fast is held fast here: addresses, shapes, and every number that came from the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hiserve.attention.reference_attention import ReferenceAttention
from hiserve.distributed.exchange import Exchange
from hiserve.kernels import step_reference
from hiserve.kernels.noise import gumbel
from hiserve.kernels.sampling import masked
from hiserve.kernels.step_ops import TokenMasks
from tests.helpers.models import Engine

# Of numbers from the device, or with shapes that depend on them.
READS = (
    torch.ops.aten.item.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.bincount.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.repeat_interleave.Tensor,
)


class Recorder(TorchDispatchMode):
    """Remembers ops while they run; those that a graph cannot hold raise, as they would in a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs or {})
        self.ops.append((func, args, kwargs or {}, out))
        return out


def _is_view(call: Sequence[Any], out: Any) -> bool:
    """Whether an op gave a view of its arguments: it sees what is written there, and to make it again would change nothing."""
    func, args, _ = call
    if not isinstance(func, OpOverload) or not func.is_view:  # collectives are recorded too
        return False
    storages = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, Tensor)}
    return all(each.untyped_storage().data_ptr() in storages for each in tree_leaves(out))


class RecordedGraph:
    """Stands in for ``Graph``."""

    def __init__(self, recorder: Recorder, exchange: Exchange | None = None) -> None:
        self._ops = [(*call, tree_leaves(out)) for *call, out in recorder.ops if not _is_view(call, out)]
        self.num_nodes = len(recorder.ops)
        self._exchange = exchange
        self._exchanges = () if exchange is None else exchange.end_graph()

    def replay(self) -> None:
        for func, args, kwargs, held in self._ops:
            again = func(*args, **kwargs)
            for new, old in zip((again,) if isinstance(again, Tensor) else tree_leaves(again), held, strict=True):
                if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():  # not in place
                    old.copy_(new)
        if self._exchange is not None:
            self._exchange.replayed(self._exchanges)


class RecordedCapture:
    """Stands in for ``Capture``.

    Args:
        exchange: Of a rank of a group, whose collectives are recorded too.

    Attributes:
        graphs: Captured, and held by anybody.
    """

    def __init__(self, exchange: Exchange | None = None) -> None:
        self._open: Recorder | None = None
        self._exchange = exchange
        self.graphs: WeakSet[RecordedGraph] = WeakSet()
        if exchange is not None:
            for name in ("_all_reduce", "_all_gather"):
                setattr(exchange, name, self._recorded(getattr(exchange, name)))

    def _recorded(self, work: Callable[..., None]) -> Callable[..., None]:
        """A collective is no op of torch, which a recorder would see."""

        def run(*tensors: Tensor) -> None:
            work(*tensors)
            if self._open is not None:
                self._open.ops.append((work, tensors, {}, None))

        return run

    def check_failure(self, error: RuntimeError) -> None:
        """Any is dropped."""

    @property
    def is_active(self) -> bool:
        return self._open is not None

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        yield

    def record(self, work: Callable[[], None]) -> RecordedGraph:
        self.begin()
        try:
            work()
        except BaseException:
            self.abandon()
            raise
        return self.end()

    def begin(self) -> None:
        assert self._open is None
        if self._exchange is not None:
            self._exchange.begin_graph()
        self._open = Recorder()
        self._open.__enter__()

    def end(self) -> RecordedGraph:
        recorder = self._open
        assert recorder is not None
        self.abandon()
        graph = RecordedGraph(recorder, self._exchange)
        self.graphs.add(graph)
        return graph

    def abandon(self) -> None:
        if self._open is not None:
            recorder, self._open = self._open, None
            recorder.__exit__(None, None, None)


class RecordableAttention:
    """The reference, laid out in the first layer, so that a graph does that anew each time."""

    needs_host_lengths = False

    def __init__(self, reference: ReferenceAttention) -> None:
        self._reference = reference
        self._inputs: Any = None
        self._first: int | None = None  # layer with attention

    def captured(self, num_rows: int, width: int) -> RecordableAttention:
        return RecordableAttention(self._reference)

    def ragged(self) -> RecordableAttention:
        return RecordableAttention(self._reference)

    def plan(self, inputs: Any) -> None:
        self._inputs = inputs

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Any, layer: int, out: Tensor | None = None) -> Tensor:
        self._first = layer if self._first is None else self._first
        if layer == self._first:
            self._reference.plan(self._inputs)
        return self._reference.forward(q, k, v, kv, layer, out)


class HostLengthAttention(RecordableAttention):
    """Attends by the lengths that the host told before each step, as FlashInfer does, whatever the device knows.

    Attributes:
        log: Of each plan whether its lengths were those of the device; of graphs there is nothing to compare them with.
    """

    needs_host_lengths = True

    def __init__(self, reference: ReferenceAttention, *, is_graph: bool = False, log: list[bool] | None = None) -> None:
        super().__init__(reference)
        self.log: list[bool] = [] if log is None else log
        self._is_graph = is_graph
        self._lens = torch.empty(0, dtype=torch.int64)

    def captured(self, num_rows: int, width: int) -> HostLengthAttention:
        return HostLengthAttention(self._reference, is_graph=True, log=self.log)

    def ragged(self) -> None:  # type: ignore[override]
        return None

    def plan(self, inputs: Any) -> None:
        self._inputs = inputs
        told = torch.from_numpy(np.maximum(inputs.kv_bounds, inputs.q_lens)).long()
        if self._is_graph and self._lens.numel():
            self._lens.copy_(told)  # where a graph reads it
        else:
            self._lens = told
        if not self._is_graph:
            self.log.append(torch.equal(told, inputs.kv_lens))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Any, layer: int, out: Tensor | None = None) -> Tensor:
        if layer == 0:
            self._reference.plan(replace(self._inputs, kv_lens=self._lens))
        return self._reference.forward(q, k, v, kv, layer, out)


def make_recordable(subject: Engine) -> None:
    """Gives an engine on the CPU, with attention ``reference``, what can be recorded: no numpy, no plans beforehand."""
    subject.attention = RecordableAttention(subject.attention)  # type: ignore[arg-type, assignment]
    subject.rows.ops = recordable_ops()


def recordable_ops() -> Any:
    """The step's kernels without what is numpy's."""
    return SimpleNamespace(**vars(step_reference) | {"greedy": _greedy, "draw_free": _draw_free})


def _greedy(logits: Tensor, masks: TokenMasks | None = None) -> Tensor:
    return _masked(logits, masks).argmax(-1)


def _masked(logits: Tensor, masks: TokenMasks | None) -> Tensor:
    return logits if masks is None else masked(logits, masks.entries, masks.words)


def _draw_free(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    drawn: Any,
    masks: TokenMasks | None = None,
) -> Tensor:
    """As the CPU's, whose search for the largest is numpy's."""
    logits = _masked(logits, masks)
    noise = gumbel(seed, choice, position, step_reference.SAMPLE_STREAM, logits.shape[1])
    scores = logits + temperature[:, None] * noise
    return (scores if drawn is None else torch.where(drawn[:, None], scores, logits)).argmax(-1)


def warnings_of(records: list[logging.LogRecord]) -> list[str]:
    """Returns what was told as a warning, or worse."""
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]
