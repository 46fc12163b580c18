"""Inputs and outputs of one forward pass, and a layer's view of the KV pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from hiserve.core.plan import Int32Array
from hiserve.core.row_shapes import PackedPages


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """Keys and values of one layer: views of the device pool, indexed by slot.

    Slot ``page * page_size + offset`` holds one token. Slots without an owner may hold anything, NaN included.

    Attributes:
        k: ``[num_slots, num_kv_heads, head_dim]``, the group's dtype, on the device. If packed, uint8: bits of E4M3, or of one row
            that is both, ``[num_slots, 1, row_bytes]``.
        v: Like ``k``; where one row is both, a view of its first elements, or of all its bytes.
        scales: Of packed keys and values, int32 ``[num_slots, scale_words]`` (``core.row_shapes``); None of others.
        page_rows: Slots of a page.
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = field(default=None, kw_only=True)
    page_rows: int = field(default=1, kw_only=True)

    @property
    def is_packed(self) -> bool:
        """Whether it is in 8 bits."""
        return self.k.dtype == torch.uint8


@dataclass(frozen=True, slots=True, eq=False)
class LatentKV(LayerKV):
    """A layer whose heads share one row per token: a latent, and a rotated key (DeepSeek-V2, arXiv:2405.04434).

    ``k`` is ``[num_slots, 1, rank + rope_dim]``, ``v`` its first ``rank`` elements, unless they are packed.

    Attributes:
        to_keys: ``[num_heads, nope_dim, rank]``. A head's key is its product with the latent, then the rotated key.
        to_values: ``[num_heads, value_dim, rank]``, likewise of values.
        packed: How ``k`` holds rows in 8 bits; None is as they are.
    """

    to_keys: Tensor
    to_values: Tensor
    packed: PackedPages | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GroupedKV(LayerKV):
    """A layer that stores rows of several groups; ``k`` and ``v`` are those of ``CachePlan.layers``.

    Where that group has no pages, both are its memory, as in ``beside``.

    Attributes:
        beside: Memory of the others, by name: of pages ``[num_slots, n]``, of rings ``[R, ring, n]``, of states ``[R, heads,
            head_dim, value_dim]``, where R counts the permanent rows, row 0 included.
        snapshots: Of each group that rows carry along, by name: ``[S, snapshot_rows, n]``, the inputs before a boundary, the
            oldest first, or ``[S, heads, head_dim, value_dim]``. Slot 0 takes what padding writes.
    """

    beside: Mapping[str, Tensor]
    snapshots: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True, slots=True, eq=False)
class RowMemory:
    """What rows carry along in all layers of one group.

    Memory without an owner may hold anything, NaN included. Row 0 and slot 0 take what padding writes.

    Attributes:
        rows: ``[L, R, ring, n]``, where the inputs of position p lie at ``p % ring``; or the states, ``[L, R, heads, head_dim,
            value_dim]``. By permanent row number, on the device.
        snapshots: ``[L, S, ...]``, as in ``GroupedKV``.
    """

    rows: Tensor
    snapshots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Where the B rows of a batch keep their recurrent states, and how far each is advanced; int64 ``[B]``, on the device.

    A stored state lags behind the drafts: it covers tokens that no verification can reject. A step replays the others from
    the ring of their inputs. Rows that pad a batch or failed the check are row 0, of length 0, without a snapshot.

    Attributes:
        rows: Permanent row numbers.
        starts: Tokens computed before the step.
        state_lens: Leading tokens that the stored state covers, at most ``starts``. 0 is the empty state, whatever the memory
            holds.
        state_ends: Tokens that it covers after the step: all but the step's drafts.
        snap_at: The state behind so many tokens is kept as a snapshot by the step that reaches it.
        snap_slots: The snapshot's slot; 0 is none.
    """

    rows: Tensor
    starts: Tensor
    state_lens: Tensor
    state_ends: Tensor
    snap_at: Tensor
    snap_slots: Tensor

    def cut(self, first: int, end: int) -> StateRows:
        """Returns some adjacent rows."""
        return StateRows(*(getattr(self, each.name)[first:end] for each in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class ForwardInputs:
    """One ragged batch: B rows, T tokens in row order, N rows of logits.

    A model's forward and its attention read only this. Every tensor is on the device and has exact lengths. The host knows
    the exact tokens of each row, and upper bounds of its length, so that shapes never wait for the device.

    Attributes:
        input_ids: int32 ``[T]``. Token ids.
        positions: int64 ``[T]``. Absolute positions, from 0.
        slots: int64 ``[T]``. Where each token's keys and values are stored.
        token_rows: int64 ``[T]``. Which of the B rows a token belongs to.
        qo_indptr: int32 ``[B + 1]``. Row b has tokens ``qo_indptr[b]`` to ``qo_indptr[b + 1]``.
        kv_lens: int64 ``[B]``. Tokens a row attends over, this step's included; at least 1.
        page_table: int32 ``[B, W]``. Pages of each row; those past ``kv_lens`` mean nothing and may be no pages at all.
        window_slots: int64 ``[T]``. Where the keys and values of layers with a window are stored; None where ``slots`` are.
        window_table: int32 ``[B, W]``. The pages of these layers, by the same entries; those below a row's window, too, mean
            nothing. None where ``page_table`` lists them.
        logits_rows: int64 ``[N]``. Tokens, as indices into T, whose logits are wanted: first the last known token of
            each row that samples and its drafts, as many of each row, the last repeated; then the tokens whose next
            token is scored; both in the order of rows.
        q_lens: int32 ``[B]``, on the host. Tokens of each row.
        kv_bounds: int32 ``[B]``, on the host. Upper bounds of ``kv_lens``, exact but for drafts.
        max_kv_len: Upper bound of all ``kv_lens``; in a captured graph that of any replay.
        num_decode: Rows up to the last that decodes: the ``kv_bounds`` of the later ones are exact.
        tree_mask: int64 ``[T]``. Bit j of a token: it attends to the j-th of its row's new tokens, besides all before these.
            0, as of all tokens of a row of more than 63, is causal. None: all tokens are.
        num_nodes_before: Tokens of each row, the last ones before its new ones, that the bits of ``tree_mask`` count from; only where
            all tokens have a mask.
        before_layer: Called with the index of each layer, or once with None for all, before it reads keys and values that may
            still be loading; None when all are loaded.
        wants_hidden_states: Whether a draft head reads the hidden states of this step, if the model has ``aux_layers``.
        state: The rows' recurrent states; None in a model without any.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    token_rows: Tensor
    qo_indptr: Tensor
    kv_lens: Tensor
    page_table: Tensor
    logits_rows: Tensor
    q_lens: Int32Array
    kv_bounds: Int32Array
    max_kv_len: int
    num_decode: int = 0
    tree_mask: Tensor | None = None
    num_nodes_before: int = 0
    before_layer: Callable[[int | None], None] | None = None
    wants_hidden_states: bool = True
    window_slots: Tensor | None = None
    window_table: Tensor | None = None
    state: StateRows | None = None

    @property
    def max_q_len(self) -> int:
        """Most tokens of one row."""
        return int(self.q_lens.max())

    def cut(self, first: int, end: int) -> ForwardInputs:
        """Returns some adjacent rows, at least one, as a batch without logits."""
        start, stop = int(self.q_lens[:first].sum()), int(self.q_lens[:end].sum())
        bounds = self.kv_bounds[first:end]
        return replace(
            self,
            input_ids=self.input_ids[start:stop],
            positions=self.positions[start:stop],
            slots=self.slots[start:stop],
            token_rows=self.token_rows[start:stop] - first,
            qo_indptr=self.qo_indptr[first : end + 1] - start,
            kv_lens=self.kv_lens[first:end],
            page_table=self.page_table[first:end],
            window_slots=None if self.window_slots is None else self.window_slots[start:stop],
            window_table=None if self.window_table is None else self.window_table[first:end],
            logits_rows=self.logits_rows[:0],
            q_lens=self.q_lens[first:end],
            kv_bounds=bounds,
            num_decode=min(max(self.num_decode - first, 0), end - first),
            max_kv_len=int(bounds.max()),
            tree_mask=None if self.tree_mask is None else self.tree_mask[start:stop],
            state=None if self.state is None else self.state.cut(first, end),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutputs:
    """The result of a forward pass.

    Attributes:
        logits: ``[N, vocab_size]``, of a rank of a group those of its tokens; the model's dtype, on the device.
        hidden_states: ``[T, n]``, outputs of the model's ``aux_layers``, likewise; None without them.
    """

    logits: Tensor
    hidden_states: Tensor | None = None
