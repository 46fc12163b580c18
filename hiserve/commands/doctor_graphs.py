"""``hiserve doctor --graphs``: runs steps to test their replay as CUDA graphs on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryFile
from threading import Timer

import msgspec

from hiserve.config.settings import Settings
from hiserve.ipc.messages import GraphReport

TIMEOUT_S = 1800.0  # weights are read and kernels compiled
_COMMAND = (sys.executable, "-m", "hiserve.engine.graph_check")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The result, printed as JSON.

    Attributes:
        is_ready: No step has a problem.
        report: Of the steps; None if none ran.
        not_run: The reason why none ran; empty if they ran.
        is_broken: No step ran though there is a device.
    """

    is_ready: bool
    report: GraphReport | None
    not_run: str
    is_broken: bool


def judge(config: Settings, run_steps: Callable[[Settings], GraphReport | str]) -> Answer:
    """Runs steps where there is a device for graphs.

    Args:
        config: Resolved.
        run_steps: Runs them; returns a sentence if it could not.
    """
    if config.model.device == "cpu":
        not_run = "models run on the CPU here, which has no graphs"
        return Answer(is_ready=True, report=None, not_run=not_run, is_broken=False)
    result = run_steps(config)
    if isinstance(result, str):
        return Answer(is_ready=False, report=None, not_run=result, is_broken=True)
    has_problems = any(check.problems for check in result.checks)
    return Answer(is_ready=not has_problems, report=result, not_run="", is_broken=False)


def run_on_device(config: Settings) -> GraphReport | str:
    """Runs steps in another process; returns the last line of its standard error if it failed.

    These lines are printed as they come: kernels that are compiled first may take minutes.
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
    """Writes a process's input and prints its standard error until it closes; returns the last line."""
    assert process.stdin is not None and process.stderr is not None
    with suppress(BrokenPipeError), process.stdin:  # it may have ended already; its error says why
        process.stdin.write(given)
    last = "it said nothing"
    for raw in process.stderr:
        said = raw.decode(errors="replace").rstrip()
        sys.stderr.write(said + "\n")
        sys.stderr.flush()
        last = said.strip() or last
    return last
