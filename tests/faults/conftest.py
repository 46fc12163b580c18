"""How long the long ones take, and where they leave what they found."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=2000.0, help="how long everything strikes at once")
    parser.addoption("--soak-result", default=None, help="JSON file for what was found")
