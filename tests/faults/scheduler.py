"""The real scheduler process with workers of a test's own: ``python -m tests.faults.scheduler 'MODULE ARG...' ENDPOINT``."""

from __future__ import annotations

import sys

from hiserve.scheduler.process import main
from hiserve.scheduler.supervisor import WORKER_COMMAND

if __name__ == "__main__":
    sys.exit(main(sys.argv[2], (*WORKER_COMMAND[:-1], *sys.argv[1].split())))
