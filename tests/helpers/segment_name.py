"""Names of host caches, for tests that share memory between processes or lives."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from hiserve.cache.storage.segment import SHARED_MEMORY


@contextmanager
def segment_name() -> Iterator[str]:
    """Gives a name that nobody else has; nothing of it stays."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    try:
        yield name
    finally:
        gc.collect()  # the lock of the name goes with the last view of its memory
        for path in SHARED_MEMORY.glob(f"*hiserve-{name}*"):
            path.unlink()
