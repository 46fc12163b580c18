"""The page store in a directory: one file per page, shared by the servers of one user."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path

from hiserve.cache.storage.page_order import PageOrder
from hiserve.cache.storage.store import HEADER_BYTES, is_intact, seal
from hiserve.errors import ConfigError
from hiserve.ipc.cache_stats import StoreStats

PAUSE_S = 30.0  # without writes after one that failed

_PAGE = re.compile(r"[0-9a-f]{64}")
_DRAFT = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{8}-[0-9]+\.new")
_DRAFT_AGE_S = 3600.0  # age of an unfinished file whose writer is gone
_LISTINGS_PER_CAP = 8  # how often the directory is listed anew while its cap is written once
MARKER = "hiserve-store"  # identifies the directory, and prevents its deletion
MARKER_TEXT = "hiserve page store, version 1\n"

logger = logging.getLogger(__name__)


class FileStore:
    """Pages as files ``DIR/ab/abcd...``, at most ``cap_bytes`` of them; see ``PageOrder`` for those that are removed first.

    A page is written to a temporary file, which is renamed and not synced: no reader sees a partial file, and a page
    damaged by a loss of power fails its check. The time of its last use is the file's mtime, so that it survives a restart.

    Only a regular file that is longer than a header is a page; any other entry with a page's name is a miss, which the
    next ``put`` replaces. If ``get`` finds a damaged file, the pages after it also count as missing, until they are
    written again or read.

    Several processes may share the directory. Each enforces the cap on the files that it knows, and lists the directory
    again after writing an eighth of the cap; so N processes may exceed it by N eighths.

    Args:
        directory: Created with mode 0700 if missing.
        cap_bytes: Limit of all files, headers included.
        clock: Seconds, monotonic.
        is_shared: Lock the marker, which prevents the deletion of the store (``inventory.delete_store``).

    Raises:
        ConfigError: The directory cannot be used, or is neither empty nor a store of this version; it is not changed.
    """

    def __init__(
        self,
        directory: Path,
        cap_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        is_shared: bool = True,
    ) -> None:
        claim(directory)
        marker_fd = share_marker(directory / MARKER) if is_shared else None
        self._close_marker = None if marker_fd is None else weakref.finalize(self, os.close, marker_fd)
        self._directory = directory
        self._cap_bytes = cap_bytes
        self._clock = clock
        self._paused_until = clock()
        self._is_closed = False
        self._lock = threading.Lock()  # around the fields below, never around a read or a write
        self._order = PageOrder()
        self._doubted: set[bytes] = set()  # of them, those to be written again
        self._tag = os.urandom(4).hex()  # in the names of this object's temporary files
        self._num_drafts = 0
        self._unlisted_bytes = 0
        self._counts: Counter[str] = Counter()
        self._last_error = ""
        self._list()

    def exists(self, keys: Sequence[bytes]) -> int:
        return next((index for index, key in enumerate(keys) if not self._has(key)), len(keys))

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        count = 0
        for key, buffer in zip(keys, buffers, strict=True):
            if self._is_closed:
                break
            outcome = self._read(key, buffer)
            if outcome is _Read.BAD:
                self._doubt(keys[count:])
            if outcome is not _Read.WHOLE:
                break
            count += 1
        self._use([*before, *keys[:count]])
        self._count(num_hits=count, num_misses=len(keys) - count)
        return count

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        count = num_stored = 0
        last = before[-1:]  # else they might make room for what is of no use without them
        with self._lock:
            self._order.use(before)
        for key, buffer in zip(keys, buffers, strict=True):
            if not self._has(key):
                if not self._write(key, buffer, last):
                    break
                num_stored += 1
            with self._lock:
                self._order.use([*last, key])
            last = [key]
            count += 1
        self._use([*before, *keys[:count]])
        self._count(num_stored=num_stored, num_refused=len(keys) - count)
        if self._unlisted_bytes * _LISTINGS_PER_CAP > self._cap_bytes:
            self._list()
        return count

    def clear(self) -> int:
        """Removes every page; temporary files of other processes stay."""
        count = sum(self._remove(bytes.fromhex(entry.name)) for entry in self._entries() if _PAGE.fullmatch(entry.name))
        self._list()
        return count

    def stats(self) -> StoreStats:
        """Takes no lock, because listing a large directory holds the lock for long."""
        return StoreStats(
            num_pages=len(self._order), num_bytes=self._order.num_bytes, last_error=self._last_error, **self._counts
        )

    def close(self) -> None:
        self._is_closed = True
        if self._close_marker is not None:
            self._close_marker()

    def _has(self, key: bytes) -> bool:
        """Whether a page is present, in memory or in the directory."""
        if self._is_closed or key in self._doubted:
            return False
        if key in self._order:
            return True
        try:
            status = os.lstat(self._path(key))
        except OSError as error:
            self._record_error(error)
            return False
        if not _may_be_page(status):
            return False
        self._remember(key, status.st_size)
        return True

    def _read(self, key: bytes, buffer: memoryview) -> _Read:
        header = bytearray(HEADER_BYTES)
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for somebody to write to it.
            fd = os.open(self._path(key), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(fd)
                is_whole = stat.S_ISREG(status.st_mode) and status.st_size == HEADER_BYTES + buffer.nbytes
                is_whole = is_whole and os.readv(fd, [header, buffer]) == status.st_size
            finally:
                os.close(fd)
        except OSError as error:
            self._record_error(error)
            self._forget(key)
            return _Read.MISSING if isinstance(error, FileNotFoundError) else _Read.BAD
        if is_whole and is_intact(key, header, buffer):
            self._remember(key, status.st_size)
            return _Read.WHOLE
        self._remove(key)
        self._count(num_corrupt=1)
        return _Read.BAD

    def _doubt(self, keys: Sequence[bytes]) -> None:
        """Marks pages after a damaged one as missing: the same fault may have damaged them."""
        with self._lock:
            self._doubted.update(keys)

    def _write(self, key: bytes, buffer: memoryview, before: Sequence[bytes]) -> bool:
        size = HEADER_BYTES + buffer.nbytes
        if self._is_closed or self._clock() < self._paused_until or not self._make_room(size, before):
            return False
        path = self._path(key)
        with self._lock:
            self._num_drafts += 1
            draft = f"{path}.{self._tag}-{self._num_drafts}.new"
        try:
            try:
                _write_file(draft, seal(key, buffer), buffer)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another thread was faster
                    os.mkdir(os.path.dirname(path), mode=0o700)
                _write_file(draft, seal(key, buffer), buffer)
            _replace(draft, path)
        except OSError as error:
            self._record_error(error, may_be_missing=False)
            with contextlib.suppress(OSError):  # the first error counts
                os.unlink(draft)
            self._paused_until = self._clock() + PAUSE_S
            logger.warning("the store %s takes no pages for %g s: %s", self._directory, PAUSE_S, error.strerror)
            return False
        self._remember(key, size)
        with self._lock:
            self._unlisted_bytes += size
        return True

    def _make_room(self, size: int, before: Sequence[bytes]) -> bool:
        """Removes the least recently used pages until ``size`` more bytes fit behind the page ``before``, which stays; whether they do."""
        while size <= self._cap_bytes:
            with self._lock:
                oldest = self._order.next()
                if oldest is None or self._order.num_bytes + size <= self._cap_bytes:
                    return True
            if oldest in before:
                return False
            self._count(num_evicted=int(self._remove(oldest)))
        return False

    def _remove(self, key: bytes) -> bool:
        self._forget(key)
        try:
            _unlink(self._path(key))
        except OSError as error:
            self._record_error(error)
            return False
        return True

    def _use(self, keys: Sequence[bytes]) -> None:
        """Marks pages of one prefix as just used, in reverse order: a prefix is useless without its start."""
        now = time.time_ns()
        with self._lock:
            self._order.use(keys)
        for index, key in enumerate(keys):
            try:
                os.utime(self._path(key), ns=(now - index, now - index), follow_symlinks=False)
            except OSError as error:
                self._record_error(error)

    def _remember(self, key: bytes, size: int) -> None:
        with self._lock:
            self._order.add(key, size)
            self._doubted.discard(key)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._order.remove(key)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _record_error(self, error: OSError, may_be_missing: bool = True) -> None:
        """Counts an error. A missing file is none, because other processes remove files too."""
        if not (may_be_missing and isinstance(error, FileNotFoundError)):
            self._count(num_errors=1)
            self._last_error = str(error)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._directory}/{name[:2]}/{name}"

    def _list(self) -> None:
        """Reads the present files and their times of use from the directory; removes leftover temporary files."""
        self._unlisted_bytes = 0
        with self._lock:
            known = set(self._order.by_use())
        found: list[tuple[int, bytes, int]] = []
        for entry in self._entries():
            try:
                status = entry.stat(follow_symlinks=False)
                if _PAGE.fullmatch(entry.name) and _may_be_page(status):
                    found.append((status.st_mtime_ns, bytes.fromhex(entry.name), status.st_size))
                elif _DRAFT.fullmatch(entry.name) and time.time() - status.st_mtime > _DRAFT_AGE_S:
                    os.unlink(entry.path)
            except OSError as error:
                self._record_error(error)
        found.sort()
        with self._lock:
            written = [key for key in self._order.by_use() if key not in known]  # while the directory was read
            self._order.retain([*(key for _, key, _ in found), *written])
            for _, key, size in found:
                self._order.add(key, size)
            for key in [*(key for _, key, _ in found), *written]:
                self._order.use([key])
            self._doubted &= set(self._order.by_use())

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yields the files in the folders of this store."""
        for number in range(256):
            try:
                with os.scandir(f"{self._directory}/{number:02x}") as files:
                    yield from files
            except OSError as error:
                self._record_error(error)


class _Read(Enum):
    WHOLE = "whole"
    MISSING = "missing"  # there is no file
    BAD = "bad"  # there is one, and it is damaged, not readable or no file


def _may_be_page(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size > HEADER_BYTES


def _replace(draft: str, path: str) -> None:
    """Moves a file to a page's path, replacing any entry there."""
    try:
        os.rename(draft, path)
    except (IsADirectoryError, FileExistsError):
        _unlink(path)
        os.rename(draft, path)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path)


def _write_file(path: str, header: bytes, page: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if os.writev(fd, [header, page]) != len(header) + page.nbytes:  # only a full disk cuts a write short
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


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
