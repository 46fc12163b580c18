"""The suite does not depend on the signals that its parent ignores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CTRL_C = "tests/unit/commands/test_top.py::test_ctrl_c_ends_the_board_without_a_word_of_error"
IGNORANT = "import os, signal, sys; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3)]; os.execv(sys.executable, sys.argv[1:])"


def test_a_test_of_ctrl_c_passes_in_a_background_job_of_a_shell() -> None:
    """Such a job, and what nohup starts, begins with signals ignored, and its children inherit that."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", CTRL_C]
    done = subprocess.run(
        [sys.executable, "-c", IGNORANT, *command],
        cwd=root,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
