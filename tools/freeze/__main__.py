"""Records plans, results and answers of the engine and its server, or checks that they are still the same.

    python -m tools.freeze record [NAME ...]
    python -m tools.freeze check [--quick] [NAME ...]
    python -m tools.freeze show [NAME ...]

Names are those of ``workloads.py``, ``session`` and ``refusals``; without any, all. The first step or
answer that differs is shown. ``names.py`` lists renames and new wordings.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from tools.freeze.clock import VirtualClock

clock = VirtualClock()
clock.install()  # before anything takes a clock as a default

from tools.freeze import names  # noqa: E402
from tools.freeze.drive import run  # noqa: E402
from tools.freeze.logs import Logs, difference  # noqa: E402
from tools.freeze.wire import refusals, session  # noqa: E402
from tools.freeze.workloads import WORKLOADS  # noqa: E402

BY_NAME = {workload.name: workload for workload in WORKLOADS}
WIRE: dict[str, Callable[[], list[str]]] = {"session": session, "refusals": refusals}
QUICK = [*(workload.name for workload in WORKLOADS if workload.is_quick), "session"]


def cpu_s() -> float:
    """Returns the CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def lines_of(name: str) -> list[str]:
    """Runs something of this name; returns its log."""
    return WIRE[name]() if name in WIRE else run(BY_NAME[name], clock)


def reworded(lines: list[str]) -> list[str]:
    """Returns a recorded log with the words that are wanted now."""
    for old, new in names.REWORDED.items():
        lines = [line.replace(old, new) for line in lines]
    return lines


def main() -> int:
    """Returns 1 if a log differs from the recorded one."""
    parser = argparse.ArgumentParser(prog="python -m tools.freeze", description=__doc__)
    parser.add_argument("what", choices=("record", "check", "show"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="the few that every run of the tests checks")
    options = parser.parse_args()
    wanted = options.names or (QUICK if options.quick else [*BY_NAME, *WIRE])
    if unknown := [name for name in wanted if name not in BY_NAME and name not in WIRE]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join([*BY_NAME, *WIRE])}")
    recorded, found, num_differing = Logs.load(), {}, 0
    if options.what == "show":
        print("\n".join(line for name in wanted for line in (f"=== {name}", *recorded.lines[name])))
        return 0
    for name in wanted:
        begin_s = cpu_s()
        lines = found[name] = lines_of(name)
        shown = difference(reworded(recorded.lines.get(name, [])), lines) if options.what == "check" else ""
        num_differing += bool(shown)
        verdict = "DIFFERS" if shown else "recorded" if options.what == "record" else "the same"
        print(f"{name:<24} {len(lines):6} lines  {cpu_s() - begin_s:5.1f} s  {verdict}", flush=True)
        if shown:
            print(shown, flush=True)
    if options.what == "record":
        Logs(recorded.lines | found).save()
    print(f"{len(wanted) - num_differing} of {len(wanted)} are as recorded" if options.what == "check" else "recorded")
    return int(num_differing > 0)


if __name__ == "__main__":
    sys.exit(main())
