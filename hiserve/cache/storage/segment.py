"""Shared memory of the host tier, which outlives its worker, and the layout of a page in it."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import re
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.storage.records import RecordArray, record_type
from hiserve.core.kv_groups import CacheGroupSpec
from hiserve.core.machine import GIB
from hiserve.errors import ConfigError, ResourceError

SHARED_MEMORY = Path("/dev/shm")
VERSION = 3  # of header, records and their order; the namespace covers the layout within a page
ALIGNMENT = 64  # bytes: of every group within a page, so that kernels may read whole vectors

_MAGIC = b"hiserve\0"
_HEADER = struct.Struct("<8sIIQQ16s")  # magic, version, page_size, page_bytes, num_pages, namespace
_HEADER_BYTES = 4096
_LOOK_S = 0.05  # between two looks at a lock
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PageLayout:
    """Offsets within a page. A piece is the keys, or the values, of one layer; or its rows that are both.

        page    group | group | ...
        group   layer 0: keys, values | layer 1: keys, values | ...
        piece   [page_size / ratio, num_kv_heads, head_dim]

    Attributes:
        page_bytes: Bytes from one page to the next; a multiple of ``ALIGNMENT``.
        offsets: By group: int64 ``[num_layers, num_planes]``, bytes from the start of a page to its keys and values.
    """

    def __init__(self, groups: Sequence[CacheGroupSpec], page_size: int) -> None:
        self.groups = tuple(groups)
        self.page_size = page_size
        self.offsets: dict[str, NDArray[np.int64]] = {}
        end = 0
        for group in groups:
            assert group.name not in self.offsets, f"two KV groups are named {group.name!r}"
            planes = np.arange(group.num_planes * group.num_layers, dtype=np.int64).reshape(-1, group.num_planes)
            self.offsets[group.name] = end + planes * self.piece_bytes(group)
            end += -(-group.page_bytes(page_size) // ALIGNMENT) * ALIGNMENT
        self.page_bytes = end

    def frames_of(self, frame_bytes: int) -> int:
        """Returns how many frames of so many bytes hold a page of this layout."""
        return -(-self.page_bytes // frame_bytes)

    def piece_bytes(self, group: CacheGroupSpec) -> int:
        """Returns the bytes of one piece of a group."""
        rows = group.page_rows(self.page_size)
        return math.prod((rows, group.num_kv_heads, group.head_dim)) * group.element_bytes


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Identity and layout of a segment: one page of header, the records, the pages."""

    namespace: bytes  # 16 bytes. Digest of everything that separates caches, but for tenants: model, weights, dtype ...
    page_size: int  # tokens per page
    page_bytes: int  # bytes per page (see ``PageLayout``)
    num_pages: int  # pages, the unused page 0 included; at least 2

    @property
    def pages_offset(self) -> int:
        """Bytes before page 0: whole pages of memory."""
        return (
            -(-(_HEADER_BYTES + self.num_pages * record_type(self.page_size).itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole segment."""
        return self.pages_offset + self.num_pages * self.page_bytes

    def pack(self) -> bytes:
        """Returns the header."""
        fields = (_MAGIC, VERSION, self.page_size, self.page_bytes, self.num_pages, self.namespace)
        return _HEADER.pack(*fields).ljust(_HEADER_BYTES, b"\0")

    def differences(self, other: SegmentLayout) -> list[str]:
        """Describes how another segment differs from this one, in terms that a user can change."""
        words = []
        if other.page_size != self.page_size:
            words.append(f"pages of {other.page_size} tokens, not {self.page_size} (--page-size)")
        if other.namespace != self.namespace:
            words.append(
                "another model, other weights, or another --dtype, --state-dtype, --kv-dtype, --store or --kv-canary"
            )
        elif other.page_bytes != self.page_bytes:
            words.append(f"pages of {other.page_bytes} bytes, not {self.page_bytes}")
        if not words and other.num_pages != self.num_pages:
            words.append(f"{other.num_bytes / GIB:.3g} GiB, not {self.num_bytes / GIB:.3g} (--host-cache-gib)")
        return words


class Segment:
    """A mapped segment, made by ``anonymous``, ``named`` or ``attach``.

    Attributes:
        layout: Of the segment.
        fd: Descriptor to pass to another process (``pass_fds``, ``SCM_RIGHTS``); open until ``close``.
        records: ``[num_pages]`` of ``record_type(page_size)``, in shared memory.
        pages: uint8 ``[num_pages, page_bytes]``, in shared memory. Not resident before it is touched, and writing to
            an untouched page of a full /dev/shm kills the process: see ``Prefault``.
    """

    def __init__(self, fd: int, layout: SegmentLayout) -> None:
        self.fd = fd
        self.layout = layout
        self._map = mmap.mmap(fd, layout.num_bytes)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        start = layout.pages_offset
        records = whole[_HEADER_BYTES:][: layout.num_pages * record_type(layout.page_size).itemsize]
        self.records: RecordArray = records.view(record_type(layout.page_size))
        self.pages: NDArray[np.uint8] = whole[start:].reshape(layout.num_pages, layout.page_bytes)

    @classmethod
    def anonymous(cls, layout: SegmentLayout) -> Segment:
        """Creates a segment without a name; it is freed when the last process that maps it ends, even by SIGKILL.

        Raises:
            ResourceError: There is not enough memory.
        """
        fd = os.memfd_create("hiserve-host-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            _resize(fd, layout)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            os.pwrite(fd, layout.pack(), 0)
            segment = _mapped(fd, layout)
            undo.pop_all()
        return segment

    @classmethod
    def named(
        cls, name: str, layout: SegmentLayout, directory: Path = SHARED_MEMORY, *, patience_s: float = 0.0
    ) -> Segment:
        """Opens the segment of this name, or creates it; its content stays, for ``Records.recover``.

        An exclusive lock keeps other processes from opening it.

        Args:
            name: ``--host-cache-name``: 1 to 64 letters, digits, '.', '_' and '-'.
            layout: Required layout.
            directory: A file system in memory.
            patience_s: Seconds to wait for a process that ends.

        Raises:
            ConfigError: The name is malformed, or the file is not a segment of this layout, version and model, or
                not private to this user; the file is not changed.
            ResourceError: Another process uses it, or the file system has no room for it.
        """
        path = segment_path(name, directory)
        fd = _open_private(path)
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            _lock(fd, path, time.monotonic() + patience_s)
            if (found := _read(fd, path)) is None:
                _claim(fd, path, layout)
            elif words := layout.differences(found):
                raise ConfigError(
                    f"{path} holds a host cache of {' and '.join(words)}; it was left alone. "
                    f"Give another --host-cache-name, or delete it: rm {path}",
                    param="host_cache_name",
                )
            _resize(fd, layout)  # also completes a file whose creation was interrupted: missing records read as FREE
            segment = _mapped(fd, layout)
            undo.pop_all()
        return segment

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """Maps a segment of another process by its descriptor, and takes ownership of the descriptor."""
        found = _read(fd, Path(f"/proc/self/fd/{fd}"))
        assert found is not None, f"descriptor {fd} is an empty file"
        size = os.fstat(fd).st_size
        assert size == found.num_bytes, f"the segment has {size} bytes, its header says {found.num_bytes}"
        return _mapped(fd, found)

    def close(self) -> None:
        """Closes the descriptor and drops the arrays.

        The mapping itself, and with it the lock of a named segment, ends with the last view of it.
        """
        del self.records, self.pages
        try:
            self._map.close()
        except BufferError:
            del self._map  # a view still exists; the memory is unmapped with it
        os.close(self.fd)


def stored_layout(name: str, directory: Path = SHARED_MEMORY) -> SegmentLayout | None:
    """Returns the layout of the segment of this name, so that ``auto`` can keep its size; None without one.

    Raises:
        ConfigError: The name is malformed, or the file is no segment of this version.
    """
    path = segment_path(name, directory)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refusal(path, str(error.strerror)) from None
    try:
        return _read(fd, path)
    finally:
        os.close(fd)


def segment_path(name: str, directory: Path = SHARED_MEMORY) -> Path:
    """Returns the file of a named segment.

    Raises:
        ConfigError: The name is malformed.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--host-cache-name is {name!r}; give 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first.",
            param="host_cache_name",
        )
    return directory / f"hiserve-{name}"


def _refusal(path: Path, fact: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be the host cache: {fact}; it was left alone. Give another --host-cache-name, or delete it.",
        param="host_cache_name",
    )


def _open_private(path: Path) -> int:
    """Opens or creates a file that only this user can open."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _refusal(path, str(error.strerror)) from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise _refusal(path, "it is not a file that this user alone can open")
    return fd


def _has_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(fd: int, path: Path, until_s: float) -> None:
    """Takes the exclusive lock. It belongs to the open file: a process that inherits the descriptor shares it."""
    while not _has_locked(fd):
        if time.monotonic() >= until_s:
            raise ResourceError(
                f"another server uses {path}. Give each server its own --host-cache-name, or stop the other.",
                param="host_cache_name",
            )
        time.sleep(_LOOK_S)
    if not path.exists() or os.fstat(fd).st_ino != path.stat().st_ino:
        raise ResourceError(f"{path} was deleted while it was opened. Start again.", param="host_cache_name")


def _read(fd: int, path: Path) -> SegmentLayout | None:
    """Returns the layout in a file's header; None for an empty file."""
    header = os.pread(fd, _HEADER_BYTES, 0)
    if not header:
        return None
    if not header.startswith(_MAGIC) or len(header) < _HEADER.size:
        raise _refusal(path, "it is not one of ours")
    _, version, page_size, page_bytes, num_pages, namespace = _HEADER.unpack_from(header)
    if version != VERSION:
        raise _refusal(path, f"it has layout version {version}, this server writes {VERSION}")
    return SegmentLayout(namespace, page_size, page_bytes, num_pages)


def _claim(fd: int, path: Path, layout: SegmentLayout) -> None:
    """Initializes an empty file, if there is room for the segment; else removes it."""
    status = os.statvfs(path.parent)
    free = status.f_bavail * status.f_frsize
    if free < layout.num_bytes:
        path.unlink()
        raise no_memory(layout.num_bytes, f"{path.parent} has {free / GIB:.3g} GiB free")
    os.pwrite(fd, layout.pack(), 0)


def _resize(fd: int, layout: SegmentLayout) -> None:
    """Sets a file's size and allocates its header and records; ``Prefault`` allocates the pages."""
    try:
        os.ftruncate(fd, layout.num_bytes)
        os.posix_fallocate(fd, 0, layout.pages_offset)
    except OSError as error:
        raise no_memory(layout.num_bytes, str(error.strerror)) from None


def _mapped(fd: int, layout: SegmentLayout) -> Segment:
    try:
        return Segment(fd, layout)
    except (OSError, ValueError) as error:
        raise no_memory(layout.num_bytes, str(error)) from None


def no_memory(num_bytes: int, fact: str) -> ResourceError:
    """Returns the error of a host tier that does not fit."""
    return ResourceError(
        f"the host cache needs {num_bytes / GIB:.3g} GiB of shared memory, but {fact}. "
        "Lower --host-cache-gib, or allow more (a container: --shm-size).",
        param="host_cache_gib",
    )
