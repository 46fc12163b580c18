"""A router of its own making: reads KV events and knows which prefixes an engine has. Shares no code with the engine."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from tests.helpers.waiting import PATIENCE_S

Prefix = tuple[int, ...]


class Mirror:
    """Applies batches in order, and checks that each makes sense.

    Attributes:
        cached: Per medium, the tokens from the start of the prompt to the end of each block, by its hash.
        known: The same for every block that was ever stored: a block may come while the one before it is on its way.
        num_events: By type.
    """

    def __init__(self) -> None:
        self.cached: dict[str, dict[int, Prefix]] = {"GPU": {}, "CPU_PINNED": {}}
        self.known: dict[int, Prefix] = {}
        self.num_events = {"BlockStored": 0, "BlockRemoved": 0, "AllBlocksCleared": 0}

    def apply(self, payload: bytes, rank: int = 0) -> list[dict[str, Any]]:
        """Takes a batch in; returns its events."""
        seconds, events, named = msgspec.msgpack.decode(payload)
        assert seconds > 1_700_000_000 and named == rank
        for event in events:
            self.num_events[event["type"]] += 1
            getattr(self, event["type"])(**{key: value for key, value in event.items() if key != "type"})
        return list(events)

    def BlockStored(  # noqa: N802 - as on the wire
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        medium: str,
        lora_id: None,
        lora_name: None,
    ) -> None:
        cached = self.cached[medium]
        assert lora_id is lora_name is None
        assert block_hashes and len(token_ids) == block_size * len(block_hashes)
        assert all(-(2**63) <= each < 2**63 for each in block_hashes)
        prefix = () if parent_block_hash is None else self.known[parent_block_hash]
        for i, each in enumerate(block_hashes):
            assert each not in cached, "a block was stored twice"
            prefix = (*prefix, *token_ids[i * block_size : (i + 1) * block_size])
            assert self.known.setdefault(each, prefix) == prefix
            cached[each] = prefix

    def BlockRemoved(self, block_hashes: list[int], medium: str) -> None:  # noqa: N802
        for each in block_hashes:
            del self.cached[medium][each]

    def AllBlocksCleared(self) -> None:  # noqa: N802
        for cached in self.cached.values():
            cached.clear()

    def num_cached(self, prompt: list[int], *media: str) -> int:
        """Counts the leading tokens of a prompt that these media have between them, the last token left out."""
        known = {prefix for medium in media for prefix in self.cached[medium].values()}
        return max((n for n in range(1, len(prompt)) if tuple(prompt[:n]) in known), default=0)


class Reader:
    """Sockets of a router.

    Args:
        events: Endpoint of the events.
        replay: Endpoint of replays.
    """

    def __init__(self, events: str, replay: str | None = None) -> None:
        self._context = zmq.Context()
        self.events = self._context.socket(zmq.SUB)
        self.events.subscribe(b"")
        self.events.connect(events)
        self.replays = self._context.socket(zmq.DEALER)
        if replay is not None:
            self.replays.connect(replay)

    def receive(self, timeout_s: float = PATIENCE_S) -> tuple[int, bytes]:
        """Returns the next batch with its number."""
        assert self.events.poll(timeout_s * 1000), f"nothing was published within {timeout_s} s"
        topic, sequence, payload = self.events.recv_multipart()
        assert topic == b""
        return int(struct.unpack(">Q", sequence)[0]), payload

    def replay(
        self, start: int, *, delimiter: bool = True, timeout_s: float = PATIENCE_S
    ) -> Iterator[tuple[int, bytes]]:
        """Asks for the batches from a number on, as a REQ socket asks or without its delimiter; yields them."""
        before = [b""] if delimiter else []
        self.replays.send_multipart([*before, struct.pack(">Q", start)])
        while True:
            assert self.replays.poll(timeout_s * 1000), f"the replay stopped for {timeout_s} s"
            *envelope, sequence, payload = self.replays.recv_multipart()
            assert envelope == before
            (number,) = struct.unpack(">q", sequence)
            if number == -1:
                assert payload == b""
                return
            yield number, payload

    def close(self) -> None:
        """Closes everything."""
        self.events.close(linger=0)
        self.replays.close(linger=0)
        self._context.term()
