"""The files behind ``ipc://`` endpoints: in directories of their own, found once somebody listens, removed."""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hiserve.errors import ResourceError

SCHEME = "ipc://"
POLL_S = 0.002


def new_endpoint() -> str:
    """Returns an endpoint at which nobody listens yet, in a new directory for this user alone.

    Raises:
        ResourceError: The directory for temporary files cannot be used.
    """
    try:
        return f"{SCHEME}{tempfile.mkdtemp(prefix='hiserve-')}/s"
    except OSError as error:
        raise ResourceError(f"No directory for sockets can be made: {error}. Point TMPDIR elsewhere.") from error


def path_of(endpoint: str) -> Path:
    """Returns the file of an ``ipc://`` endpoint; it exists while somebody listens there."""
    return Path(endpoint.removeprefix(SCHEME))


def wait_for_listener(endpoint: str, timeout_s: float, is_hopeful: Callable[[], bool]) -> None:
    """Returns once somebody listens at a new endpoint, or nobody will: time is over, it was removed, or hope is lost."""
    path, late_s = path_of(endpoint), time.monotonic() + timeout_s
    while path.parent.is_dir() and not path.exists() and is_hopeful() and time.monotonic() < late_s:
        time.sleep(POLL_S)


def remove(endpoint: str) -> None:
    """Removes an endpoint with its directory; connections stay."""
    shutil.rmtree(path_of(endpoint).parent, ignore_errors=True)


def require_free(path: Path) -> None:
    """Refuses a path that zmq would take from a living process, or from a file that is no socket.

    Raises:
        OSError: It is one of both.
    """
    if not path.exists():
        return
    if not path.is_socket():
        raise FileExistsError(errno.EEXIST, "no socket")
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise OSError(errno.EADDRINUSE, "in use")
