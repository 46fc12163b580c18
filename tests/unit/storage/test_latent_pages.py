"""Rows that are key and value in one: moved once, and values are views of them, on both sides of a transfer."""

from __future__ import annotations

import msgspec
import torch

from hiserve.core.kv_groups import CacheGroupSpec
from tests.helpers.transfers import THREAD, TransferBench

ROW, VALUE = 6, 4
GROUPS = (
    CacheGroupSpec(
        name="kv", num_layers=2, num_kv_heads=1, head_dim=ROW, dtype="float32", codec="latent", value_dim=VALUE
    ),
    CacheGroupSpec(name="draft", num_layers=1, num_kv_heads=2, head_dim=3, dtype="bfloat16"),
)


def test_rows_survive_the_way_to_the_host_and_back() -> None:
    bench = TransferBench(THREAD, groups=GROUPS)
    try:
        layers = bench.device.layers("kv")
        for kv in layers:
            assert kv.v.shape == (*kv.k.shape[:-1], VALUE)
            assert kv.v.data_ptr() == kv.k.data_ptr()
        before = bench.device.storage("kv").clone()
        bench.store(1, [3, 5], [2, 7])
        bench.acks(1)
        assert [tuple(kv.v.shape) for kv in bench.host.layers("kv")] == [(12, 4, 1, VALUE)] * 2
        bench.device.storage("kv").fill_(torch.nan)
        bench.load(2, [8, 1], [2, 7])
        assert [ack.is_ok for ack in bench.acks(1)] == [True]
        after, pages = bench.device.storage("kv"), before.shape[2] // 12
        for source, target in ((3, 8), (5, 1)):
            mine, theirs = (slice(page * pages, (page + 1) * pages) for page in (source, target))
            assert torch.equal(after[:, :, theirs], before[:, :, mine])
        assert after.isnan().sum() == after.numel() * 10 // 12
    finally:
        bench.close()


RARE = msgspec.structs.replace(GROUPS[0], name="rare", num_layers=3, ratio=2)


def test_a_row_that_stands_for_several_tokens_survives_it_too() -> None:
    """Its pages have fewer rows on both sides, and none of them are those of other groups."""
    bench = TransferBench(THREAD, groups=(*GROUPS, RARE))
    try:
        before = {group.name: bench.device.storage(group.name).clone() for group in bench.groups}
        assert before["rare"].shape[2] * 2 == before["kv"].shape[2]
        assert bench.host.layers("rare")[2].k.shape == (12, 2, 1, ROW)
        bench.store(1, [3, 5], [2, 7])
        bench.acks(1)
        for name in before:
            bench.device.storage(name).fill_(torch.nan)
        bench.load(2, [8, 1], [2, 7])
        assert [ack.is_ok for ack in bench.acks(1)] == [True]
        for name, rows in before.items():
            after, pages = bench.device.storage(name), rows.shape[2] // 12
            for source, target in ((3, 8), (5, 1)):
                mine, theirs = (slice(page * pages, (page + 1) * pages) for page in (source, target))
                assert torch.equal(after[:, :, theirs], rows[:, :, mine]), name
            assert after.isnan().sum() == after.numel() * 10 // 12
    finally:
        bench.close()
