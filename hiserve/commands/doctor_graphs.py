"""``hiserve doctor --graphs``: whether steps are ready to be replayed as CUDA graphs, by reading the code and by running it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

import hiserve
from hiserve.cache.storage.host_segment import probe_segments
from hiserve.commands.doctor_lines import Level, line, mark
from hiserve.commands.graph_allowed import ALLOWED
from hiserve.commands.graph_scan import PATTERNS, GraphHazard, Scan, scan
from hiserve.config import Config
from hiserve.core.machine import probe
from hiserve.core.resolve import resolve
from hiserve.ipc.graph_report import GraphReport
from hiserve.models.builtin_shapes import read_model
from hiserve.models.speculation import model_facts

TIMEOUT_S = 1800.0  # weights are read and kernels compiled
_COMMAND = (sys.executable, "-m", "hiserve.engine.graph_check")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is printed as JSON.

    Attributes:
        is_ready: Nothing is wrong.
        violations: Of the hot path's code.
        idle_exceptions: Exceptions from the rules that cover nothing any more.
        num_exceptions: Places that one covers.
        report: Of the device; None where nothing was run on one.
        not_run: Why not; empty if it was.
        is_broken: It could not be run though there is a device.
    """

    is_ready: bool
    violations: list[dict[str, Any]]
    idle_exceptions: list[dict[str, Any]]
    num_exceptions: int
    report: GraphReport | None
    not_run: str
    is_broken: bool


def run(config: Config, *, as_json: bool) -> int:
    """Prints what was found; returns 1 when something is wrong.

    Raises:
        HiserveError: The model cannot be read, or the configuration is not possible here.
    """
    resolved = resolve(config, model_facts(config, *read_model(config.model)), probe_segments(config, probe())).config
    found = scan(Path(hiserve.__file__).parent, ALLOWED)
    answer = judge(found, resolved, run_on_device)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer)).decode() + "\n")
    else:
        _show(answer, found)
    return int(not answer.is_ready)


def judge(found: Scan, config: Config, run_steps: Callable[[Config], GraphReport | str]) -> Answer:
    """Joins what the code says and what the device says.

    Args:
        found: In the code.
        config: Resolved.
        run_steps: Runs steps on a device; returns a sentence if it could not.
    """
    report: GraphReport | None = None
    not_run = "models run on the CPU here, which has no graphs"
    is_broken = False
    if config.model.device != "cpu":
        result = run_steps(config)
        is_broken = isinstance(result, str)
        report, not_run = (None, result) if isinstance(result, str) else (result, "")
    has_problems = report is not None and any(check.problems for check in report.checks)
    return Answer(
        is_ready=not (found.violations or found.idle or is_broken or has_problems),
        violations=[each._asdict() for each in found.violations],
        idle_exceptions=[each._asdict() for each in found.idle],
        num_exceptions=len(found.excused),
        report=report,
        not_run=not_run,
        is_broken=is_broken,
    )


def run_on_device(config: Config) -> GraphReport | str:
    """Runs steps in a process of its own, as a worker would; returns the last thing it said if it failed.

    What it says meanwhile is passed on to stderr: kernels that are compiled first may take minutes.
    """
    with (
        TemporaryFile() as report,
        subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=report, stderr=subprocess.PIPE) as process,
    ):
        limit = Timer(TIMEOUT_S, process.kill)
        limit.start()
        try:
            last = _talk(process, msgspec.json.encode(config))
            process.wait()
        finally:
            process.kill()
            is_late = not limit.is_alive()
            limit.cancel()
        if process.returncode:
            return f"the steps did not end within {TIMEOUT_S:g} s" if is_late else last
        report.seek(0)
        return msgspec.json.decode(report.read().splitlines()[-1], type=GraphReport)


def _talk(process: subprocess.Popen[bytes], given: bytes) -> str:
    """Writes what a process reads, passes on what it says, and returns the last of that once it has closed stderr."""
    assert process.stdin is not None and process.stderr is not None
    with suppress(BrokenPipeError), process.stdin:  # it may be gone already, and says why
        process.stdin.write(given)
    last = "it said nothing"
    for raw in process.stderr:
        said = raw.decode(errors="replace").rstrip()
        sys.stderr.write(said + "\n")
        sys.stderr.flush()
        last = said.strip() or last
    return last


def _show(answer: Answer, found: Scan) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for each in found.violations:
        console.print(line("fail", f"{each.file}:{each.line}", f"{_describe(each)}: {each.text}"))
    for entry in found.idle:
        text = f"{entry.file} {entry.function}: nothing there needs the exception for {entry.pattern}; take it out"
        console.print(line("fail", "graph_allowed", text))
    if not (found.violations or found.idle):
        text = f"the hot path waits for nothing, but in {answer.num_exceptions} places that have a reason"
        console.print(line("ok", "code", text))
    if answer.report is None:
        console.print(line("fail" if answer.is_broken else "note", "steps", f"not run: {answer.not_run}"))
        return
    table = Table(title=f"steps on {answer.report.device}, {answer.report.num_nodes} graph nodes", title_justify="left")
    for name in ("", "step", "ran", "allocations", "difference", "problems"):
        table.add_column(name)
    for check in answer.report.checks:
        level: Level = "fail" if check.problems else "ok"
        numbers = (f"{check.allocations:g}", f"{check.difference:.4f}")
        problems = Text("; ".join(check.problems))  # lines of code: brackets are no markup
        table.add_row(mark(level), check.kind, check.ran, *numbers, problems)
    console.print(table)


def _describe(finding: GraphHazard) -> str:
    return f"{finding.function}: {finding.pattern} {PATTERNS[finding.pattern]}"
