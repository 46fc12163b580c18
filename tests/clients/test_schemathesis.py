"""schemathesis: whatever ``/openapi.json`` allows or forbids, the server does not fail. See ``e2e/test_hostile_load.py``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest

from tests.clients.fuzzing import CHECKS, COMMAND, CONFIG, num_cases, num_tested
from tests.e2e.live import serve

MAX_MODEL_LEN = 64  # Caps replies without changing a request: most requests do not say max_tokens.
SEED = 20_261_121


def fuzz(folder: Path, *, max_examples: int, timeout_s: int) -> str:
    """Runs schemathesis against a server of its own; returns what it printed."""
    print(f"seed {SEED}")
    flags = ("--cpu-threads", "1", "--max-model-len", str(MAX_MODEL_LEN), "--log-level", "warning")
    with serve(folder, *flags) as live:
        options = ["--phases", "fuzzing", "--max-examples", str(max_examples), "--checks", CHECKS, "--no-color"]
        options += ["--workers", "2", "--seed", str(SEED), "--generation-database", "none", "--continue-on-failure"]
        done = subprocess.run(
            [*COMMAND, "--config-file", str(CONFIG), "run", f"{live.url}/openapi.json", *options],
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        num_paths = len(httpx.get(f"{live.url}/openapi.json").json()["paths"])
        assert num_tested(done.stdout) >= num_paths
        live.wait_idle()
        assert "Traceback" not in live.log.read_text()
        return done.stdout


@pytest.mark.clients
def test_no_request_of_many_makes_the_server_fail(tmp_path: Path) -> None:
    assert num_cases(fuzz(tmp_path, max_examples=100, timeout_s=280)) >= 600
