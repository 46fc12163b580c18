"""Encoding is lossless, and decoding refuses everything else with one typed error."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiserve.config.settings import Settings
from hiserve.core.digest import split_digests
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.ipc.codec import MalformedError, MessageDecoder, encode
from hiserve.ipc.messages import (
    Abort,
    Admit,
    Configure,
    Failed,
    FromWorker,
    Generate,
    Ready,
    Status,
    StepReport,
    ToClient,
    ToScheduler,
    ToWorker,
    WorkerFacts,
    WorkerStats,
)
from hiserve.ipc.updates import RequestUpdates, TokenDelta
from tests.helpers.settings import settings_of

TOKENS = np.array([1, 2, 2**31 - 1, 0], dtype=np.int32)
SCORES = b"0123456789ab"


def report(**changes: object) -> StepReport:
    updates = RequestUpdates(failed=[(9, "engine_error", "no")], published=b"p" * 32, removed=b"r" * 16)
    updates.add(
        TokenDelta([1, 2, 2**31 - 1], scores=SCORES[:8], uid=5, cached=CacheUse(16, 8, 4, "cold", 28), queue_s=0.5),
        TokenDelta([0], FinishReason.LENGTH, SCORES[8:], 6, drafts=DraftUse(2, 6, (2, 1, 0))),
    )
    return StepReport(3, msgspec.structs.replace(updates, **changes), WorkerStats(running=2))


def test_a_message_with_tokens_survives_the_wire() -> None:
    message = Generate(7, SamplingParams(temperature=0.5, seed=2**63 - 1), b"\x00tenant", 1)
    received = MessageDecoder[ToScheduler](ToScheduler).decode(encode(message, TOKENS))
    assert received.message == message
    assert received.tokens.tolist() == TOKENS.tolist()
    assert received.tokens.dtype == np.int32


def test_a_report_carries_tokens_scores_and_both_lists_of_digests() -> None:
    message = MessageDecoder[FromWorker](FromWorker).decode(encode(report())).message
    assert message == report()
    assert isinstance(message, StepReport)
    updates = message.updates
    assert updates.tokens.tolist() == TOKENS.tolist()
    assert updates.scores == SCORES
    assert split_digests(updates.published) == [b"p" * 16, b"p" * 16]
    assert updates.removed == b"r" * 16


def test_a_configuration_survives_the_wire() -> None:
    message = Configure(settings=settings_of(), replica=1, incarnation=2)
    assert MessageDecoder[ToWorker](ToWorker).decode(encode(message)).message == message
    assert MessageDecoder[Settings](Settings).decode(encode(settings_of())).message == settings_of()


def test_tokens_that_are_a_strided_view_are_sent_in_order() -> None:
    admit = Admit(1, 2, SamplingParams(seed=1), b"", 0)
    received = MessageDecoder[ToWorker](ToWorker).decode(encode(admit, TOKENS[::2]))
    assert received.tokens.tolist() == [1, 2**31 - 1]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"not msgpack"],
        [*encode(Abort([1]))[:1], b"surplus"],
        encode(Generate(1, SamplingParams()), TOKENS)[:1],
        [encode(Generate(1, SamplingParams()), TOKENS)[0], b"\x00" * 7],
        encode(Failed(1, 500, "x", "wrong direction")),
        [msgspec.msgpack.encode(["Abort", [1.5]])],
        [msgspec.msgpack.encode(["Abort", ["one"]])],
        [msgspec.msgpack.encode(["Generate", 1, {"temperature": -1.0}, b"", 0]), b""],
        [msgspec.msgpack.encode(["Generate", 1, {"unknown": 1}, b"", 0]), b""],
    ],
)
def test_malformed_frames_raise_one_typed_error(frames: list[bytes]) -> None:
    with pytest.raises(MalformedError):
        MessageDecoder[ToScheduler](ToScheduler).decode(frames)


@pytest.mark.parametrize(
    "changes",
    [
        {"uids": [5]},
        {"counts": [3]},
        {"counts": [5, -1]},
        {"counts": [3, 2]},
        {"finishes": [0, 9]},
        {"finishes": [-1, 0]},
        {"cached": []},
        {"drafts": [None]},
        {"score_words": [3]},
        {"score_words": [4, -1]},
        {"score_words": [2, 2]},
        {"score_words": [2, 0]},
        {"uids": [5, 5]},
        {"failed": [(6, "engine_error", "ended twice")]},
        {"failed": [(8, "a", "b"), (8, "a", "b")]},
        {"queue_s": []},
        {"token_bytes": bytes(15)},
        {"scores": bytes(13)},
        {"published": b"p" * 17},
        {"removed": b"r" * 15},
    ],
)
def test_columns_that_contradict_each_other_are_malformed(changes: dict[str, object]) -> None:
    updates = report(**changes).updates
    with pytest.raises(MalformedError):
        MessageDecoder[FromWorker](FromWorker).decode(encode(report(**changes)))
    with pytest.raises(MalformedError):
        MessageDecoder[ToClient](ToClient).decode(encode(updates))


def test_output_reaches_the_client_as_the_worker_wrote_it() -> None:
    updates = report().updates
    assert MessageDecoder[ToClient](ToClient).decode(encode(updates)).message == updates


def test_an_error_keeps_the_struct_that_could_be_read() -> None:
    frames = encode(Generate(41, SamplingParams()), TOKENS)
    with pytest.raises(MalformedError) as caught:
        MessageDecoder[ToScheduler](ToScheduler).decode([frames[0], b"\x00"])
    assert caught.value.message == Generate(41, SamplingParams())


def test_sending_a_message_without_its_array_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="needs tokens"):
        encode(Generate(1, SamplingParams()))


VALID = [
    encode(Generate(7, SamplingParams(), b"x", 1), TOKENS),
    encode(report()),
    encode(report().updates),
    encode(Abort([1, 2**40])),
    encode(Configure(settings=settings_of(), replica=1, incarnation=2)),
    encode(Admit(1, 2, SamplingParams(seed=1, stop=("a",), logit_bias={5: 1.0}), b"n" * 16, 0), TOKENS),
    encode(Ready(1, 1, 4, 64, 10, 16, b"n" * 16, {"load": 1.0})),
    encode(Status(1, 1, 1, [WorkerFacts(0, 1, 1, {"load": 1.0}, 1, WorkerStats())])),
    encode(Failed(1, 500, "x", "broke")),
]
KINDS = [MessageDecoder[object](kinds) for kinds in (ToScheduler, ToClient, ToWorker, FromWorker, Settings)]


def decode_everywhere(frames: list[bytes]) -> None:
    """Whatever may arrive anywhere is decoded or refused with the one typed error."""
    for decoder in KINDS:
        with contextlib.suppress(MalformedError):
            decoder.decode(frames)


@st.composite
def damaged(draw: st.DrawFn) -> list[bytes]:
    """A valid message after a few changes, insertions, cuts and repetitions, in it and among its frames."""
    frames = [bytearray(frame) for frame in draw(st.sampled_from(VALID))]
    for _ in range(draw(st.integers(1, 5))):
        if not frames:
            break
        at = draw(st.integers(0, len(frames) - 1))
        frame = frames[at]
        first = draw(st.integers(0, len(frame)))
        last = min(len(frame), first + draw(st.integers(0, 8)))
        match draw(st.sampled_from(["change", "insert", "cut", "repeat", "frame", "lose", "swap"])):
            case "change":
                frame[first:last] = draw(st.binary(min_size=last - first, max_size=last - first))
            case "insert":
                frame[first:first] = draw(st.binary(max_size=9))
            case "cut":
                del frame[first:]
            case "repeat":
                frame[first:first] = frame[first:last]
            case "frame":
                frames.insert(at, bytearray(draw(st.binary(max_size=24))))
            case "lose":
                del frames[at]
            case "swap":
                frames.append(frames.pop(at))
    return [bytes(frame) for frame in frames]


@settings(max_examples=600, deadline=None)
@given(damaged())
def test_no_damage_to_a_message_raises_anything_else(frames: list[bytes]) -> None:
    decode_everywhere(frames)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=5))
def test_random_frames_raise_nothing_else(frames: list[bytes]) -> None:
    decode_everywhere(frames)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x91" * 100_000,  # an array in an array in an array
        b"\x81\xa1a" * 50_000,
        b"\x93\xa5Abort\x90" + b"\x91" * 100_000,  # behind the last field
        b"\x92\xa5Abort\xdd\xff\xff\xff\xff",  # announces four thousand million
        b"\x92\xa5Abort\xc6\xff\xff\xff\xff",
        b"\x92\xa5Abort\x91\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
)
def test_neither_depth_nor_announced_sizes_get_through(frame: bytes) -> None:
    decode_everywhere([frame])
