"""A worker that breaks the protocol as the configured model's name asks. Run as a fake worker: ``... rogue_worker ENDPOINT``."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time

from hiserve.ipc.channel import Link
from hiserve.ipc.child import connect_to_parent
from hiserve.ipc.codec import Frames, MessageDecoder, encode
from hiserve.ipc.lifecycle import CrashSnapshot, StepSnapshot
from hiserve.ipc.messages import Configure, Ready, StepReport, WorkerFailed, WorkerStats
from hiserve.ipc.updates import RequestUpdates, TokenDelta


def say(link: Link, frames: Frames) -> None:
    while not link.try_send(frames):
        link.wait(until_writable=True)


def report(incarnation: int, uid: int, *, running: int = 0) -> Frames:
    stats = WorkerStats(steps=incarnation, running=running)
    updates = RequestUpdates()
    updates.add(TokenDelta([1], uid=uid))
    return encode(StepReport(incarnation, updates, stats))


def main() -> None:
    link, frames = connect_to_parent(sys.argv[1], signal.SIGKILL)
    configure = MessageDecoder[Configure](Configure).decode(frames).message
    own, model = configure.incarnation, configure.settings.model.model
    ready = encode(Ready(own, 0, 4, 64, 10, 16, b"n" * 16, {}))
    if model == "mute":  # with work that does not get on
        say(link, ready)
        say(link, report(own, 1, running=int(own == 1)))
        faulthandler.register(signal.SIGUSR1)
    elif model == "spin":
        say(link, ready)
        say(link, report(own, 1, running=int(own == 1)))
        while own == 1:
            pass
    elif model == "last words" and own == 1:
        say(link, ready)
        snapshot = CrashSnapshot([StepSnapshot(7, [1, 2], 5, 0, [], [])], "replay of 4: decode", 7, [3])
        say(link, report(own, 1))
        words = WorkerFailed(own, "CUDA error: gone", "engine_error", "the trace", time.monotonic(), snapshot)
        say(link, encode(words))
        link.close(linger_ms=1000)
        os._exit(71)
    elif model == "stale":
        say(link, encode(Ready(own - 1, 0, 4, 64, 10, 16, b"n" * 16, {})))
        say(link, ready)
        say(link, report(own - 1, 55))
        say(link, report(own + 1, 55))
        say(link, report(own, 1))
    elif own > 1:
        say(link, ready)
    elif model == "garbage":
        say(link, ready)
        say(link, [b"\xc1", b"garbage"])
    elif model == "early":
        say(link, report(own, 1))
    elif model == "twice":
        say(link, ready)
        say(link, ready)
    elif model == "farewell":
        say(link, ready)
        say(link, encode(WorkerFailed(own, "the device is on fire", "engine_error", "the trace", time.monotonic())))
    time.sleep(3600)


if __name__ == "__main__":
    main()
