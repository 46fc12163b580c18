"""Masks of the step that draws next: written by the host while its forward runs, copied to tensors that graphs read."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.core.plan import MASK_BITS, NO_MASK, Int32Array, MaskPlan
from hiserve.core.upload import mapped
from hiserve.kernels.step_ops import TokenMasks


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
