"""Which pages became reachable or were lost since somebody last asked."""

from __future__ import annotations


class PrefixEvents:
    """Collects digests of published and removed pages, in order, until they are taken.

    A page that is published and removed between two takes is still reported in both lists;
    the reader applies published first, so it ends as removed. The opposite order (removed,
    then published again) is kept apart by cancelling the removal.
    """

    def __init__(self) -> None:
        self._published: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def publish(self, digests: list[bytes]) -> None:
        """Records pages that a match can now find."""
        for digest in digests:
            if self._removed.pop(digest, self) is self:
                self._published[digest] = None

    def remove(self, digests: list[bytes]) -> None:
        """Records pages that a match no longer finds."""
        for digest in digests:
            if self._published.pop(digest, self) is self:
                self._removed[digest] = None

    def take(self) -> tuple[bytes, bytes]:
        """Returns (published, removed) as joined 16-byte digests, and starts afresh."""
        taken = b"".join(self._published), b"".join(self._removed)
        self._published.clear()
        self._removed.clear()
        return taken
