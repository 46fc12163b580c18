"""A real worker process around the fake engine: ``python -m tests.helpers.fake_worker ENDPOINT``."""

import sys

from hiserve.engine.service import serve
from tests.helpers.fake_engine import build

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], build))
