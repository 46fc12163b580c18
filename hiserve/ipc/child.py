"""What a child process does about its parent: meets it, dies with it, leaves SIGINT and SIGTERM to it."""

from __future__ import annotations

import ctypes
import logging
import os
import signal

from hiserve.config.settings import Settings
from hiserve.ipc.channel import Link
from hiserve.ipc.codec import Frames
from hiserve.ipc.endpoints import wait_for_listener

MEET_S = 10.0
_PR_SET_PDEATHSIG = 1


def meet_parent(endpoint: str, death_signal: signal.Signals) -> tuple[Link, Frames]:
    """Connects to the parent and waits for its first message.

    From here on SIGINT and SIGTERM are ignored: they may reach every process of a service at
    once, and the parent decides what ends when.

    Args:
        endpoint: Where the parent listens; removed once connected.
        death_signal: Sent to this process by the kernel when the thread that started it ends
            (Linux; elsewhere the link alone tells).

    Returns:
        The link, and the frames of the first message.

    Raises:
        SystemExit: The parent died before it said anything.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    parent = os.getppid()
    wait_for_listener(endpoint, MEET_S, lambda: os.getppid() == parent)
    link = Link.connect(endpoint)
    while (frames := link.try_receive()) is None:
        if link.is_gone:
            link.close()
            raise SystemExit(f"No parent listens at {endpoint}; this process is started by hiserve, not by hand.")
        link.wait()
    link.remove_endpoint()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    return link, frames


def log_to_stderr(config: Settings) -> None:
    """Sets up logging of a child process as the configuration asks."""
    logging.basicConfig(
        level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
