"""KV events on the wire: what routers decode, and what a replay has."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest

from hiserve.core.digest import chain, namespace_digest, pack_tokens
from hiserve.engine.kv_event_sender import KvEventLog
from hiserve.ipc.kv_events import Cleared, Removed, Stored, block_hashes, encode_batch

PAGE_SIZE = 2
KEY = pack_tokens(np.arange(6, dtype=np.int32))
DIGESTS = chain(namespace_digest("model"), KEY, PAGE_SIZE)


def hashes(digests: list[bytes]) -> list[int]:
    return [struct.unpack(">q", digest[:8])[0] for digest in digests]


def test_a_batch_is_a_list_of_time_events_and_rank_and_its_events_are_maps_with_a_type() -> None:
    changes = [
        Cleared(),
        Stored("GPU", None, b"".join(DIGESTS[:2]), KEY[:16]),
        Stored("CPU_PINNED", DIGESTS[1], DIGESTS[2], KEY[16:]),
        Removed("GPU", b"".join(DIGESTS)),
    ]
    assert msgspec.msgpack.decode(encode_batch(12.5, changes, PAGE_SIZE, 3)) == [
        12.5,
        [
            {"type": "AllBlocksCleared"},
            {
                "type": "BlockStored",
                "block_hashes": hashes(DIGESTS[:2]),
                "parent_block_hash": None,
                "token_ids": [0, 1, 2, 3],
                "block_size": 2,
                "medium": "GPU",
                "lora_id": None,
                "lora_name": None,
            },
            {
                "type": "BlockStored",
                "block_hashes": hashes(DIGESTS[2:]),
                "parent_block_hash": hashes(DIGESTS)[1],
                "token_ids": [4, 5],
                "block_size": 2,
                "medium": "CPU_PINNED",
                "lora_id": None,
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": hashes(DIGESTS), "medium": "GPU"},
        ],
        3,
    ]


def test_a_heartbeat_is_a_batch_without_events() -> None:
    assert msgspec.msgpack.decode(encode_batch(1.0, (), PAGE_SIZE, 0)) == [1.0, [], 0]


def test_hashes_are_signed_and_have_the_first_byte_in_front() -> None:
    digests = bytes([0x80, *bytes(15)]) + bytes([0] * 7 + [2] + [9] * 8)
    assert block_hashes(digests) == [-(2**63), 2]


def number(value: int) -> bytes:
    return struct.pack(">q", value)


END = (number(-1), b"")


def test_a_replay_has_what_was_kept_from_a_number_on_and_an_end() -> None:
    history = KvEventLog(max_batches=3)
    assert list(history.answer(number(0))) == [END]
    assert [history.add(b"%d" % i) for i in range(5)] == [number(i) for i in range(5)]
    assert list(history.answer(number(3))) == [(number(3), b"3"), (number(4), b"4"), END]
    assert [payload for _, payload in history.answer(number(0))] == [b"2", b"3", b"4", b""]
    assert list(history.answer(number(5))) == [END]


def test_heartbeats_and_lost_batches_take_numbers_and_no_room() -> None:
    history = KvEventLog(max_batches=2)
    history.add(b"first")
    for _ in range(10):
        history.add(b"", keep=False)
    history.skip(4)
    assert history.add(b"second") == number(15)
    assert list(history.answer(number(0))) == [(number(0), b"first"), (number(15), b"second"), END]


@pytest.mark.parametrize("request_frame", [b"", b"1", bytes(7), bytes(9), bytes(100)])
def test_nonsense_is_answered_by_the_end_alone(request_frame: bytes) -> None:
    history = KvEventLog()
    history.add(b"first")
    assert list(history.answer(request_frame)) == [END]
