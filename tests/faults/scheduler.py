"""The real scheduler process with workers of a test's own: ``python -m tests.faults.scheduler 'MODULE ARG...' ENDPOINT``."""

from __future__ import annotations

import sys

from hiserve.scheduler.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[2], (sys.executable, "-m", *sys.argv[1].split())))
