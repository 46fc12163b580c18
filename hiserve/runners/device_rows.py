"""Rows: a request's state on the device, from admission to release."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hiserve.core.forward import RowMemory
from hiserve.core.plan import MASK_BITS, NO_MASK, BatchPlan, Int32Array, MaskPlan, RowAdmit, TableWrites
from hiserve.core.upload import mapped, upload
from hiserve.distributed.exchange import Exchange
from hiserve.kernels.reference import NO_OWNER, PADDING_PAGE
from hiserve.kernels.step_ops import RowTensors, TokenMasks, TreeTensors, WindowTensors, step_ops_for
from hiserve.runners.row_states import RowStates
from hiserve.sampling.logit_shares import DrawOps, LogitShares
from hiserve.sampling.params import SamplingRows


class MaskBuffers:
    """Memory for the masks of one step, on the device and, on CUDA, pinned on the host.

    Captured draws read the device's part in every replay. Outside a draw with masks every entry is ``NO_MASK``: steps without a
    grammar replay the same graphs, and copy nothing.

    One set is enough: the host writes the masks of a step once it knows the result of the step before, whose draw read the
    masks before these. After a step that failed its copy may still run, so both sides wait for an event too.

    Args:
        num_entries: Most rows of logits that a step samples from, each with a mask of its own.
        vocab_size: Entries of a row of logits.
        device: On a CPU the host writes where draws read.
    """

    def __init__(self, num_entries: int, vocab_size: int, device: torch.device) -> None:
        self._num_entries, self._num_words = num_entries, -(-vocab_size // MASK_BITS)
        self._device = device
        # Entries, then masks: one copy carries both.
        self._on_device = torch.empty(num_entries * (1 + self._num_words), dtype=torch.int32, device=device)
        self._entries, self._words = self._parts(self._on_device)
        self._entries.fill_(NO_MASK)
        self._host = self._on_device
        self._mapped: Tensor | None = None  # the host's part, as the device reads it; made with the first masks
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._drawn = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._drawn.record(torch.cuda.current_stream(device))

    def of(self, num_entries: int) -> TokenMasks:
        """Returns the masks of so many rows of logits, on the device: always the same memory."""
        assert num_entries <= self._num_entries, (
            f"{num_entries} rows of logits; there are masks for {self._num_entries}"
        )
        return TokenMasks(self._entries[:num_entries], self._words)

    def lend(self, num_entries: int, num_masks: int) -> tuple[Int32Array, Int32Array]:
        """Lends the host's part for the next step, until ``send``; the draw of the step before has ended.

        Returns:
            int32 ``[num_entries]``, all ``NO_MASK``, and int32 ``[num_masks, ceil(vocab_size / 32)]``, of any content.
        """
        assert num_masks <= num_entries <= self._num_entries, f"{num_masks} masks of {num_entries} rows of logits"
        if self._device.type == "cuda":
            if self._mapped is None:
                self._host = torch.empty_like(self._on_device, device="cpu", pin_memory=True)
                self._mapped = mapped(self._host, self._device)
            self._copied.synchronize()
        host = self._host.numpy()
        entries, words = host[: self._num_entries], host[self._num_entries :].reshape(self._num_entries, -1)
        entries.fill(NO_MASK)
        return entries[:num_entries], words[:num_masks]

    def send(self, masks: MaskPlan) -> None:
        """Makes the next draw on the current stream read lent masks, which are copied on a stream of their own.

        A kernel copies them: the copy engine may be busy with pages.
        """
        if self._mapped is None:
            return
        end = self._num_entries + masks.masks.size
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._drawn)
            torch.bitwise_or(self._mapped[:end], 0, out=self._on_device[:end])
            self._copied.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def free(self) -> None:
        """Frees every row of logits again, after the draw, on the same stream."""
        self._entries.fill_(NO_MASK)
        if self._mapped is not None:
            self._drawn.record(torch.cuda.current_stream(self._device))

    def _parts(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return memory[: self._num_entries], memory[self._num_entries :].view(self._num_entries, self._num_words)


class DeviceRows:
    """Tokens, lengths, page tables and sampling parameters of every row; rows are never reordered.

    Row 0 pads batches: it has no tokens, so the check of each step makes it read and write the padding page.

    Attributes:
        max_len: Longest row, in tokens.
        page_size: Tokens per page.
        num_pages: Pages of the pool, the padding page included.
        ops: The kernels of this device.
        shares: Of a rank of a group, which has the logits of its tokens; None has those of all.
        tokens: int32 ``[R, max_len]``, R = max_rows + 1. Those from ``known_len`` on are drafts, if there are any.
        computed_len: int64 ``[R]``. Leading tokens whose keys and values are stored.
        known_len: int64 ``[R]``. Valid entries of ``tokens``, drafts not counted.
        page_table: int32 ``[R, max_pages]``.
        entry_owner: int32 ``[R, max_pages]``. The allocation that each entry was written for.
        page_owner: int32 ``[num_pages]``. The allocation that each page belongs to.
        windows: Window tables, their owners and those of window pages; None where all layers share their pages.
        states: What rows carry along; None where they carry nothing.
        state: These tensors, as the step kernels take them.
        relocation_version: Of the latest plan that was applied; 0 before the first.
        has_moved: A page of a live row had moved between the planning of the step before and that of this one.
        sampling: Sampling parameters.
        masks: Those of the step that draws next.
        max_draft: Drafts of a row, at most.
        taken_len: int64 ``[R]``, as in ``DraftProgress``: 0 for a row that changes hands.
        storages: Memory of the pool with a row for each token that the model writes, as ``StepOps.move`` takes it.
        is_drafted: ``[num_pages]``, as in ``DraftProgress``: 0 once a page is handed out for tokens that are to be
            computed. None where no page has anything to draft with.

    Args:
        max_rows: Requests at a time.
        max_len, page_size, num_pages, max_draft: As above.
        device: Of all tensors.
        eos_token_ids: Tokens that end a reply; below the vocabulary's size.
        vocab_size: Entries of a row of logits, of all ranks; 0 where nothing is drawn.
        window: The widest, where layers with one have pages of their own; else 0.
        num_window_pages: Of these pages, the padding page included.
        carried: Memory of what rows carry along, of each group; empty where they carry nothing.
        max_depth: The longest path of a row's drafts, where they may be trees; 0 where they are chains.
        storages: As above; read where drafts may be trees.
        exchange: Of a rank of a group; None runs alone.
    """

    def __init__(
        self,
        max_rows: int,
        max_len: int,
        page_size: int,
        num_pages: int,
        device: str,
        eos_token_ids: Sequence[int] = (),
        *,
        vocab_size: int = 0,
        max_draft: int = 0,
        window: int = 0,
        num_window_pages: int = 0,
        carried: Sequence[RowMemory] = (),
        max_depth: int = 0,
        storages: Sequence[Tensor] = (),
        exchange: Exchange | None = None,
    ) -> None:
        self.device = torch.empty(0, device=device).device  # with its index
        self.ops = step_ops_for(self.device)
        self.shares = None if exchange is None else LogitShares.of(self.ops, exchange, vocab_size)
        self.max_len = max_len
        self.page_size = page_size
        self.num_pages = num_pages
        num_rows, max_pages = max_rows + 1, -(-max_len // page_size)
        self.tokens = torch.zeros((num_rows, max_len), dtype=torch.int32, device=self.device)
        self.computed_len = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.known_len = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.taken_len = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.page_table = torch.full((num_rows, max_pages), PADDING_PAGE, dtype=torch.int32, device=self.device)
        self.entry_owner = torch.full((num_rows, max_pages), NO_OWNER, dtype=torch.int32, device=self.device)
        self.page_owner = torch.full((num_pages,), NO_OWNER, dtype=torch.int32, device=self.device)
        self.windows = None if not num_window_pages else _windows(self.page_table, num_window_pages, window)
        self.states = RowStates(num_rows, self.device, carried) if carried else None
        self.storages = tuple(storages)
        self.state = RowTensors(
            tokens=self.tokens,
            computed_len=self.computed_len,
            known_len=self.known_len,
            page_table=self.page_table,
            entry_owner=self.entry_owner,
            page_owner=self.page_owner,
            windows=self.windows,
            states=None if self.states is None else self.states.tensors,
            trees=_chains(num_rows, max_draft, max_depth, self.device) if max_depth else None,
        )
        self.forget()
        self.relocation_version = 0
        self.has_moved = False
        self.sampling = SamplingRows(num_rows, self.device, eos_token_ids)
        self.is_drafted: Tensor | None = None
        self.max_draft = max_draft
        self.masks = MaskBuffers(max_rows * (1 + max_draft), vocab_size, self.device)
        self._ahead = torch.arange(max_draft, device=self.device)

    @property
    def draw_ops(self) -> DrawOps:
        """Those that choose tokens from the model's logits."""
        return self.ops if self.shares is None else self.shares

    def apply(self, plan: BatchPlan) -> None:
        """Releases rows, admits requests, writes page tables, assigns snapshots, in this order.

        Plans are applied in the order in which they were made: a page may change rows with a later plan, and the step
        before it must have read the page by then.
        """
        before = self.relocation_version
        assert plan.relocation_version >= before, (
            f"step {plan.step_id} was planned under relocation version {plan.relocation_version}, after a step of {before}"
        )
        self.has_moved = 0 < before < plan.relocation_version
        if plan.release.size or plan.admit:
            self._clear(plan.release, plan.admit)
        if plan.admit:
            self._admit(plan.admit)
        if plan.table.rows.size:
            self._write_table(plan.table)
        if plan.window_table.rows.size:
            self._write_window_table(plan.window_table)
        if self.states is not None:
            self.states.assign(plan.snapshots)
        self.relocation_version = plan.relocation_version

    def copy_drafts(self, host: Tensor) -> None:
        """Copies the tokens after the known ones of every row to the host, int32 ``[R, max_draft]``, without a wait."""
        places = (self.known_len[:, None] + self._ahead).clamp_(max=self.max_len - 1)
        host.copy_(self.tokens.gather(1, places), non_blocking=True)

    def warm_up(self, num_tokens: int) -> None:
        """Gives each row one known token and pages for so many, before any request has a row or a page.

        All rows share these pages and compute the same, so that no two tokens of a row share a slot. Those of a row that
        pads a batch may: the padding page has no more slots than any page.
        """
        num_pages = min(-(-num_tokens // self.page_size), self.num_pages - 1, self.page_table.shape[1])
        if self.windows is not None:
            num_pages = min(num_pages, self.windows.page_owner.shape[0] - 1)
        pages = slice(PADDING_PAGE + 1, PADDING_PAGE + 1 + num_pages)
        self.tokens[1:, :num_tokens].zero_()
        self.computed_len[1:].zero_()
        self.known_len[1:].fill_(1)
        if self.states is not None:
            self.states.forget()
        for table, entry_owner, page_owner in self._tables():
            table[1:, :num_pages] = torch.arange(pages.start, pages.stop, device=self.device)
            entry_owner[1:, :num_pages].zero_()
            page_owner[pages].zero_()

    def forget(self) -> None:
        """Resets all rows and pages."""
        for lengths in (self.tokens, self.computed_len, self.known_len, self.taken_len):
            lengths.zero_()
        if self.states is not None:
            self.states.forget()
        for table, entry_owner, page_owner in self._tables():
            table.fill_(PADDING_PAGE)
            entry_owner.fill_(NO_OWNER)
            page_owner.fill_(NO_OWNER)
            page_owner[PADDING_PAGE] = 0  # not NO_OWNER: an entry never written is not owned

    def _tables(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns the tables of each space, with the owners of their entries and of the pages."""
        tables = [(self.page_table, self.entry_owner, self.page_owner)]
        if self.windows is not None:
            tables.append((self.windows.table, self.windows.entry_owner, self.windows.page_owner))
        return tables

    def _clear(self, release: Int32Array, admit: Sequence[RowAdmit]) -> None:
        """Resets rows, so that no entry of their last request is valid for the next."""
        host_rows = np.concatenate((release, np.array([each.row for each in admit], dtype=np.int32)))
        (rows,) = upload((host_rows.astype(np.int64),), self.device)
        self.computed_len.index_fill_(0, rows, 0)
        self.known_len.index_fill_(0, rows, 0)
        self.taken_len.index_fill_(0, rows, 0)
        if self.states is not None:
            self.states.clear(rows, host_rows.tolist())
        for table, entry_owner, _ in self._tables():
            table.index_fill_(0, rows, PADDING_PAGE)
            entry_owner.index_fill_(0, rows, NO_OWNER)

    def _admit(self, admit: Sequence[RowAdmit]) -> None:
        host_rows = np.array([each.row for each in admit], dtype=np.int64)
        known = np.array([each.tokens.size for each in admit], dtype=np.int64)
        computed = np.array([each.num_computed for each in admit], dtype=np.int64)
        assert (host_rows > 0).all(), "row 0 is the padding row and takes no request"
        assert (computed < known).all(), f"rows {host_rows} have {known} tokens of which {computed} are computed"
        assert (known <= self.max_len).all(), f"rows {host_rows} have {known} tokens; a row holds {self.max_len}"
        columns = upload((host_rows, known, computed, *(each.tokens for each in admit)), self.device)
        rows, known_len, computed_len, *tokens = columns
        self.known_len.index_copy_(0, rows, known_len)
        self.computed_len.index_copy_(0, rows, computed_len)
        if self.states is not None:
            self.states.admit(admit, rows, computed_len)
        if self.state.trees is not None:
            constrained = np.array([each.sampling.grammar is not None for each in admit])
            self.state.trees.is_chain.index_copy_(0, rows, *upload((constrained,), self.device))
        for each, prompt in zip(admit, tokens, strict=True):
            self.tokens[each.row, : each.tokens.size].copy_(prompt)
        self.sampling.write(admit)

    def _write_table(self, writes: TableWrites) -> None:
        low, high = int(writes.pages.min()), int(writes.pages.max())
        assert PADDING_PAGE < low <= high < self.num_pages, f"pages {low} to {high} of a pool of {self.num_pages}"
        flat = writes.rows.astype(np.int64) * self.page_table.shape[1] + writes.indices
        has_flags = self.is_drafted is not None
        new = writes.pages[writes.are_new].astype(np.int64) if has_flags and writes.are_new.size else flat[:0]
        entries, pages, owners, new_pages = upload((flat, writes.pages, writes.owners, new), self.device)
        if self.is_drafted is not None and new.size:
            self.is_drafted.index_fill_(0, new_pages, 0)
        self.page_table.view(-1).index_copy_(0, entries, pages)
        self.entry_owner.view(-1).index_copy_(0, entries, owners)
        self.page_owner.index_copy_(0, pages.long(), owners)

    def _write_window_table(self, writes: TableWrites) -> None:
        windows = self.windows
        assert windows is not None, "a plan for layers with pages of their own"
        flat = writes.rows.astype(np.int64) * windows.table.shape[1] + writes.indices
        entries, pages, owners = upload((flat, writes.pages, writes.owners), self.device)
        windows.table.view(-1).index_copy_(0, entries, pages)
        windows.entry_owner.view(-1).index_copy_(0, entries, owners)
        windows.page_owner.index_copy_(0, pages.long(), owners)


def _windows(page_table: Tensor, num_pages: int, size: int) -> WindowTensors:
    """Returns room for window tables of the shape of page tables."""
    return WindowTensors(
        table=torch.empty_like(page_table),
        entry_owner=torch.empty_like(page_table),
        page_owner=torch.empty(num_pages, dtype=torch.int32, device=page_table.device),
        size=size,
    )


def _chains(num_rows: int, max_draft: int, max_depth: int, device: torch.device) -> TreeTensors:
    """Returns room for trees, which are chains until something drafts."""
    masks = (2 << torch.arange(1 + max_draft, device=device)) - 1
    return TreeTensors(masks.repeat(num_rows, 1), torch.zeros(num_rows, dtype=torch.bool, device=device), max_depth)
