"""Latent attention by FlashInfer's kernels for Hopper: absorbed queries, and expanded prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.attention.flashinfer_calls import (
    AbsorbedRows,
    GraphBuffers,
    PromptRows,
    RowLengths,
    absorbed_builds,
    prompt_builds,
)
from hiserve.attention.flashinfer_libraries import Libraries
from hiserve.attention.flashinfer_memory import Workspace
from hiserve.attention.latent import expanded_shape
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.core.plan import Int32Array
from hiserve.core.upload import upload
from hiserve.kernels.page_lists import list_pages

_NUM_TURNS = 2  # schedules whose upload may be in flight
_TILE = 64  # query vectors of one program
_MAX_TOKENS = 8192  # of a schedule, but for its last row: FlashInfer has room for 16,384 tiles


class FlashInferLatentAttention:
    """Attends over pages, by schedules that the host makes from host lengths.

    Plans alternate between two sets of schedules, and each waits until the upload of the set's previous ones has ended.
    ``shape`` is that of absorbed queries: one KV head of 512 + 64 elements. Only graphs may have a number of heads that
    does not divide 128. ``waits`` is that of ``FlashInferAttention``.

    Raises:
        ConfigError: The kernel cannot be compiled on this machine.
    """

    needs_host_lengths = True

    def __init__(self, shape: AttentionShape, *, waits: bool = True) -> None:
        assert shape.num_kv_heads == 1 and not shape.hides_first, shape
        self._shape = shape
        self._workspace = Workspace(shape, torch.device("cuda", torch.cuda.current_device()))
        self._turns = [_Turn(shape, self._workspace) for _ in range(_NUM_TURNS)]
        self._num_plans = 0
        self._parts: list[_Part] = []
        self._unlisted: ForwardInputs | None = None  # None once the pages of its rows are listed
        self._libraries = Libraries(lambda: absorbed_builds(shape), self._load, waits=waits)

    def is_ready(self) -> bool:
        """As of ``FlashInferAttention``."""
        return self._libraries.is_ready()

    def _load(self) -> None:
        one = np.ones(1, dtype=np.int32)
        pages = torch.zeros(1, dtype=torch.int32, device=self._workspace.device)
        partials = self._workspace.partials(self._workspace.num_programs, _TILE)
        rows = AbsorbedRows(self._shape, partials, is_causal=False)
        rows.schedule(RowLengths(one, one, self._shape.page_size), pages)

    def captured(self, num_rows: int, width: int) -> Attention | None:
        """Returns a backend with its own buffers for rows of one token; None for others."""
        return _GraphAttention(self._shape, self._workspace, num_rows) if width == 1 else None

    def ragged(self) -> None:
        """Returns None: its schedules depend on the lengths."""

    def plan(self, inputs: ForwardInputs) -> None:
        """Schedules the rows."""
        assert inputs.tree_mask is None, "latent attention has no tree masks"
        turn = self._turns[self._num_plans % _NUM_TURNS]
        self._num_plans += 1
        self._unlisted = inputs
        self._parts = turn.plan(inputs.q_lens, np.maximum(inputs.kv_bounds, inputs.q_lens))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends; the first call after a plan lists the pages for all layers."""
        page_size = self._shape.page_size
        if (inputs := self._unlisted) is not None:
            for part in self._parts:
                list_pages(inputs.page_table, inputs.kv_lens, part.numbers, part.indptr, page_size, part.indices)
            self._unlisted = None
        out = q.new_empty((*q.shape[:2], v.shape[2])) if out is None else out
        pool = kv.k.view(-1, page_size, kv.k.shape[2])
        for part in self._parts:
            part.rows.attend(q[part.tokens], pool, out[part.tokens])
        return out


class _GraphAttention:
    """Rows of one token in a graph, as of ``FlashInferAttention``: a schedule is uploaded before each replay."""

    needs_host_lengths = True

    def __init__(self, shape: AttentionShape, workspace: Workspace, num_rows: int) -> None:
        self._shape, self._workspace = shape, workspace
        self._numbers = torch.arange(num_rows, device=workspace.device)
        self._indptr = torch.zeros(num_rows + 1, dtype=torch.int32, device=workspace.device)
        self._indices = self._indptr[:0]
        self._rows: AbsorbedRows | None = None
        self._inputs: ForwardInputs | None = None
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def captured(self, num_rows: int, width: int) -> Attention:
        """Returns itself."""
        assert (num_rows, width) == (self._numbers.shape[0], 1), f"{num_rows} rows of {width} tokens"
        return self

    def ragged(self) -> None:
        """Returns None: its rows have one token."""

    def plan(self, inputs: ForwardInputs) -> None:
        """Schedules the rows."""
        assert inputs.tree_mask is None, "latent attention has no tree masks"
        if self._rows is None:
            self._indices = self._workspace.indices(inputs.page_table.numel())
            tokens = torch.arange(self._indptr.shape[0], dtype=torch.int32, device=self._indptr.device)
            buffers = GraphBuffers(tokens, self._indptr, torch.ones_like(self._indptr[1:]), self._indices)
            partials = self._workspace.partials(self._workspace.num_programs, _TILE)
            self._rows = AbsorbedRows(self._shape, partials, buffers, is_causal=False)
        self._inputs = inputs
        lengths = RowLengths(inputs.q_lens, np.maximum(inputs.kv_bounds, inputs.q_lens), self._shape.page_size)
        self._copied.synchronize()
        self._rows.schedule(lengths, self._indices[: int(lengths.page_indptr[-1])])
        self._copied.record()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends; the first layer lists the pages for all layers."""
        inputs, page_size = self._inputs, self._shape.page_size
        assert inputs is not None and self._rows is not None, "forward before plan"
        if layer == self._shape.first_layer:
            table, lengths = inputs.page_table, inputs.kv_lens
            list_pages(table, lengths, self._numbers, self._indptr, page_size, self._indices)
        out = q.new_empty((*q.shape[:2], v.shape[2])) if out is None else out
        self._rows.attend(q, kv.k.view(-1, page_size, kv.k.shape[2]), out)
        return out


class FlashInferPrompts:
    """Attends over prompts whose keys and values are expanded, in one launch for each layer.

    Plans alternate as those of ``FlashInferLatentAttention``, whose ``waits`` and errors this has too; ``shape`` has
    ``latent``.
    """

    def __init__(self, shape: AttentionShape, *, waits: bool = True) -> None:
        self._shape = expanded_shape(shape)
        unused = Workspace(self._shape, torch.device("cuda", torch.cuda.current_device())).partials(1, _TILE)
        self._turns = [(PromptRows(self._shape, None, unused, "fa3"), torch.cuda.Event()) for _ in range(_NUM_TURNS)]  # type: ignore[no-untyped-call]
        self._num_plans = 0
        self._libraries = Libraries(lambda: prompt_builds(self._shape), self._load, waits=waits)

    def is_ready(self) -> bool:
        """As of ``FlashInferAttention``."""
        return self._libraries.is_ready()

    def _load(self) -> None:
        for _ in self._turns:
            self.plan(*[np.array([2], dtype=np.int32)] * 2)

    def plan(self, q_lens: Int32Array, kv_lens: Int32Array) -> None:
        """Schedules prompts of these numbers of new tokens, and of tokens with their prefixes."""
        self._num_plans += 1
        rows, copied = self._turns[self._num_plans % _NUM_TURNS]
        copied.synchronize()
        none = torch.empty(0, dtype=torch.int32)
        rows.schedule(RowLengths(q_lens, kv_lens, self._shape.page_size), none)
        copied.record()

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Writes ``out``, contiguous: the last token of each prompt sees all its keys, others as many fewer."""
        rows, _ = self._turns[self._num_plans % _NUM_TURNS]
        rows.attend(q, keys, values, (keys, values), out)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Adjacent rows, scheduled; tensors on the device."""

    rows: AbsorbedRows
    tokens: slice
    numbers: Tensor  # int64 ``[n]``, of the rows
    indptr: Tensor  # int32 ``[n + 1]``: where the pages of each row start
    indices: Tensor  # int32: their pages


class _Turn:
    """Schedules for one batch, and the event after which their pinned buffers may be rewritten."""

    def __init__(self, shape: AttentionShape, workspace: Workspace) -> None:
        self._shape, self._device = shape, workspace.device
        self._partials = workspace.partials(workspace.num_programs, _TILE)
        self._schedules: list[AbsorbedRows] = []
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, q_lens: Int32Array, kv_lens: Int32Array) -> list[_Part]:
        """Schedules a batch: ``q_lens`` ``[B]`` are tokens of each row, ``kv_lens`` ``[B]`` tokens it attends over."""
        self._copied.synchronize()
        ends = np.cumsum(q_lens)
        edges = np.flatnonzero(np.diff((ends - 1) // _MAX_TOKENS)) + 1
        parts = []
        for number, ours in enumerate(np.split(np.arange(q_lens.size), edges)):
            if number == len(self._schedules):
                self._schedules.append(AbsorbedRows(self._shape, self._partials))
            lengths = RowLengths(q_lens[ours], kv_lens[ours], self._shape.page_size)
            numbers, indptr = upload((ours, lengths.page_indptr), self._device)
            indices = torch.empty(int(lengths.page_indptr[-1]), dtype=torch.int32, device=self._device)
            self._schedules[number].schedule(lengths, indices)
            tokens = slice(int(ends[ours[0]] - q_lens[ours[0]]), int(ends[ours[-1]]))
            parts.append(_Part(self._schedules[number], tokens, numbers, indptr, indices))
        self._copied.record()
        return parts
