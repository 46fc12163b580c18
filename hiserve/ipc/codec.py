"""Encodes messages to frames and decodes them strictly: one msgpack struct, and for a request its tokens."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from hiserve.core.plan import WORD_BYTES, Int32Array
from hiserve.errors import HiserveError
from hiserve.ipc.messages import Admit, Generate, StepReport
from hiserve.ipc.updates import RequestUpdates

Frames = list[bytes]
MessageT = TypeVar("MessageT")

_WITH_TOKENS = Generate | Admit
_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)
_NO_TOKENS.flags.writeable = False


class MalformedError(Exception):
    """Frames that no hiserve process would send.

    Args:
        reason: The fault, with numbers.
        message: The struct, if it could be decoded, so that its sender can be answered.
    """

    def __init__(self, reason: str, message: object = None) -> None:
        super().__init__(reason)
        self.message = message


class Received(NamedTuple, Generic[MessageT]):
    """A decoded message.

    Attributes:
        message: The struct.
        tokens: int32 ``[n]`` of a request, a read-only view of the second frame; empty for other messages.
    """

    message: MessageT
    tokens: Int32Array = _NO_TOKENS


def encode(message: msgspec.Struct, tokens: Int32Array | None = None) -> Frames:
    """Returns the frames of a message; only ``Generate`` and ``Admit`` have ``tokens``, int32 ``[n]``."""
    expects = isinstance(message, _WITH_TOKENS)
    assert expects == (tokens is not None), f"{type(message).__name__} {'needs' if expects else 'takes no'} tokens"
    frames = [msgspec.msgpack.encode(message)]
    if tokens is not None:
        frames.append(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    return frames


class MessageDecoder(Generic[MessageT]):
    """Decodes the messages of one direction; ``kinds`` is the union of their types."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kinds)

    def decode(self, frames: Frames) -> Received[MessageT]:
        """Returns the message.

        Raises:
            MalformedError: The frames are not such a message, or its arrays contradict its struct.
        """
        try:
            message = self._decoder.decode(frames[0])
        except (msgspec.DecodeError, HiserveError, UnicodeDecodeError, IndexError, RecursionError) as error:
            raise MalformedError(f"undecodable struct: {error}") from error
        num_arrays = int(isinstance(message, _WITH_TOKENS))
        if len(frames) - 1 != num_arrays:
            name = type(message).__name__
            raise MalformedError(f"{name} came with {len(frames) - 1} arrays, not {num_arrays}", message)
        if num_arrays:
            if len(frames[1]) % WORD_BYTES:
                raise MalformedError(f"{len(frames[1])} bytes are no whole number of int32 tokens", message)
            return Received(message, np.frombuffer(frames[1], dtype="<i4"))
        updates = message.updates if isinstance(message, StepReport) else message
        if isinstance(updates, RequestUpdates):
            try:
                updates.check()
            except ValueError as error:
                raise MalformedError(str(error), message) from error
        return Received(message)
