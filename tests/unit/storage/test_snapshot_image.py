"""The image of a snapshot: the pieces that the copy engine moves are the bytes that the CPU moves."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import SnapshotImage
from tests.helpers.transfers import CARRIED, GROUPS

SLOT, FRAMES = 2, np.array([3, 1, 6, 4, 0, 8, 2, 9, 7, 10, 5], dtype=np.int32)


@pytest.mark.parametrize("frame_bytes", [256, 448, 1024, 1 << 20])
def test_pieces_between_device_and_frames_are_the_parts_of_the_image(frame_bytes: int) -> None:
    carried = DevicePool((*GROUPS, *CARRIED), 4, 4, "cpu", 0, 2, 5).carried
    for each in carried.values():
        each.snapshots.copy_(torch.randn(each.snapshots.shape))
    layout = SnapshotImage((*GROUPS, *CARRIED))
    frames = FRAMES[: layout.frames_of(frame_bytes)]
    assert frames.size == -(-layout.num_bytes // frame_bytes)
    image = torch.zeros(frames.size * frame_bytes, dtype=torch.uint8)
    for kept, part in layout.parts(image, carried, SLOT):
        part.copy_(kept)
    host = torch.zeros((1 + int(FRAMES.max()), frame_bytes), dtype=torch.uint8)
    for address, offset, size in zip(*layout.runs(carried, SLOT, frames, frame_bytes), strict=True):
        assert int(offset) // frame_bytes == int(offset + size - np.uint64(1)) // frame_bytes, "a piece of two frames"
        ctypes.memmove(host.data_ptr() + int(offset), int(address), int(size))
    assert torch.equal(host[frames].view(-1), image)


def test_a_model_without_states_has_no_image() -> None:
    layout = SnapshotImage(GROUPS)
    assert (layout.num_bytes, layout.frames_of(64)) == (0, 0)
