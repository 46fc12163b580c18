"""How long the long ones take, where they leave what they found, and how patient soaks are."""

from __future__ import annotations

import pytest

from hiserve.bench.soak import faults, server_process, soak_run
from tests.helpers.waiting import PATIENCE_S


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=2000.0, help="how long everything strikes at once")
    parser.addoption("--soak-result", default=None, help="JSON file for what was found")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soak gives a server on a busy machine the time it needs to answer, to rest and to end."""
    for module, name in (
        (soak_run, "IDLE_S"),
        (faults, "ANSWER_S"),
        (server_process, "STOP_S"),
        (server_process, "DEAD_S"),
    ):
        monkeypatch.setattr(module, name, PATIENCE_S)
