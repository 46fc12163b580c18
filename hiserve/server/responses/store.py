"""Responses that clients continue or read later: bounded in size and age, separate by caller."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hiserve.errors import ConfigError, NotFoundError, RequestError, UnavailableError

MAX_BYTES = 64 * 2**20
KEPT_S = 3600.0
ROW_BYTES = 1024  # of a response in addition to its texts, its entries of the indexes included
ITEM_BYTES = 256  # of the entries of one item
MAX_ITEM_ID_BYTES = 64  # of the ids by which items are found
# Of the items of one conversation, as many as a request may have, and of its responses.
MAX_CHAIN_ITEMS = 4096
MAX_CHAIN_BYTES = 8 * 2**20
VERSION = 2  # 1 had no items
MEMORY, OFF, FILE = "memory", "off", "sqlite:"

_TABLE = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, caller BLOB, previous TEXT, items BLOB, reply BLOB, num_items INTEGER, num_bytes INTEGER, used REAL
);
CREATE INDEX by_caller ON responses (caller, used, num_bytes);
CREATE INDEX by_use ON responses (used);
"""
# By their ids, the items of responses, whose numbers they have.
_ITEMS = """
CREATE TABLE items (id TEXT, response INTEGER, PRIMARY KEY (id, response)) WITHOUT ROWID;
CREATE INDEX by_response ON items (response);
CREATE TRIGGER forget_items AFTER DELETE ON responses BEGIN DELETE FROM items WHERE response = OLD.rowid; END;
"""
# A response and those before it, the last one first.
_CHAIN = """
WITH RECURSIVE chain (depth, id, previous) AS (
    SELECT 0, id, previous FROM responses WHERE id = :id AND caller = :caller
    UNION ALL
    SELECT depth + 1, responses.id, responses.previous FROM responses JOIN chain ON responses.id = chain.previous
    WHERE caller = :caller AND depth < :most
)
"""
# The latest response with an item.
_HOLDING = """
SELECT responses.id, num_bytes FROM items JOIN responses ON responses.rowid = response
WHERE items.id = :id AND caller = :caller ORDER BY response DESC LIMIT 1
"""
_STEP_S = 1e-6  # a response counts as used by this time later than its continuation, so that it is evicted later


class StoredResponse(NamedTuple):
    """A response.

    Attributes:
        id: Its id.
        previous: The one that it continues, or None.
        items: JSON of the input items that are its own.
        reply: JSON of the response.
        num_items: Of its input and its output.
    """

    id: str
    previous: str | None
    items: bytes
    reply: bytes
    num_items: int

    @property
    def num_bytes(self) -> int:
        """The size that is counted."""
        return len(self.items) + len(self.reply) + ROW_BYTES + self.num_items * ITEM_BYTES


class ResponseStore:
    """Keeps responses for ``KEPT_S`` after their last use, in at most ``max_bytes``.

    Where they do not fit, the least recently used response of the caller with the most bytes is evicted: no caller loses
    responses within its share, the limit divided by the callers. Its methods are called from one thread at a time.

    Args:
        path: A file; None keeps them in memory.
        max_bytes: Most bytes of all responses.
        now: Seconds; of a clock that other processes share, for a file.

    Raises:
        ConfigError: The file cannot be used, or holds something else; it is not changed.
    """

    def __init__(
        self, path: Path | None = None, *, max_bytes: int = MAX_BYTES, now: Callable[[], float] = time.time
    ) -> None:
        self._max_bytes = max_bytes
        self._now = now
        try:
            if path is not None:
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"--responses-store {FILE}{path} cannot be used: {error}. Give another file.", param="responses_store"
            ) from None

    def _open(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        tables = self._db.execute("SELECT name FROM sqlite_master").fetchall()
        if version not in (0, 1, VERSION) or bool(tables) != bool(version):
            raise sqlite3.DatabaseError("it holds something else than responses of this version")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        if version != VERSION:
            missing_tables = _ITEMS if version else _TABLE + _ITEMS
            self._db.executescript(f"BEGIN; {missing_tables} PRAGMA user_version = {VERSION}; COMMIT;")

    def put(self, caller: bytes, stored: StoredResponse, item_ids: Sequence[str] = ()) -> bool:
        """Keeps a response, and uses those before it; returns False where it does not fit.

        Args:
            caller: Its caller.
            stored: The response.
            item_ids: Of its input and its output, for ``holding``; those of more than ``MAX_ITEM_ID_BYTES`` are not found.

        Raises:
            UnavailableError: The file cannot be written.
        """
        with self._transaction():
            self._use(caller, stored.previous)
            self._expire()
            if not self._make_room(caller, stored.num_bytes):
                return False
            made = self._db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (stored.id, caller, *stored[1:], stored.num_bytes, self._now()),
            )
            found_by = {item_id for item_id in item_ids if len(item_id.encode()) <= MAX_ITEM_ID_BYTES}
            self._db.executemany("INSERT INTO items VALUES (?, ?)", [(each, made.lastrowid) for each in found_by])
        return True

    def get(self, caller: bytes, response_id: str) -> StoredResponse:
        """Returns a response.

        Raises:
            NotFoundError: The store does not have it, or it is another caller's.
        """
        with self._transaction():
            self._expire()
            self._use(caller, response_id)
            row = self._db.execute(
                "SELECT id, previous, items, reply, num_items FROM responses WHERE id = ? AND caller = ?",
                (response_id, caller),
            ).fetchone()
        if row is None:
            raise missing(response_id)
        return StoredResponse(*row)

    def chain(self, caller: bytes, response_id: str) -> list[StoredResponse]:
        """Returns a response and those that it continues, the first one first.

        Raises:
            NotFoundError: The store does not have one of them, or it is another caller's.
            RequestError: They are more than one request may have.
        """
        wanted = {"id": response_id, "caller": caller, "most": MAX_CHAIN_ITEMS}
        with self._transaction():
            self._expire()
            sizes = self._db.execute(
                f"{_CHAIN} SELECT chain.previous, num_items, num_bytes FROM chain JOIN responses USING (id) ORDER BY depth",
                wanted,
            ).fetchall()
            first = sizes[-1][0] if sizes else response_id  # the one before the first that was found
            if first is not None and len(sizes) <= MAX_CHAIN_ITEMS:
                raise missing(first, is_previous=True)
            num_items, num_bytes = (sum(row[column] for row in sizes) for column in (1, 2))
            if num_items > MAX_CHAIN_ITEMS or num_bytes > MAX_CHAIN_BYTES:
                raise RequestError(
                    f"the responses up to {response_id[:100]!r} have {num_items} items and {num_bytes} bytes; the most is "
                    f"{MAX_CHAIN_ITEMS} and {MAX_CHAIN_BYTES}. Send the items that are still needed as input.",
                    param="previous_response_id",
                )
            self._use(caller, response_id)
            rows = self._db.execute(
                f"{_CHAIN} SELECT id, chain.previous, items, reply, num_items FROM chain JOIN responses USING (id) "
                "ORDER BY depth DESC",
                wanted,
            ).fetchall()
        return [StoredResponse(*row) for row in rows]

    def holding(self, caller: bytes, item_ids: Sequence[str]) -> list[StoredResponse]:
        """Returns, each once, the latest responses that have these items.

        Raises:
            NotFoundError: The store does not have one of the items, or it is another caller's.
            RequestError: The responses have more bytes than one request may have.
        """
        sizes = dict[str, int]()
        with self._transaction():
            self._expire()
            for item_id in item_ids:
                row = self._db.execute(_HOLDING, {"id": item_id, "caller": caller}).fetchone()
                if row is None:
                    raise missing_item(item_id)
                sizes[row[0]] = row[1]
            if sum(sizes.values()) > MAX_CHAIN_BYTES:
                raise RequestError(
                    f"the responses of the items that input refers to have {sum(sizes.values())} bytes; the most is "
                    f"{MAX_CHAIN_BYTES}. Send the items themselves.",
                    param="input",
                )
            found = []
            for response_id in sizes:
                self._db.execute("UPDATE responses SET used = ? WHERE id = ?", (self._now(), response_id))
                columns = "SELECT id, previous, items, reply, num_items FROM responses WHERE id = ?"
                found.append(StoredResponse(*self._db.execute(columns, (response_id,)).fetchone()))
        return found

    def delete(self, caller: bytes, response_id: str) -> None:
        """Forgets a response.

        Raises:
            NotFoundError: The store does not have it, or it is another caller's.
        """
        with self._transaction():
            found = self._db.execute("DELETE FROM responses WHERE id = ? AND caller = ?", (response_id, caller))
        if not found.rowcount:
            raise missing(response_id)

    @property
    def num_bytes(self) -> int:
        """Bytes of all responses."""
        return sum(self._by_caller().values())

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with self._db:  # commits, or rolls back whatever is raised
                self._db.execute("BEGIN IMMEDIATE")
                yield
        except sqlite3.Error as error:
            raise UnavailableError(f"stored responses cannot be reached: {error}; try again later.") from None

    def _use(self, caller: bytes, response_id: str | None) -> None:
        """Makes a response and those before it the most recently used ones, the first one last, so that it is evicted last."""
        self._db.execute(
            f"{_CHAIN} UPDATE responses SET used = :now + depth * :step FROM chain WHERE responses.id = chain.id",
            {"id": response_id, "caller": caller, "most": MAX_CHAIN_ITEMS, "now": self._now(), "step": _STEP_S},
        )

    def _expire(self) -> None:
        self._db.execute("DELETE FROM responses WHERE used < ?", (self._now() - KEPT_S,))

    def _make_room(self, caller: bytes, num_bytes: int) -> bool:
        """Makes room for a response of a caller; returns False where it is larger than its share."""
        sizes = self._by_caller()
        sizes[caller] = sizes.get(caller, 0) + num_bytes
        while sum(sizes.values()) > self._max_bytes:
            largest = max(sizes, key=lambda each: sizes[each])
            oldest = "SELECT rowid, num_bytes FROM responses WHERE caller = ? ORDER BY used, rowid LIMIT 1"
            found = self._db.execute(oldest, (largest,)).fetchone()
            if found is None:
                return False
            self._db.execute("DELETE FROM responses WHERE rowid = ?", (found[0],))
            sizes[largest] -= found[1]
        return True

    def _by_caller(self) -> dict[bytes, int]:
        return dict(self._db.execute("SELECT caller, sum(num_bytes) FROM responses GROUP BY caller").fetchall())


def open_responses(where: str) -> ResponseStore | None:
    """Returns the store of ``--responses-store``; None for ``off``.

    Raises:
        ConfigError: It names none, or a file that cannot be used.
    """
    if where == OFF:
        return None
    if where == MEMORY:
        return ResponseStore()
    if where.startswith(FILE) and where != FILE:
        return ResponseStore(Path(where.removeprefix(FILE)).expanduser())
    raise ConfigError(f"--responses-store is {where!r}; give {MEMORY}, {OFF} or {FILE}PATH.", param="responses_store")


def missing(response_id: str, *, is_previous: bool = False) -> NotFoundError:
    """Returns the error for a response that the store does not have; ``is_previous`` says that a request continues it."""
    return NotFoundError(
        f"there is no response {response_id[:100]!r}: it was not stored, has expired, or gave way to later ones. "
        "Send its items as input.",
        code="previous_response_not_found" if is_previous else "response_not_found",
        param="previous_response_id" if is_previous else None,
    )


def missing_item(item_id: str) -> NotFoundError:
    """Returns the error for an item that the store does not have."""
    return NotFoundError(
        f"there is no item {item_id[:100]!r}: its response was not stored, has expired, or gave way to later ones. "
        "Send the item itself.",
        code="item_not_found",
        param="input",
    )
