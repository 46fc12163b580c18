"""Publishes the pages that tiers of the prefix index gain and lose, a batch a step; a thread serves the routers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from hiserve.cache.index.prefix_cache import Tier
from hiserve.config.settings import Settings
from hiserve.core.endpoints import endpoint_of, topic_of
from hiserve.errors import InvariantError
from hiserve.ipc.channel import PublishChannel
from hiserve.ipc.codec import Frames
from hiserve.ipc.kv_events import Change, Cleared, Removed, Stored, encode_batch

SEQUENCE_BYTES = 8
MAX_KEPT_BATCHES = 10_000
END_OF_REPLAY = ((-1).to_bytes(SEQUENCE_BYTES, "big", signed=True), b"")


class KvEventLog:
    """Numbers batches, and keeps the last of those with changes."""

    def __init__(self, max_batches: int = MAX_KEPT_BATCHES) -> None:
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=max_batches)
        self._next = 0

    def add(self, payload: bytes, *, keep: bool = True) -> bytes:
        """Gives a batch the next number; returns it as it is sent."""
        sequence, self._next = self._next, self._next + 1
        if keep:
            self._kept.append((sequence, payload))
        return sequence.to_bytes(SEQUENCE_BYTES, "big")

    def skip(self, count: int) -> None:
        """Leaves out the numbers of batches that were lost."""
        self._next += count

    def answer(self, request: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields the kept batches from the requested number, and the end; for a malformed request, the end alone."""
        if len(request) == SEQUENCE_BYTES:
            start = int.from_bytes(request, "big")
            for sequence, payload in self._kept:
                if sequence >= start:
                    yield sequence.to_bytes(SEQUENCE_BYTES, "big"), payload
        yield END_OF_REPLAY


logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
MAX_QUEUED_BATCHES = 10_000
MAX_ENVELOPE = 2


class Publisher:
    """Numbers, encodes and publishes batches in the order they are put.

    Args:
        broadcast: Owned from now on.
        page_size: Tokens per page.
        replica: Data-parallel rank that every batch names.
        topic: The first frame of every batch; readers may subscribe to those that begin alike.
        heartbeat_s: An empty batch follows so many seconds of silence.
        max_queued: Batches that may wait for the thread; further ones are dropped, and their numbers with them.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        broadcast: PublishChannel,
        *,
        page_size: int,
        replica: int,
        topic: str = "",
        heartbeat_s: float = HEARTBEAT_S,
        max_queued: int = MAX_QUEUED_BATCHES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broadcast = broadcast
        self._page_size = page_size
        self._replica = replica
        self._topic = topic.encode()
        self._heartbeat_s = heartbeat_s
        self._max_queued = max_queued
        self._clock = clock
        self._history = KvEventLog()
        self._queue: deque[tuple[int, float, Sequence[Change]]] = deque()
        self._num_lost = 0  # since the last batch that was queued
        self.num_dropped = 0
        self._is_closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="hiserve-kv-events", daemon=True)
        self._thread.start()

    def put(self, changes: Sequence[Change]) -> None:
        """Queues a batch; the caller changes it no more.

        Raises:
            InvariantError: The thread has failed.
        """
        if self._failure is not None:
            raise InvariantError("the publisher of KV events has failed") from self._failure
        if len(self._queue) >= self._max_queued:
            if not self.num_dropped:
                logger.warning("KV events are dropped: %d batches wait to be published", len(self._queue))
            self.num_dropped += 1
            self._num_lost += 1
            return
        self._queue.append((self._num_lost, time.time(), changes))
        self._num_lost = 0
        self._broadcast.wake()

    def close(self) -> None:
        """Publishes the queued batches, and ends the thread."""
        self._is_closing = True
        self._broadcast.wake()
        self._thread.join()
        self._broadcast.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - the next put raises it
            self._failure = error

    def _serve(self) -> None:
        due_s = self._clock() + self._heartbeat_s
        is_closing = False
        while not is_closing:
            self._broadcast.wait(due_s - self._clock())
            is_closing = self._is_closing  # read first: every batch put before is queued by now
            is_silent = self._clock() >= due_s and not self._queue
            while self._queue:  # more may come meanwhile
                due_s = self._clock() + self._heartbeat_s
                num_lost, now_s, changes = self._queue.popleft()
                self._history.skip(num_lost)
                self._publish(now_s, changes)
            if is_silent:
                due_s = self._clock() + self._heartbeat_s
                self._publish(time.time(), ())
            question = self._broadcast.take_question()
            if question is not None:
                self._replay(question)

    def _publish(self, now_s: float, changes: Sequence[Change]) -> None:
        payload = encode_batch(now_s, changes, self._page_size, self._replica)
        # Heartbeats are not kept: they would displace the batches with changes.
        self._broadcast.publish([self._topic, self._history.add(payload, keep=bool(changes)), payload])

    def _replay(self, question: Frames) -> None:
        *envelope, request = question  # the client's address, and an empty frame if it is a REQ socket
        if len(envelope) > MAX_ENVELOPE:  # all of it would be sent again with every batch
            return
        for sequence, payload in self._history.answer(request):
            self._broadcast.answer([*envelope, sequence, payload])


# The names that routers know: the device is "GPU" also on a machine without one.
MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU_PINNED"}


class KvEventSender:
    """Listens to the tiers and publishes a batch per step.

    Args:
        publisher: Owned from now on. The first batch says that nothing is cached.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._changes: list[Change] = [Cleared()]
        self.send()

    @property
    def num_dropped(self) -> int:
        """Batches that were dropped because routers, or the network, were too slow."""
        return self._publisher.num_dropped

    def stored(self, tier: Tier, parent: bytes | None, digests: list[bytes], key: bytes) -> None:
        """As ``TierListener``."""
        self._changes.append(Stored(MEDIA[tier], parent, b"".join(digests), key))

    def removed(self, tier: Tier, digests: list[bytes]) -> None:
        """As ``TierListener``."""
        self._changes.append(Removed(MEDIA[tier], b"".join(digests)))

    def cleared(self) -> None:
        """As ``TierListener``; earlier changes of this step are dropped."""
        self._changes = [Cleared()]

    def send(self) -> None:
        """Ends a step: publishes its changes, if there are any."""
        if self._changes:
            self._publisher.put(self._changes)
            self._changes = []

    def close(self) -> None:
        """Publishes the queued batches, and closes the sockets."""
        self._publisher.close()


def open_kv_events(settings: Settings, replica: int) -> KvEventSender | None:
    """Opens the sockets of a worker; None without ``--kv-events``.

    Raises:
        ResourceError: An address is in use or cannot be used.
    """
    given, replay = settings.cache.kv_events, settings.cache.kv_events_replay
    if given is None:
        return None
    given, topic = topic_of(given)
    num_replicas = settings.parallel.replicas
    broadcast = PublishChannel(
        endpoint_of(given, replica, num_replicas),
        None if replay is None else endpoint_of(replay, replica, num_replicas),
        setting="kv_events",
        questions_setting="kv_events_replay",
    )
    return KvEventSender(Publisher(broadcast, page_size=settings.cache.page_size, replica=replica, topic=topic))
