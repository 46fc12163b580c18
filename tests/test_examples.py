"""Every file of ``examples/`` is executed as it stands, against a live server where it wants one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import Live, serve
from tests.helpers import forks
from tools.import_path import import_path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
LIMIT_S = 600
CACHED = " prompt tokens from the cache]"
# What a run must say, by file; ``demo.py`` checks itself.
SAYS = {
    "curl.sh": ['"finish_reason"', "data: [DONE]", '"token_logprobs"', '"tokens"'],
    "demo.py": ['get_weather {"city": "San Jose"', "server stopped with status 0"],
    "langchain_chat.py": ["?"],
    "offline.py": ["'def add(a, b):\\n' -> ", "assistant: ", CACHED],
    "openai_chat.py": ["assistant: ", CACHED],
    "token_ids.py": ["Book a table for two, please.", CACHED],
}
WITHOUT_SERVER = {"demo.py", "offline.py"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(tmp_path_factory.mktemp("examples"), "--cpu-threads", "1") as running:
        yield running


def run(name: str, folder: Path, *arguments: str) -> str:
    """Runs an example in an empty folder; returns what it printed. Of those without a server one is a fork."""
    program = ["bash"] if name.endswith(".sh") else [sys.executable]
    environment = os.environ | {"PYTHONPATH": import_path(ROOT)}
    if name == "offline.py":
        with contextlib.chdir(folder):
            done = forks.run([*program, "-c", (EXAMPLES / name).read_text()], environment)
    else:
        done = subprocess.run(
            [*program, str(EXAMPLES / name), *arguments],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_executed() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == SAYS.keys()


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs(name: str, live: Live, tmp_path: Path) -> None:
    printed = run(name, tmp_path, *([] if name in WITHOUT_SERVER else [live.url]))
    for text in SAYS[name]:
        assert text in printed, printed
    turns = [line.strip(" [") for line in printed.splitlines() if line.endswith(CACHED)]
    assert not turns or int(turns[-1].split()[0]) > 0, "the last turn did not come from the cache"
