"""A process that is launched collects no garbage while it imports, and does again when its ``main`` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODULE = """
import gc, sys

WAS_ON = gc.isenabled()
MADE = [[number] for number in range(1000)]

def main(*arguments):
    print(WAS_ON, gc.isenabled(), gc.get_freeze_count() > len(MADE), *arguments)
    return 7
"""


def test_what_is_imported_is_never_looked_through(tmp_path: Path) -> None:
    (tmp_path / "launched.py").write_text(MODULE)
    command = [sys.executable, "-m", "hiserve.ipc.launcher", "launched", "one", "two"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "False True True one two\n", "")
