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
        lengths = inputs.q_lens, np.maximum(inputs.kv_bounds, inputs.q_lens)
        self._parts = turn.plan(*lengths, frees_windows=inputs.window_table is not None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends part by part; the first call after a plan lists the pages for all layers."""
        if self._unlisted is not None:
            for part in self._parts:
                for pages in part.pages:
                    pages.fill(self._unlisted)
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
        self._num_rows, self._width = num_rows, width
        self._lists: dict[int | None, _GraphPages] = {}  # of the pages that layers of a window read; None is all others
        self._rows: dict[int | None, RowGroup] = {}
        self._inputs: ForwardInputs | None = None
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def captured(self, num_rows: int, width: int) -> Attention:
        """Returns itself."""
        assert (num_rows, width) == (self._num_rows, self._width), f"{num_rows} rows of {width} tokens"
        return self

    def ragged(self) -> None:
        """Returns None: its rows have one width."""

    def plan(self, inputs: ForwardInputs) -> None:
        """Schedules the rows."""
        assert inputs.tree_mask is None, "FlashInfer's kernels for Hopper have no tree masks"
        self._inputs = inputs
        if not self._rows:
            self._make(inputs)
        lengths = RowLengths(inputs.q_lens, np.maximum(inputs.kv_bounds, inputs.q_lens), self._shape.page_size)
        seen = {window: each.upload(lengths) for window, each in self._lists.items()}
        self._copied.synchronize()
        for window, rows in self._rows.items():
            read = window if window in seen else None
            rows.schedule(seen[read], self._lists[read].pages.indices[: int(seen[read].page_indptr[-1])])
        self._copied.record()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends; the first layer lists the pages for all layers."""
        assert self._inputs is not None, "forward before plan"
        if layer == self._shape.first_layer:
            for each in self._lists.values():
                each.pages.fill(self._inputs)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        self._rows[self._shape.window(layer)].attend(q, k, v, _as_pages(kv, self._shape), out)
        return out

    def _make(self, inputs: ForwardInputs) -> None:
        shape, workspace, num_rows = self._shape, self._workspace, self._num_rows
        group = shape.num_heads // shape.num_kv_heads
        num_tiles, tile = graph_tiles(num_rows, self._width, group, shape.num_kv_heads, workspace.num_programs)
        partials = workspace.partials(num_tiles * shape.num_heads, tile)
        qo_indptr = self._width * torch.arange(num_rows + 1, dtype=torch.int32, device=workspace.device)
        read = _lists_of(shape, frees_windows=inputs.window_table is not None)
        room = workspace.indices(len(read) * inputs.page_table.numel()).view(len(read), -1)
        for window, indices in zip(read, room.unbind(), strict=True):
            self._lists[window] = _GraphPages(num_rows, window, indices, shape.page_size)
        self._rows = {}
        for window in shape.distinct_windows:
            buffers = self._lists[window if window in read else None].buffers(qo_indptr)
            self._rows[window] = (
                DecodeRows(shape, window, partials, buffers)
                if self._width == 1
                else ChunkRows(shape, window, partials, "fa2", buffers)
            )


def _prefill(device: torch.device) -> str:
    return "fa3" if is_hopper(device) else "fa2"


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of one kind, scheduled."""

    rows: Mapping[int | None, RowGroup]  # their kernels, by window
    tokens: slice | Tensor  # their tokens: a slice, or int64 on the device if they are not adjacent
    pages: tuple[_PageList, ...]  # the lists of their pages, if they read pages


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

    def plan(self, q_lens: Int32Array, kv_lens: Int32Array, *, frees_windows: bool = False) -> list[_Part]:
        """Schedules a batch.

        Args:
            q_lens: ``[B]``. Tokens of each row.
            kv_lens: ``[B]``. Tokens it attends over.
            frees_windows: Layers with a window have pages of their own, of which those below it may be anything.
        """
        self._copied.synchronize()
        is_one, is_prompt = q_lens == 1, q_lens == kv_lens
        is_chunk, is_short = ~is_prompt & ~is_one, q_lens <= _MAX_SHORT
        kinds: tuple[tuple[NDArray[np.bool_], Mapping[int | None, RowGroup]], ...] = (
            (is_one, self._decode),
            (is_prompt & ~is_one, self._prompts),
            (is_chunk & is_short, self._short_chunks),
            (is_chunk & ~is_short, self._chunks),
        )
        read = _lists_of(self._shape, frees_windows=frees_windows)
        parts = [
            self._schedule(np.flatnonzero(ours), rows, q_lens, kv_lens, read) for ours, rows in kinds if ours.any()
        ]
        self._copied.record()
        return parts

    def _schedule(
        self,
        ours: NDArray[np.int64],
        rows: Mapping[int | None, RowGroup],
        q_lens: Int32Array,
        kv_lens: Int32Array,
        read: tuple[int | None, ...],
    ) -> _Part:
        lengths, is_prompts = RowLengths(q_lens[ours], kv_lens[ours], self._shape.page_size), rows is self._prompts
        made = {window: self._list(ours, lengths, window) for window in ((None,) if is_prompts else read)}
        for window, each in rows.items():
            seen, pages = made[window if window in made else None]
            each.schedule(seen, pages.indices)
        lists = () if is_prompts else tuple(pages for _, pages in made.values())
        return _Part(rows, self._tokens(ours, np.cumsum(q_lens) - q_lens, q_lens), lists)

    def _list(self, ours: NDArray[np.int64], lengths: RowLengths, window: int | None) -> tuple[RowLengths, _PageList]:
        """Returns the lengths that layers of a window see, and the unfilled list of their pages; None is all pages."""
        first = None if window is None else lengths.first_pages(window)
        seen = lengths if first is None else lengths.behind(first)
        columns = (ours, seen.page_indptr) if first is None else (ours, seen.page_indptr, first)
        numbers, indptr, *starts = upload(columns, self._device)
        indices = torch.empty(int(seen.page_indptr[-1]), dtype=torch.int32, device=self._device)
        return seen, _PageList(numbers, indptr, indices, lengths.page_size, starts[0] if starts else None)

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
    first: Tensor | None  # int32 ``[n]``: first entry of each row in its window table; None lists the page table

    def fill(self, inputs: ForwardInputs) -> None:
        """Lists the pages that the table holds now."""
        table = inputs.page_table if self.first is None else inputs.window_table
        assert table is not None, "planned for layers with pages of their own"
        list_pages(table, inputs.kv_lens, self.rows, self.indptr, self.page_size, self.indices, self.first)


class _GraphPages:
    """A list of pages at fixed addresses, for the rows of a graph in layers of one window; None is all others."""

    def __init__(self, num_rows: int, window: int | None, indices: Tensor, page_size: int) -> None:
        self._window = window
        zeros = torch.zeros(num_rows, dtype=torch.int32, device=indices.device)
        self._last_page_len = zeros + 1
        self.pages = _PageList(
            rows=torch.arange(num_rows, device=indices.device),
            indptr=torch.zeros(num_rows + 1, dtype=torch.int32, device=indices.device),
            indices=indices,
            page_size=page_size,
            first=None if window is None else zeros,
        )

    def buffers(self, qo_indptr: Tensor) -> GraphBuffers:
        """Returns the tensors that a graph reads."""
        return GraphBuffers(qo_indptr, self.pages.indptr, self._last_page_len, self.pages.indices)

    def upload(self, lengths: RowLengths) -> RowLengths:
        """Copies the lengths that these layers see to the device, without a wait; returns them."""
        columns = []
        if self._window is not None and self.pages.first is not None:
            first = lengths.first_pages(self._window)
            lengths = lengths.behind(first)
            columns.append((self.pages.first, first))
        columns += [(self.pages.indptr, lengths.page_indptr), (self._last_page_len, lengths.last_page_len)]
        for buffer, ours in columns:
            buffer.copy_(pin(ours), non_blocking=True)
        return lengths


def _lists_of(shape: AttentionShape, *, frees_windows: bool) -> tuple[int | None, ...]:
    """Returns the windows whose layers read a list of pages of their own; None is the list of all pages of a row."""
    return shape.distinct_windows if frees_windows else (None,)


def _as_pages(kv: LayerKV, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Returns keys and values as ``[num_pages, page_size, num_kv_heads, head_dim]``."""
    by_page = (-1, shape.page_size, *kv.k.shape[1:])
    return kv.k.view(by_page), kv.v.view(by_page)
