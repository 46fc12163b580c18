"""INV-36 for routers outside: what they are told, read as it goes over the wire, is what each tier can give."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence

import numpy as np

from hiserve.engine.kv_event_sender import KvEventSender
from hiserve.ipc.kv_events import Change, encode_batch
from tests.helpers.kv_mirror import Mirror
from tests.invariants.index_model import Place
from tests.invariants.tier_checks import digest


class Direct:
    """A publisher without sockets: a mirror reads each batch at once.

    Args:
        page_size: Tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.mirror = Mirror()
        self.batches: list[bytes] = []

    def put(self, changes: Sequence[Change]) -> None:
        self.batches.append(encode_batch(1.8e9, changes, self.page_size, 0))
        self.mirror.apply(self.batches[-1])

    def close(self) -> None:
        """Nothing is open."""


class Told:
    """A listener for a cache, and the mirror that reads what it publishes."""

    def __init__(self, page_size: int) -> None:
        self.direct = Direct(page_size)
        self.events = KvEventSender(self.direct)  # type: ignore[arg-type]


def inv_36_routers_know_what_each_tier_can_give(told: Told, device: Collection[Place], host: Collection[Place]) -> None:
    told.events.send()
    for medium, places in (("GPU", device), ("CPU_PINNED", host)):
        cached = told.direct.mirror.cached[medium]
        assert cached == {hash_of(place): tokens(place) for place in places}, f"{medium} differs from the tree"
    fresh = Mirror()
    for batch in told.direct.batches:
        fresh.apply(batch)
    assert fresh.cached == told.direct.mirror.cached


def hash_of(place: Place) -> int:
    return int(struct.unpack(">q", digest(place)[:8])[0])


def tokens(place: Place) -> tuple[int, ...]:
    return tuple(np.frombuffer(b"".join(place[1]), dtype="<i4").tolist())
