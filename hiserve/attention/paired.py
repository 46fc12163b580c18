"""Combines two backends: one for rows that decode and one for prompts after them, or one for some graphs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from hiserve.attention.base import Attention, LaterAttention
from hiserve.core.forward import ForwardInputs, LayerKV


class GraphedAttention:
    """Computes graphs of rows of one token by ``graphs``, and all else by ``attention``, which needs no host lengths.

    The graphs are planned before each replay, with lengths of the host: no row may have drafts while steps are planned
    ahead (``engine/build.py``). A graph is captured once, so ``graphs`` must be ready by then, or has none.

    Args:
        attention: For all steps without a graph, and the other graphs.
        graphs: For graphs of at least ``min_rows`` rows.
        min_rows: Fewer are computed by ``attention``.
    """

    needs_host_lengths = True

    def __init__(self, attention: Attention, graphs: LaterAttention, min_rows: int) -> None:
        assert not attention.needs_host_lengths, "steps without a graph get bounds"
        self._attention, self._graphs, self._min_rows = attention, graphs, min_rows
        self.ragged, self.plan, self.forward = attention.ragged, attention.plan, attention.forward

    def captured(self, num_rows: int, width: int) -> Attention | None:
        """Returns that of ``graphs`` if it is ready and has one, else that of ``attention``."""
        captured = None
        if num_rows >= self._min_rows and self._graphs.is_ready():
            captured = self._graphs.captured(num_rows, width)
        return self._attention.captured(num_rows, width) if captured is None else captured


class PairedAttention:
    """Splits each batch after the last row that decodes.

    The host may know only a bound of the length of a row that decodes, while drafts of it are in flight; it knows the
    lengths of the other rows. So ``prompts`` may plan with host lengths also in steps that have drafts.

    Args:
        decoding: For rows that decode, and for graphs.
        prompts: For the rows after them.
        has_prompts: Whether ``prompts`` may plan; called at each plan until it returns true. Until then ``decoding``
            computes all rows. No graph contains launches of ``prompts``, so the change happens between two steps.
    """

    def __init__(self, decoding: Attention, prompts: Attention, has_prompts: Callable[[], bool] = lambda: True) -> None:
        self.needs_host_lengths = decoding.needs_host_lengths
        self.captured, self.ragged = decoding.captured, decoding.ragged  # such graphs compute prompts too
        self._decoding = decoding
        self._prompts = prompts
        self._num_tokens = 0  # of the rows that decode
        self._may_split = has_prompts
        self._is_split = False  # never reset
        self._has_prompts = False

    def plan(self, inputs: ForwardInputs) -> None:
        """Plans the parts that are not empty; a part that is the whole batch needs no launch."""
        num_rows, num_decode = len(inputs.q_lens), inputs.num_decode
        self._num_tokens = int(inputs.q_lens[:num_decode].sum())
        self._is_split = self._is_split or self._may_split()
        if not self._is_split:
            self._has_prompts = False
            self._decoding.plan(inputs)
            return
        self._has_prompts = num_decode < num_rows
        if num_decode:
            self._decoding.plan(inputs.cut(0, num_decode) if self._has_prompts else inputs)
        if self._has_prompts:
            prompts = inputs.cut(num_decode, num_rows) if num_decode else inputs
            self._prompts.plan(replace(prompts, tree_mask=None))  # no row without a draft has nodes

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends part by part."""
        cut = self._num_tokens
        if not self._has_prompts:
            return self._decoding.forward(q, k, v, kv, layer, out)
        if not cut:
            return self._prompts.forward(q, k, v, kv, layer, out)
        out = q.new_empty((*q.shape[:2], v.shape[2])) if out is None else out  # values of latents are narrower
        self._decoding.forward(q[:cut], k[:cut], v[:cut], kv, layer, out[:cut])
        self._prompts.forward(q[cut:], k[cut:], v[cut:], kv, layer, out[cut:])
        return out
