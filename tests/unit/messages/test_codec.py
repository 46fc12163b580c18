"""Encoding is lossless, and decoding refuses everything else with one typed error."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiserve.config import Config
from hiserve.core.draft_use import DraftUse
from hiserve.core.request import SamplingParams
from hiserve.core.reuse import CacheUse
from hiserve.messages.codec import Decoder, MalformedError, encode, split_digests
from hiserve.messages.types import (
    Abort,
    Admit,
    Configure,
    Failed,
    FromWorker,
    Generate,
    StepReport,
    ToClient,
    Tokens,
    ToScheduler,
    ToWorker,
    WorkerStats,
)

TOKENS = np.array([1, 2, 2**31 - 1, 0], dtype=np.int32)
SCORES = b"0123456789ab"


def report(**changes: object) -> StepReport:
    fields = {
        "uids": [5, 6],
        "counts": [3, 1],
        "finishes": [0, 2],
        "cached": [CacheUse(16, 8, 4, "cold", 28), None],
        "drafts": [None, DraftUse(2, 6, (2, 1, 0))],
        "score_words": [2, 1],
        "failed": [(9, "engine_error", "no")],
    }
    return StepReport(incarnation=3, stats=WorkerStats(running=2), **(fields | changes))


def test_a_message_with_tokens_survives_the_wire() -> None:
    message = Generate(7, SamplingParams(temperature=0.5, seed=2**63 - 1), b"\x00tenant", 1)
    received = Decoder[ToScheduler](ToScheduler).decode(encode(message, TOKENS))
    assert received.message == message
    assert received.tokens.tolist() == TOKENS.tolist()
    assert received.tokens.dtype == np.int32
    assert received.published == received.removed == b""


def test_a_report_carries_tokens_scores_and_both_lists_of_digests() -> None:
    received = Decoder[FromWorker](FromWorker).decode(encode(report(), TOKENS, SCORES, b"p" * 32, b"r" * 16))
    assert received.message == report()
    assert received.tokens.tolist() == TOKENS.tolist()
    assert received.scores == SCORES
    assert split_digests(received.published) == [b"p" * 16, b"p" * 16]
    assert received.removed == b"r" * 16


def test_a_configuration_survives_the_wire() -> None:
    message = Configure(config=Config(), replica=1, incarnation=2)
    assert Decoder[ToWorker](ToWorker).decode(encode(message)).message == message
    assert Decoder[Config](Config).decode(encode(Config())).message == Config()


def test_tokens_that_are_a_strided_view_are_sent_in_order() -> None:
    admit = Admit(1, 2, SamplingParams(seed=1), b"", 0)
    received = Decoder[ToWorker](ToWorker).decode(encode(admit, TOKENS[::2]))
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
        Decoder[ToScheduler](ToScheduler).decode(frames)


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
    ],
)
def test_columns_that_contradict_each_other_are_malformed(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedError):
        Decoder[FromWorker](FromWorker).decode(encode(report(**changes), TOKENS, SCORES, b"", b""))


@pytest.mark.parametrize("changes", [{"queue_s": []}, {"drafts": []}, {"score_words": [1]}, {"counts": [3]}])
def test_news_whose_columns_contradict_each_other_is_malformed(changes: dict[str, object]) -> None:
    news = Tokens([1], [4], [1], [CacheUse()], [DraftUse(1, 3, (1, 1, 0))], [3], [0.5])
    frames = encode(news, TOKENS, SCORES)
    received = Decoder[ToClient](ToClient).decode(frames)
    assert (received.message, received.scores) == (news, SCORES)
    with pytest.raises(MalformedError):
        Decoder[ToClient](ToClient).decode(encode(msgspec.structs.replace(news, **changes), TOKENS, SCORES))


def test_digests_cut_short_are_malformed() -> None:
    with pytest.raises(MalformedError, match="digests"):
        Decoder[FromWorker](FromWorker).decode(encode(report(), TOKENS, SCORES, b"p" * 17, b""))


def test_an_error_keeps_the_struct_that_could_be_read() -> None:
    frames = encode(Generate(41, SamplingParams()), TOKENS)
    with pytest.raises(MalformedError) as caught:
        Decoder[ToScheduler](ToScheduler).decode([frames[0], b"\x00"])
    assert caught.value.message == Generate(41, SamplingParams())


def test_sending_a_message_without_its_array_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="takes 1"):
        encode(Generate(1, SamplingParams()))


VALID = [
    encode(Generate(7, SamplingParams(), b"x", 1), TOKENS),
    encode(report(), TOKENS, SCORES, b"p" * 16, b""),
    encode(Tokens([1], [4], [1], [CacheUse()], [None], [3], [0.5]), TOKENS, SCORES),
]


@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from(VALID),
    frame=st.integers(0, 3),
    position=st.integers(0, 10_000),
    value=st.integers(0, 255),
    cut=st.integers(0, 40),
)
def test_no_damage_to_a_message_raises_anything_else(
    base: list[bytes], frame: int, position: int, value: int, cut: int
) -> None:
    frames = list(base)
    target = bytearray(frames[frame % len(frames)])
    if target:
        target[position % len(target)] = value
    frames[frame % len(frames)] = bytes(target[: len(target) - cut if cut < 20 else len(target)])
    for kinds in (ToScheduler, ToClient, FromWorker):
        with contextlib.suppress(MalformedError):
            Decoder[object](kinds).decode(frames)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=5))
def test_random_frames_raise_nothing_else(frames: list[bytes]) -> None:
    for kinds in (ToScheduler, ToClient, ToWorker, FromWorker, Config):
        with contextlib.suppress(MalformedError):
            Decoder[object](kinds).decode(frames)
