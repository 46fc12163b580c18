"""The model worker, which the supervisor starts by ``ipc/launcher.py``."""

from __future__ import annotations

from hiserve.cache.storage.segment import Segment
from hiserve.config.settings import Settings
from hiserve.core.startup_measurements import StartupMeasurements
from hiserve.engine.build import build_engine
from hiserve.engine.loop import Engine
from hiserve.engine.service import serve


def build(settings: Settings, host_fd: int, replica: int, measurements: StartupMeasurements) -> Engine:
    """Builds the engine on the host segment that the supervisor passed, if there is one."""
    segment = Segment.attach(host_fd) if host_fd >= 0 else None
    return build_engine(settings, segment, replica, measurements, waits_for_compilers=False, ends_process=True)


def main(endpoint: str) -> int:
    """Serves the scheduler that listens at ``endpoint``; returns the exit code."""
    return serve(endpoint, build)
