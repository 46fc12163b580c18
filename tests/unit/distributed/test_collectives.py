"""Exchanges over gloo: equal bits on all ranks, and no open door."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hiserve.core.devices import prepare_nccl
from hiserve.distributed import collectives
from hiserve.distributed.collectives import Collectives
from hiserve.distributed.exchange import Exchanged
from hiserve.distributed.shard import Shard
from hiserve.kernels import reference
from tests.helpers.gloo import CPU, together

VOCABULARY = 300  # of which the last rank has fewer tokens than its share


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_logits_have_the_same_bits_everywhere(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    parts, residual = torch.randn((size, 5, 32)).to(dtype), torch.randn((5, 32)).to(dtype)
    logits, weight = torch.randn((4, VOCABULARY)).to(dtype), torch.rand(32).to(dtype)

    def work(exchange: Collectives) -> tuple[torch.Tensor, ...]:
        stream, shard = residual.clone(), exchange.shard
        normed = exchange.reduce_add_norm(parts[shard.rank].clone(), stream, weight, 1e-6)
        begin, end = shard.tokens(VOCABULARY)
        gathered = exchange.gather_columns(logits[:, begin:end], VOCABULARY)
        nothing = exchange.gather_columns(logits[:0, begin:end], VOCABULARY), exchange.sum(parts[0, :0])
        assert [each.shape for each in nothing] == [(0, VOCABULARY), (0, 32)]
        assert torch.equal(exchange.gather(parts[shard.rank]), parts)
        with exchange.paused():
            assert torch.equal(exchange.gather(parts[0])[-1], parts[0])  # nothing that no rank might have
        return normed, stream, gathered

    first, *others = together(tmp_path, size, work)
    for other in others:
        assert all(torch.equal(mine, its) for mine, its in zip(first, other, strict=True))
    expected = residual.clone()
    normed = reference.add_rms_norm(parts.float().sum(0).to(dtype), expected, weight, 1e-6)
    close = {"rtol": 0.02, "atol": 0.05} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(first[0], normed, **close)
    torch.testing.assert_close(first[1], expected, **close)
    assert torch.equal(first[2], logits)


def listening(path: str) -> dict[str, str]:
    """Returns the address of each socket of this machine that listens, by inode."""
    rows = [line.split() for line in Path(path).read_text().splitlines()[1:]]
    return {row[9]: row[1].partition(":")[0] for row in rows if row[3] == "0A"}


def test_a_group_listens_on_loopback_alone(tmp_path: Path) -> None:
    def work(exchange: Collectives) -> set[str]:
        ours = {
            link.readlink().name.removeprefix("socket:[").rstrip("]")
            for link in Path("/proc/self/fd").iterdir()
            if link.is_symlink()
        }
        found = listening("/proc/self/net/tcp") | listening("/proc/self/net/tcp6")
        exchange.sum(torch.zeros(1))  # nobody has left yet
        return {address for inode, address in found.items() if inode in ours}

    loopback = "0100007F"
    assert together(tmp_path, 2, work)[0] <= {loopback}


def test_a_collective_that_is_on_the_stream_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's, which return nothing then."""
    done: list[str] = []
    group = SimpleNamespace(
        allreduce=lambda tensors, _: done.append("sum"), _allgather_base=lambda parts, x, _: done.append("gather")
    )
    monkeypatch.setattr(collectives, "_open", lambda *_: group)
    exchange = Collectives(Shard(0, 2), CPU, tmp_path / "rendezvous")
    exchange.sum(torch.ones(2, 3))
    exchange.gather_columns(torch.ones(2, 192), VOCABULARY)
    assert done == ["sum", "sum", "gather"]


class FakePush:
    """Doubles up to two rows, as two ranks with the same rows would have them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def takes(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= 2

    def sum(self, x: torch.Tensor) -> None:
        self.calls.append("sum")
        x.mul_(2)

    def add_norm(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        self.calls.append("add_norm")
        out.copy_(reference.add_rms_norm(2 * delta, residual, weight, eps))

    def abort(self) -> None:
        self.calls.append("abort")

    def close(self) -> None:
        self.calls.append("close")


def test_few_rows_are_pushed_and_noted_as_any_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank owes the others of a step that failed goes the same way."""
    collected: list[int] = []
    group = SimpleNamespace(allreduce=lambda tensors, _: collected.append(tensors[0].shape[0]))
    monkeypatch.setattr(collectives, "_open", lambda *_: group)
    exchange, push = Collectives(Shard(0, 2), CPU, tmp_path / "rendezvous", may_push=True), FakePush()
    assert exchange._push is None  # on a CPU
    exchange._push = push  # type: ignore[assignment]
    collected.clear()
    exchange.expect([Exchanged("sum", rows, 4, torch.float32) for rows in (2, 1, 3, 3, 2, 3)])
    weight, residual = torch.ones(4), torch.ones(2, 4)
    normed = exchange.reduce_add_norm(torch.full((2, 4), 3.0), residual, weight, 0.0)
    assert residual.unique().tolist() == [7.0] and normed.unique().tolist() == [1.0]
    assert exchange.sum(torch.ones(1, 4)).unique().tolist() == [2.0]
    exchange.reduce_add_norm(torch.ones(3, 4), torch.ones(3, 4), weight, 0.0)
    exchange.sum(torch.ones(3, 4))
    with exchange.paused():
        exchange.sum(torch.ones(1, 4))
        exchange.reduce_add_norm(torch.ones(1, 4), residual[:1], weight, 0.0)
    exchange.reduce_add_norm(torch.ones(0, 4), torch.ones(0, 4), weight, 0.0)
    exchange.finish()
    exchange.expect(None)
    exchange.abort()
    exchange.close()
    assert push.calls == ["add_norm", "sum", "sum", "abort", "close"] and collected == [3, 3, 3]


def test_a_rank_issues_what_no_graph_that_it_launched_holds(tmp_path: Path) -> None:
    """Of three exchanges the graph that is launched holds the first two; the other rank issues all by itself."""

    def work(exchange: Collectives) -> list[float]:
        expected = [Exchanged("sum", rows, 2, torch.float32) for rows in (1, 2, 3)]
        exchange.expect(expected)
        sums = [torch.full((each.rows, each.columns), 1.0) for each in expected]
        if exchange.shard.rank:
            exchange.begin_graph()
            for each in sums[:2]:
                exchange.sum(each)
            held = exchange.end_graph()
            assert held == tuple(expected[:2])
            exchange.replayed(held)
            exchange.finish()
        else:
            for each in sums:
                exchange.sum(each)
        exchange.expect(None)
        return [float(each[0, 0]) for each in sums]

    assert together(tmp_path, 2, work) == [[2.0, 2.0, 1.0], [2.0, 2.0, 1.0]]


def test_settings_of_nccl_are_those_of_the_user_if_there_are_any() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "eth0"}
    prepare_nccl(environment)
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"
    assert (environment["NCCL_RAS_ENABLE"], environment["NCCL_GRAPH_REGISTER"]) == ("0", "0")
