"""Lists and deletes leftovers of former servers: named host caches in shared memory, and stores."""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hiserve.cache.storage.file_store import MARKER, FileStore
from hiserve.cache.storage.segment import SHARED_MEMORY, SegmentLayout, segment_path, stored_layout
from hiserve.errors import ConfigError, ResourceError

_PREFIX = "hiserve-"
_NO_CAP = 1 << 62


@dataclass(frozen=True, slots=True)
class Leftover:
    """A named host cache, or a store."""

    name: str  # in the user's form: the name of a host cache, or ``file:DIR``
    path: Path
    num_bytes: int = 0
    num_pages: int = 0  # capacity of a host cache, or content of a store
    page_size: int = 0  # tokens per page of a host cache; 0 for a store
    used_s: float = 0.0  # time of the last write or read, in seconds since 1970
    is_used: bool = False  # a server has it open
    trouble: str = ""  # reason why it could not be read; empty if it was


def named_caches(directory: Path = SHARED_MEMORY, names: str = ".*") -> list[Leftover]:
    """Returns the named host caches of this user, by name.

    Args:
        directory: Of shared memory.
        names: A regular expression of their names. Others are not touched: a look at whether a cache is used locks it for a moment, in
            which its server cannot start.
    """
    found: list[Leftover] = []
    for path in sorted(directory.glob(f"{_PREFIX}*")):
        name = path.name.removeprefix(_PREFIX)
        if not re.fullmatch(names, name):
            continue
        try:
            status = path.lstat()
        except FileNotFoundError:  # a server has just removed it
            continue
        if status.st_uid != os.geteuid():
            continue
        num_bytes, trouble, layout = status.st_blocks * 512, "", None
        try:
            layout = stored_layout(name, directory)
        except ConfigError as error:
            trouble = error.message
        layout = layout or SegmentLayout(b"", 0, 0, 0)
        is_used = not trouble and _is_locked(path)
        found.append(
            Leftover(name, path, num_bytes, layout.num_pages, layout.page_size, status.st_mtime, is_used, trouble)
        )
    return found


def store_in(directory: Path) -> Leftover:
    """Returns the facts of a store.

    Raises:
        ConfigError: The directory is no store of this version.
    """
    _check_store(directory)
    store = FileStore(directory, _NO_CAP)
    stats = store.stats()
    store.close()
    used_s = max((entry.stat().st_mtime for entry in directory.iterdir()), default=0.0)
    is_used = _is_locked(directory / MARKER)
    return Leftover(f"file:{directory}", directory, stats.num_bytes, stats.num_pages, used_s=used_s, is_used=is_used)


def parts_of_groups(name: str, directory: Path = SHARED_MEMORY) -> list[Leftover]:
    """Returns what the ranks above 0 of groups of any size (``--tp``) left beside the host cache of a name, which is rank 0's."""
    return named_caches(directory, rf"{re.escape(name)}-\d+-of-\d+")


def delete_named_cache(name: str, directory: Path = SHARED_MEMORY) -> int:
    """Removes a named host cache, those of the other ranks of its groups, and its secret; returns the freed bytes.

    Raises:
        ConfigError: There is none of this name, or a file is not hiserve's; nothing is changed.
        ResourceError: A server uses one of them; nothing is changed.
    """
    path = segment_path(name, directory)
    paths = [path] * path.exists() + [each.path for each in parts_of_groups(name, directory)]
    if not paths:
        raise ConfigError(f"there is no host cache named {name!r} in {directory}. See hiserve cache list.")
    num_bytes = 0
    with ExitStack() as undo:
        for each in paths:
            part = each.name.removeprefix(_PREFIX)
            stored_layout(part, directory)
            fd = os.open(each, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, fd)
            _lock(fd, f"the host cache {part!r}")
            num_bytes += os.fstat(fd).st_blocks * 512
        for each in paths:
            each.unlink()
        path.with_name(f".{path.name}.secret").unlink(missing_ok=True)
    return num_bytes


def delete_store(directory: Path) -> int:
    """Removes the pages, the secret and the marker of a store, and the directory if it is then empty; returns the pages.

    Raises:
        ConfigError: The directory is no store of this version; it is not changed.
        ResourceError: A server uses it.
    """
    _check_store(directory)
    with ExitStack() as undo:
        fd = os.open(directory / MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        undo.callback(os.close, fd)
        _lock(fd, f"the store file:{directory}")
        store = FileStore(directory, _NO_CAP, is_shared=False)
        num_pages = store.clear()
        store.close()
        for path in (*directory.glob(f"{MARKER}.*"), directory / MARKER):
            path.unlink(missing_ok=True)
        for folder in (*directory.glob("[0-9a-f][0-9a-f]"), directory):
            if not any(folder.iterdir()):
                folder.rmdir()
    return num_pages


def _check_store(directory: Path) -> None:
    """Checks that there is a store, without creating one."""
    if not (directory / MARKER).is_file():
        raise ConfigError(f"{directory} is no store of hiserve: it has no file {MARKER}.")


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)
    return False


def _lock(fd: int, name: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ResourceError(f"a server uses {name}; it was left alone. Stop the server first.") from None
