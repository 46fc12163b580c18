"""Latent attention: heads that share one row per token, absorbed or expanded (DeepSeek-V2, arXiv:2405.04434).

Absorbed, a query is multiplied by its head's key projection and attends over the rows themselves: one KV head of
``rank + rope_dim`` elements. Expanded, keys and values of every head are computed from the rows: more work for each
key, less for each pair of query and key, so that it pays for many queries of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.core.forward import ForwardInputs, LatentKV, LayerKV
from hiserve.core.plan import Int32Array
from hiserve.core.step_memory import EXPANDED_BYTES, EXPANDED_KEYS
from hiserve.kernels.reference import merge
from hiserve.kernels.row_codecs import load_latents

MIN_EXPANDED = 128
"""Least new tokens of a row that is expanded."""

_NUM_SCORES = 1 << 24  # in memory at once, where no fused kernel computes them
_FUSED_DTYPES = (torch.bfloat16, torch.float16)
_MAX_FUSED_DIM = 256


class ExpandedPrompts(Protocol):
    """A kernel of prompts whose keys and values are expanded, those of their prefixes too."""

    def is_ready(self) -> bool:
        """Whether it may plan."""

    def plan(self, q_lens: Int32Array, kv_lens: Int32Array) -> None:
        """Prepares prompts of these numbers of new tokens, and of tokens with their prefixes."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """As ``attend_prompts``, into ``out``."""


def open_with(
    shape: AttentionShape,
    make: Callable[[AttentionShape], Attention],
    prompts: ExpandedPrompts | None = None,
) -> Attention:
    """Returns a backend of a shape; ``make`` gives one of grouped-query attention, which computes absorbed queries."""
    if shape.latent is None:
        return make(shape)
    return LatentAttention(shape, make(absorbed_shape(shape)), prompts=prompts)


def absorbed_shape(shape: AttentionShape) -> AttentionShape:
    """Returns the shape of absorbed queries: grouped-query attention with the scores of the latent one."""
    assert shape.latent is not None, shape
    return replace(shape, latent=None, score_scalar=shape.latent.scale**-2)


def expanded_shape(shape: AttentionShape) -> AttentionShape:
    """Returns the shape of expanded prompts: every head has keys, and values of the size of its output."""
    latent = shape.latent
    assert latent is not None, shape
    key_dim = latent.nope_dim + latent.rope_dim
    return replace(shape, num_kv_heads=shape.num_heads, head_dim=key_dim, score_scalar=latent.scale**-2)


@dataclass(frozen=True, slots=True, eq=False)
class _LongRow:
    """A row to expand."""

    start: int  # first of its tokens
    num_new: int  # its tokens
    num_cached: int  # its tokens before this step
    pages: Tensor  # int64 ``[n]``, those of ``num_cached`` tokens


@dataclass(frozen=True, slots=True, eq=False)
class _Prompts:
    """All rows to expand, whose keys are in memory at once: one launch computes them."""

    starts: Tensor  # int32 ``[n + 1]``: where the new tokens of each row start, from the first of them
    key_starts: Tensor  # likewise, where its keys start
    max_new: int  # new tokens of the row with most
    max_keys: int  # keys of the row with most, its prefix included
    cached: Tensor | None  # int64: slots of all tokens before this step, row after row; None without any
    kernel: ExpandedPrompts | None  # planned for them; None is torch's


class LatentAttention:
    """Expands the keys of rows with many new tokens; ``absorbed`` computes the rows before the first of them.

    Args:
        shape: With ``latent``.
        absorbed: A backend for one KV head of ``head_dim`` elements, of which the first ``rank`` are the value, and
            scores scaled by ``shape.latent.scale``.
        min_expanded: Least new tokens of a row to expand; None expands none.
        prompts: Computes prompts where one launch may, once it is ready; None is torch's kernel.
    """

    def __init__(
        self,
        shape: AttentionShape,
        absorbed: Attention,
        min_expanded: int | None = MIN_EXPANDED,
        prompts: ExpandedPrompts | None = None,
    ) -> None:
        assert shape.latent is not None and not shape.windows and not shape.sinks, shape
        self.needs_host_lengths = absorbed.needs_host_lengths
        self._shape, self._latent = shape, shape.latent
        self._absorbed = absorbed
        self._min_expanded = min_expanded
        self._kernel = prompts
        self._long: list[_LongRow] = []
        self._prompts: _Prompts | None = None  # the same rows, if one launch computes them
        self._num_absorbed = 0  # tokens of the rows before them

    def captured(self, num_rows: int, width: int) -> Attention | None:
        """Returns one that expands nothing: a graph depends on no lengths of the host."""
        return self._fixed(self._absorbed.captured(num_rows, width))

    def ragged(self) -> Attention | None:
        """Likewise."""
        return self._fixed(self._absorbed.ragged())

    def _fixed(self, absorbed: Attention | None) -> Attention | None:
        return None if absorbed is None else LatentAttention(self._shape, absorbed, min_expanded=None)

    def plan(self, inputs: ForwardInputs) -> None:
        """Finds the first row to expand. The host knows exact lengths of rows that do not decode."""
        num_rows = first = len(inputs.q_lens)
        if self._min_expanded is not None:
            is_long = inputs.q_lens[inputs.num_decode :] >= self._min_expanded
            first = inputs.num_decode + int(is_long.argmax()) if is_long.any() else num_rows
        self._num_absorbed = int(inputs.q_lens[:first].sum())
        self._long = []
        start = self._num_absorbed
        for row in range(first, num_rows):
            num_new = int(inputs.q_lens[row])
            num_cached = int(inputs.kv_bounds[row]) - num_new
            pages = inputs.page_table[row, : -(-num_cached // self._shape.page_size)].long()
            self._long.append(_LongRow(start, num_new, num_cached, pages))
            start += num_new
        num_cached = sum(row.num_cached for row in self._long)
        has_launch = self._long and num_cached <= most_keys(self._shape) and self._has_launch(inputs.kv_lens.device)
        self._prompts = self._one_launch(inputs, first) if has_launch else None
        if first:
            self._absorbed.plan(inputs.cut(0, first) if self._long else inputs)

    def _one_launch(self, inputs: ForwardInputs, first: int) -> _Prompts:
        """Returns the launch of the rows from ``first`` on."""
        starts = key_starts = inputs.qo_indptr[first:] - self._num_absorbed
        cached = None
        if any(row.num_cached for row in self._long):
            key_starts = torch.nn.functional.pad(inputs.kv_lens[first:].cumsum(0, dtype=torch.int32), (1, 0))
            cached = torch.cat([self._slots(row.pages, 0, row.num_cached) for row in self._long])
        kernel = self._kernel if self._kernel is not None and self._kernel.is_ready() else None
        if kernel is not None:
            kernel.plan(inputs.q_lens[first:], inputs.kv_bounds[first:])
        max_new = max(row.num_new for row in self._long)
        max_keys = max(row.num_cached + row.num_new for row in self._long)
        return _Prompts(starts, key_starts, max_new, max_keys, cached, kernel)

    def _has_launch(self, device: torch.device) -> bool:
        """Whether one launch may compute several prompts; it sees the first key of each."""
        return _is_fused(device, self._shape.dtype, self._key_dim) and not self._shape.hides_first

    @property
    def _key_dim(self) -> int:
        return self._latent.nope_dim + self._latent.rope_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends; ``kv`` is a ``LatentKV``."""
        assert isinstance(kv, LatentKV), type(kv)
        cut = self._num_absorbed
        out = q.new_empty((*q.shape[:2], self._latent.value_dim)) if out is None else out
        if cut:
            latents = self._absorbed.forward(absorb(q[:cut], kv.to_keys), k[:cut], v[:cut], kv, layer)
            torch.bmm(latents.transpose(0, 1), kv.to_values.transpose(1, 2), out=out[:cut].transpose(0, 1))
        if self._prompts is not None:
            keys, values = expand(self._all_rows(self._prompts, k[cut:, 0], kv), kv)
            if self._prompts.kernel is not None:
                self._prompts.kernel.attend(q[cut:], keys, values, out[cut:])
                return out
            starts, most = self._prompts.starts, (self._prompts.max_new, self._prompts.max_keys)
            key_starts, scale = self._prompts.key_starts, self._latent.scale
            out[cut:] = attend_prompts(q[cut:], keys, values, starts, key_starts, most, scale)
            return out
        for row in self._long:
            mine = slice(row.start, row.start + row.num_new)
            out[mine] = self._expand_and_attend(row, q[mine], k[mine, 0], kv)
        return out

    def _all_rows(self, prompts: _Prompts, new: Tensor, kv: LatentKV) -> Tensor:
        """Returns the rows of all keys of a launch, ``[num_keys, width]``; ``new`` are those of its new tokens."""
        if prompts.cached is None:
            return new
        cached = self._read(kv, new.dtype, prompts.cached)
        old = cached.split_with_sizes([row.num_cached for row in self._long])
        own = new.split_with_sizes([row.num_new for row in self._long])
        return torch.cat([each for pair in zip(old, own, strict=True) for each in pair])

    def _expand_and_attend(self, row: _LongRow, q: Tensor, new: Tensor, kv: LatentKV) -> Tensor:
        """Attends over the new keys, then over the cached ones, some at a time.

        ``q`` is ``[n, num_heads, nope_dim + rope_dim]``, ``new`` the rows of the same tokens, ``[n, width]``.
        """
        hidden = int(self._shape.hides_first)  # keys that no token sees, at the start of the row
        if row.num_cached + row.num_new <= hidden:
            return q.new_zeros((*q.shape[:2], self._latent.value_dim))
        if not row.num_cached:
            seen, _ = self._attend(q[hidden:], new[hidden:], kv, is_causal=True)
            return torch.cat((seen.new_zeros((hidden, *seen.shape[1:])), seen)).to(q.dtype)
        out, lse = self._attend(q, new, kv, is_causal=True)
        step = most_keys(self._shape)
        for begin in range(hidden, row.num_cached, step):
            end = min(begin + step, row.num_cached)
            rows = self._read(kv, q.dtype, self._slots(row.pages, begin, end))
            out, lse = merge(out, lse, *self._attend(q, rows, kv, is_causal=False))
        return out.to(q.dtype)

    def _slots(self, pages: Tensor, begin: int, end: int) -> Tensor:
        """Returns the slots of the positions ``begin`` to ``end`` of a row with these pages, int64."""
        position, page_size = torch.arange(begin, end, device=pages.device), self._shape.page_size
        return pages[position // page_size] * page_size + position % page_size

    def _read(self, kv: LatentKV, dtype: torch.dtype, slots: Tensor) -> Tensor:
        """Returns the rows in some slots, ``[n, width]``."""
        return (
            kv.k.view(-1, kv.k.shape[-1]).index_select(0, slots)
            if kv.packed is None
            else load_latents(kv, slots, dtype)
        )

    def _attend(self, q: Tensor, rows: Tensor, kv: LatentKV, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        """Expands rows ``[m, width]`` and attends; as ``attend_dense``."""
        keys, values = (each.transpose(0, 1) for each in expand(rows, kv))
        return attend_dense(q, keys, values, self._latent.scale, is_causal=is_causal)


def most_keys(shape: AttentionShape) -> int:
    """Returns how many keys beside those of new tokens are expanded at once; of few heads they are hardly larger than the rows that are read for them."""
    latent = shape.latent
    assert latent is not None, shape
    elements = shape.num_heads * (latent.nope_dim + latent.rope_dim + latent.value_dim) + latent.rank + latent.rope_dim
    return max(EXPANDED_KEYS, EXPANDED_BYTES // (elements * shape.dtype.itemsize))


def expand(rows: Tensor, kv: LatentKV) -> tuple[Tensor, Tensor]:
    """Returns keys and values of rows ``[m, rank + rope_dim]``: ``[m, num_heads, nope_dim + rope_dim]``, ``[m, num_heads, value_dim]``."""
    num_heads, nope_dim, rank = kv.to_keys.shape
    latents, rotated = rows.split_with_sizes((rank, rows.shape[1] - rank), -1)
    size, each_head = (rows.shape[0], num_heads), latents.expand(num_heads, -1, -1)
    keys, values = rows.new_empty((*size, nope_dim + rotated.shape[1])), rows.new_empty((*size, kv.to_values.shape[1]))
    torch.bmm(each_head, kv.to_keys.transpose(1, 2), out=keys[..., :nope_dim].transpose(0, 1))
    torch.bmm(each_head, kv.to_values.transpose(1, 2), out=values.transpose(0, 1))
    keys[..., nope_dim:] = rotated[:, None]
    return keys, values


def absorb(q: Tensor, to_keys: Tensor) -> Tensor:
    """Multiplies queries by their heads' projections of keys.

    Args:
        q: ``[T, num_heads, nope_dim + rope_dim]``.
        to_keys: As in ``LatentKV``.

    Returns:
        Queries of rows, ``[T, num_heads, rank + rope_dim]``.
    """
    _, nope_dim, rank = to_keys.shape
    plain, turned = q.split_with_sizes((nope_dim, q.shape[2] - nope_dim), -1)
    absorbed = q.new_empty((*q.shape[:2], rank + turned.shape[2]))
    torch.bmm(plain.transpose(0, 1), to_keys, out=absorbed[..., :rank].transpose(0, 1))
    absorbed[..., rank:] = turned
    return absorbed


def attend_dense(q: Tensor, keys: Tensor, values: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attends over keys that all queries see, or over their own and those before.

    Args:
        q: ``[n, num_heads, d]``.
        keys: ``[num_heads, m, d]``.
        values: ``[num_heads, m, v]``.
        scale: Factor of the scores.
        is_causal: Query i sees the keys up to i, and m is n.

    Returns:
        ``[n, num_heads, v]`` and the natural logarithm of the sum of exponentials, ``[n, num_heads]``; both float32, or
        float64 for float64.
    """
    if _is_fused(q.device, q.dtype, q.shape[2]):
        return _attend_fused(q, keys, values, scale, is_causal=is_causal)
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = keys.to(wide), values.to(wide)
    step = max(1, _NUM_SCORES // (keys.shape[0] * keys.shape[1]))
    outs, sums = [], []
    for first, part in zip(range(0, q.shape[0], step), torch.split(q, step), strict=True):
        scores = torch.einsum("nhd,hmd->hnm", part.to(wide), keys).mul_(scale)
        if is_causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu_(first + 1)
            scores.masked_fill_(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        outs.append(torch.einsum("hnm,hmv->nhv", scores.sub_(lse[..., None]).exp_(), values))
        sums.append(lse.transpose(0, 1))
    return torch.cat(outs), torch.cat(sums)


def attend_prompts(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, key_starts: Tensor, most: tuple[int, int], scale: float
) -> Tensor:
    """Attends in one launch over several prompts: the last token of each sees all its keys, others as many fewer. On CUDA, 16 bits.

    Args:
        q: ``[T, num_heads, d]``, ``d`` at most 256.
        keys: ``[num_keys, num_heads, d]``: of each prompt its prefix, then its tokens.
        values: ``[num_keys, num_heads, v]``, ``v`` at most ``d``.
        starts: int32 ``[n + 1]``, of the tokens of each prompt.
        key_starts: Likewise, of its keys.
        most: Tokens of the prompt that has most, and its keys.
        scale: Factor of the scores.

    Returns:
        ``[T, num_heads, v]``, of the type of ``q``.
    """
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, keys, _widened(values, keys), starts, key_starts, *most, 0.0, True, False, scale=scale
    )[0]
    return out[..., : values.shape[2]]


def _is_fused(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether torch has a fused kernel for heads of ``dim`` elements."""
    return device.type == "cuda" and dtype in _FUSED_DTYPES and dim <= _MAX_FUSED_DIM


def _widened(values: Tensor, keys: Tensor) -> Tensor:
    """Returns values as wide as keys, as the fused kernel takes them."""
    spare = keys.shape[2] - values.shape[2]
    assert spare >= 0, f"keys of {keys.shape[2]} elements, values of {values.shape[2]}"
    return torch.nn.functional.pad(values, (0, spare)) if spare else values


def _attend_fused(q: Tensor, keys: Tensor, values: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """As ``attend_dense``, by the kernel of torch that returns the sums."""
    num_values = values.shape[2]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q.transpose(0, 1)[None], keys[None], _widened(values, keys)[None], 0.0, is_causal, False, scale=scale
    )
    return out[0, :, :, :num_values].transpose(0, 1).float(), lse[0, :, : q.shape[0]].transpose(0, 1)
