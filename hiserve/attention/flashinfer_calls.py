"""All calls of FlashInfer, whose arguments change between versions.

Each class schedules rows of one kind on the host, and then attends for them in every layer of one window. FlashInfer
stages a schedule in one pinned buffer: its upload must end before the next schedule is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    fast_decode_plan,
)
from flashinfer.jit import gen_batch_decode_module, gen_batch_mla_module, gen_batch_prefill_module
from torch import Tensor

from hiserve.attention.base import AttentionShape
from hiserve.core.plan import Int32Array

_MIN_TENSOR_CORE_GROUP = 4  # query heads of one KV head from which decoding is faster on tensor cores
_LATENT_RANK, _LATENT_ROPE_DIM = 512, 64  # sizes of its kernel of absorbed queries
_GRAPH_SCHEDULE_BYTES = 1 << 20  # many times the need of a graph's rows; FlashInfer's default is 8 MiB


@dataclass(frozen=True, slots=True, eq=False)
class RowLengths:
    """Rows of one kind, on the host.

    Attributes:
        q_lens: int32 ``[n]``, tokens of each row.
        kv_lens: int32 ``[n]``, tokens it attends over.
        page_size: Tokens per page.
    """

    q_lens: Int32Array
    kv_lens: Int32Array
    page_size: int

    def first_pages(self, window: int) -> Int32Array:
        """int32 ``[n]``: the page of each row with the first key that a token sees in layers of a window."""
        first_keys: Int32Array = np.maximum(self.kv_lens - self.q_lens - window + 1, 0)
        return first_keys // np.int32(self.page_size)

    def behind(self, first_pages: Int32Array) -> RowLengths:
        """Returns the rows without the pages before these: a window sees as many tokens, wherever positions start."""
        return RowLengths(self.q_lens, self.kv_lens - first_pages * np.int32(self.page_size), self.page_size)

    @property
    def qo_indptr(self) -> Int32Array:
        """int32 ``[n + 1]``: where the tokens of each row start."""
        return _starts(self.q_lens)

    @property
    def page_indptr(self) -> Int32Array:
        """int32 ``[n + 1]``: where the pages of each row start in their list."""
        return _starts(-(-self.kv_lens // self.page_size))

    @property
    def last_page_len(self) -> Int32Array:
        """int32 ``[n]``: tokens in the last page of each row, 1 to ``page_size``."""
        return (self.kv_lens - 1) % np.int32(self.page_size) + 1


@dataclass(frozen=True, slots=True, eq=False)
class GraphBuffers:
    """Tensors on the device that a graph reads, all int32.

    Attributes:
        qo_indptr: ``[n + 1]``.
        page_indptr: ``[n + 1]``. Filled by the graph's owner, like the next two.
        last_page_len: ``[n]``.
        indices: As long as the lists of pages can become.
    """

    qo_indptr: Tensor
    page_indptr: Tensor
    last_page_len: Tensor
    indices: Tensor


class RowGroup(Protocol):
    """Rows of one kind, in layers of one window."""

    def schedule(self, lengths: RowLengths, indices: Tensor) -> None:
        """Makes the schedule of rows of these lengths and copies it to the device.

        ``indices`` is the list of their pages, int32 on the device; it may be filled later.
        """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pool: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Writes ``out``, contiguous, like ``q`` ``[tokens of the rows, num_heads, head_dim]``.

        ``k`` and ``v`` are the rows' own; ``pool`` is ``[num_pages, page_size, num_kv_heads, head_dim]`` of keys, and
        of values.
        """


class DecodeRows:
    """Rows of one token.

    Args:
        partials: Zeroed memory for parts of rows.
        buffers: Of a graph, which fixes the rows and addresses; None outside of graphs.
    """

    def __init__(
        self, shape: AttentionShape, window: int | None, partials: Tensor, buffers: GraphBuffers | None = None
    ) -> None:
        of_graph = {}
        if buffers is not None:
            of_graph = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": buffers.page_indptr,
                "paged_kv_indices_buffer": buffers.indices,
                "paged_kv_last_page_len_buffer": buffers.last_page_len,
            }
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            partials, "NHD", use_tensor_cores=_uses_tensor_cores(shape), backend="fa2", **of_graph
        )
        if buffers is not None:
            self._wrapper.reset_workspace_buffer(partials, _graph_schedule(partials))
        self._arguments = _of_model(shape, window) | {"head_dim": shape.head_dim, "page_size": shape.page_size}
        self._keeps_buffers = buffers is not None
        self._is_compiled = False

    def schedule(self, lengths: RowLengths, indices: Tensor) -> None:
        indptr, last = pin(lengths.page_indptr), pin(lengths.last_page_len)
        if self._keeps_buffers and self._is_compiled:
            # ``plan`` would search the longest row in a Python loop: 0.6 ms for 256 rows.
            fast_decode_plan(self._wrapper, indptr, indices, last, global_override_indptr_cpu=indptr, **self._arguments)
        else:
            self._wrapper.plan(indptr, indices, last, **self._arguments)
        self._is_compiled = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pool: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Attends over the pool."""
        self._wrapper.run(q, pool, out=out)


class PromptRows:
    """Rows whose keys and values are given, those of the step or of prefixes too. ``backend`` is ``fa2`` or ``fa3``."""

    def __init__(self, shape: AttentionShape, window: int | None, partials: Tensor, backend: str) -> None:
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(partials, "NHD", backend=backend)
        sizes = {"head_dim_qk": shape.head_dim, "head_dim_vo": shape.out_dim}
        self._arguments = _of_model(shape, window) | sizes | {"causal": True}

    def schedule(self, lengths: RowLengths, indices: Tensor) -> None:
        """Makes the schedule; there are no pages."""
        self._wrapper.plan(pin(lengths.qo_indptr), pin(_starts(lengths.kv_lens)), **self._arguments)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pool: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Attends over ``k`` and ``v``."""
        self._wrapper.run(q, k, v, out=out)


class ChunkRows:
    """Rows of several tokens after a prefix.

    ``backend`` is ``fa2``, which makes one product of all heads of a KV head and all tokens of a row, or ``fa3``; the
    other arguments are those of ``DecodeRows``.
    """

    def __init__(
        self,
        shape: AttentionShape,
        window: int | None,
        partials: Tensor,
        backend: str,
        buffers: GraphBuffers | None = None,
    ) -> None:
        of_graph = {}
        if buffers is not None:
            of_graph = {
                "use_cuda_graph": True,
                "qo_indptr_buf": buffers.qo_indptr,
                "paged_kv_indptr_buf": buffers.page_indptr,
                "paged_kv_indices_buf": buffers.indices,
                "paged_kv_last_page_len_buf": buffers.last_page_len,
            }
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(partials, "NHD", backend=backend, **of_graph)
        if buffers is not None:
            self._wrapper.reset_workspace_buffer(partials, _graph_schedule(partials))
        self._arguments = _of_model(shape, window) | {
            "head_dim_qk": shape.head_dim,
            "page_size": shape.page_size,
            "causal": True,
        }

    def schedule(self, lengths: RowLengths, indices: Tensor) -> None:
        self._wrapper.plan(
            pin(lengths.qo_indptr),
            pin(lengths.page_indptr),
            indices,
            pin(lengths.last_page_len),
            max_token_per_sequence=int(lengths.q_lens.max()),
            **self._arguments,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pool: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Attends over the pool."""
        self._wrapper.run(q, pool, out=out)


class AbsorbedRows:
    """Rows of absorbed queries over rows that all heads share; ``partials`` and ``buffers`` as of ``DecodeRows``.

    In its causal mode a program reads too few keys where its 64 or 128 queries end inside a token: the heads of a token
    must divide 128. Without it rows have one token and any number of heads. The plan fills the buffers, with the lengths
    of rows in place of those of their last pages.
    """

    def __init__(
        self, shape: AttentionShape, partials: Tensor, buffers: GraphBuffers | None = None, *, is_causal: bool = True
    ) -> None:
        assert shape.head_dim == _LATENT_RANK + _LATENT_ROPE_DIM, shape
        assert 128 % shape.num_heads == 0 or not is_causal, shape
        self._shape, self._is_causal = shape, is_causal
        of_graph: dict[str, Any] = {}
        if buffers is not None:
            of_graph = {
                "use_cuda_graph": True,
                "qo_indptr": buffers.qo_indptr,
                "kv_indptr": buffers.page_indptr,
                "kv_indices": buffers.indices,
                "kv_len_arr": buffers.last_page_len,
            }
        self._wrapper = BatchMLAPagedAttentionWrapper(partials, backend="fa3", **of_graph)

    def schedule(self, lengths: RowLengths, indices: Tensor) -> None:
        """As of ``RowGroup``."""
        shape = self._shape
        self._wrapper.plan(
            pin(lengths.qo_indptr),
            pin(lengths.page_indptr),
            indices,
            pin(lengths.kv_lens),
            shape.num_heads,
            _LATENT_RANK,
            _LATENT_ROPE_DIM,
            shape.page_size,
            self._is_causal,
            shape.scale,
            shape.dtype,
            shape.dtype,
        )

    def attend(self, q: Tensor, pool: Tensor, out: Tensor) -> None:
        """Writes ``out``, ``[T, num_heads, 512]``; ``q`` is ``[T, num_heads, 576]``, ``pool`` ``[num_pages, page_size, 576]``."""
        rank = _LATENT_RANK
        self._wrapper.run(q[..., :rank], q[..., rank:], pool[..., :rank], pool[..., rank:], out=out)


def absorbed_builds(shape: AttentionShape) -> list[Callable[[], None]]:
    """As ``builds``, of the library of absorbed queries."""
    spec = gen_batch_mla_module("fa3", *[shape.dtype] * 3, torch.int32, _LATENT_RANK, _LATENT_ROPE_DIM, False)
    return [] if spec.is_compiled else [partial(spec.build, verbose=False)]


def prompt_builds(shape: AttentionShape) -> list[Callable[[], None]]:
    """As ``builds``, of the library of prompts alone, whose values may have another size than their keys."""
    positions, has_window, has_soft_cap, reduces_in_fp16 = 0, False, False, False
    spec = gen_batch_prefill_module(
        "fa3",
        *[shape.dtype] * 3,
        torch.int32,
        shape.head_dim,
        shape.out_dim,
        positions,
        has_window,
        has_soft_cap,
        reduces_in_fp16,
    )
    return [] if spec.is_compiled else [partial(spec.build, verbose=False)]


def builds(shape: AttentionShape, prefill: str) -> list[Callable[[], None]]:
    """Returns functions that compile the libraries that a model's rows need and this machine lacks, one each.

    The arguments are those by which the schedules of this version look up their libraries; a library that is not built
    here is compiled at its first use. ``prefill`` is ``fa2`` or ``fa3``, for prompts and long chunks.
    """
    specs = []
    for has_window in sorted({window is not None for window in shape.distinct_windows}):
        positions, has_soft_cap, reduces_in_fp16 = 0, False, False
        of_model = (
            *[shape.dtype] * 3,
            torch.int32,
            shape.head_dim,
            shape.head_dim,
            positions,
            has_window,
            has_soft_cap,
        )
        specs += [gen_batch_prefill_module(kind, *of_model, reduces_in_fp16) for kind in sorted({"fa2", prefill})]
        if not _uses_tensor_cores(shape):  # otherwise it decodes with the library of fa2
            specs.append(gen_batch_decode_module(*of_model))
    return [partial(spec.build, verbose=False) for spec in specs if not spec.is_compiled]


def _uses_tensor_cores(shape: AttentionShape) -> bool:
    return shape.num_heads // shape.num_kv_heads >= _MIN_TENSOR_CORE_GROUP


def _of_model(shape: AttentionShape, window: int | None) -> dict[str, Any]:
    """FlashInfer's arguments of the model. Its window counts the tokens before the query, ours also the query."""
    return {
        "num_qo_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "window_left": -1 if window is None else window - 1,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
        "sm_scale": shape.scale,
    }


def _starts(counts: Int32Array) -> Int32Array:
    starts = np.zeros(counts.size + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def pin(array: Int32Array) -> Tensor:
    """Returns pinned memory, so that an upload does not block."""
    return torch.from_numpy(array).pin_memory()


def _graph_schedule(partials: Tensor) -> Tensor:
    return torch.empty(_GRAPH_SCHEDULE_BYTES, dtype=torch.uint8, device=partials.device)
