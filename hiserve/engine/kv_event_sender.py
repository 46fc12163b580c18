"""What the prefix index tells of its tiers, collected step by step for routers outside."""

from __future__ import annotations

from hiserve.cache.index.prefix_cache import Tier
from hiserve.config.settings import Settings
from hiserve.core.public_endpoints import endpoint_of
from hiserve.ipc.channel import PublishChannel
from hiserve.ipc.kv_events import Change, Cleared, Removed, Stored
from hiserve.ipc.publisher import Publisher

# Routers know no other words; the device is a GPU to them on a machine without one, too.
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
        """As ``TierListener``; what was said before in this step does not matter any more."""
        self._changes = [Cleared()]

    def send(self) -> None:
        """Ends a step: publishes what changed in it, if anything did."""
        if self._changes:
            self._publisher.put(self._changes)
            self._changes = []

    def close(self) -> None:
        """Publishes what was sent, and closes the sockets."""
        self._publisher.close()


def open_kv_events(config: Settings, replica: int) -> KvEventSender | None:
    """Opens the sockets of a worker, or none when none were asked for.

    Args:
        config: Resolved.
        replica: Which worker.

    Raises:
        ResourceError: An address is in use or cannot be used.
    """
    given, replay = config.cache.kv_events, config.cache.kv_events_replay
    if given is None:
        return None
    num_replicas = config.parallel.replicas
    broadcast = PublishChannel(
        endpoint_of(given, replica, num_replicas),
        None if replay is None else endpoint_of(replay, replica, num_replicas),
        setting="kv_events",
        questions_setting="kv_events_replay",
    )
    return KvEventSender(Publisher(broadcast, page_size=config.cache.page_size, replica=replica))
