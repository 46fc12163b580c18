"""Rates of a page store in a real Valkey on loopback: pages of several sizes, written, looked up and read, with their tags.

Usage: ``python -m benchmarks.store_rate OUT.json COMMIT [--tiny]``. Client and server run on one machine and share its cores: what a
network adds, and what other cores would give, is not in these figures. CPU times are those of both processes for a page.
``--tiny`` is a test of this file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.record import Record, gpu_parser, medians
from benchmarks.served import child_pids, cpu_s
from hiserve.cache.storage.valkey_store import ValkeyStore
from tests.helpers.valkey import SECRET, valkey

SIZES = (64 * 2**10, 512 * 2**10, 2 * 2**20)
BATCH_BYTES = 32 * 2**20


def timed(call: Callable[[], int], count: int) -> tuple[float, float]:
    """Returns the seconds, and those of CPU in both processes, that a call took on ``count`` pages."""
    (server,) = child_pids(os.getpid())
    cpu, begin = time.process_time() + cpu_s(server), time.perf_counter()
    assert call() == count
    return time.perf_counter() - begin, time.process_time() + cpu_s(server) - cpu


def round_of(store: ValkeyStore, size: int, number: int) -> dict[str, float]:
    """Returns the figures of one batch of pages."""
    count = max(1, BATCH_BYTES // size)
    keys = [b"".join(each.to_bytes(8, "big") for each in (size, number, index, 0)) for index in range(count)]
    pages = [memoryview(bytearray(os.urandom(4096) * (size // 4096))) for _ in keys]
    blanks = [memoryview(bytearray(size)) for _ in keys]
    put_s, put_cpu_s = timed(lambda: store.put(keys, pages), count)
    exists_s, _ = timed(lambda: store.exists(keys), count)
    get_s, get_cpu_s = timed(lambda: store.get(keys, blanks), count)
    one_s, _ = timed(lambda: store.get(keys[:1], blanks[:1]), 1)
    assert blanks == pages
    return {
        "put_gb_per_s": count * size / put_s / 1e9,
        "get_gb_per_s": count * size / get_s / 1e9,
        "exists_us_a_key": 1e6 * exists_s / count,
        "get_one_ms": 1e3 * one_s,
        "put_cpu_ms_a_page": 1e3 * put_cpu_s / count,
        "get_cpu_ms_a_page": 1e3 * get_cpu_s / count,
    }


def main() -> int:
    given = gpu_parser(__doc__).parse_args()
    sources = ("hiserve/cache/storage", "benchmarks/store_rate.py")
    record = Record(given.out, "python -m benchmarks.store_rate OUT.json COMMIT", *sources, at_commit=given.commit)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
        with valkey(Path(folder), *flags) as endpoint:
            store = ValkeyStore([endpoint], SECRET, 10.0)
            for size in SIZES[:1] if given.tiny else SIZES:
                rounds = [round_of(store, size, number) for number in range(3 if given.tiny else 10)][1:]
                found[str(size)] = medians({name: [each[name] for each in rounds] for name in rounds[0]}, 4)
                print(size, found[str(size)], flush=True)
            store.close()
    record |= {"by_page_bytes": found}
    record.save()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
