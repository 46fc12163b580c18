"""Turns messages into frames and back, strictly: one msgpack struct, then raw arrays."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from hiserve.core.digest import DIGEST_BYTES
from hiserve.core.plan import WORD_BYTES, Int32Array
from hiserve.core.request import FinishReason
from hiserve.errors import HiserveError
from hiserve.ipc.messages import Admit, Generate, StepReport, Tokens

Frames = list[bytes]
MessageT = TypeVar("MessageT")

_NUM_ARRAYS: dict[type, int] = {Generate: 1, Admit: 1, Tokens: 2, StepReport: 4}
_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)
_NO_TOKENS.flags.writeable = False


class MalformedError(Exception):
    """Frames that no peer of ours would send.

    Args:
        reason: What is wrong, with numbers.
        message: The struct, where it could still be read: its sender can be answered.
    """

    def __init__(self, reason: str, message: object = None) -> None:
        super().__init__(reason)
        self.message = message


class Received(NamedTuple, Generic[MessageT]):
    """A decoded message and the arrays that came beside it; those it does not carry are empty.

    Attributes:
        message: The struct.
        tokens: int32 ``[n]``, a read-only view of the frame.
        scores: Words of four bytes, as ``core.plan.Scores.pack`` writes them.
        published: Page digests, 16 bytes each; one that several tiers gained occurs as often.
        removed: Likewise.
    """

    message: MessageT
    tokens: Int32Array = _NO_TOKENS
    scores: bytes = b""
    published: bytes = b""
    removed: bytes = b""


def encode(message: msgspec.Struct, *arrays: Int32Array | bytes) -> Frames:
    """Returns the frames of a message: the struct, then its arrays in the order its type documents."""
    expected = _NUM_ARRAYS.get(type(message), 0)
    assert len(arrays) == expected, f"{type(message).__name__} takes {expected} arrays, got {len(arrays)}"
    frames = [msgspec.msgpack.encode(message)]
    frames.extend(
        array if isinstance(array, bytes) else np.ascontiguousarray(array, dtype="<i4").tobytes() for array in arrays
    )
    return frames


class MessageDecoder(Generic[MessageT]):
    """Decodes the messages of one direction.

    Args:
        kinds: The struct type, or the union of them, that may arrive.
    """

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kinds)

    def decode(self, frames: Frames) -> Received[MessageT]:
        """Returns the message.

        Raises:
            MalformedError: Not such a message, or its arrays contradict its struct.
        """
        try:
            message = self._decoder.decode(frames[0])
        except (msgspec.DecodeError, HiserveError, UnicodeDecodeError, IndexError, RecursionError) as error:
            raise MalformedError(f"undecodable struct: {error}") from error
        expected = _NUM_ARRAYS.get(type(message), 0)
        if len(frames) - 1 != expected:
            name = type(message).__name__
            raise MalformedError(f"{name} came with {len(frames) - 1} arrays, not {expected}", message)
        if not expected:
            return Received(message)
        if len(frames[1]) % WORD_BYTES:
            raise MalformedError(f"{len(frames[1])} bytes are no whole number of int32 tokens", message)
        received = Received(message, np.frombuffer(frames[1], dtype="<i4"), *frames[2:])
        if isinstance(message, Tokens | StepReport):
            _check_columns(message, len(received.tokens), len(received.scores))
        for digests in (received.published, received.removed):
            if len(digests) % DIGEST_BYTES:
                raise MalformedError(f"{len(digests)} bytes are no whole number of digests", message)
        return received


def _check_columns(message: Tokens | StepReport, num_tokens: int, num_score_bytes: int) -> None:
    rows, counts, finishes, words = len(message.uids), message.counts, message.finishes, message.score_words
    lengths = [len(column) for column in (counts, finishes, message.cached, message.drafts, words)]
    if isinstance(message, Tokens):
        lengths.append(len(message.queue_s))
    if any(length != rows for length in lengths):
        raise MalformedError(f"columns of {lengths} rows for {rows} requests", message)
    if rows and (min(counts) < 0 or min(finishes) < 0 or max(finishes) > max(FinishReason) or min(words) < 0):
        raise MalformedError(
            f"counts {min(counts)}.., finishes {min(finishes)}..{max(finishes)}, score words {min(words)}..", message
        )
    ended = [uid for uid, finish in zip(message.uids, finishes, strict=True) if finish]
    if isinstance(message, StepReport):
        ended += [uid for uid, _, _ in message.failed]
    if len(set(message.uids)) < rows or len(set(ended)) < len(ended):
        raise MalformedError("a request is named or ended twice", message)
    if sum(counts) != num_tokens:
        raise MalformedError(f"{sum(counts)} tokens announced, {num_tokens} received", message)
    if WORD_BYTES * sum(words) != num_score_bytes:
        raise MalformedError(f"{sum(words)} score words announced, {num_score_bytes} bytes received", message)


def split_digests(joined: bytes) -> list[bytes]:
    """Returns the single digests of a frame of page digests."""
    return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]
