"""The page store in Valkey, or Redis: for servers of several hosts, over any network."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hiserve.cache.storage.breaker import PAUSE_S, Breaker
from hiserve.cache.storage.page_tags import HEADER_BYTES, PageTags
from hiserve.cache.storage.resp import Argument, Connection, Endpoint, ProtocolError, RefusedError
from hiserve.ipc.cache_stats import StoreStats

PREFIX = b"hiserve:page:"
MAX_KEYS = 256  # of an exchange
MAX_BYTES = 1 << 22  # of pages in an exchange, or one page
MAX_SCANNED = 4096  # keys of an answer to SCAN, of which a hundredth is asked for
CLEAR_S = 60.0
_HEADER, _PAGE = b"h", b"p"  # fields of a page's hash

logger = logging.getLogger(__name__)


class ValkeyStore:
    """Pages as hashes ``hiserve:page:KEY`` of one or more servers, which hold what ``maxmemory`` and its policy say.

    A key belongs to the server with the highest score of key and server (Thaler and Ravishankar, 1998), so that a server more or less
    moves few keys. Headers have the tags of ``PageTags``: a page that no server of this secret wrote is removed and a miss.

    Each exchange ends within ``timeout_s``. A server that fails three times in a row is left alone for ``breaker.PAUSE_S``, and
    then tried once; what it holds is missing meanwhile. A server that is full, or refuses writes, is left alone by writes only.

    Args:
        endpoints: At least one.
        secret: Of the servers that share the store, 32 bytes.
        timeout_s: Longest that an exchange of ``MAX_BYTES``, or of one page, may take.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        secret: bytes,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards = [_Shard(endpoint, timeout_s, clock) for endpoint in endpoints]
        self._tags = PageTags(secret)
        self._is_closed = False
        self._lock = threading.Lock()  # around the counts, never around an exchange
        self._counts: Counter[str] = Counter()
        self._last_error = ""
        self._num_seen = self._seen_bytes = 0  # pages that were read or written, and their bytes

    def exists(self, keys: Sequence[bytes]) -> int:
        count = 0
        for batch in _batches(keys, [0] * len(keys)):
            there = self._ask(batch, self._exists)
            count += next((index for index, key in enumerate(batch) if not there.get(key)), len(batch))
            if len(there) < len(batch) or not all(there.values()):
                break
        return count

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        count, of_key = 0, dict(zip(keys, buffers, strict=True))
        for batch in _batches(keys, [buffer.nbytes for buffer in buffers]):
            read = self._ask(batch, lambda shard, mine: self._read(shard, mine, of_key))
            found = next((index for index, key in enumerate(batch) if not read.get(key)), len(batch))
            count += found
            if found < len(batch):
                break
        self._use([*before, *keys[:count]] if count else [])
        self._count(num_hits=count, num_misses=len(keys) - count)
        return count

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        count, of_key = 0, dict(zip(keys, buffers, strict=True))
        for batch in _batches(keys, [buffer.nbytes for buffer in buffers]):
            done = self._ask(batch, lambda shard, mine: self._write(shard, mine, of_key))
            written = next((index for index, key in enumerate(batch) if not done.get(key)), len(batch))
            count += written
            if written < len(batch):
                break
        self._use([*before, *keys[:count]] if count else [])
        self._count(num_refused=len(keys) - count)
        self._measure()
        return count

    def clear(self) -> int:
        """Removes the pages of all servers that answer, for at most ``CLEAR_S``."""
        count, end_s = 0, time.monotonic() + CLEAR_S
        for shard in self._shards:
            cursor: bytes | None = b"0"
            while cursor is not None and time.monotonic() < end_s:
                cursor, removed = self._clear_some(shard, cursor)
                count += removed
        self._measure()
        return count

    def _clear_some(self, shard: _Shard, cursor: bytes) -> tuple[bytes | None, int]:
        """Removes the pages at a cursor; returns the next one, None at the end, and how many were removed."""
        with self._calling(shard) as connection:
            if connection is not None:
                connection.send([[b"SCAN", cursor, b"MATCH", PREFIX + b"*", b"COUNT", b"%d" % (MAX_SCANNED // 100)]])
                following, names = connection.read_scan(MAX_SCANNED)
                count = 0
                if names:
                    connection.send([[b"UNLINK", *names]])
                    count = connection.read_number()
                return None if following == b"0" else following, count
        return None, 0

    def stats(self) -> StoreStats:
        """The pages are those of the servers' databases after the last write; their bytes follow from the mean of those seen."""
        num_pages = sum(shard.num_keys for shard in self._shards)
        num_bytes = round(num_pages * self._seen_bytes / max(1, self._num_seen))
        return StoreStats(num_pages=num_pages, num_bytes=num_bytes, last_error=self._last_error, **self._counts)

    def close(self) -> None:
        self._is_closed = True
        for shard in self._shards:
            shard.close()

    def _ask(
        self, keys: Sequence[bytes], work: Callable[[_Shard, list[bytes]], dict[bytes, bool]]
    ) -> dict[bytes, bool]:
        """Returns what the servers of some keys say of them, up to the first that is not there; a server that fails says nothing."""
        by_shard: dict[int, list[bytes]] = {}
        for key in keys:
            by_shard.setdefault(self._shard_of(key), []).append(key)
        said: dict[bytes, bool] = {}
        for index, mine in by_shard.items():
            said |= work(self._shards[index], mine)
        return said

    def _exists(self, shard: _Shard, keys: list[bytes]) -> dict[bytes, bool]:
        with self._calling(shard) as connection:
            if connection is not None:
                connection.send([[b"EXISTS", PREFIX + key] for key in keys])
                return {key: connection.read_number() > 0 for key in keys}
        return {}

    def _read(self, shard: _Shard, keys: list[bytes], buffers: dict[bytes, memoryview]) -> dict[bytes, bool]:
        found: dict[bytes, bool] = {}
        foreign: list[bytes] = []
        with self._calling(shard) as connection:
            if connection is None:
                return {}
            connection.send([[b"HMGET", PREFIX + key, _HEADER, _PAGE] for key in keys])
            for key in keys:
                header = bytearray(HEADER_BYTES)
                try:
                    found[key] = connection.read_values([memoryview(header), buffers[key]])
                except ProtocolError as error:
                    # The connection is of no further use: no later reply can be assigned to its command.
                    shard.drop(connection)
                    found[key], self._last_error = False, str(error)
                    foreign.append(key)
                    break
                except RefusedError as error:
                    if not str(error).startswith("WRONGTYPE"):
                        raise
                    found[key] = False
                    foreign.append(key)
                if found[key] and not self._tags.is_intact(key, header, buffers[key]):
                    found[key] = False
                    foreign.append(key)
                if found[key]:
                    self._saw(buffers[key])
        if foreign:
            self._remove(shard, foreign)
        return found

    def _write(self, shard: _Shard, keys: list[bytes], buffers: dict[bytes, memoryview]) -> dict[bytes, bool]:
        done = self._exists(shard, keys)
        missing = [key for key in keys if done.get(key) is False]
        if not missing:
            return done
        if not shard.writes.allows():
            self._count(num_paused=1)
            return done
        with self._calling(shard) as connection:
            if connection is None:
                return done
            commands: list[list[Argument]] = []
            for key in missing:
                header = self._tags.seal(key, buffers[key])
                commands.append([b"HSET", PREFIX + key, _HEADER, header, _PAGE, buffers[key]])
            connection.send(commands)
            refusal: RefusedError | None = None
            for key in missing:
                try:
                    connection.read_number()
                    done[key] = True
                    self._saw(buffers[key])
                    self._count(num_stored=1)
                except RefusedError as error:
                    refusal = error
            if refusal is None:
                shard.writes.succeeded()
            else:
                shard.writes.failed()
                self._record(refusal)
        return done

    def _use(self, keys: Sequence[bytes]) -> None:
        """Touches pages of one prefix, its start last: a prefix is useless without its start."""
        for batch in _batches(keys[::-1], [0] * len(keys)):
            self._ask(batch, self._touch)

    def _touch(self, shard: _Shard, keys: list[bytes]) -> dict[bytes, bool]:
        with self._calling(shard) as connection:
            if connection is not None:
                connection.send([[b"TOUCH", *(PREFIX + key for key in keys)]])
                connection.read_number()
        return {}

    def _remove(self, shard: _Shard, keys: list[bytes]) -> None:
        """Removes pages that no server of this secret wrote, so that they are written again."""
        self._count(num_corrupt=len(keys))
        with self._calling(shard) as connection:
            if connection is not None:
                connection.send([[b"UNLINK", *(PREFIX + key for key in keys)]])
                connection.read_number()

    def _measure(self) -> None:
        for shard in self._shards:
            with self._calling(shard) as connection:
                if connection is not None:
                    connection.send([[b"DBSIZE"]])
                    shard.num_keys = connection.read_number()

    @contextmanager
    def _calling(self, shard: _Shard) -> Iterator[Connection | None]:
        """Lends a connection for an exchange, and takes its failure; None where the server is left alone, or cannot be reached."""
        connection: Connection | None = None
        try:
            if self._is_closed or not shard.calls.allows():
                self._count(num_paused=int(not self._is_closed))
                yield None
                return
            try:
                connection = shard.take()
            except OSError as error:
                self._failed(shard, error)
                yield None
                return
            yield connection
            shard.calls.succeeded()
            shard.give(connection)
        except OSError as error:
            shard.drop(connection)
            self._failed(shard, error)

    def _failed(self, shard: _Shard, error: OSError) -> None:
        shard.calls.failed()
        self._record(error)
        self._count(num_timeouts=int(isinstance(error, TimeoutError)))
        if shard.calls.is_paused:
            logger.warning("the store %s is left alone for %g s: %s", shard.name, PAUSE_S, error)

    def _record(self, error: OSError) -> None:
        self._count(num_errors=1)
        self._last_error = str(error)

    def _saw(self, page: memoryview) -> None:
        with self._lock:
            self._num_seen += 1
            self._seen_bytes += HEADER_BYTES + page.nbytes

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _shard_of(self, key: bytes) -> int:
        if len(self._shards) == 1:
            return 0
        scores = [hashlib.blake2b(key, key=shard.digest, digest_size=8).digest() for shard in self._shards]
        return max(range(len(scores)), key=scores.__getitem__)


class _Shard:
    """One server, and the connections to it that no thread uses.

    Attributes:
        name: Host and port.
        digest: 16 bytes of the name.
        calls: Pauses all calls.
        writes: Pauses writes alone.
        num_keys: Of its database, when it was last asked.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float, clock: Callable[[], float]) -> None:
        self.name = endpoint.name
        self.digest = hashlib.sha256(self.name.encode()).digest()[:16]
        self.calls, self.writes = Breaker(clock), Breaker(clock)
        self.num_keys = 0
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._free: list[Connection] = []
        self._is_closed = False

    def take(self) -> Connection:
        """Returns a connection, new if none is free.

        Raises:
            OSError: The server cannot be reached.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
        return Connection(self._endpoint, self._timeout_s)

    def give(self, connection: Connection) -> None:
        """Takes a connection back, unless it was dropped."""
        with self._lock:
            if not self._is_closed and not connection.is_closed:
                self._free.append(connection)
                return
        connection.close()

    def drop(self, connection: Connection | None) -> None:
        """Closes a connection that is of no further use."""
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Closes the connections that no thread uses; the others are closed when they come back."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for connection in free:
            connection.close()


def _batches(keys: Sequence[bytes], sizes: Sequence[int]) -> Iterator[list[bytes]]:
    """Yields the keys in order, as many at once as an exchange may have."""
    batch: list[bytes] = []
    num_bytes = 0
    for key, size in zip(keys, sizes, strict=True):
        if batch and (len(batch) == MAX_KEYS or num_bytes + size > MAX_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(key)
        num_bytes += size
    if batch:
        yield batch
