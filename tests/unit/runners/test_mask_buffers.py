"""Memory for masks: lent, sent, read by draws, free again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hiserve.core.plan import NO_MASK, MaskPlan
from hiserve.kernels import step_reference
from hiserve.runners.device_rows import MaskBuffers

NUM_ENTRIES, VOCAB_SIZE = 6, 70


@pytest.fixture
def masks() -> MaskBuffers:
    return MaskBuffers(NUM_ENTRIES, VOCAB_SIZE, torch.device("cpu"))


def test_draws_read_what_was_lent_and_all_rows_are_free_before_and_afterwards(masks: MaskBuffers) -> None:
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32).expand(4, -1)
    static = masks.of(4)  # as a graph holds it

    def drawn() -> list[int]:
        found: list[int] = step_reference.greedy(logits, static).tolist()
        return found

    last = VOCAB_SIZE - 1
    assert drawn() == [last] * 4
    for step, token in enumerate((3, 40, 69)):
        entries, words = masks.lend(4, 2)
        assert entries.shape == (4,) and words.shape == (2, 3) and (entries == NO_MASK).all()
        words[:] = 0
        words[1, token // 32] = 1 << token % 32
        entries[2] = 1
        masks.send(MaskPlan(step, entries, words))
        assert drawn() == [last, last, token, last]
        masks.free()
        assert drawn() == [last] * 4


def test_there_are_no_more_masks_than_rows_of_logits(masks: MaskBuffers) -> None:
    assert masks.lend(NUM_ENTRIES, NUM_ENTRIES)[1].dtype == np.int32
    for num_entries, num_masks in ((NUM_ENTRIES + 1, 1), (2, 3)):
        with pytest.raises(AssertionError, match="rows of logits"):
            masks.lend(num_entries, num_masks)
    with pytest.raises(AssertionError, match="rows of logits"):
        masks.of(NUM_ENTRIES + 1)
