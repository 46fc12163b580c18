"""What the machine says of its devices without torch, beside what torch says."""

from __future__ import annotations

import pytest
import torch

from hiserve.core.machine import free_cuda_bytes
from tests.helpers.cuda import DEVICE

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_free_memory_is_what_torch_says_and_falls_by_what_is_taken() -> None:
    before = free_cuda_bytes()
    assert (
        abs(before - torch.cuda.mem_get_info(DEVICE)[0]) < 2048 * MIB
    )  # the context, and what NVML counts as reserved
    taken = torch.empty(512 * MIB, dtype=torch.uint8, device=DEVICE)
    assert 400 * MIB < before - free_cuda_bytes() < 2048 * MIB
    del taken
    torch.cuda.empty_cache()
