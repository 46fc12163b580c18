"""The model worker: ``python -m hiserve.worker.process ENDPOINT``, started by the supervisor."""

from __future__ import annotations

import sys

from hiserve.worker.build import build_engine
from hiserve.worker.service import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], build_engine))
