"""Which pages became reachable or were lost since somebody last asked."""

from __future__ import annotations


class PrefixEvents:
    """Collects digests of published and removed pages, in order, until they are taken.

    A page that comes and goes between two takes, or goes and comes back, is not reported: the
    lists have no digest in common, and a page's parent stands before it in ``published`` or
    was reported earlier.
    """

    def __init__(self) -> None:
        self._published: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def publish(self, digests: list[bytes]) -> None:
        """Records pages that a match can now find."""
        _move(digests, self._removed, self._published)

    def remove(self, digests: list[bytes]) -> None:
        """Records pages that a match no longer finds."""
        _move(digests, self._published, self._removed)

    def take(self) -> tuple[bytes, bytes]:
        """Returns (published, removed) as joined 16-byte digests, and starts afresh."""
        taken = b"".join(self._published), b"".join(self._removed)
        self._published.clear()
        self._removed.clear()
        return taken


def _move(digests: list[bytes], undone: dict[bytes, None], done: dict[bytes, None]) -> None:
    """Adds digests to ``done``, but for those that only undo what was not told yet."""
    if len(digests) > 1 and undone.keys().isdisjoint(digests):
        done.update(dict.fromkeys(digests))
        return
    for digest in digests:
        if undone.pop(digest, done) is done:
            done[digest] = None
