"""The store of responses: its bounds, its shares, its age, and its file."""

from __future__ import annotations

import random
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiserve.errors import ConfigError, NotFoundError, RequestError, UnavailableError
from hiserve.server.responses import store as response_store
from hiserve.server.responses.store import ITEM_BYTES, KEPT_S, ROW_BYTES, ResponseStore, StoredResponse, open_responses
from tests.helpers.clock import Clock

MAX_BYTES = 20 * (ROW_BYTES + 2 * ITEM_BYTES + 1000)
SEED = 7


def stored(name: str, previous: str | None = None, size: int = 1000, num_items: int = 2) -> StoredResponse:
    return StoredResponse(name, previous, b"i" * (size // 2), b"r" * (size - size // 2), num_items)


@pytest.fixture(params=["memory", "file"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ResponseStore, Clock]]:
    clock = Clock()
    made = ResponseStore(tmp_path / "x.db" if request.param == "file" else None, max_bytes=MAX_BYTES, now=clock)
    yield made, clock
    made.close()


def has(store: ResponseStore, caller: bytes, name: str) -> bool:
    try:
        return store.get(caller, name).id == name
    except NotFoundError:
        return False


def test_a_flood_stays_within_the_bytes_and_takes_nothing_from_another_s_share(
    kept: tuple[ResponseStore, Clock],
) -> None:
    print(f"seed {SEED}")
    store, clock = kept
    draw = random.Random(SEED)
    for name in ("a0", "a1", "a2"):
        assert store.put(b"quiet", stored(name))
    for i in range(400):
        clock.now_s += 0.001
        store.put(b"loud", stored(f"b{i}", size=draw.choice([0, 10, 1000, 9000, 30_000])))
        assert store.num_bytes <= MAX_BYTES
    assert all(has(store, b"quiet", name) for name in ("a0", "a1", "a2"))
    assert not has(store, b"loud", "b0")
    for i in range(40):  # a share is no promise of more than it
        clock.now_s += 0.001
        store.put(b"quiet", stored(f"c{i}"))
    assert store.num_bytes <= MAX_BYTES
    assert not has(store, b"quiet", "a0")


def test_a_response_larger_than_its_share_is_not_kept(kept: tuple[ResponseStore, Clock]) -> None:
    store, _ = kept
    assert not store.put(b"a", stored("x", size=MAX_BYTES))
    assert store.put(b"a", stored("y", size=MAX_BYTES - 9 * ROW_BYTES))
    assert not store.put(b"b", stored("z", size=MAX_BYTES - ROW_BYTES - 2 * ITEM_BYTES))
    assert not has(store, b"b", "z")
    assert store.num_bytes <= MAX_BYTES


def test_the_least_recently_used_goes_first_and_a_conversation_from_its_end(
    kept: tuple[ResponseStore, Clock],
) -> None:
    store, clock = kept
    for i in range(20):
        clock.now_s += 1
        store.put(b"a", stored(f"r{i}", f"r{i - 1}" if 0 < i < 5 else None))
    clock.now_s += 1
    assert [each.id for each in store.chain(b"a", "r4")] == ["r0", "r1", "r2", "r3", "r4"]
    for i in range(17):
        clock.now_s += 1
        store.put(b"a", stored(f"s{i}"))
    assert not has(store, b"a", "r19")
    clock.now_s += 1
    with pytest.raises(NotFoundError, match="'r4'"):
        store.chain(b"a", "r4")
    assert [each.id for each in store.chain(b"a", "r2")] == ["r0", "r1", "r2"]


def test_what_is_not_used_for_an_hour_is_forgotten(kept: tuple[ResponseStore, Clock]) -> None:
    store, clock = kept
    store.put(b"a", stored("old"))
    store.put(b"a", stored("used"))
    clock.now_s += KEPT_S - 1
    assert has(store, b"a", "used")
    clock.now_s += 2
    assert has(store, b"a", "used")
    assert not has(store, b"a", "old")
    store.put(b"a", stored("next", "used"))
    clock.now_s += KEPT_S - 1
    assert store.chain(b"a", "next")
    clock.now_s += KEPT_S + 1
    store.put(b"a", stored("last"))
    assert store.num_bytes == stored("last").num_bytes


def test_callers_are_apart(kept: tuple[ResponseStore, Clock]) -> None:
    store, _ = kept
    store.put(b"a", stored("x"))
    store.put(b"b", stored("y", "x"))
    assert not has(store, b"b", "x")
    for name in ("x", "y"):
        with pytest.raises(NotFoundError) as caught:
            store.chain(b"b", name)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(NotFoundError):
        store.delete(b"b", "x")
    store.delete(b"a", "x")
    assert not has(store, b"a", "x")


def test_a_conversation_has_no_more_items_and_bytes_than_a_request(
    kept: tuple[ResponseStore, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = kept
    for i in range(6):
        store.put(b"a", stored(f"r{i}", f"r{i - 1}" if i else None, num_items=3))
    monkeypatch.setattr(response_store, "MAX_CHAIN_ITEMS", 12)
    assert len(store.chain(b"a", "r3")) == 4
    with pytest.raises(RequestError, match="have 15 items"):
        store.chain(b"a", "r4")
    monkeypatch.setattr(response_store, "MAX_CHAIN_ITEMS", 4)  # more responses than items: found before they are read
    with pytest.raises(RequestError, match="Send the items"):
        store.chain(b"a", "r5")
    monkeypatch.undo()
    monkeypatch.setattr(response_store, "MAX_CHAIN_BYTES", 3 * stored("x", num_items=3).num_bytes)
    assert len(store.chain(b"a", "r2")) == 3
    with pytest.raises(RequestError, match="Send the items"):
        store.chain(b"a", "r3")


def test_pages_of_what_is_gone_are_used_again() -> None:
    store = ResponseStore(max_bytes=2**20)
    for i in range(300):
        store.put(b"a", stored(f"r{i}", size=20_000))
    (pages,), (page_bytes,) = (store._db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    assert pages * page_bytes < 1.5 * 2**20


def test_a_file_outlives_the_server_and_is_its_owner_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    first = open_responses(f"sqlite:{path}")
    assert first is not None
    first.put(b"a", stored("x"))
    first.close()
    second = open_responses(f"sqlite:{path}")
    assert second is not None
    assert second.get(b"a", "x") == stored("x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second.close()


def test_a_file_of_something_else_is_refused_and_unchanged(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as made:
        made.execute("CREATE TABLE t (x)")
    made.close()
    text = tmp_path / "text"
    text.write_text("no database " * 200)
    for path in (other, text, tmp_path, tmp_path / "no" / "folder"):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(ConfigError, match="cannot be used") as caught:
            open_responses(f"sqlite:{path}")
        assert caught.value.param == "responses_store"
        assert before is None or path.read_bytes() == before
    for value in ("redis:", "sqlite:", ""):
        with pytest.raises(ConfigError, match="give memory, off or sqlite:PATH"):
            open_responses(value)
    assert open_responses("off") is None


def test_a_file_that_fails_is_no_fault_of_the_caller(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "x.db")
    store.put(b"a", stored("x"))
    store._db.execute("DROP TABLE responses")
    with pytest.raises(UnavailableError, match="cannot be reached"):
        store.get(b"a", "x")


def test_a_continuation_uses_what_it_continues(kept: tuple[ResponseStore, Clock]) -> None:
    store, clock = kept
    store.put(b"a", stored("x"))
    clock.now_s += KEPT_S - 1
    store.put(b"a", stored("y", "x"))
    clock.now_s += KEPT_S - 1
    assert [each.id for each in store.chain(b"a", "y")] == ["x", "y"]
