"""Device operations around the model's forward in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from hiserve.core.forward import ForwardInputs

ENTRY_WORDS = 4  # of what ``best_entries`` gives for a row
_MODULES = {"cpu": "hiserve.kernels.step_reference", "cuda": "hiserve.kernels.step_triton"}


@dataclass(frozen=True, slots=True, eq=False)
class WindowTensors:
    """The window tables of the rows, by the entries of the page tables; fields as in ``RowTensors``.

    Attributes:
        table: int32 ``[R, P]``.
        entry_owner: int32 ``[R, P]``.
        page_owner: int32 ``[num_window_pages]``.
        size: A token at position p sees positions above p - ``size``, at most.
    """

    table: Tensor
    entry_owner: Tensor
    page_owner: Tensor
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class StateTensors:
    """How far the recurrent states of the rows are advanced, and which snapshot of each is wanted; int64 ``[R]``.

    Attributes:
        lens: Leading tokens that the stored state covers: no draft, so that none of them can be rejected.
        snap_at: The state behind so many tokens is to be kept.
        snap_slot: In this slot; 0 is not at all.
    """

    lens: Tensor
    snap_at: Tensor
    snap_slot: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TreeTensors:
    """The trees of the rows' drafts: node 0, the root, is the last known token, node j the j-th of its drafts.

    Attributes:
        masks: int64 ``[R, N]``. Bit j: node j lies on the path from the root to the node, itself included. Parents come before
            children, so that the first nodes of a tree are a tree. A chain has the masks 1, 3, 7, …
        is_chain: bool ``[R]``. Rows that get chains where others get trees.
        max_depth: No node has more ancestors.
    """

    masks: Tensor
    is_chain: Tensor
    max_depth: int


@dataclass(frozen=True, slots=True, eq=False)
class RowTensors:
    """The device state of R permanent rows of L tokens and P pages; fields as in ``DeviceRows``.

    Attributes:
        tokens: int32 ``[R, L]``. Entries from ``known_len`` on are the row's drafts, if it has any.
        computed_len: int64 ``[R]``. Leading tokens whose keys and values are stored.
        known_len: int64 ``[R]``. Valid entries of ``tokens``, drafts not counted; 0 in row 0.
        page_table: int32 ``[R, P]``.
        entry_owner: int32 ``[R, P]``. The allocation each entry was written for.
        page_owner: int32 ``[num_pages]``. The allocation each page belongs to.
        windows: The same of the layers with a window; None where their pages are those of the other layers.
        states: Of what rows carry along; None where they carry nothing.
        trees: Of the rows' drafts; None where all drafts are chains.
    """

    tokens: Tensor
    computed_len: Tensor
    known_len: Tensor
    page_table: Tensor
    entry_owner: Tensor
    page_owner: Tensor
    windows: WindowTensors | None = None
    states: StateTensors | None = None
    trees: TreeTensors | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """The tokens that may be drawn from rows of logits; columns of a ``core.plan.MaskPlan`` on the device.

    Attributes:
        entries: int32 ``[S]``. The mask of each row of logits; -1 allows all tokens.
        words: int32 ``[M, ceil(vocab_size / 32)]``. Bit t % 32 of word t // 32 allows token t.
    """

    entries: Tensor
    words: Tensor


class FreeDraws(NamedTuple):
    """How rows draw from all tokens; columns as for ``StepOps.draw_free``."""

    temperature: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor
    is_drawn: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step on the device: B rows, T tokens in row order; S rows sample, the next token of P tokens is scored.

    Row 0 pads batches and may occur several times. The plan's columns come first; ``fill_inputs`` writes ``legal`` and
    all of ``forward`` that depends on the rows: tokens, positions, slots, lengths, page tables. In a graph every tensor
    keeps its address; before a replay only ``rows`` and ``max_len`` change.

    Attributes:
        rows: int64 ``[B]``.
        num_new: int64 ``[B]``. Tokens to compute, drafts included; at least 1.
        num_draft: int64 ``[B]``. The drafts among these; 0 where the row does not sample.
        samples: bool ``[B]``. The row reaches the end of its known tokens and emits tokens.
        max_len: int64 ``[B]``. Upper bound of the row's length after the step; at least ``num_new``.
        offsets: int64 ``[T]``. The token's index among its row's new tokens.
        sampling: int64 ``[S]``. Which of the B rows sample.
        width: Most tokens that a row may emit: each of the S rows has this many rows of logits, the last repeated where
            a row has fewer drafts.
        legal: bool ``[B]``. Rows that passed the check; the others read and write the padding page, from position 0.
        forward: The inputs of the model.
        scored_tokens: int64 ``[P]``. Known tokens to score, in plan order: those that follow the tokens of
            ``forward.logits_rows[S * width:]``. None when P is 0.
        path: int64 ``[S, D + 1]``, where drafts may be trees, of which none is deeper than D: the nodes whose tokens each row accepts, from the root on, the
            last of them repeated. Written when tokens are drawn. None where drafts are chains or no row has any.
    """

    rows: Tensor
    num_new: Tensor
    num_draft: Tensor
    samples: Tensor
    max_len: Tensor
    offsets: Tensor
    sampling: Tensor
    width: int
    legal: Tensor
    forward: ForwardInputs
    scored_tokens: Tensor | None = None
    path: Tensor | None = None

    @property
    def num_emitted(self) -> int:
        """Columns of the step's emitted tokens."""
        return self.width if self.path is None else self.path.shape[1]


class StepOps(Protocol):
    """Operations of fixed shape that do not wait for the device, so that a graph can record them."""

    def fill_inputs(self, inputs: StepInputs, state: RowTensors, *, page_size: int) -> None:
        """Checks the rows, and gathers the step's tokens, positions, slots and page tables.

        A row is legal if the slot of its last computed token agrees with its length, if every page it reads or writes
        still belongs to it (in layers with a window, from the first one seen on), if it stays within ``max_len``, and if
        its tokens are known: a row that samples ends exactly at its last known token, drafts aside, and has capacity for
        all tokens that it may emit.

        ``max_len`` is at most the capacity of the page table; entries past a row's last page are not written, nor those of
        its window table below the first page seen. ``state`` is unchanged.

        What rows carry along is addressed by ``forward.state``: an illegal row is row 0 there, of no tokens, without a snapshot.

        With ``forward.tree_mask``, of rows that verify drafts it gets the masks of ``state.trees``, of others 0. A node stands at the
        position of its depth, and is stored at its number: ``move`` puts accepted tokens into the slots of their positions.
        """

    def accept(self, drawn: Tensor, sampling_rows: Tensor, num_draft: Tensor, state: RowTensors) -> Tensor:
        """Counts the tokens that each sampling row emits: 1, and the drafts before the first that was not drawn.

        Args:
            drawn: int64 ``[S, w]``. The token drawn after each of a row's last known token and its drafts.
            sampling_rows: int64 ``[S]``. Row numbers.
            num_draft: int64 ``[S]``. Drafts of each, below w.
            state: The rows; ``known_len`` as before the step.

        Returns:
            int64 ``[S]``, at least 1; meaningless for an illegal row.
        """

    def walk(self, drawn: Tensor, sampling_rows: Tensor, num_draft: Tensor, state: RowTensors) -> tuple[Tensor, Tensor]:
        """Accepts in the tree of each row, from the root on, the child whose token was drawn, as long as there is one.

        Args:
            drawn: int64 ``[S, w]``. The token drawn after each node.
            sampling_rows: int64 ``[S]``. Row numbers.
            num_draft: int64 ``[S]``. Nodes after the root, below w.
            state: The rows, with ``trees``; ``known_len`` as before the step.

        Returns:
            int64 ``[S]``, as ``accept``, and int64 ``[S, min(max_depth, w - 1) + 1]``, as ``StepInputs.path``; both are meaningless
            for an illegal row, but its nodes are below w.
        """

    def move(self, storages: Sequence[Tensor], slots: Tensor, starts: Tensor, path: Tensor, counts: Tensor) -> None:
        """Moves the nodes of accepted paths into adjacent slots: the d-th of a path into that of node d.

        A path's nodes ascend, so that no slot is written before it was read.

        Args:
            storages: Memory of KV groups with a row for each token, ``[num_layers, num_planes, num_slots, heads, head_dim]``,
                elements adjacent. Changed.
            slots: int64 ``[T]``. Of the step's tokens.
            starts: int ``[S]``. The root of each path among these.
            path: int64 ``[S, max_depth + 1]``, from ``walk``.
            counts: int64 ``[S]``. Nodes of each path; no others are moved.
        """

    def advance(self, inputs: StepInputs, drawn: Tensor, counts: Tensor, state: RowTensors) -> Tensor:
        """Adds the step's computed and emitted tokens to the rows, and packs the result for the host.

        The tokens of a row that failed the check are cleared, so that a step already launched for it fails too. The state of
        the others covers all tokens but the step's drafts.

        Args:
            inputs: Filled. Row 0 may occur several times, and must have failed the check.
            drawn: int64 ``[S, w]``. Row s emits the first ``counts[s]`` of them.
            counts: int64 ``[S]``, from ``accept``.
            state: Changed.

        Returns:
            int32 ``[B + S + S * w]``: B legal flags, S counts, 0 for an illegal row, then ``drawn``.
        """

    def greedy(self, logits: Tensor, masks: TokenMasks | None = None) -> Tensor:
        """Returns the largest allowed entry of each row of ``[S, vocab_size]``, int64 ``[S]``; of equal ones the lowest."""

    def draw_free(
        self,
        logits: Tensor,
        temperature: Tensor,
        seed: Tensor,
        choice: Tensor,
        position: Tensor,
        is_drawn: Tensor | None,
        masks: TokenMasks | None = None,
    ) -> Tensor:
        """Draws from all allowed tokens, as ``sampling.sampler`` does for unfiltered rows; returns int64 ``[S]``.

        Args:
            logits: ``[S, vocab_size]``, any floating type. Unchanged.
            temperature: float64 ``[S]``; above 0 where the row draws.
            seed: int64 ``[S]``, in [0, 2**63).
            choice: int64 ``[S]``, in [0, 2**32).
            position: int64 ``[S]``, in [0, 2**32). Absolute position of the token to draw.
            is_drawn: bool ``[S]``. The other rows take their likeliest token; None if all draw.
            masks: Each allows a token of finite logit; None allows all.
        """

    def best_entries(self, logits: Tensor, first: int, draws: FreeDraws | None, masks: TokenMasks | None) -> Tensor:
        """Finds in a share of the vocabulary the entries that ``greedy`` or ``draw_free`` would choose, for ``join_entries``.

        Args:
            logits: ``[S, n]``, of entries ``first`` to ``first + n``. Unchanged.
            first: A multiple of 32.
            draws: None takes the largest.
            masks: Of the whole vocabulary; None allows all.

        Returns:
            ``[S, 4]``, float32, or float64 for float64 logits: the best entry's logit, -inf if it is not allowed; its noise, 0 without
            draws; the largest logit of the share; the entry.
        """

    def join_entries(self, entries: Tensor, draws: FreeDraws | None) -> Tensor:
        """Returns the best of the entries of all shares, ``[N, S, 4]``: int64 ``[S]``; of equal ones the lowest."""


def step_ops_for(device: torch.device) -> StepOps:
    """Returns the kernels for a device: plain torch on the CPU, Triton elsewhere."""
    return cast("StepOps", import_module(_MODULES[device.type]))
