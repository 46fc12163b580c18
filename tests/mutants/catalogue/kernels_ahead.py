"""Guards of kernels that are compiled side by side at a start: none is launched unwritten, and other threads are left alone."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AHEAD = "hiserve/kernels/ahead.py"
TESTS = "tests/unit/kernels/test_ahead.py::"

MUTANTS = [
    Mutant(
        name="ahead: kernels are launched on what nobody has written",
        file=AHEAD,
        old="grid=grid, warmup=True, **settings)",
        new="grid=grid, warmup=warmup, **settings)",
        test=TESTS + "test_kernels_are_compiled_by_other_threads_and_not_launched",
    ),
    Mutant(
        name="ahead: an engine beside the one that starts launches nothing meanwhile",
        file=AHEAD,
        old="        if threading.get_ident() != ours:\n",
        new="        if not ours:\n",
        test=TESTS + "test_other_threads_launch_meanwhile",
    ),
    Mutant(
        name="ahead: graphs are captured before their kernels are compiled",
        file="hiserve/worker/runners.py",
        old="    if before_capture is not None:\n        before_capture(runners)\n    begin",
        new="    begin",
        test=TESTS + "test_what_graphs_and_steps_launch_was_compiled_before[off]",
    ),
]
