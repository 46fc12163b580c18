"""Launches that begin early."""

from __future__ import annotations

import pytest
import torch

from hiserve.kernels.launch import early_launch


@pytest.mark.parametrize(
    ("device", "capability", "is_early"),
    [
        ("cpu", (9, 0), False),
        ("cuda", (8, 9), False),
        ("cuda", (9, 0), True),
        ("cuda", (10, 3), True),
    ],
)
def test_kernels_begin_early_where_the_device_can_do_it(
    device: str, capability: tuple[int, int], is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert early_launch(torch.device(device)) == {"IS_EARLY": is_early, "launch_pdl": is_early}
