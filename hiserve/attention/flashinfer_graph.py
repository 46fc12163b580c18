"""FlashInfer in captured graphs, and the memory shared with steps outside of graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.attention.flashinfer_calls import ChunkRows, DecodeRows, GraphBuffers, RowGroup, RowLengths, pin
from hiserve.attention.flashinfer_tiles import graph_tiles
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.kernels.page_lists import list_pages


class Workspace:
    """Memory that all schedules share, since their kernels run in sequence.

    Attributes:
        device: A CUDA device.
        num_programs: Programs among which FlashInfer splits rows.
    """

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self.device = device
        self.num_programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        self._shape = shape
        self._partials = torch.empty(0, dtype=torch.uint8, device=device)
        self._indices = torch.empty(0, dtype=torch.int32, device=device)

    def partials(self, num_tiles: int, tile: int) -> Tensor:
        """Returns memory for intermediate results of programs that share a row.

        ``num_tiles`` counts programs times the query heads that each computes; ``tile`` is the query vectors of one.
        """
        num_bytes = 4 * num_tiles * tile * (self._shape.head_dim + 1) + 4096  # float32; a weight with each vector
        if self._partials.numel() < num_bytes:
            self._partials = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)  # FlashInfer asks for zeros
        return self._partials

    def indices(self, count: int) -> Tensor:
        """Returns memory for the lists of pages of a graph, int32 ``[count]``."""
        if self._indices.numel() < count:
            self._indices = torch.empty(count, dtype=torch.int32, device=self.device)
        return self._indices[:count]


@dataclass(frozen=True, slots=True, eq=False)
class PageList:
    """The concatenated pages of some rows; all on the device.

    Attributes:
        rows: int64 ``[n]``.
        indptr: int32 ``[n + 1]``: start of each row's pages.
        indices: int32, at least ``indptr[n]`` long.
        page_size: Tokens per page.
    """

    rows: Tensor
    indptr: Tensor
    indices: Tensor
    page_size: int

    def fill(self, inputs: ForwardInputs) -> None:
        """Lists the pages that the table holds now."""
        list_pages(inputs.page_table, inputs.kv_lens, self.rows, self.indptr, self.page_size, self.indices)


class GraphAttention:
    """Rows of one width in a graph: addresses and grids are fixed, and a schedule is uploaded before each replay.

    The graph itself lists the pages, because it may also fill the tensors of the plan that they are read from.
    """

    needs_host_lengths = True

    def __init__(self, shape: AttentionShape, workspace: Workspace, num_rows: int, width: int) -> None:
        self._shape = shape
        self._workspace = workspace
        self._width = width
        self._pages = PageList(
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
        self._rows[self._shape.window(layer)].attend(q, k, v, as_pages(kv, self._shape), out)
        return out

    def _make(self, table_width: int) -> None:
        shape, workspace, num_rows = self._shape, self._workspace, self._pages.rows.shape[0]
        group = shape.num_heads // shape.num_kv_heads
        num_tiles, tile = graph_tiles(num_rows, self._width, group, shape.num_kv_heads, workspace.num_programs)
        partials = workspace.partials(num_tiles * shape.num_heads, tile)
        self._pages = PageList(
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


def as_pages(kv: LayerKV, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Returns keys and values as ``[num_pages, page_size, num_kv_heads, head_dim]``."""
    by_page = (-1, shape.page_size, *kv.k.shape[1:])
    return kv.k.view(by_page), kv.v.view(by_page)
