"""The real scheduler process with fake workers: ``python -m tests.helpers.fake_scheduler ENDPOINT``."""

import sys

from hiserve.scheduler.process import main

FAKE_WORKER = (sys.executable, "-m", "tests.helpers.fake_worker")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], FAKE_WORKER))
