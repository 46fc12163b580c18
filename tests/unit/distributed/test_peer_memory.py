"""Memory that ranks map from each other, by a driver that refuses where a test says so."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from hiserve.distributed.peer_memory import CudaDriver, PeerMemory, map_memory
from hiserve.distributed.shard import Shard

SIZE, NUM_BYTES = 3, 1024


class FakeDriver:
    """Of one rank. Addresses in its process tell rank and owner; all calls of all ranks are in one list."""

    def __init__(self, rank: int, refuses: str, calls: list[str]) -> None:
        self._rank, self._refuses, self._calls = rank, refuses, calls

    def allocate(self, num_bytes: int) -> int:
        assert num_bytes == NUM_BYTES
        self._note(f"{self._rank} allocates")
        return self._at(self._rank)

    def free(self, address: int) -> None:
        assert address == self._at(self._rank)
        self._note(f"{self._rank} frees")

    def handle_of(self, address: int) -> bytes:
        assert address == self._at(self._rank)
        self._note(f"{self._rank} gives a handle")
        return bytes([0, 255, self._rank])

    def open(self, handle: bytes) -> int:
        assert handle[:2] == b"\0\xff" and len(handle) == 3
        self._note(f"{self._rank} opens {handle[2]}")
        return self._at(handle[2])

    def close(self, address: int) -> None:
        self._note(f"{self._rank} closes {address % 10}")

    def _at(self, owner: int) -> int:
        return 10 * (1 + self._rank) + owner

    def _note(self, call: str) -> None:
        if call == self._refuses:
            raise RuntimeError(f"{call}: refused")
        self._calls.append(call)


def mapped(refuses: str = "") -> tuple[list[PeerMemory | str], list[str]]:
    """Returns what each rank got, and all calls."""
    store, calls, found = dist.HashStore(), list[str](), dict[int, PeerMemory | str]()  # type: ignore[attr-defined]

    def run(rank: int) -> None:
        found[rank] = map_memory(FakeDriver(rank, refuses, calls), store, Shard(rank, SIZE), NUM_BYTES)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return [found[rank] for rank in range(SIZE)], calls


def test_each_rank_has_the_memory_of_all() -> None:
    found, calls = mapped()
    for rank, memory in enumerate(found):
        assert isinstance(memory, PeerMemory)
        assert memory.addresses == [10 * (1 + rank) + owner for owner in range(SIZE)]
    calls.clear()
    for memory in reversed(found):
        assert isinstance(memory, PeerMemory)
        memory.close()
    # Others are freed by the end of their process: the first rank has them mapped until then.
    assert calls == ["2 closes 0", "2 closes 1", "1 closes 0", "1 closes 2", "0 closes 1", "0 closes 2", "0 frees"]


@pytest.mark.parametrize("refuses", ["1 allocates", "2 gives a handle", "0 opens 2"])
def test_what_one_rank_cannot_map_no_rank_has(refuses: str) -> None:
    found, calls = mapped(refuses)
    assert found == [f"rank {refuses[0]}: {refuses}: refused"] * SIZE
    made = {call.replace("opens", "closes").replace("allocates", "frees") for call in calls if "handle" not in call}
    ended = [call for call in calls if "closes" in call or "frees" in call]
    assert made == set(ended) and len(made) == len(ended)
    first_freed = next(number for number, call in enumerate(ended) if "frees" in call)
    assert all("frees" in call for call in ended[first_freed:])


@pytest.mark.parametrize("refused", ["cuMemAlloc_v2", "cuMemsetD8_v2", "cuCtxSynchronize"])
def test_memory_that_is_not_cleared_is_freed(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Library:
        def __getattr__(self, name: str) -> Callable[..., int]:
            made.append(name)
            return lambda *args: 2 * (name == refused)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    with pytest.raises(RuntimeError, match=f"{refused} answered 2"):
        CudaDriver().allocate(NUM_BYTES)
    assert made.count("cuMemFree_v2") == (refused != "cuMemAlloc_v2")
