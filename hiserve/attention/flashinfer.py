"""Attention by FlashInfer: decode, whole prompts and chunks after a prefix, each by its own kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape, is_hopper
from hiserve.attention.flashinfer_calls import (
    ChunkRows,
    DecodeRows,
    GraphBuffers,
    PromptRows,
    RowGroup,
    RowLengths,
    builds,
    pin,
)
from hiserve.attention.flashinfer_libraries import Libraries
from hiserve.attention.flashinfer_memory import Workspace, graph_tiles
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.core.plan import Int32Array
from hiserve.core.upload import upload
from hiserve.kernels.page_lists import list_pages

_MAX_TILE = 128  # query vectors of one program
_NUM_TURNS = 2  # schedules whose upload may be in flight
# Tokens of a chunk up to which fa2 is faster than fa3, whose tile has 128 of one head; one of fa2's has those of all heads
# of a KV head. On an H200, 32 chunks of 4 tokens after 2,048 take 72 and 264 us, 4 chunks of 64 tokens 60 and 39 us.
_MAX_SHORT = 16


class FlashInferAttention:
    """Splits a batch by the kind of its rows, and computes each part with a kernel of FlashInfer's.

    Rows of one token are decoded over their pages; rows without a prefix attend over the step's keys and values; all
    others over their pages. Schedules are made on the host, hence from host lengths. Plans alternate between two sets
    of schedules, and each waits until the upload of the set's previous schedule has ended.

    The constructor compiles the kernels in parallel, which takes a minute the first time. With ``waits`` false it
    returns at once, and ``plan`` may be called only after ``is_ready``. Sinks, hidden positions and tree masks are not
    supported.

    Raises:
        ConfigError: The kernels cannot be compiled on this machine.
    """

    needs_host_lengths = True

    def __init__(self, shape: AttentionShape, *, waits: bool = True) -> None:
        self._shape = shape
        self._workspace = Workspace(shape, torch.device("cuda", torch.cuda.current_device()))
        self._turns = [_BatchSchedule(shape, self._workspace) for _ in range(_NUM_TURNS)]
        self._num_plans = 0
        self._parts: list[_Part] = []
        self._unlisted: ForwardInputs | None = None  # None once the pages of its rows are listed
        prefill = _prefill(self._workspace.device)
        self._libraries = Libraries(lambda: builds(shape, prefill), self._load, waits=waits)

    def is_ready(self) -> bool:
        """Whether it may plan. The first call after the compilers have ended loads the kernels, in about a second."""
        return self._libraries.is_ready()

    def _load(self) -> None:
        for turn in self._turns:
            turn.load()

    def captured(self, num_rows: int, width: int) -> Attention:
        """Returns a backend with its own buffers."""
        return _GraphAttention(self._shape, self._workspace, num_rows, width)

    def ragged(self) -> None:
        """Returns None: its launches depend on the lengths."""

    def plan(self, inputs: ForwardInputs) -> None:
        """Schedules each part of the batch."""
        assert inputs.tree_mask is None, "FlashInfer's kernels for Hopper have no tree masks"
        turn = self._turns[self._num_plans % _NUM_TURNS]
        self._num_plans += 1
        self._unlisted = inputs
        self._parts = turn.plan(inputs.q_lens, np.maximum(inputs.kv_bounds, inputs.q_lens))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends part by part; the first call after a plan lists the pages for all layers."""
        if self._unlisted is not None:
            for part in self._parts:
                if part.pages is not None:
                    part.pages.fill(self._unlisted)
            self._unlisted = None
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        window, pool = self._shape.window(layer), _as_pages(kv, self._shape)
        for part in self._parts:
            ours, rows = part.tokens, part.rows[window]
            if isinstance(ours, slice):
                rows.attend(q[ours], k[ours], v[ours], pool, out[ours])
            else:
                mine = torch.empty((ours.shape[0], *q.shape[1:]), dtype=q.dtype, device=q.device)
                rows.attend(q[ours], k[ours], v[ours], pool, mine)
                out.index_copy_(0, ours, mine)
        return out


class _GraphAttention:
    """Rows of one width in a graph: addresses and grids are fixed, and a schedule is uploaded before each replay.

    The graph itself lists the pages, because it may also fill the tensors of the plan that they are read from.
    """

    needs_host_lengths = True

    def __init__(self, shape: AttentionShape, workspace: Workspace, num_rows: int, width: int) -> None:
        self._shape = shape
        self._workspace = workspace
        self._width = width
        self._pages = _PageList(
            rows=torch.arange(num_rows, device=workspace.device),
            indptr=torch.zeros(num_rows + 1, dtype=torch.int32, device=workspace.device),
            indices=torch.empty(0, dtype=torch.int32, device=workspace.device),
            page_size=shape.page_size,
        )
        self._last_page_len = torch.ones(num_rows, dtype=torch.int32, device=workspace.device)
        self._rows: Mapping[int | None, RowGroup] = {}
        self._inputs: ForwardInputs | None = None
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def captured(self, num_rows: int, width: int) -> Attention:
        """Returns itself."""
        assert (num_rows, width) == (self._pages.rows.shape[0], self._width), f"{num_rows} rows of {width} tokens"
        return self

    def ragged(self) -> None:
        """Returns None: its rows have one width."""

    def plan(self, inputs: ForwardInputs) -> None:
        """Schedules the rows."""
        assert inputs.tree_mask is None, "FlashInfer's kernels for Hopper have no tree masks"
        self._inputs = inputs
        if not self._rows:
            self._make(inputs.page_table.shape[1])
        lengths = RowLengths(inputs.q_lens, np.maximum(inputs.kv_bounds, inputs.q_lens), self._shape.page_size)
        indptr = lengths.page_indptr
        for buffer, ours in ((self._pages.indptr, indptr), (self._last_page_len, lengths.last_page_len)):
            buffer.copy_(pin(ours), non_blocking=True)
        self._copied.synchronize()
        for rows in self._rows.values():
            rows.schedule(lengths, self._pages.indices[: int(indptr[-1])])
        self._copied.record()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends; the first layer lists the pages for all layers."""
        assert self._inputs is not None, "forward before plan"
        if layer == 0:
            self._pages.fill(self._inputs)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        self._rows[self._shape.window(layer)].attend(q, k, v, _as_pages(kv, self._shape), out)
        return out

    def _make(self, table_width: int) -> None:
        shape, workspace, num_rows = self._shape, self._workspace, self._pages.rows.shape[0]
        group = shape.num_heads // shape.num_kv_heads
        num_tiles, tile = graph_tiles(num_rows, self._width, group, shape.num_kv_heads, workspace.num_programs)
        partials = workspace.partials(num_tiles * shape.num_heads, tile)
        self._pages = _PageList(
            self._pages.rows, self._pages.indptr, workspace.indices(num_rows * table_width), shape.page_size
        )
        buffers = GraphBuffers(
            qo_indptr=self._width * torch.arange(num_rows + 1, dtype=torch.int32, device=workspace.device),
            page_indptr=self._pages.indptr,
            last_page_len=self._last_page_len,
            indices=self._pages.indices,
        )
        if self._width == 1:
            self._rows = {window: DecodeRows(shape, window, partials, buffers) for window in shape.distinct_windows}
        else:
            self._rows = {
                window: ChunkRows(shape, window, partials, "fa2", buffers) for window in shape.distinct_windows
            }


def _prefill(device: torch.device) -> str:
    return "fa3" if is_hopper(device) else "fa2"


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of one kind, scheduled."""

    rows: Mapping[int | None, RowGroup]  # their kernels, by window
    tokens: slice | Tensor  # their tokens: a slice, or int64 on the device if they are not adjacent
    pages: _PageList | None  # the list of their pages, if they read pages


class _BatchSchedule:
    """Schedules for one batch, and the event after which their pinned buffers may be rewritten."""

    def __init__(self, shape: AttentionShape, workspace: Workspace) -> None:
        self._shape = shape
        self._device = workspace.device
        group = shape.num_heads // shape.num_kv_heads
        partials = workspace.partials(workspace.num_programs * group, _MAX_TILE)
        prefill = _prefill(workspace.device)
        windows = shape.distinct_windows
        self._decode = {window: DecodeRows(shape, window, partials) for window in windows}
        self._prompts = {window: PromptRows(shape, window, partials, prefill) for window in windows}
        self._chunks = {window: ChunkRows(shape, window, partials, prefill) for window in windows}
        self._short_chunks = {window: ChunkRows(shape, window, partials, "fa2") for window in windows}
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def load(self) -> None:
        """Schedules one row of each kind, which loads the kernels."""
        q_lens = np.array([1, 2, 2, _MAX_SHORT + 1], dtype=np.int32)
        self.plan(q_lens, q_lens + np.array([0, 0, 1, 1], dtype=np.int32))

    def plan(self, q_lens: Int32Array, kv_lens: Int32Array) -> list[_Part]:
        """Schedules a batch: ``q_lens`` ``[B]`` are tokens of each row, ``kv_lens`` ``[B]`` tokens it attends over."""
        self._copied.synchronize()
        is_one, is_prompt = q_lens == 1, q_lens == kv_lens
        is_chunk, is_short = ~is_prompt & ~is_one, q_lens <= _MAX_SHORT
        kinds: tuple[tuple[NDArray[np.bool_], Mapping[int | None, RowGroup]], ...] = (
            (is_one, self._decode),
            (is_prompt & ~is_one, self._prompts),
            (is_chunk & is_short, self._short_chunks),
            (is_chunk & ~is_short, self._chunks),
        )
        parts = [self._schedule(np.flatnonzero(ours), rows, q_lens, kv_lens) for ours, rows in kinds if ours.any()]
        self._copied.record()
        return parts

    def _schedule(
        self, ours: NDArray[np.int64], rows: Mapping[int | None, RowGroup], q_lens: Int32Array, kv_lens: Int32Array
    ) -> _Part:
        page_size = self._shape.page_size
        lengths = RowLengths(q_lens[ours], kv_lens[ours], page_size)
        row_numbers, indptr = upload((ours, lengths.page_indptr), self._device)
        indices = torch.empty(int(lengths.page_indptr[-1]), dtype=torch.int32, device=self._device)
        for each in rows.values():
            each.schedule(lengths, indices)
        pages = None if rows is self._prompts else _PageList(row_numbers, indptr, indices, page_size)
        return _Part(rows, self._tokens(ours, np.cumsum(q_lens) - q_lens, q_lens), pages)

    def _tokens(self, ours: NDArray[np.int64], starts: NDArray[np.int64], q_lens: Int32Array) -> slice | Tensor:
        first, last = ours[0], ours[-1]
        if last - first + 1 == ours.size:
            return slice(int(starts[first]), int(starts[last] + q_lens[last]))
        tokens = np.concatenate([np.arange(starts[row], starts[row] + q_lens[row]) for row in ours])
        return upload((tokens,), self._device)[0]


@dataclass(frozen=True, slots=True, eq=False)
class _PageList:
    """The concatenated pages of some rows; all on the device."""

    rows: Tensor  # int64 ``[n]``
    indptr: Tensor  # int32 ``[n + 1]``: start of each row's pages
    indices: Tensor  # int32, at least ``indptr[n]`` long
    page_size: int

    def fill(self, inputs: ForwardInputs) -> None:
        """Lists the pages that the table holds now."""
        list_pages(inputs.page_table, inputs.kv_lens, self.rows, self.indptr, self.page_size, self.indices)


def _as_pages(kv: LayerKV, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Returns keys and values as ``[num_pages, page_size, num_kv_heads, head_dim]``."""
    by_page = (-1, shape.page_size, *kv.k.shape[1:])
    return kv.k.view(by_page), kv.v.view(by_page)
