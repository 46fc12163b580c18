"""The messages between the first rank of a group, which plans, and each of the others, which execute the same plans."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from hiserve.config.settings import Settings
from hiserve.core.plan import BatchPlan, Int32Array, StepFault
from hiserve.core.startup_measurements import NO_MEASUREMENTS, StartupMeasurements
from hiserve.core.transfers import CopyAck
from hiserve.runners.gate import Coverage, Decision


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a rank."""

    settings: Settings
    rank: int
    rendezvous: str  # path of the file at which the ranks meet
    replica: int = 0  # of the group
    measurements: StartupMeasurements = NO_MEASUREMENTS  # of the group before it


class Order(msgspec.Struct, frozen=True, tag=True):
    """A plan, and how its step is launched: a rank decides nothing."""

    number: int  # orders are numbered from 1, without gaps
    plan: BatchPlan
    decision: Decision | None  # None of a plan without rows
    ended: list[tuple[int, int]] = []  # steps that ended on the first rank since the last order, and their checksums


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """Answers ``HeldPages``: the host pages of a former group that all ranks have. All others are freed."""

    pages: Int32Array


class DrawOrder(msgspec.Struct, frozen=True, tag=True):
    """The second half of the step ordered last, which awaits masks; fields as in ``MaskPlan``, None where all tokens are free."""

    step_id: int
    entries: Int32Array | None = None
    masks: Int32Array | None = None


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """Ends a rank; no order follows."""


ToRank = Setup | Adopt | Order | DrawOrder | StopRank


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """A rank holds its share; it must agree with the first one in all of this."""

    facts: dict[str, str]


class HeldPages(msgspec.Struct, frozen=True, tag=True):
    """The host pages of a former group that a rank has, in order; ``Adopt`` follows."""

    pages: Int32Array
    identities: NDArray[np.uint8]  # ``[n, k]``: namespace and digest of each, and its place in its tail


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank executes orders, and replays no other graphs than these."""

    coverage: Coverage


class Ran(msgspec.Struct, frozen=True, tag=True):
    """A step was launched, or ran out of memory."""

    step_id: int
    fault: StepFault | None = None


class Acked(msgspec.Struct, frozen=True, tag=True):
    """Copies have ended, or more host pages are ready."""

    acks: list[CopyAck]
    num_ready_host_pages: int


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """A rank ends because of an error."""

    message: str
    code: str  # of ``HiserveError``
    trace: str


FromRank = RankLoaded | HeldPages | RankReady | Ran | Acked | Farewell


def encode(message: ToRank | FromRank) -> bytes:
    """Returns the frame of a message."""
    return _ENCODER.encode(message)


def decode_to_rank(frame: bytes) -> ToRank:
    """Reads a frame of the first rank; its arrays can be written, as torch asks of arrays that become tensors."""
    return _TO_RANK.decode(frame)


def decode_from_rank(frame: bytes) -> FromRank:
    """Reads a frame of another rank."""
    return _FROM_RANK.decode(frame)


def _to_bytes(value: Any) -> Any:
    """Returns an array as bytes, with its shape before them if it has not one dimension."""
    assert isinstance(value, np.ndarray), f"a {type(value).__name__} in a message between ranks"
    return value.tobytes() if value.ndim == 1 else [*value.shape, value.tobytes()]


def _to_array(kind: Any, value: Any) -> NDArray[Any]:
    element = get_args(get_args(kind)[1])[0]
    shape, held = ([-1], value) if isinstance(value, bytes) else (value[:-1], value[-1])
    assert len(shape) == 1 or len(held) == math.prod(shape) * np.dtype(element).itemsize, (
        f"{len(held)} bytes of {shape}"
    )
    return np.frombuffer(bytearray(held), dtype=element).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=_to_array)
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank, dec_hook=_to_array)
