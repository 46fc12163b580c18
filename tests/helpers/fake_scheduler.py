"""The real scheduler process with fake workers: ``python -m tests.helpers.fake_scheduler ENDPOINT``."""

import sys

from hiserve.scheduler import supervisor
from hiserve.scheduler.process import main

FAKE_WORKER = (sys.executable, "-m", "tests.helpers.fake_worker")

if __name__ == "__main__":
    supervisor.RESTART_DELAYS_S = (0.0, 0.01, 0.02, 0.05)
    sys.exit(main(sys.argv[1], FAKE_WORKER))
