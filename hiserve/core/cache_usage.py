"""What of a prompt came from the cache: how much from which tier, and why no more."""

from __future__ import annotations

import msgspec

COLD = "cold"
SOURCES = (COLD, "device", "host", "store")


class CacheUse(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens that were not computed, by the tier that had them when the request was admitted.

    Attributes:
        device: From the device.
        host: From the host, where no store had brought them for this request.
        store: From a store beyond the host.
        miss: Why there were no more (``cache.index.miss_reasons.MissReason``); empty when nobody looked.
        miss_at: Position in the prompt that the reason is about, in tokens.
    """

    device: int = 0
    host: int = 0
    store: int = 0
    miss: str = ""
    miss_at: int = 0

    @property
    def num_tokens(self) -> int:
        """All of them together."""
        return self.device + self.host + self.store

    @property
    def source(self) -> str:
        """The tier that gave most of them, the nearest of several; one of ``SOURCES``, cold when there are none."""
        return max(SOURCES[1:], key=lambda tier: int(getattr(self, tier))) if self.num_tokens else COLD

    def __add__(self, other: CacheUse) -> CacheUse:
        """Returns the use of two prompts, this one and a later one; the miss is that of this one."""
        return CacheUse(
            self.device + other.device, self.host + other.host, self.store + other.store, self.miss, self.miss_at
        )


NOTHING = CacheUse()  # of a request that never reached a worker
