"""The page store in files: restarts, damage, the cap, disks that fail, directories that are not ours."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hiserve.cache.storage import file_store
from hiserve.cache.storage.file_store import MARKER, MARKER_TEXT, PAUSE_S, FileStore
from hiserve.cache.storage.store import HEADER_BYTES
from hiserve.errors import ConfigError
from hiserve.ipc.cache_stats import StoreStats
from tests.helpers.host import make_keys
from tests.helpers.stores import KEYS, PAGE_BYTES, PLENTY, blanks, flip, pages, path_of
from tests.helpers.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
FILE_BYTES = HEADER_BYTES + PAGE_BYTES
OTHERS, STRANGE = make_keys("y", 20), make_keys("z", 20)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("??/*"))


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "store"
    FileStore(directory, PLENTY).put(KEYS, pages(KEYS))
    for path in (directory, *directory.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600) or path.name == MARKER


def test_pages_survive_a_restart(tmp_path: Path) -> None:
    FileStore(tmp_path, PLENTY).put(KEYS, pages(KEYS))
    store = FileStore(tmp_path, PLENTY)
    assert (store.stats().num_pages, store.stats().num_bytes) == (20, 20 * FILE_BYTES)
    buffers = blanks(20)
    assert store.exists(KEYS) == 20
    assert store.get(KEYS, buffers) == 20
    assert buffers == pages(KEYS)


def test_counts_are_told_while_the_directory_is_listed(tmp_path: Path) -> None:
    """The worker asks at every step: it must not wait for a thread that lists a million files."""
    store = FileStore(tmp_path, PLENTY)
    store.put(KEYS, pages(KEYS))
    told: list[StoreStats] = []
    thread = threading.Thread(target=lambda: told.append(store.stats()), daemon=True)
    with store._lock:
        thread.start()
        thread.join(PATIENCE_S)
        assert [stats.num_stored for stats in told] == [20]


def test_a_page_that_is_written_while_the_directory_is_listed_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the store would grow beyond its cap by it."""
    store = FileStore(tmp_path, PLENTY)
    store.put(KEYS[:3], pages(KEYS[:3]))
    entries = list(store._entries())

    def listed() -> Iterator[os.DirEntry[str]]:
        store.put(KEYS[3:5], pages(KEYS[3:5]))
        yield from entries

    monkeypatch.setattr(store, "_entries", listed)
    store._list()
    assert (store.stats().num_pages, store.stats().num_bytes) == (5, 5 * FILE_BYTES)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half a header": lambda content: content[:30],
    "short by one": lambda content: content[:-1],
    "long by one": lambda content: content + b"x",
    "magic": lambda content: flip(content, 0),
    "version": lambda content: flip(content, 8),
    "length": lambda content: flip(content, 16),
    "checksum": lambda content: flip(content, 24),
    "key": lambda content: flip(content, 40),
    "first byte": lambda content: flip(content, HEADER_BYTES),
    "last byte": lambda content: flip(content, len(content) - 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_a_miss_removed_and_counted(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    FileStore(tmp_path, PLENTY).put(KEYS, pages(KEYS))
    victim = path_of(tmp_path, KEYS[3])
    victim.write_bytes(damage(victim.read_bytes()))
    store = FileStore(tmp_path, PLENTY)
    buffers = blanks(20)
    assert store.get(KEYS, buffers) == 3
    assert buffers[:3] == pages(KEYS[:3])
    assert not victim.exists()
    stats = store.stats()
    assert (stats.num_corrupt, stats.num_hits, stats.num_misses, stats.num_pages) == (1, 3, 17, 19)
    assert store.exists(KEYS) == 3
    assert store.put(KEYS, pages(KEYS)) == 20
    assert store.get(KEYS, blanks(20)) == 20


def test_the_bytes_of_another_page_do_not_pass(tmp_path: Path) -> None:
    store = FileStore(tmp_path, PLENTY)
    store.put(KEYS[:2], pages(KEYS[:2]))
    path_of(tmp_path, KEYS[0]).write_bytes(path_of(tmp_path, KEYS[1]).read_bytes())
    assert store.get(KEYS[:1], blanks(1)) == 0
    assert store.stats().num_corrupt == 1


def test_a_file_that_vanished_is_a_plain_miss(tmp_path: Path) -> None:
    store = FileStore(tmp_path, PLENTY)
    store.put(KEYS, pages(KEYS))
    path_of(tmp_path, KEYS[3]).unlink()
    assert store.get(KEYS, blanks(20)) == 3
    assert store.exists(KEYS) == 3
    assert (store.stats().num_corrupt, store.stats().num_errors) == (0, 0)


def test_the_cap_holds_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 4 * FILE_BYTES)
    for key in KEYS[:4]:
        store.put([key], pages([key]))
    assert store.get(KEYS[:1], blanks(1)) == 1
    assert store.put(KEYS[4:6], pages(KEYS[4:6])) == 2
    assert files(tmp_path) == sorted(key.hex() for key in (KEYS[0], KEYS[3], KEYS[4], KEYS[5]))
    assert store.stats().num_evicted == 2
    assert store.stats().num_bytes == 4 * FILE_BYTES


def test_what_was_used_last_survives_a_restart(tmp_path: Path) -> None:
    first = FileStore(tmp_path, PLENTY)
    for key in KEYS[:4]:
        first.put([key], pages([key]))
    first.get(KEYS[:1], blanks(1))
    store = FileStore(tmp_path, 4 * FILE_BYTES)
    store.put(OTHERS[:2], pages(OTHERS[:2]))
    assert [store.exists([key]) for key in KEYS[:4]] == [1, 0, 0, 1]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_the_end_of_a_prefix_goes_before_its_start(tmp_path: Path, restarts: bool, reads: bool) -> None:
    store = FileStore(tmp_path, 8 * FILE_BYTES)
    assert store.put(KEYS[:8], pages(KEYS[:8])) == 8
    if reads:
        store.get(KEYS[:8], blanks(8))
    if restarts:
        store = FileStore(tmp_path, 8 * FILE_BYTES)
    store.put(OTHERS[:3], pages(OTHERS[:3]))
    assert store.exists(KEYS) == 5
    assert store.exists(OTHERS) == 3


def test_a_page_larger_than_the_cap_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 2 * FILE_BYTES)
    store.put(KEYS[:2], pages(KEYS[:2]))
    assert store.put(KEYS[2:3], blanks(1, 3 * PAGE_BYTES)) == 0
    assert store.exists(KEYS) == 2
    assert (store.stats().num_refused, store.stats().num_evicted) == (1, 0)


def test_more_pages_at_once_than_the_store_holds_are_stored_from_the_first_on_as_far_as_they_fit(
    tmp_path: Path,
) -> None:
    keys, store = KEYS[:5], FileStore(tmp_path, 3 * FILE_BYTES)
    buffers = pages(keys)
    assert [store.put(keys, buffers), store.put(keys, buffers)] == [3, 3]
    assert store.exists(keys) == 3 and store.stats().num_evicted == 0


def test_uploads_of_one_prefix_that_is_larger_than_the_store_leave_no_gap_in_it(tmp_path: Path) -> None:
    """Pages behind a gap are never read. What is of other prefixes makes room."""
    store = FileStore(tmp_path, 4 * FILE_BYTES)
    assert store.put(OTHERS[:2], pages(OTHERS[:2])) == store.put(KEYS[:2], pages(KEYS[:2])) == 2
    assert store.put(KEYS[2:5], pages(KEYS[2:5]), KEYS[1:2]) == 2
    assert (store.exists(KEYS[:5]), store.stats().num_evicted, store.stats().num_refused) == (4, 2, 1)


def test_a_tail_counts_by_its_bytes_and_goes_before_the_history_that_is_read_with_it(tmp_path: Path) -> None:
    tail = blanks(1, 3 * PAGE_BYTES)
    store = FileStore(tmp_path, 4 * FILE_BYTES + (FILE_BYTES + 2 * PAGE_BYTES))
    store.put(KEYS[4:5], tail)
    store.put(KEYS[:4], pages(KEYS[:4]))
    assert store.stats().num_evicted == 0
    assert store.get(KEYS[:5], [*blanks(4), *tail]) == 5
    store.put(OTHERS[:1], pages(OTHERS[:1]))
    assert (store.exists(KEYS[4:5]), store.exists(KEYS[:4]), store.stats().num_evicted) == (0, 4, 1)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_full_store_removes_no_history_before_its_tails(tmp_path: Path, restarts: bool) -> None:
    """Conversations share their first pages; each turn adds pages, then a tail, or reads those of a turn."""
    rng = random.Random(3)
    store = FileStore(tmp_path, 12 * FILE_BYTES)
    history = [KEYS[:2]] * 4
    tails: dict[bytes, list[bytes]] = {}
    num_read = 0
    for step in range(60):
        number = rng.randrange(4)
        if rng.randrange(3):
            before = history[number]
            if len(before) > 5 or store.exists(before) < len(before):
                before = KEYS[:2]
                store.put(before, pages(before))
            *new, tail = (rng.randbytes(32) for _ in range(rng.randint(2, 3)))
            store.put(new, pages(new), before[-1:])
            history[number] = [*before, *new]
            if store.exists(history[number]) == len(history[number]):
                tails[tail] = history[number]
                store.put([tail], pages([tail]), tails[tail])
        elif tails:
            tail = rng.choice([*tails])
            start = rng.randint(0, len(tails[tail]))
            wanted = [*tails[tail][start:], tail]
            num_read += store.get(wanted, blanks(len(wanted)), tails[tail][:start]) == len(wanted)
        if restarts and step % 9 == 0:
            store = FileStore(tmp_path, 12 * FILE_BYTES)
        there = [keys for tail, keys in tails.items() if store.exists([tail])]
        assert all(store.exists(keys) == len(keys) for keys in there), f"step {step}: a tail without its history"
        assert there
    assert store.stats().num_evicted and num_read > 5


def test_the_end_of_a_prefix_goes_before_a_start_that_another_call_wrote(tmp_path: Path) -> None:
    """Turns of two conversations in their order, then pages of others: without its first turn a conversation is of no use."""
    store = FileStore(tmp_path, 9 * FILE_BYTES)
    for keys, start in ((KEYS, 0), (OTHERS, 0), (KEYS, 2), (OTHERS, 2), (KEYS, 4)):
        store.put(keys[start : start + 2], pages(keys[start : start + 2]), keys[max(0, start - 1) : start])
    assert store.get(OTHERS[:2], blanks(2)) == 2
    found = [(store.exists(KEYS), store.exists(OTHERS))]
    for key in STRANGE[:8]:
        store.put([key], pages([key]))
        found.append((store.exists(KEYS), store.exists(OTHERS)))
    assert found == [(6, 3), (6, 2), (5, 2), (4, 2), (3, 2), (2, 2), (1, 2), (0, 2), (0, 1)]
    assert store.stats().num_pages == 9


def test_a_cap_that_was_lowered_is_kept_at_the_next_write(tmp_path: Path) -> None:
    FileStore(tmp_path, PLENTY).put(KEYS, pages(KEYS))
    store = FileStore(tmp_path, 5 * FILE_BYTES)
    store.put(OTHERS[:1], pages(OTHERS[:1]))
    assert len(files(tmp_path)) == 5


class FailingDisk:
    """Lets ``writev`` through until told to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        self.is_short = False
        self._writev = os.writev
        monkeypatch.setattr(file_store.os, "writev", self.writev)

    def writev(self, fd: int, buffers: list[memoryview]) -> int:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        if self.is_short:
            return self._writev(fd, [memoryview(buffers[0])[:10]])
        return self._writev(fd, buffers)


@pytest.mark.parametrize("how", [errno.ENOSPC, errno.EIO, "short"])
def test_a_disk_that_takes_no_more_stops_writing_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: int | str
) -> None:
    disk = FailingDisk(monkeypatch)
    now = [50.0]
    store = FileStore(tmp_path, PLENTY, clock=lambda: now[0])
    assert store.put(KEYS[:3], pages(KEYS[:3])) == 3
    if how == "short":
        disk.is_short = True
    else:
        disk.error = int(how)
    assert store.put(KEYS[:8], pages(KEYS[:8])) == 3
    assert len(files(tmp_path)) == 3
    disk.error, disk.is_short = 0, False
    now[0] += PAUSE_S - 0.1
    assert store.put(KEYS[:8], pages(KEYS[:8])) == 3
    stats = store.stats()
    assert (stats.num_refused, stats.num_errors, stats.num_stored) == (10, 1, 3)
    assert os.strerror(errno.ENOSPC if how == "short" else int(how)) in stats.last_error
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert store.get(KEYS[:3], blanks(3)) == 3
    now[0] += 0.2
    assert store.put(KEYS[:8], pages(KEYS[:8])) == 8
    assert store.get(KEYS[:8], blanks(8)) == 8


def test_a_disk_that_cannot_be_read_costs_hits_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path, PLENTY)
    store.put(KEYS[:3], pages(KEYS[:3]))

    def fail(fd: int, buffers: list[memoryview]) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(file_store.os, "readv", fail)
        assert store.get(KEYS[:3], blanks(3)) == 0
    assert store.stats().num_errors == 1
    assert store.stats().num_corrupt == 0
    assert store.get(KEYS[:3], blanks(3)) == 3


def test_folders_that_became_files_cost_hits_and_nothing_else(tmp_path: Path) -> None:
    store = FileStore(tmp_path, PLENTY)
    folder = path_of(tmp_path, KEYS[0]).parent
    folder.write_text("in the way")
    assert store.exists(KEYS[:1]) == store.get(KEYS[:1], blanks(1)) == store.put(KEYS[:1], pages(KEYS[:1])) == 0
    assert store.stats().num_errors == 3  # put writes without a look: get found something bad
    assert FileStore(tmp_path, PLENTY).stats().num_errors == 1
    assert folder.read_text() == "in the way"


def test_a_directory_removed_behind_our_back_is_not_made_again(tmp_path: Path) -> None:
    """Without its marker nobody would know it for a store."""
    store = FileStore(tmp_path / "store", PLENTY)
    shutil.rmtree(tmp_path / "store")
    assert store.put(KEYS[:1], pages(KEYS[:1])) == 0
    assert store.stats().num_errors == 1
    assert list(tmp_path.iterdir()) == []


def test_unfinished_files_are_removed_when_old(tmp_path: Path) -> None:
    FileStore(tmp_path, PLENTY).put(KEYS[:1], pages(KEYS[:1]))
    folder = path_of(tmp_path, KEYS[0]).parent
    names = [f"{KEYS[0].hex()}.0123abcd-{number}.new" for number in (1, 2)]
    for name in (*names, "notes.txt"):
        (folder / name).write_text("x")
    old = time.time() - 2 * 3600
    os.utime(folder / names[0], (old, old))
    os.utime(folder / "notes.txt", (old, old))
    store = FileStore(tmp_path, PLENTY)
    assert files(tmp_path) == sorted([KEYS[0].hex(), names[1], "notes.txt"])
    assert store.stats().num_pages == 1
    assert store.clear() == 1
    assert files(tmp_path) == sorted([names[1], "notes.txt"])


def test_processes_that_share_a_directory_find_each_others_pages(tmp_path: Path) -> None:
    one, two = FileStore(tmp_path, PLENTY), FileStore(tmp_path, PLENTY)
    one.put(KEYS[:4], pages(KEYS[:4]))
    assert two.exists(KEYS) == 4
    assert two.get(KEYS[:4], blanks(4)) == 4
    assert two.put(KEYS[:4], pages(KEYS[:4])) == 4
    assert two.stats().num_stored == 0
    assert two.stats().num_pages == 4
    assert one.clear() == 4
    assert two.get(KEYS[:4], blanks(4)) == 0


def test_processes_that_share_a_directory_keep_the_cap_together(tmp_path: Path) -> None:
    cap = 16
    one, two = FileStore(tmp_path, cap * FILE_BYTES), FileStore(tmp_path, cap * FILE_BYTES)
    for mine, yours in zip(make_keys("one", 100), make_keys("two", 100), strict=True):
        one.put([mine], pages([mine]))
        two.put([yours], pages([yours]))
        assert len(files(tmp_path)) <= cap + 2 * cap // 8 + 2
    assert one.stats().num_evicted + two.stats().num_evicted >= 200 - cap - 2 * cap // 8 - 2


def test_an_empty_directory_becomes_a_store(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    FileStore(tmp_path, PLENTY)
    assert (tmp_path / MARKER).read_text() == MARKER_TEXT
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


def test_a_marker_that_a_killed_process_had_begun_keeps_no_directory_from_becoming_a_store(tmp_path: Path) -> None:
    (tmp_path / f"{MARKER}.0123abcd").write_text(MARKER_TEXT[:5])
    assert FileStore(tmp_path, PLENTY).put(KEYS, pages(KEYS)) == len(KEYS)
    assert (tmp_path / MARKER).read_text() == MARKER_TEXT


def test_a_store_that_is_being_deleted_is_opened_without_its_lock(tmp_path: Path) -> None:
    FileStore(tmp_path, PLENTY).put(KEYS, pages(KEYS))
    with (tmp_path / MARKER).open() as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        store = FileStore(tmp_path, PLENTY)
        assert store.get(KEYS, blanks(len(KEYS))) == len(KEYS)
        store.close()


FOREIGN = {
    "another's files": ("notes.txt", "hello", "no store of hiserve"),
    "another version": (MARKER, "hiserve page store, version 2\n", "says 'hiserve page store, version 2'"),
    "no text": (MARKER, "", "says ''"),
}


@pytest.mark.parametrize(("name", "text", "words"), FOREIGN.values(), ids=FOREIGN)
def test_a_directory_that_is_not_ours_is_refused_and_left_alone(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=f"--store file:{tmp_path} cannot be used: .*{words}.*another dir") as caught:
        FileStore(tmp_path, PLENTY)
    assert caught.value.param == "store"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == text
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="File exists"):
        FileStore(tmp_path / "file", PLENTY)


OPENER = """
import sys
from pathlib import Path
from hiserve.cache.storage.file_store import FileStore
sys.stdin.readline()
FileStore(Path(sys.argv[1]), 10**9)
assert "torch" not in sys.modules
"""


def test_servers_that_start_at_once_share_a_new_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPENER, str(tmp_path / "new")]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) for _ in range(3)]
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    assert [child.wait(PATIENCE_S) for child in children] == [0, 0, 0]
    assert [path.name for path in (tmp_path / "new").iterdir()] == [MARKER]
