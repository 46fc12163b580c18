"""The replica of a conversation, the same on every router and after every restart: no router knows the state of a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

NUM_HOMES = 4
# A home that is busier than so many times the mean, and some more, is passed by.
BUSY_FACTOR, BUSY_MORE = 2.0, 4.0
PROMPT_CHARS = 1024  # that a prompt without messages is known by


class Affinity:
    """Chooses replicas by the scores of key and replica (rendezvous hashing; Thaler and Ravishankar, 1998).

    The best replicas of a key are its homes. One replica more or less of n moves some 1/n of all keys.

    Args:
        replicas: Their names; routers that know the same names choose alike, in any order.
    """

    def __init__(self, replicas: Sequence[str]) -> None:
        assert replicas, "no replica"
        self.replicas = tuple(replicas)
        self._hashes = np.array([_hash(name.encode()) for name in replicas], dtype=np.uint64)

    def homes(self, key: bytes) -> list[int]:
        """Returns the indices of the ``NUM_HOMES`` best replicas of a key, best first; all where there are fewer."""
        scores = _mixed(self._hashes ^ np.uint64(_hash(key)))
        count = min(NUM_HOMES, scores.size)
        best = np.argpartition(scores, scores.size - count)[scores.size - count :]
        return [int(index) for index in best[np.argsort(scores[best])[::-1]]]

    def choose(self, key: bytes, loads: NDArray[np.int64]) -> int:
        """Returns the index of the replica for a request.

        Args:
            key: Of its conversation.
            loads: int64 ``[n]``. Requests that each replica has, as this router knows.

        Returns:
            The first home that is not far busier than the mean, else the replica with the fewest requests.
        """
        limit = BUSY_FACTOR * float(loads.mean()) + BUSY_MORE
        return next((home for home in self.homes(key) if loads[home] <= limit), int(loads.argmin()))


def conversation_key(tenant: str, body: Mapping[str, Any]) -> bytes:
    """Returns the key of a request: that of its conversation, whatever turn it is.

    Args:
        tenant: Separates callers, whose caches are separate.
        body: Of the request. Its messages, or items, up to the user's first one, with system texts and tools, are known to every turn; of a
            request without messages the start of its prompt.
    """
    given = body.get("messages") or body.get("input")
    messages = given if isinstance(given, list) and given and isinstance(given[0], dict) else ()
    if messages:
        ends = (
            index
            for index, message in enumerate(messages, 1)
            if isinstance(message, dict) and message.get("role") == "user"
        )
        start: Any = [
            body.get("system") or body.get("instructions"),
            body.get("tools"),
            messages[: next(ends, len(messages))],
        ]
    else:
        prompt = next((body[name] for name in ("prompt", "text", "input", "input_ids") if body.get(name)), "")
        start = prompt[:PROMPT_CHARS] if isinstance(prompt, str | list) else prompt
    return hashlib.sha256(msgspec.json.encode([tenant, start], order="deterministic")).digest()


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns evenly spread values (the finalizer of splitmix64; Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
