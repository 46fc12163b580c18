"""Grammars without an engine: verdicts on unseen schemas, the memory of 128 of them in a worker, and the CPU time of their masks.

Usage: ``python -m benchmarks.vetting [--schemas N] [--dry | --tiny]``, on any machine. Schemas are drawn like those that clients send: objects
in objects, lists, enumerations, bounded numbers and texts, patterns, formats, references; the vocabulary is like a published one of 131,072
tokens. Times of verdicts are CPU times of the process that tries grammars and of this one, so that other load does not count; times on the
clock are told too. Memory is that of a process before and after it compiles and follows 128 schemas, its vocabulary told apart. Masks
are those of all places of a random walk. ``--tiny`` is a test of this file.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grammars import enlarge
from benchmarks.record import RESULTS, Record, judge, spread
from benchmarks.served import child_pids, thread_cpu_s
from hiserve.core.plan import MASK_BITS
from hiserve.core.request import Grammar
from hiserve.grammar import bounds
from hiserve.grammar.compiler import Compiler
from hiserve.grammar.matcher import Vocabulary
from hiserve.grammar.vet import Vetting

CODE = (
    "hiserve/grammar",
    "hiserve/core/request.py",
    "hiserve/ipc/child.py",
    "benchmarks/vetting.py",
    "benchmarks/grammars.py",
)
SEED, VOCAB_SIZE, END = 20261123, 131_072, 1
WALK = 48  # tokens
BARS = {"verdict_ms_p50": 5.0, "verdict_ms_p99": 50.0, "schemas_mib": 64.0, "mask_us_mean": 60.0}
WORDS = [
    "id",
    "name",
    "title",
    "status",
    "kind",
    "owner",
    "email",
    "price",
    "count",
    "tags",
    "items",
    "address",
    "city",
    "country",
    "created",
    "note",
    "url",
    "parent",
    "score",
]
PATTERNS = (r"^[A-Z]{2}-[0-9]{4}$", r"^[a-z0-9_]{3,16}$", r"^#[0-9a-f]{6}$")
FORMATS = ("date", "date-time", "email", "uuid", "uri")


def leaf(rng: random.Random) -> dict[str, Any]:
    """Returns the schema of a value without parts."""
    low = rng.randrange(100)
    return rng.choice(
        [
            {"type": "string"},
            {"type": "string", "maxLength": rng.choice((16, 40, 200))},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"enum": rng.sample(WORDS, rng.randint(2, 8))},
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 10**6)},
            {"type": "number"},
            {"type": ["string", "null"]},
            {"type": "boolean"},
        ]
    )


def value(rng: random.Random, depth: int) -> dict[str, Any]:
    """Returns the schema of a value of at most so many levels."""
    kind = rng.random()
    if depth == 0 or kind < 0.55:
        return leaf(rng)
    if kind < 0.75:
        return {"type": "array", "items": value(rng, depth - 1), "maxItems": rng.randint(1, 20)}
    if kind < 0.85:
        return {"anyOf": [value(rng, depth - 1), value(rng, depth - 1)]}
    return table(rng, depth - 1)


def table(rng: random.Random, depth: int) -> dict[str, Any]:
    """Returns the schema of an object."""
    names = rng.sample(WORDS, rng.randint(1, 10))
    properties = {name: value(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def drawn(number: int) -> Grammar:
    """Returns a schema like no other."""
    rng = random.Random(SEED + number)
    schema = table(rng, 3)
    schema["title"] = f"Drawn {number}"
    if rng.random() < 0.3:
        schema["properties"]["next"] = {"$ref": "#/$defs/entry"}
        schema["$defs"] = {"entry": table(rng, 1)}
    return bounds.json_schema(schema, "schema")


async def verdicts(folder: Path, count: int) -> dict[str, list[float]]:
    """Returns milliseconds of each verdict: of CPU, and on the clock; those of the start of the process do not count."""
    vetting = Vetting(folder, VOCAB_SIZE, [END])
    await vetting.check(Grammar.of("regex", "a"), "regex")
    pids = [os.getpid(), *child_pids(os.getpid())]
    found: dict[str, list[float]] = {"cpu_ms": [], "clock_ms": []}
    for number in range(count):
        grammar, used_s = drawn(number), sum(map(thread_cpu_s, pids))
        begin = time.perf_counter()
        await vetting.check(grammar, "schema", may_relax=True)
        found["clock_ms"].append(round(1e3 * (time.perf_counter() - begin), 3))
        found["cpu_ms"].append(round(1e3 * (sum(map(thread_cpu_s, pids)) - used_s), 3))
    assert vetting.trials["accepted"] == count + 1, vetting.trials
    await vetting.close()
    return found


def rss_mib() -> float:
    """Returns the memory of this process."""
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024


def followed(folder: str, count: int) -> dict[str, Any]:
    """Returns the memory of a worker's grammars in MiB, and microseconds of CPU of each mask; run it in a process of its own."""
    before = rss_mib()
    compiler = Compiler(lambda: Vocabulary.load(Path(folder), VOCAB_SIZE, [END]))
    compiler.compile(Grammar.of("regex", "a")).result()
    opened, rng = rss_mib(), np.random.default_rng(SEED)
    words, taken_us, matchers = np.zeros(-(-VOCAB_SIZE // MASK_BITS), dtype=np.int32), [], []
    for number in range(count):
        matcher = compiler.compile(drawn(number)).result().copy()
        matchers.append(matcher)
        for _ in range(WALK):
            begin = time.thread_time()
            matcher.mask(words)
            taken_us.append(1e6 * (time.thread_time() - begin))
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if matcher.advance([int(rng.choice(allowed))]) is not None:
                break
        assert not matcher.error, matcher.error
    compiler.close()
    return {"vocabulary_mib": opened - before, "schemas_mib": rss_mib() - opened, "mask_us": taken_us}


def percentiles(samples: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the 99th percentile."""
    middle, high = np.percentile(samples, (50, 99))
    return float(middle), float(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--dry", action="store_true", help="print and write nothing")
    parser.add_argument("--tiny", action="store_true", help="a few schemas; implies --dry")
    given = parser.parse_args()
    num_verdicts, num_followed = (4, 2) if given.tiny else (given.schemas, 128)
    with tempfile.TemporaryDirectory() as folder:
        enlarge(Path(folder), VOCAB_SIZE)
        tried = asyncio.run(verdicts(Path(folder), num_verdicts))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            worker = pool.apply(followed, (folder, num_followed))
    p50, p99 = percentiles(tried["cpu_ms"])
    found = {"verdict_ms_p50": p50, "verdict_ms_p99": p99, "schemas_mib": worker["schemas_mib"]}
    found |= {"mask_us_mean": float(np.mean(worker["mask_us"]))}
    clock = percentiles(tried["clock_ms"])
    print(f"on the clock {clock[0]:.2f}, {clock[1]:.2f} ms; vocabulary {worker['vocabulary_mib']:.0f} MiB; "
          f"masks {spread(worker['mask_us'])} of {len(worker['mask_us'])}")  # fmt: skip
    missed = judge(found, most=BARS)
    if given.dry or given.tiny:
        return 0
    record = Record(RESULTS / "vetting.json", "python -m benchmarks.vetting", *CODE)
    record |= {"vocab_size": VOCAB_SIZE, "schemas": {"tried": num_verdicts, "followed": num_followed}, "bars": BARS}
    record |= {
        "found": {name: round(each, 3) for name, each in found.items()},
        "clock_ms": [round(each, 3) for each in clock],
    }
    record |= {"vocabulary_mib": round(worker["vocabulary_mib"], 1), "num_masks": len(worker["mask_us"])}
    record |= {"mask_us": [round(each, 1) for each in percentiles(worker["mask_us"])], "samples": tried}
    record.save()
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
