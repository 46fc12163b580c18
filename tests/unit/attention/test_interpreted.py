"""The contract of attention backends for Triton's kernels, where there is no GPU: by Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.helpers.interpreted import PORTABLE, interpreted

ALL = "triton-cpu"
SOME = f"{ALL} and not each_plan and not bounds and (not ragged_batches or 16-True-2-80 or 64-False-8-128)"


@pytest.mark.parametrize("which", [SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"])
def test_the_kernels_keep_the_contract(which: str) -> None:
    done = interpreted(
        *("-m", "pytest", "-q", "-p", PORTABLE, "-k", which),
        *("tests/contract/test_attention.py", "tests/contract/test_ragged_attention.py"),
    )
    assert done.returncode == 0, done.stdout[-4000:]
