"""``hiserve cache``: what is listed, what is deleted, and what is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hiserve import cli
from hiserve.cache.storage.file_store import MARKER, FileStore
from hiserve.cache.storage.inventory import delete_named_cache
from hiserve.cache.storage.segment import Segment
from hiserve.commands import cache
from hiserve.config.options import make_options
from hiserve.errors import ConfigError, ResourceError
from tests.helpers.host import make_keys, make_layout
from tests.helpers.stores import pages

KEYS = make_keys("x", 5)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Stands for /dev/shm; two host caches, one of which is in nobody's use."""
    folder = tmp_path / "shm"
    folder.mkdir()
    Segment.named("mine", make_layout(), folder).close()
    (folder / ".hiserve-mine.secret").write_bytes(bytes(32))
    (folder / "hiserve-odd").write_text("something else")
    (folder / "others").write_text("not ours")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    made = FileStore(tmp_path / "store", 10**9)
    made.put(KEYS, pages(KEYS))
    made.close()
    return tmp_path / "store"


def run(directory: Path, action: str, *targets: str) -> int:
    return cache.run(make_options(), action, list(targets), directory)


def test_named_host_caches_and_the_stores_given_are_listed(
    directory: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = Segment.named("used", make_layout(), directory)
    open_store = FileStore(store, 10**9)
    assert run(directory, "list", f"file:{store}") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "16 of 4 tokens" in lines["mine"] and lines["mine"].endswith("free")
    assert lines["used"].endswith("in use")
    assert "not one of ours" in lines["odd"]
    assert " 5 " in lines[f"file:{store}"] and lines[f"file:{store}"].endswith("in use")
    assert "others" not in lines
    used.close()
    open_store.close()
    run(directory, "list", "used")
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("name") and [line.split()[0] for line in lines] == ["used"] and lines[0].endswith("free")


def test_a_host_cache_is_deleted_with_its_secret(directory: Path) -> None:
    assert run(directory, "delete", "mine") == 0
    assert sorted(path.name for path in directory.iterdir()) == ["hiserve-odd", "others"]


def test_the_ranks_of_a_group_are_deleted_together_or_not_at_all(directory: Path) -> None:
    before = sorted(path.name for path in directory.iterdir())
    others = ["hiserve-mine-1", "hiserve-mine-1-of-2-old", "hiserve-mint-1-of-2"]  # of no rank, or of another group
    for name in ("mine-1-of-2", "mine-2-of-4", *(each.removeprefix("hiserve-") for each in others)):
        Segment.named(name, make_layout(), directory).close()
    used = Segment.named("mine-2-of-4", make_layout(), directory)
    with pytest.raises(ResourceError, match="a server uses the host cache 'mine-2-of-4'"):
        run(directory, "delete", "mine")
    assert len(list(directory.iterdir())) == len(before) + 5
    used.close()
    size = sum((directory / f"hiserve-mine{end}").stat().st_blocks for end in ("", "-1-of-2", "-2-of-4")) * 512
    assert delete_named_cache("mine", directory) == size > 0
    assert sorted(path.name for path in directory.iterdir()) == sorted([*others, "hiserve-odd", "others"])
    Segment.named("min.", make_layout(), directory).close()
    run(directory, "delete", "min.")  # a name, and no expression
    assert (directory / "hiserve-mint-1-of-2").exists()
    Segment.named("mine-1-of-2", make_layout(), directory).close()
    run(directory, "delete", "mine")  # of which others are left
    assert not (directory / "hiserve-mine-1-of-2").exists()


def test_a_store_is_deleted_but_not_what_others_put_there(store: Path, directory: Path) -> None:
    notes = store / "notes.txt"
    (store / f"{MARKER}.secret").write_bytes(bytes(32))
    notes.write_text("mine")
    run(directory, "delete", f"file:{store}")
    assert [path.name for path in store.iterdir()] == ["notes.txt"]
    notes.unlink()
    FileStore(store, 10**9).put(KEYS, pages(KEYS))
    run(directory, "delete", f"file:{store}")
    assert not store.exists()


def test_what_a_server_uses_is_left_alone(directory: Path, store: Path) -> None:
    segment, open_store = Segment.named("mine", make_layout(), directory), FileStore(store, 10**9)
    with pytest.raises(ResourceError, match="a server uses the host cache 'mine'"):
        run(directory, "delete", "mine")
    with pytest.raises(ResourceError, match="a server uses the store"):
        run(directory, "delete", f"file:{store}")
    assert open_store.exists(KEYS) == 5
    segment.close()
    open_store.close()
    run(directory, "delete", "mine", f"file:{store}")


@pytest.mark.parametrize(
    ("action", "target", "words"),
    [
        ("delete", "none", "no host cache named 'none'"),
        ("list", "none", "no host cache named 'none'"),
        ("delete", "odd", "not one of ours"),
        ("delete", "../x", "--host-cache-name is '../x'"),
        ("delete", "file:{tmp}", "is no store of hiserve"),
        ("list", "file:{tmp}/nowhere", "is no store of hiserve"),
    ],
)
def test_what_is_not_there_or_not_ours_is_an_error(
    directory: Path, tmp_path: Path, action: str, target: str, words: str
) -> None:
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=words):
        run(directory, action, target.format(tmp=tmp_path))
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_something_must_be_named_to_be_deleted(directory: Path) -> None:
    with pytest.raises(ConfigError, match="name what to delete"):
        run(directory, "delete")


def test_nothing_is_listed_where_nothing_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "list")
    assert "no named host cache" in capsys.readouterr().out


def test_the_command_line_reaches_it(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "list", f"file:{store}"]) == 0
    assert f"file:{store}" in capsys.readouterr().out
    assert cli.main(["cache", "delete", f"file:{store}"]) == 0
    assert not os.path.exists(store)


def test_a_command_line_without_an_action_names_the_actions_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache"]) == 1
    assert "the following arguments are required: list|delete." in capsys.readouterr().err
