"""Files of a store that are no pages, and when another process sees a page: all of it, or nothing."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hiserve.cache.storage import file_store
from hiserve.cache.storage.file_store import MARKER, FileStore
from hiserve.cache.storage.store import HEADER_BYTES
from tests.helpers.host import make_keys
from tests.helpers.stores import KEYS, PLENTY, blanks, flip, pages, path_of
from tests.helpers.waiting import PATIENCE_S

TIMEOUT_S = PATIENCE_S


def of_content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def of_kind(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("x")


def listening(path: Path) -> None:
    """Leaves a socket's file; its path may be longer than an address."""
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


NO_PAGES: dict[str, Callable[[Path], None]] = {  # what ``exists`` can tell at first sight
    "empty": of_content(lambda content: b""),
    "header alone": of_content(lambda content: content[:HEADER_BYTES]),
    "FIFO": of_kind(os.mkfifo),
    "socket": of_kind(listening),
    "directory": of_kind(Path.mkdir),
    "full directory": of_kind(full_directory),
    "link to nothing": of_kind(lambda path: path.symlink_to(path.parent / "nothing")),
    "link to a page": of_kind(lambda path: path.symlink_to(path.parent.parent / "page")),
}
BAD_PAGES: dict[str, Callable[[Path], None]] = {
    "short": of_content(lambda content: content[:-1]),
    "long": of_content(lambda content: content + b"x"),
    "garbled": of_content(lambda content: flip(content, len(content) - 1)),
    "header": of_content(lambda content: flip(content, 24)),
}


def make_store(directory: Path) -> FileStore:
    """A store of 20 pages; a file that is a page lies beside them."""
    FileStore(directory, PLENTY).put(KEYS, pages(KEYS))
    (directory / "page").write_bytes(path_of(directory, KEYS[0]).read_bytes())
    return FileStore(directory, PLENTY)


def within_time(call: Callable[[], int]) -> int:
    """Returns what a call returns that may hang."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert found, f"it hangs after {TIMEOUT_S:g} s"
    return found[0]


@pytest.mark.parametrize("is_new", [False, True], ids=["known", "new"])
@pytest.mark.parametrize("damage", [*NO_PAGES.values(), *BAD_PAGES.values()], ids=[*NO_PAGES, *BAD_PAGES])
def test_a_chain_of_what_is_no_page_is_replaced_in_one_round(
    tmp_path: Path, damage: Callable[[Path], None], is_new: bool
) -> None:
    """Looked up, fetched, computed and put, once."""
    store = make_store(tmp_path)
    for key in KEYS[3:]:
        damage(path_of(tmp_path, key))
    if is_new:
        store = FileStore(tmp_path, PLENTY)
    buffers = blanks(20)
    found = store.exists(KEYS)
    assert 3 <= found <= 20
    assert within_time(lambda: store.get(KEYS, buffers)) == 3
    assert buffers[:3] == pages(KEYS[:3])
    assert store.exists(KEYS) == 3
    assert within_time(lambda: store.put(KEYS, pages(KEYS))) == 20
    assert store.exists(KEYS) == store.get(KEYS, buffers) == 20
    assert buffers == pages(KEYS)
    assert FileStore(tmp_path, PLENTY).get(KEYS, blanks(20)) == 20
    assert store.stats().num_pages == 20
    assert (tmp_path / "page").exists()


@pytest.mark.parametrize("damage", NO_PAGES.values(), ids=NO_PAGES)
def test_what_is_no_page_is_missing_at_first_sight(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    make_store(tmp_path)
    for key in KEYS[3:]:
        damage(path_of(tmp_path, key))
    store = FileStore(tmp_path, PLENTY)
    assert (store.exists(KEYS), store.stats().num_pages) == (3, 3)
    assert within_time(lambda: store.put(KEYS, pages(KEYS))) == 20
    assert store.get(KEYS, blanks(20)) == 20


def test_files_that_may_not_be_read_are_replaced_in_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is root may read everything, so the refusal is played."""
    store = make_store(tmp_path)
    closed = {str(path_of(tmp_path, key)): os.stat(path_of(tmp_path, key)).st_ino for key in KEYS[3:]}
    open_file = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if path in closed and os.stat(path).st_ino == closed[path]:
            raise PermissionError(13, "Permission denied", path)
        return open_file(path, flags, mode)

    monkeypatch.setattr(file_store.os, "open", refuse)
    assert store.get(KEYS, blanks(20)) == 3
    assert store.exists(KEYS) == 3
    assert "Permission denied" in store.stats().last_error
    assert store.put(KEYS, pages(KEYS)) == 20
    assert store.get(KEYS, blanks(20)) == 20


def test_pages_of_other_prefixes_and_those_that_are_plainly_missing_raise_no_doubt(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    others = make_keys("y", 5)
    store.put(others, pages(others))
    path_of(tmp_path, KEYS[3]).unlink()
    assert store.get(KEYS, blanks(20)) == 3
    path_of(tmp_path, others[0]).write_bytes(b"")
    assert store.get(others, blanks(5)) == 0
    before = store.stats().num_stored
    store.put(KEYS, pages(KEYS))
    assert store.stats().num_stored == before + 1


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "replaced"])
def test_a_page_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """Another process looks while the bytes are being written: between the header and the page, and after them."""
    key = KEYS[:1]
    writer, reader = FileStore(tmp_path, PLENTY), FileStore(tmp_path, PLENTY)
    if is_there:
        writer.put(key, pages(key))
        writer._doubt(key)
    seen: list[int] = []
    write = os.writev

    def look() -> None:
        buffers = blanks(1)
        seen.append(reader.get(key, buffers))
        assert not seen[-1] or buffers == pages(key)

    def write_slowly(fd: int, buffers: list[memoryview]) -> int:
        num_bytes = write(fd, buffers[:1])
        look()
        num_bytes += write(fd, buffers[1:])
        look()
        return num_bytes

    monkeypatch.setattr(file_store.os, "writev", write_slowly)
    assert writer.put(key, pages(key)) == 1
    look()
    assert seen == [is_there, is_there, 1]
    assert reader.stats().num_corrupt == 0


def test_a_marker_that_cannot_be_opened_keeps_no_server_from_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that failed once, at the worst moment: the lock for ``hiserve cache delete`` is missing, and no page."""
    FileStore(tmp_path, PLENTY).put(KEYS, pages(KEYS))
    real_open = os.open

    def fail(path: Path, *arguments: int) -> int:
        if Path(path).name == MARKER:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_open(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(file_store.os, "open", fail)
        store = FileStore(tmp_path, PLENTY)
    assert store.get(KEYS, blanks(len(KEYS))) == len(KEYS)
    store.close()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and os.strerror(errno.EIO) in record.getMessage()
