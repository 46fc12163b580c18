"""Segments of shared memory: made, found again, passed on, refused."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hiserve.cache.storage import segment as segments
from hiserve.cache.storage.segment import Segment, SegmentLayout, stored_layout
from hiserve.core.digest import namespace_digest
from hiserve.errors import ConfigError, ResourceError
from tests.helpers.host import make_layout
from tests.helpers.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
LAYOUT = make_layout()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) in ([], ["hiserve-x"])


def test_parts_of_a_segment_do_not_overlap(directory: Path) -> None:
    segment = Segment.anonymous(LAYOUT)
    assert segment.records.shape == (16,)
    assert segment.pages.shape == (16, 128)
    assert not segment.records["state"].any()
    segment.pages[:] = 255
    segment.records.view(np.uint8)[:] = 7
    assert (segment.pages == 255).all()
    assert os.pread(segment.fd, 4096, 0) == LAYOUT.pack()
    assert os.fstat(segment.fd).st_size == LAYOUT.num_bytes
    segment.close()


def test_records_and_pages_begin_where_memory_pages_do() -> None:
    for num_pages in (2, 30, 31, 1000):
        assert make_layout(num_pages).pages_offset % 4096 == 0


def test_an_anonymous_segment_leaves_no_name_and_cannot_be_cut() -> None:
    before = set(Path("/dev/shm").iterdir())
    segment = Segment.anonymous(LAYOUT)
    assert set(Path("/dev/shm").iterdir()) == before
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)
    segment.close()


def test_a_second_mapping_sees_the_first(directory: Path) -> None:
    first = Segment.anonymous(LAYOUT)
    second = Segment.attach(os.dup(first.fd))
    assert second.layout == LAYOUT
    first.pages[3, 5] = 9
    first.records["draft_revision"][2] = 11
    assert second.pages[3, 5] == 9
    assert second.records["draft_revision"][2] == 11
    first.close()
    second.close()


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    segment = Segment.anonymous(LAYOUT)
    page = segment.pages[3]
    segment.close()
    page[:] = 5
    assert page.sum() == 5 * 128


def test_nothing_is_left_open() -> None:
    before = os.listdir("/proc/self/fd")
    segment = Segment.anonymous(LAYOUT)
    Segment.attach(os.dup(segment.fd)).close()
    segment.close()
    assert os.listdir("/proc/self/fd") == before


CHILD = """
import socket, sys
from hiserve.cache.storage.segment import Segment
how, number = sys.argv[1], int(sys.argv[2])
if how == "message":
    with socket.socket(fileno=number) as channel:
        _, (number,), _, _ = socket.recv_fds(channel, 1, 1)
segment = Segment.attach(number)
assert segment.pages[7, 0] == 41, segment.pages[7, 0]
segment.pages[7, 0] = 42
print(segment.layout.num_pages)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("how", ["inherited", "message"])
def test_another_process_gets_it_by_descriptor(how: str) -> None:
    segment = Segment.anonymous(LAYOUT)
    segment.pages[7, 0] = 41
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = segment.fd if how == "inherited" else theirs.fileno()
        command = [sys.executable, "-c", CHILD, how, str(fd)]
        with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE, cwd=ROOT) as child:
            if how == "message":
                socket.send_fds(ours, [b"x"], [segment.fd])
            assert child.communicate(timeout=PATIENCE_S)[0] == b"16\n"
        assert child.returncode == 0
    assert segment.pages[7, 0] == 42
    segment.close()


def test_a_named_segment_keeps_its_pages(directory: Path) -> None:
    first = Segment.named("x", LAYOUT, directory)
    first.pages[3] = 9
    path = directory / "hiserve-x"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first.close()
    assert stored_layout("x", directory) == LAYOUT
    second = Segment.named("x", LAYOUT, directory)
    assert (second.pages[3] == 9).all()
    second.close()


def test_nothing_is_stored_under_a_new_name(directory: Path) -> None:
    assert stored_layout("x", directory) is None
    (directory / "hiserve-x").touch(0o600)
    assert stored_layout("x", directory) is None


HOLDER = """
import sys
from pathlib import Path
from hiserve.cache.storage.segment import Segment
from tests.helpers.host import make_layout
segment = Segment.named("x", make_layout(), Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_cannot_hold_one_name(directory: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(ResourceError, match=r"another server uses .*hiserve-x.*--host-cache-name"):
            Segment.named("x", LAYOUT, directory)
        child.kill()
        child.wait()
    Segment.named("x", LAYOUT, directory).close()


def test_one_process_cannot_hold_a_name_twice_nor_while_a_passed_descriptor_lives(directory: Path) -> None:
    first = Segment.named("x", LAYOUT, directory)
    with pytest.raises(ResourceError, match="another server"):
        Segment.named("x", LAYOUT, directory)
    passed = os.dup(first.fd)
    first.close()
    with pytest.raises(ResourceError, match="another server"):
        Segment.named("x", LAYOUT, directory)
    os.close(passed)
    Segment.named("x", LAYOUT, directory).close()


OTHERS = {
    "page size": (replace(LAYOUT, page_size=8), "pages of 4 tokens, not 8"),
    "model": (
        replace(LAYOUT, namespace=namespace_digest("another model")),
        "another model, other weights, or another --dtype, --state-dtype, --kv-dtype, --store or --kv-canary",
    ),
    "page bytes": (replace(LAYOUT, page_bytes=256), "pages of 128 bytes, not 256"),
    "size": (replace(LAYOUT, num_pages=20), ".* GiB, not .*--host-cache-gib"),
}


@pytest.mark.parametrize(("other", "words"), OTHERS.values(), ids=OTHERS)
def test_a_segment_of_another_kind_is_refused_and_left_alone(directory: Path, other: SegmentLayout, words: str) -> None:
    first = Segment.named("x", LAYOUT, directory)
    first.pages[:] = 3
    first.close()
    before = (directory / "hiserve-x").read_bytes()
    with pytest.raises(ConfigError, match=f"hiserve-x holds a host cache of {words}.*left alone.*rm ") as caught:
        Segment.named("x", other, directory)
    assert caught.value.param == "host_cache_name"
    assert (directory / "hiserve-x").read_bytes() == before


@pytest.mark.parametrize("found", [b"hello", b"hiserve\0", b"\0" * 8192], ids=["text", "short", "zeros"])
def test_a_file_that_is_not_ours_is_refused_and_left_alone(directory: Path, found: bytes) -> None:
    path = directory / "hiserve-x"
    path.write_bytes(found)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not one of ours"):
        Segment.named("x", LAYOUT, directory)
    with pytest.raises(ConfigError, match="not one of ours"):
        stored_layout("x", directory)
    assert path.read_bytes() == found


def test_another_version_is_refused_by_its_number(directory: Path) -> None:
    path = directory / "hiserve-x"
    header = bytearray(LAYOUT.pack())
    header[8] = 77
    path.write_bytes(header)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"version 77, this server writes {segments.VERSION}"):
        Segment.named("x", LAYOUT, directory)


def test_a_file_that_others_can_open_is_refused(directory: Path) -> None:
    Segment.named("x", LAYOUT, directory).close()
    (directory / "hiserve-x").chmod(0o640)
    with pytest.raises(ConfigError, match="this user alone"):
        Segment.named("x", LAYOUT, directory)


def test_a_link_is_refused(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("elsewhere") / "target"
    target.touch(0o600)
    (directory / "hiserve-x").symlink_to(target)
    with pytest.raises(ConfigError, match="cannot be the host cache"):
        Segment.named("x", LAYOUT, directory)
    with pytest.raises(ConfigError, match="cannot be the host cache"):
        stored_layout("x", directory)
    assert target.read_bytes() == b""


@pytest.mark.parametrize("size", [0, 4096, LAYOUT.num_bytes - 1])
def test_a_segment_whose_making_was_cut_short_is_completed(directory: Path, size: int) -> None:
    Segment.named("x", LAYOUT, directory).close()
    os.truncate(directory / "hiserve-x", size)
    segment = Segment.named("x", LAYOUT, directory)
    assert not segment.records["state"].any()
    segment.close()
    assert (directory / "hiserve-x").stat().st_size == LAYOUT.num_bytes


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "x" * 65, "x\n"])
def test_a_name_that_is_no_file_name_is_refused(directory: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        Segment.named(name, LAYOUT, directory)


def test_a_file_system_without_room_is_told_with_numbers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TC-64: a small /dev/shm."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1 << 18, f_frsize=4096))
    large = replace(LAYOUT, page_bytes=1 << 30, num_pages=4)
    with pytest.raises(ResourceError, match=r"needs 4 GiB .* has 1 GiB free.*--host-cache-gib.*--shm-size") as caught:
        Segment.named("x", large, directory)
    assert caught.value.param == "host_cache_gib"
    assert list(directory.iterdir()) == []


def test_records_have_their_memory_from_the_start(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing a record to a full /dev/shm would kill the process."""
    large = make_layout(100_000)
    segment = Segment.anonymous(large)
    assert os.fstat(segment.fd).st_blocks * 512 >= large.pages_offset
    segment.close()

    def fail(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ResourceError, match=r"No space left.*--host-cache-gib"):
        Segment.named("x", large, directory)


LIMITED = """
import resource
from hiserve.cache.storage.segment import Segment
from hiserve.errors import ResourceError
from tests.helpers.host import make_layout
resource.setrlimit({limit}, (1 << 30, 1 << 30))
try:
    Segment.anonymous(make_layout(4, page_bytes=1 << 30))
except ResourceError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", ["resource.RLIMIT_FSIZE", "resource.RLIMIT_AS"])
def test_a_limit_of_the_system_is_told_with_the_flag_to_lower(limit: str) -> None:
    command = [sys.executable, "-c", LIMITED.format(limit=limit)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "needs 4 GiB" in said
    assert "--host-cache-gib" in said
