"""A writer may die at any write: what the next process adopts is true, and nothing that was safe is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hiserve.cache.storage.checksums import page_checksum
from hiserve.cache.storage.records import NO_CHECKSUM, Records, record_type
from hiserve.cache.storage.segment import Segment
from hiserve.core.transfers import PageRun
from tests.helpers.host import PAGE_BYTES, PAGE_SIZE, TENANTS, content, make_layout, make_run, seal, told

NUM_PAGES = 8


@dataclass
class Writer:
    """A process that writes pages, with a look at its memory at every moment that another could see."""

    look: Callable[[np.ndarray, np.ndarray], None]
    table: np.ndarray = field(default_factory=lambda: np.zeros(NUM_PAGES, dtype=record_type(PAGE_SIZE)))
    pages: np.ndarray = field(default_factory=lambda: np.zeros((NUM_PAGES, PAGE_BYTES), dtype=np.uint8))

    def __post_init__(self) -> None:
        self.records = Records(self.table, PAGE_SIZE)
        self._write_at_once = self.records._write
        self.records._write = self._write_slowly  # type: ignore[method-assign]

    def _write_slowly(self, name: str, pages: np.ndarray, value: object) -> None:
        """Page by page, and half a digest or token list at a time; a word of eight bytes is written whole."""
        width = self.table[name].shape[1:]
        values = np.broadcast_to(np.asarray(value), (pages.size, *width))
        for page, row in zip(pages, values, strict=True):
            if width:
                half = width[0] // 2
                self.table[name][page, :half] = row[:half]
                self.look(self.table, self.pages)
            self._write_at_once(name, np.array([page]), row[None] if width else row)
            self.look(self.table, self.pages)

    def copy(self, run: PageRun) -> None:
        for page, digest in zip(run.pages, run.digests, strict=True):
            for part in (slice(None, PAGE_BYTES // 2), slice(PAGE_BYTES // 2, None)):
                self.pages[page, part] = content(digest)[part]
                self.look(self.table, self.pages)


class Model:
    """Plays a random life and checks every snapshot against what was safe before and after the current operation."""

    def __init__(self) -> None:
        self.writer = Writer(self.check)
        self.safe: dict[int, bytes] = {}  # digest of each page that is VALID and sealed
        self.settled: dict[int, bytes] = {}  # of these, those that the current operation leaves alone
        self.generations: list[tuple[str, PageRun]] = []
        self.parents: dict[bytes, bytes] = {}
        self.num_looks = 0
        self.num_adopted = 0

    def check(self, table: np.ndarray, pages: np.ndarray) -> None:
        self.num_looks += 1
        found = told(Records(table.copy(), PAGE_SIZE).recover())
        for page, (_, parent, digest, key, _) in found.items():
            assert digest == expected_digest(parent, key)
            assert np.array_equal(pages[page], content(digest)), (
                f"page {page} is adopted with bytes that are not its own"
            )
            assert table["checksum"][page] == page_checksum(pages[page].data, digest)
            assert page in self.safe, f"page {page} was never safe"
        digests = [entry[2] for entry in found.values()]
        assert len(set(digests)) == len(digests)
        reachable = self._reachable(set(self.settled.values()))
        assert reachable <= set(digests), f"{len(reachable - set(digests))} safe pages are lost"
        self.num_adopted += len(found)

    def _reachable(self, digests: set[bytes]) -> set[bytes]:
        kept = set()
        for digest in digests:
            chain = [digest]
            while chain[-1] not in TENANTS and chain[-1] in digests:
                chain.append(self.parents[chain[-1]])
            if chain[-1] in TENANTS:
                kept.add(digest)
        return kept

    def begin(self, tenant: int, below: int, tokens: list[int]) -> None:
        used = {int(page) for _, run in self.generations for page in run.pages}
        free = [page for page in range(1, NUM_PAGES) if page not in used][: len(tokens)]
        if not free:
            return
        namespace = TENANTS[tenant]
        known = [namespace, *(d for _, run in self.generations if run.namespace == namespace for d in run.digests)]
        run = make_run(free, tokens[: len(free)], namespace=namespace, parent=known[below % len(known)])
        self.parents.update(zip(run.digests, [run.parent, *run.digests[:-1]], strict=True))
        self.writer.records.begin(run)
        self.generations.append(("writing", run))

    def store(self, tenant: int, below: int, tokens: list[int]) -> None:
        """A whole life, so that random steps get far."""
        self.begin(tenant, below, tokens)
        self.finish(-1)
        self.seal(-1)

    def finish(self, index: int) -> None:
        life = self._pick("writing", index)
        if life is None:
            return
        self.writer.copy(life)
        self.writer.records.finish(life.pages)
        self.generations.append(("valid", life))

    def seal(self, index: int) -> None:
        if (life := self._pick("valid", index)) is None:
            return
        self.generations.append(("valid", life))
        for page, digest in zip(life.pages.tolist(), life.digests, strict=True):
            if not self.writer.records.unsealed(np.array([page], dtype=np.int32))[0].size:
                continue
            self.safe[page] = digest
            assert seal(self.writer.records, self.writer.pages, page)
            self.settled[page] = digest

    def free(self, index: int) -> None:
        life = self._pick(None, index)
        if life is None:
            return
        for page in life.pages.tolist():
            self.settled.pop(page, None)
        self.writer.records.free(life.pages)
        for page in life.pages.tolist():
            self.safe.pop(page, None)
        self.writer.pages[life.pages] = 255  # what comes next into a free page is nobody's concern
        self.check(self.writer.table, self.writer.pages)

    def _pick(self, state: str | None, index: int) -> PageRun | None:
        found = [entry for entry in self.generations if state in (None, entry[0])]
        if not found:
            return None
        chosen = found[index % len(found)]
        self.generations = [entry for entry in self.generations if entry is not chosen]
        return chosen[1]


def expected_digest(parent: bytes, key: bytes) -> bytes:
    """The digest that follows from a parent and tokens, in words of its own."""
    return xxhash.xxh3_128(parent + key).digest()


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=3)
STEP = st.one_of(
    st.tuples(st.sampled_from(["begin", "store"]), st.integers(0, 1), st.integers(0, 9), TOKENS),
    st.tuples(st.sampled_from(["finish", "seal", "free"]), st.integers(0, 9)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(STEP, max_size=24))
def test_at_every_moment_a_restart_adopts_all_that_is_safe_and_only_what_is_true(steps: list[tuple]) -> None:
    model = Model()
    for name, *arguments in steps:
        getattr(model, name)(*arguments)


def test_the_random_lives_reach_adoption() -> None:
    """A fixed life, so that the property above is not true for want of pages."""
    model = Model()
    model.begin(0, 0, [1, 2, 3])
    model.finish(0)
    model.seal(0)
    model.begin(0, 2, [1, 1])
    model.finish(0)
    model.seal(1)
    model.free(0)
    model.begin(1, 0, [1, 1])
    assert model.num_looks > 60
    assert model.num_adopted > 60


WRITER = """
import sys, itertools
from hiserve.cache.storage.records import Records
from hiserve.cache.storage.segment import Segment
from tests.helpers.host import make_run, store
segment = Segment.attach(int(sys.argv[1]))
records = Records(segment.records, segment.layout.page_size)
records.clear()
print("ready", flush=True)
held = []
for turn in itertools.count():
    if len(held) == 5:
        records.free(held.pop(0).pages)
    used = {int(page) for run in held for page in run.pages}
    pages = [page for page in range(1, 16) if page not in used][:3]
    held.append(store(records, segment.pages, make_run(pages, [turn, turn % 7, turn % 3])))
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.013, 0.031])
def test_a_killed_writer_leaves_only_true_pages(wait_s: float) -> None:
    segment = Segment.anonymous(make_layout(16))
    root = Path(__file__).parents[3]
    arguments = [sys.executable, "-c", WRITER, str(segment.fd)]
    with subprocess.Popen(arguments, pass_fds=[segment.fd], stdout=subprocess.PIPE, cwd=root) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        while not (segment.records["checksum"] != NO_CHECKSUM).any():  # from then on some run always has all of its own
            time.sleep(0.001)
        time.sleep(wait_s)
        child.send_signal(signal.SIGKILL)
    found = told(Records(segment.records, PAGE_SIZE).recover())
    assert found
    for page, (_, _, digest, _, _) in found.items():
        assert np.array_equal(segment.pages[page], content(digest))
    segment.close()
