"""Live servers for all clients."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.forcing import TEMPLATE
from tests.e2e.live import Live, serve
from tools.import_path import import_path

ROOT = Path(__file__).parents[2]
CALLS = {"look": {"where": "Oslo"}, "final_answer": {"answer": "It is done."}}


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(tmp_path_factory.mktemp("live"), "--cpu-threads", "1") as running:
        yield running


@pytest.fixture(scope="package")
def forced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The embedded model, which calls these tools once each where it may, and then says that it is done."""
    folder = tmp_path_factory.mktemp("forced")
    command = (sys.executable, "-m", "tests.clients.forcing", json.dumps(CALLS), str(folder / "record.jsonl"))
    with serve(
        folder,
        "--cpu-threads",
        "1",
        *TEMPLATE,
        command=command,
        environment={"PYTHONPATH": import_path(ROOT)},
        is_fork=False,
    ) as running:
        yield running
