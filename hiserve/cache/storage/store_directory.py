"""The directory of a page store: its marker, which identifies it and prevents its deletion."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from hiserve.errors import ConfigError

MARKER = "hiserve-store"
MARKER_TEXT = "hiserve page store, version 1\n"

logger = logging.getLogger(__name__)


def claim(directory: Path) -> None:
    """Makes a directory a store, or checks that it is one; creates it with mode 0700 if it is missing.

    Raises:
        ConfigError: It cannot be used, or is neither empty nor a store of this version; it is not changed.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker = directory / MARKER
        names = [name for name in os.listdir(directory) if not name.startswith(f"{MARKER}.")]
        if not names:
            draft = directory / f"{MARKER}.{os.urandom(4).hex()}"
            draft.write_text(MARKER_TEXT)
            draft.rename(marker)
        elif MARKER not in names:
            raise _refusal(directory, "it holds files but is no store of hiserve")
        if (text := marker.read_text()) != MARKER_TEXT:
            raise _refusal(directory, f"its {MARKER} says {text[:80].strip()!r}, not {MARKER_TEXT.strip()!r}")
        directory.chmod(0o700)
    except (OSError, UnicodeDecodeError) as error:
        raise _refusal(directory, str(error)) from None


def share_marker(marker: Path) -> int | None:
    """Opens the marker with a shared lock, which prevents deletion; None if it cannot be opened.

    Pages are valid without the lock, and a temporary disk error must not end a server.
    """
    try:
        fd = os.open(marker, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        logger.warning("hiserve cache delete cannot see that this server uses the store %s: %s", marker.parent, error)
        return None
    with contextlib.suppress(OSError):  # a file system without locks, or a store that is being deleted
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def _refusal(directory: Path, fact: str) -> ConfigError:
    return ConfigError(f"--store file:{directory} cannot be used: {fact}. Give another directory.", param="store")
