"""The kernels of a step around the model, as each device implements them, and the tensors that they read and write."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from hiserve.core.forward import ForwardInputs

_MODULES = {"cpu": "hiserve.kernels.step_reference", "cuda": "hiserve.kernels.step_triton"}


@dataclass(frozen=True, slots=True, eq=False)
class RowTensors:
    """The state of R permanent rows of L tokens and P pages; fields as in ``DeviceRows``.

    Attributes:
        tokens: int32 ``[R, L]``. Those from ``known_len`` on are the row's drafts, if it has any.
        computed_len: int64 ``[R]``. Leading tokens whose keys and values are stored.
        known_len: int64 ``[R]``. Valid entries of ``tokens``, drafts not counted; 0 in row 0.
        page_table: int32 ``[R, P]``.
        entry_owner: int32 ``[R, P]``. The allocation each entry was written for.
        page_owner: int32 ``[num_pages]``. The allocation each page belongs to.
    """

    tokens: Tensor
    computed_len: Tensor
    known_len: Tensor
    page_table: Tensor
    entry_owner: Tensor
    page_owner: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step on the device: B rows, T tokens in row order; S rows sample, the next token of P tokens is scored.

    Row 0, which pads batches, may occur several times. The plan's columns come first; ``fill_inputs`` writes ``legal`` and, of
    ``forward``, all that depends on the rows: tokens, positions, slots, lengths, page tables. In a graph every tensor keeps
    its address; before a replay only ``rows`` and ``max_len`` change.

    Attributes:
        rows: int64 ``[B]``.
        num_new: int64 ``[B]``. Tokens to compute, drafts included; at least 1.
        num_draft: int64 ``[B]``. Of these, how many are drafts; 0 where the row does not sample.
        samples: bool ``[B]``. The row reaches its last known token and emits tokens.
        max_len: int64 ``[B]``. Upper bound of the row's length after the step; at least ``num_new``.
        offsets: int64 ``[T]``. The token's index among its row's new tokens.
        sampling: int64 ``[S]``. Which of the B rows sample.
        width: Most tokens that a row may emit: each of the S rows has so many rows of logits, the last repeated where a
            row has fewer drafts.
        legal: bool ``[B]``. Rows that passed the check; the others read and write the sink, from position 0.
        forward: The inputs of the model.
        scored_tokens: int64 ``[P]``. Known tokens to score, in plan order: those that follow the tokens of
            ``forward.logits_rows[S * width:]``. None when P is 0.
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


class StepOps(Protocol):
    """Work of fixed shape that never waits for the device, so that a graph can hold it."""

    def fill_inputs(self, inputs: StepInputs, state: RowTensors, *, page_size: int) -> None:
        """Checks the rows, and gathers the step's tokens, positions, slots and page tables.

        A row is legal if the slot of its last computed token agrees with its length, if every page it reads or writes is
        still its own, if it stays within ``max_len``, and if it knows the tokens: a row that samples reaches exactly
        the end of what it knows, its drafts aside, and has places for all tokens that it may emit.

        Args:
            inputs: Written; ``max_len`` is at most the places of its page table. Entries of this table past a row's
                last page keep what they hold.
            state: The rows. Unchanged.
            page_size: Tokens per page.
        """

    def accept(self, drawn: Tensor, sampling_rows: Tensor, num_draft: Tensor, state: RowTensors) -> Tensor:
        """Counts the tokens that each sampling row emits: its drafts up to the first that differs from the drawn token, and 1.

        Args:
            drawn: int64 ``[S, w]``. The token drawn after each of a row's last known token and its drafts.
            sampling_rows: int64 ``[S]``. Row numbers.
            num_draft: int64 ``[S]``. Drafts of each, below w.
            state: The rows; ``known_len`` as before the step.

        Returns:
            int64 ``[S]``, at least 1. That of an illegal row means nothing.
        """

    def advance(self, inputs: StepInputs, drawn: Tensor, counts: Tensor, state: RowTensors) -> Tensor:
        """Records in the rows what a step computed and emitted, and packs the outcome for the host.

        A row that failed the check loses its tokens, so that a step already launched for it fails too.

        Args:
            inputs: Filled. Row 0 may occur several times, and must have failed the check.
            drawn: int64 ``[S, w]``. Row s emits the first ``counts[s]`` of them.
            counts: int64 ``[S]``, from ``accept``.
            state: The rows; changed.

        Returns:
            int32 ``[B + S + S * w]``: B legal flags, S counts, 0 for an illegal row, then ``drawn``.
        """

    def greedy(self, logits: Tensor) -> Tensor:
        """Returns the largest entry of each row of ``[S, vocab_size]``, int64 ``[S]``; of equal ones the lowest."""

    def draw_free(
        self,
        logits: Tensor,
        temperature: Tensor,
        seed: Tensor,
        choice: Tensor,
        position: Tensor,
        is_drawn: Tensor | None,
    ) -> Tensor:
        """Draws from all tokens, as ``sampling.sampler`` does where nothing is filtered.

        Args:
            logits: ``[S, vocab_size]``, any floating type. Unchanged.
            temperature: float64 ``[S]``; above 0 where the row draws.
            seed: int64 ``[S]``, in [0, 2**63).
            choice: int64 ``[S]``, in [0, 2**32).
            position: int64 ``[S]``, in [0, 2**32). Absolute position of the token to draw.
            is_drawn: bool ``[S]``. The other rows take their likeliest token; None if all draw.

        Returns:
            int64 ``[S]``.
        """


def step_ops_for(device: torch.device) -> StepOps:
    """Returns the kernels for a device: plain torch on the CPU, Triton elsewhere."""
    return cast("StepOps", import_module(_MODULES[device.type]))
