"""Chooses a worker for each request by load and cached prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from hiserve.core.digest import Chain, chain, namespace_digest, pack_tokens, split_digests
from hiserve.core.plan import Int32Array

HASHED_PAGES = 32
LOOKAHEAD_SHARE = 8


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt as a chain of page digests, hashed on demand."""

    root: bytes
    key: bytes  # packed int32 tokens
    max_pages: int  # full pages that may be shared: the last token is always computed
    digests: list[bytes] = field(default_factory=list)
    # Per replica, the matching pages of the last search; the next search starts there
    depths: dict[int, int] = field(default_factory=dict)


class PrefixIndex:
    """The page digests that each worker has on its device or host, updated by step reports.

    A hint: a worker may have evicted a page by the time a request arrives. Workers evict
    leaves first, so the pages of a prefix that are present are its first ones.

    ``link`` computes the digests of pages, as the workers do (``core.digest.chain_of``).
    """

    def __init__(self, page_size: int, link: Chain = chain) -> None:
        self._page_size = page_size
        self._link = link
        self._namespace = b""
        self._pages: dict[int, dict[bytes, int]] = {}  # by worker and digest: on how many tiers

    def attach(self, replica: int, namespace: bytes) -> None:
        """Adds a worker with an empty cache.

        ``namespace``, the digest of everything that separates caches but for tenants, is the same for all replicas.
        """
        assert self._namespace in (b"", namespace), f"replica {replica} has base {namespace.hex()}, not as the others"
        self._namespace = namespace
        self._pages[replica] = {}

    def detach(self, replica: int) -> None:
        """Removes a worker and its cache."""
        self._pages.pop(replica, None)

    def update(self, replica: int, published: bytes, removed: bytes) -> None:
        """Applies a worker's report.

        ``published`` and ``removed`` are joined digests of pages that a tier gained or lost, once for each tier.
        """
        pages = self._pages[replica]
        for digest in split_digests(published):
            pages[digest] = pages.get(digest, 0) + 1
        for digest in split_digests(removed):
            num_tiers = pages.pop(digest, 0) - 1
            if num_tiers > 0:
                pages[digest] = num_tiers

    def prefix(self, prompt: Int32Array, namespace: bytes) -> Prefix:
        """Prepares a prompt for matching; hashing starts with the first match."""
        return Prefix(
            root=namespace_digest(self._namespace, namespace),
            key=pack_tokens(prompt),
            max_pages=(len(prompt) - 1) // self._page_size,
        )

    def match(self, prefix: Prefix, replica: int) -> int:
        """Returns the leading tokens of the prompt that a worker has cached."""
        pages = self._pages[replica]
        depth = prefix.depths.get(replica, 0)
        while depth and prefix.digests[depth - 1] not in pages:
            depth -= 1
        while depth < prefix.max_pages and self._digest(prefix, depth) in pages:
            depth += 1
        prefix.depths[replica] = depth
        return depth * self._page_size

    def _digest(self, prefix: Prefix, page: int) -> bytes:
        """Returns a page's digest, hashing a block of pages at a time: most prompts differ early."""
        digests = prefix.digests
        while page >= len(digests):
            start = 4 * self._page_size * len(digests)
            stop = start + 4 * self._page_size * HASHED_PAGES
            digests += self._link(digests[-1] if digests else prefix.root, prefix.key[start:stop], self._page_size)
        return digests[page]


@dataclass(slots=True)
class _WorkerLoad:
    """A worker's rows, the requests it holds (running, or waiting inside it), and the time of its last one."""

    max_running: int
    num_held: int = 0
    last_taken: int = 0

    @property
    def credit(self) -> int:
        # A few more than its rows, so that a freed row is used in the next step.
        return self.max_running + max(1, self.max_running // LOOKAHEAD_SHARE) - self.num_held


class Placement:
    """Credits: a worker is sent a request only while it holds less than its limit."""

    def __init__(self) -> None:
        self._loads: dict[int, _WorkerLoad] = {}
        self._reserved: set[int] = set()
        self._num_taken = 0

    def join(self, replica: int, max_running: int) -> None:
        """Adds a worker without requests; it runs up to ``max_running`` at once."""
        self._loads[replica] = _WorkerLoad(max_running)

    def leave(self, replica: int) -> None:
        """Removes a worker and its requests."""
        self._loads.pop(replica, None)

    def reserve(self, replica: int) -> None:
        """Excludes a worker, and its successors, from ``place``."""
        self._reserved.add(replica)

    def unreserve(self, replica: int) -> None:
        """Includes it again."""
        self._reserved.discard(replica)

    def is_joined(self, replica: int) -> bool:
        return replica in self._loads

    def num_held(self, replica: int) -> int:
        return self._loads[replica].num_held

    def with_credit(self) -> list[int]:
        """Returns the workers that may be sent another request by ``place``."""
        free = self._loads.items()
        return [replica for replica, load in free if load.credit > 0 and replica not in self._reserved]

    def take_credit(self, replica: int) -> None:
        """Spends a credit: the worker is sent a request."""
        load = self._loads[replica]
        assert load.credit > 0, f"worker {replica} holds {load.num_held} requests and was sent another"
        load.num_held += 1
        self._num_taken += 1
        load.last_taken = self._num_taken

    def return_credit(self, replica: int) -> None:
        """Returns a credit: a request the worker held has ended."""
        load = self._loads[replica]
        assert load.num_held > 0, f"worker {replica} ended a request but holds none"
        load.num_held -= 1

    def place(self, num_tokens: int, matched: Callable[[int], int], session: bytes = b"") -> int | None:
        """Chooses the worker for a request; None when none has credit.

        The longest cached prefix wins unless its worker is far busier than the idlest one:
        it may hold up to half its rows more if all of the prompt is cached, and less in
        proportion (a shared system prompt must not attract all traffic to one worker).
        Ties are broken by the session, whose worker may be as busy as if it had all of the prompt, then by load, then by
        the oldest assignment, so that cold conversations spread over idle workers.

        Args:
            num_tokens: Of the prompt.
            matched: Returns the prompt tokens that a worker has cached.
            session: Requests of one session have one home, as long as the same workers live; empty is none.
        """
        candidates = self.with_credit()
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        idlest = min(self._loads[replica].num_held for replica in candidates)
        cached = {replica: matched(replica) for replica in candidates}
        home = max(self._loads, key=lambda replica: _weight(session, replica)) if session else None
        ranked = []
        for replica in candidates:
            load = self._loads[replica]
            is_home = replica == home and cached[replica] == max(cached.values())
            slack = load.max_running * (num_tokens if is_home else cached[replica]) / (2 * num_tokens)
            if load.num_held - idlest <= slack:
                ranked.append((-cached[replica], not is_home, load.num_held, load.last_taken, replica))
        return min(ranked)[4]


def _weight(session: bytes, replica: int) -> int:
    """Returns the weight of a worker for a session: when workers come or go, no session moves between the others."""
    return xxhash.xxh3_64_intdigest(b"%d:" % replica + session)
