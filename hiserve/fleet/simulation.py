"""Replicas with caches under a trace of conversations: how many tokens each way to choose a replica finds cached, and how long requests wait."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hiserve.bench.datasets.recorded import TRACE_BLOCK_TOKENS, TraceRecord, read_lines
from hiserve.errors import ConfigError
from hiserve.fleet.affinity import Affinity

PolicyName = Literal["round-robin", "two-choices", "affinity", "exact"]
# Of one replica.
PREFILL_TOKENS_PER_S = 3000.0
S_PER_TOKEN = 0.025  # of a reply
MAX_RUNNING = 64  # of the rule of the exact index: as ``Placement.place``
# Conversations that are made up: like those of the trace of Mooncake (FAST'25), of whose tokens 0.37 come from earlier turns.
REQUESTS_PER_S = 0.21  # of each replica
MORE_TURNS = 0.36  # probability of a further turn
FIRST_BLOCKS, TURN_BLOCKS = 20.0, 3.0  # means of new blocks in the first turn, and in later ones
PAUSE_S = 90.0  # mean between turns
REPLY_TOKENS = 340.0  # mean


class Arrival(NamedTuple):
    """A request.

    Attributes:
        at_s: Its time.
        blocks: Of its prompt, each of ``TRACE_BLOCK_TOKENS`` tokens; the first is shared by all.
        num_reply: Tokens of the reply.
    """

    at_s: float
    blocks: tuple[int, ...]
    num_reply: int

    @property
    def key(self) -> bytes:
        """Tells conversations apart: what follows the part that all share."""
        return b"%d" % self.blocks[min(1, len(self.blocks) - 1)]


class FleetCase(msgspec.Struct, frozen=True):
    """The figures of one way to choose, with one number of replicas."""

    num_replicas: int
    policy: PolicyName
    num_requests: int
    hit_rate: float  # of the tokens of all prompts
    ttft_p50_s: float
    ttft_p99_s: float
    busiest: float  # tokens computed by the busiest replica, over the mean


def made_up(num_replicas: int, num_requests: int, seed: int) -> list[Arrival]:
    """Returns conversations for replicas, ``num_requests`` for each on average, in the order of their times."""
    rng = np.random.default_rng(seed)
    total = num_replicas * num_requests
    span_s = num_requests / REQUESTS_PER_S
    num_chats = max(1, round(total * (1 - MORE_TURNS)))
    turns = rng.geometric(1 - MORE_TURNS, num_chats)
    starts = rng.uniform(0, span_s, num_chats)
    found: list[Arrival] = []
    following = 1  # number of the next block
    for start_s, count in zip(starts.tolist(), turns.tolist(), strict=True):
        at_s, blocks = start_s, [0]
        for turn in range(count):
            size = 1 + int(rng.exponential(TURN_BLOCKS if turn else FIRST_BLOCKS))
            blocks += range(following, following + size)
            following += size
            found.append(Arrival(at_s, tuple(blocks), 1 + int(rng.exponential(REPLY_TOKENS))))
            at_s += rng.exponential(PAUSE_S)
    return sorted(found)


def recorded(path: Path, num_replicas: int, replicas_per_copy: int, seed: int) -> list[Arrival]:
    """Returns copies of a trace in Mooncake's format, each shifted at random, with blocks of its own but for the first.

    Raises:
        ConfigError: The file is no such trace.
    """
    rows = list(read_lines(path, TraceRecord, "conversation-trace"))
    if not rows or not all(row.hash_ids for row in rows):
        raise ConfigError(f"--path {path} has no requests, or one without blocks.", param="path")
    rng, span_s = np.random.default_rng(seed), max(row.timestamp for row in rows) / 1000 or 1.0
    shared, num_blocks = rows[0].hash_ids[0], 1 + max(max(row.hash_ids) for row in rows)
    found: list[Arrival] = []
    for copy in range(max(1, round(num_replicas / replicas_per_copy))):
        shift_s, first = rng.uniform(0, span_s), 1 + copy * num_blocks
        for row in rows:
            blocks = tuple(0 if block == shared else first + block for block in row.hash_ids)
            found.append(Arrival((row.timestamp / 1000 + shift_s) % span_s, blocks, row.output_length))
    return sorted(found)


def endless_hit_rate(arrivals: Sequence[Arrival]) -> float:
    """Returns the share of prompt tokens that one cache without end would have had."""
    seen: set[int] = set()
    num_hits = num_blocks = 0
    for arrival in arrivals:
        num_hits += sum(block in seen for block in arrival.blocks)
        num_blocks += len(arrival.blocks)
        seen.update(arrival.blocks)
    return num_hits / max(1, num_blocks)


def simulate(
    policy: PolicyName, num_replicas: int, arrivals: Sequence[Arrival], cache_tokens: int, seed: int
) -> FleetCase:
    """Returns the figures of a policy.

    A replica computes prompts first come, first served, and evicts the blocks used longest ago. Its load is the requests that it
    has; every router knows those of all.

    Args:
        policy: Chooses the replica of each request.
        num_replicas: At least 1.
        arrivals: In the order of their times.
        cache_tokens: Of a replica.
        seed: Of random choices.
    """
    fleet = _Fleet(num_replicas, cache_tokens // TRACE_BLOCK_TOKENS, has_index=policy == "exact")
    choose = _chooser(policy, fleet, seed)
    free_at_s, computed = np.zeros(num_replicas), np.zeros(num_replicas)
    running: list[tuple[float, int]] = []  # the end of each, and its replica
    ttft_s, num_hits, num_blocks = [], 0, 0
    for arrival in arrivals:
        while running and running[0][0] <= arrival.at_s:
            fleet.loads[heapq.heappop(running)[1]] -= 1
        replica = choose(arrival)
        found = fleet.use(replica, arrival.blocks)
        num_new = (len(arrival.blocks) - found) * TRACE_BLOCK_TOKENS
        first_s = max(arrival.at_s, float(free_at_s[replica])) + num_new / PREFILL_TOKENS_PER_S
        free_at_s[replica] = first_s
        computed[replica] += num_new
        ttft_s.append(first_s - arrival.at_s)
        num_hits += found
        num_blocks += len(arrival.blocks)
        fleet.loads[replica] += 1
        heapq.heappush(running, (first_s + arrival.num_reply * S_PER_TOKEN, replica))
    p50, p99 = np.percentile(ttft_s, (50, 99)) if ttft_s else (math.nan, math.nan)
    busiest = float(computed.max() / max(1.0, computed.mean()))
    hit_rate = num_hits / max(1, num_blocks)
    return FleetCase(num_replicas, policy, len(arrivals), hit_rate, float(p50), float(p99), busiest)


class _Fleet:
    """The caches and loads of replicas.

    Attributes:
        loads: int64 ``[n]``. Requests of each replica.
    """

    def __init__(self, num_replicas: int, num_blocks: int, *, has_index: bool) -> None:
        self.loads: NDArray[np.int64] = np.zeros(num_replicas, dtype=np.int64)
        self._capacity = num_blocks
        self._caches: list[dict[int, None]] = [{} for _ in range(num_replicas)]  # blocks used longest ago first
        self._holders: defaultdict[int, set[int]] | None = defaultdict(set) if has_index else None

    def use(self, replica: int, blocks: tuple[int, ...]) -> int:
        """Puts a prompt into a cache, its end to be evicted first; returns how many leading blocks were there."""
        cache = self._caches[replica]
        found = next((index for index, block in enumerate(blocks) if block not in cache), len(blocks))
        for block in reversed(blocks):
            if cache.pop(block, False) is False and self._holders is not None:
                self._holders[block].add(replica)
            cache[block] = None
        while len(cache) > self._capacity:
            oldest = next(iter(cache))
            del cache[oldest]
            if self._holders is not None:
                self._holders[oldest].discard(replica)
        return found

    def longest(self, blocks: tuple[int, ...]) -> int:
        """Returns the replica with the longest cached prefix that is not far busier than the idlest, by the rule of ``Placement.place``."""
        assert self._holders is not None, "no index"
        idlest = int(self.loads.min())
        for depth in range(len(blocks), 1, -1):  # the first block is everywhere
            slack = MAX_RUNNING * depth / (2 * len(blocks))
            there = self._holders.get(blocks[depth - 1], ())
            holders = [each for each in there if self.loads[each] - idlest <= slack]
            if holders:
                return min(holders, key=lambda each: (self.loads[each], each))
        return int(self.loads.argmin())


def _chooser(policy: PolicyName, fleet: _Fleet, seed: int) -> Callable[[Arrival], int]:
    rng, count = np.random.default_rng(seed), fleet.loads.size
    if policy == "affinity":
        affinity = Affinity([f"replica-{index}" for index in range(count)])
        return lambda arrival: affinity.choose(arrival.key, fleet.loads)
    if policy == "exact":
        return lambda arrival: fleet.longest(arrival.blocks)
    if policy == "two-choices":
        return lambda _: min(rng.integers(count, size=2).tolist(), key=fleet.loads.__getitem__)
    turns = iter(range(1 << 62))
    return lambda _: next(turns) % count
