"""Links between processes that nobody reads."""

from __future__ import annotations

import time

from hiserve.ipc.channel import Link
from tests.helpers.processes import others_rest


def is_full(link: Link) -> bool:
    """Whether a link takes no more, and none of the threads of zmq will change that."""
    while not link.is_writable:
        if others_rest() and not link.is_writable:
            return True
        time.sleep(0.001)
    return False
