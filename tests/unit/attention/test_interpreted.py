"""The contract of attention backends for Triton's kernels, where there is no GPU: by Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.helpers.interpreted import PORTABLE, interpreted, run_interpreted

ALL = "triton-cpu"
SIMILAR = (
    "(any_number and (plain or all)) or (what_is_behind and (33-freed or 1-freed or 7-kept))"
    " or (their_share and (12-chains or None-ragged))"
    " or (whatever_the_rows and (ordered-2 or decodes-2 or chains-2 or prompt-4 or chunk-4 or first-4 or decode-4))"
)  # to one that runs
SOME = f"{ALL} and not each_plan and not bounds and (not ragged_batches or 16-True-2-80 or 64-False-8-128) and not ({SIMILAR})"


@pytest.mark.parametrize("which", [SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"])
def test_the_kernels_keep_the_contract(which: str) -> None:
    done = interpreted(
        *("-m", "pytest", "-q", "-p", PORTABLE, "-k", which),
        *("tests/contract/test_attention.py", "tests/contract/test_ragged_attention.py"),
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize(
    "program", ["assert 1 > 2", "import sys; sys.exit()", "import os; os._exit(0)", "import os; os.abort()", "print()"]
)
def test_a_program_that_fails_or_ends_early_fails_alone(program: str) -> None:
    with pytest.raises(AssertionError):
        run_interpreted(f"import torch; torch.empty = None\n{program}")
    run_interpreted("import os, torch; assert torch.empty(1).shape == (1,) and os.environ['TRITON_INTERPRET'] == '1'")
