"""An engine with the reference attention, for tests that compare CUDA with the CPU."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.models import Engine

NUM_PAGES, MAX_LEN = 400, 512


def engine(folder: Path, dtype: str, device: str = "cuda") -> Engine:
    return Engine(
        folder, dtype=dtype, device=device, attention="reference", num_pages=NUM_PAGES, max_len=MAX_LEN, max_rows=8
    )
