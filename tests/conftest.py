"""What every test process needs, whatever started it."""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Gives SIGINT its usual handler: shells start background jobs with SIGINT ignored, and so would tests and their children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
