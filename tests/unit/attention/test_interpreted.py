"""The contract of attention backends for Triton's kernels, where there is no GPU: by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent


ALL = "triton-cpu"
SOME = f"{ALL} and not each_plan and not bounds and (not ragged_batches or 16-True-2-80 or 64-False-8-128)"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("which", [SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"])
def test_the_kernels_keep_the_contract(which: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", which, "tests/contract/test_attention.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
