"""One live server for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.live import Live, serve


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(tmp_path_factory.mktemp("live"), "--cpu-threads", "1") as running:
        yield running
