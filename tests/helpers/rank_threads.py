"""Ranks in threads of the test's process, where starting one costs nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from hiserve.engine import ranks
from hiserve.engine.rank import follow
from hiserve.engine.rank_messages import Setup, StopRank, encode
from hiserve.ipc.frames import FrameSocket

JOIN_S = 60.0


class RankThread:
    """As ``RankProcess``."""

    pid = 0

    def __init__(self, setup: Setup) -> None:
        self.number = setup.rank
        self.socket, theirs = FrameSocket.pair()
        end = FrameSocket(theirs)

        def run() -> None:
            follow(setup, end, lambda: None)
            end.close()

        self._thread = threading.Thread(target=run, name=f"rank-{setup.rank}", daemon=True)
        self._thread.start()

    def how_it_ended(self) -> str:
        return "a thread that ended"

    def close(self) -> None:
        with suppress(OSError):  # it has ended
            self.socket.send(encode(StopRank()))
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), f"rank {self.number} goes on"
        self.socket.close()


@contextmanager
def rank_threads() -> Iterator[None]:
    """Within, groups have their other ranks in threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "RankProcess", RankThread)
        yield
