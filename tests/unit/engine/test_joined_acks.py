"""Copies of a group have ended when all ranks have ended them (S6)."""

from __future__ import annotations

from itertools import permutations

import pytest

from hiserve.core.transfers import CopyAck
from hiserve.engine.joined_acks import JoinedAcks


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_an_order_ends_with_its_last_rank_and_fails_with_its_first_failure(order: tuple[int, ...]) -> None:
    joined = JoinedAcks(3)
    acks = [CopyAck(7, num_bytes=64, seconds=1.0), CopyAck(7, reason="broken"), CopyAck(7, num_bytes=64, seconds=2.0)]
    for index in order:
        assert joined.take() == []
        joined.add([acks[index], CopyAck(8, num_bytes=index, num_pages=(3, 0, 2)[index])])
    failed, done = joined.take()
    assert (failed.op, failed.reason, failed.seconds) == (7, "broken", 2.0)
    assert done.num_pages == 0
    assert done.op == 8 and done.is_ok
    assert joined.take() == []
