"""Runs pytest and returns the outcome of each test."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
SOME_FAILED, NO_TESTS = 1, 5  # exit codes of pytest: all tests ran; none was selected
KINDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test."""

    name: str  # its module and its name, ``tests.unit.test_cli::test_version``
    outcome: str  # ``passed``, ``failed`` or ``skipped``
    seconds: float  # wall time, fixtures included


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest."""

    command: list[str]
    outcomes: list[Outcome]  # in the order in which the tests ended
    exit_code: int  # pytest's

    @property
    def outcome_counts(self) -> Counter[str]:
        """Tests by outcome."""
        return Counter(each.outcome for each in self.outcomes)

    @property
    def has_ended_early(self) -> bool:
        """Whether some tests may not have run: pytest was ended, or could not go on."""
        has_failed = bool(self.outcome_counts["failed"])
        return self.exit_code not in (0, NO_TESTS) and not (self.exit_code == SOME_FAILED and has_failed)

    @property
    def counts(self) -> Counter[str]:
        """Tests by outcome. A run that ended early counts as one failed test, if no other failed."""
        found = self.outcome_counts
        if self.has_ended_early and not found["failed"]:
            found["failed"] = 1
        return found


def run_pytest(arguments: Sequence[str], python: str = sys.executable, cwd: Path = ROOT) -> Run:
    """Runs pytest in a process of its own, which writes to this terminal."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", *arguments]
        child = subprocess.Popen([*command, f"--junitxml={report}"], cwd=cwd)
        while child.returncode is None:
            with suppress(KeyboardInterrupt):  # pytest has it too: it ends, and reports the tests that ended
                child.wait()
        outcomes = read_report(report) if report.exists() else []
    return Run(command, outcomes, child.returncode)


def read_report(path: Path) -> list[Outcome]:
    """Reads a JUnit XML file of pytest, without tests that did not end: a test that fails and whose teardown fails too is one."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(path).iterfind(".//testcase[@name]"):  # one without a name was set up, no more
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = next((KINDS[child.tag] for child in case if child.tag in KINDS), "passed")
        if name not in found or outcome == "failed":
            found[name] = Outcome(name, outcome, round(float(case.get("time", 0)), 3))
    return list(found.values())


def verdict(counts: Counter[str]) -> str:
    """Returns the closing line, ``12 passed, 1 failed, 2 skipped``."""
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return f"{counts['passed']} passed, {counts['failed']} failed{skipped}"
