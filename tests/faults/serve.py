"""``hiserve serve`` whose workers are of a test's own: ``python -m tests.faults.serve 'MODULE ARG...' serve FLAG...``."""

from __future__ import annotations

import sys
from typing import Any

from hiserve import cli
from hiserve.commands import serve
from hiserve.config.settings import Settings
from hiserve.scheduler.client import EngineClient


class Client:
    """Starts engines whose scheduler starts other workers."""

    def __init__(self, worker: str) -> None:
        self._command = (sys.executable, "-m", "tests.faults.scheduler", worker)

    async def start(self, config: Settings, **options: Any) -> EngineClient:
        return await EngineClient.start(config, command=self._command, **options)


if __name__ == "__main__":
    serve.EngineClient = Client(sys.argv[1])  # type: ignore[misc,assignment]
    sys.exit(cli.main(sys.argv[2:]))
