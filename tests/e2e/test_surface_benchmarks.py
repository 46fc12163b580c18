"""The benchmarks of constrained replies and of the API process run, and tell what they are to tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--tiny"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.long
def test_each_way_of_streaming_is_one_measured_beside_the_others(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run("api_process", str(out), "test")
    found = json.loads(out.read_text())
    (measured,) = found["rounds"]
    assert measured.keys() == {"text", "chat", "messages", "responses", "traced"} and all(measured.values())
    assert found["ratios"].keys() == found["bars"].keys()


@pytest.mark.long
def test_the_first_token_is_timed_free_and_under_known_and_unseen_grammars(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run("first_constrained", str(out), "test")
    found = json.loads(out.read_text())
    assert {way: len(each["cpu_ms"]) for way, each in found["samples"].items()} == {"free": 2, "known": 2, "unseen": 2}
    assert found["cpu_ms"].keys() - {"free, ms"} == found["bars"].keys()


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "figures"),
    [
        ("vetting", {"verdict_ms_p50", "schemas_mib", "mask_us_mean"}),
        ("accept_constrained", {"json", "calls", "words"}),
    ],
)
def test_schemas_masks_and_drafts_are_counted(module: str, figures: set[str]) -> None:
    lines = run(module).splitlines()
    assert figures <= {line.split()[0] for line in lines}
