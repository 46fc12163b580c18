"""A worker on the CPU whose graphs are recorded: ``tests.helpers.recorded_worker ENDPOINT``."""

from __future__ import annotations

import pytest

from hiserve.engine import worker
from tests.helpers.recorded_llm import allow_recording


def main(endpoint: str) -> int:
    """Serves as ``hiserve.engine.worker`` does, until the process ends."""
    with pytest.MonkeyPatch.context() as patch:
        allow_recording(patch)
        return worker.main(endpoint)
