"""Records the CPU figures anew: ``python -m benchmarks``, on a machine that does nothing else.

Each benchmark runs, also after one that failed; then ``docs/figures.md`` is written. Takes some 25 minutes on 2 cores.
What is not among these takes longer, or a GPU, or data that is not in the repository.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.record import ROOT, commit

RESULTS = "benchmarks/results"
SUITES: tuple[tuple[str, ...], ...] = (
    ("-m", "benchmarks.radix"),
    ("-m", "benchmarks.planner", "--core", "1"),
    ("benchmarks/second_turn.py",),
    ("-m", "benchmarks.offline", "--threads", "1"),
    ("-m", "benchmarks.serving"),
    ("-m", "benchmarks.dashboard"),
    ("-m", "benchmarks.nano_spec"),
    ("-m", "benchmarks.vetting"),
    ("-m", "benchmarks.accept_constrained"),
    ("-m", "benchmarks.first_constrained", f"{RESULTS}/first_constrained.json", "COMMIT", "--cpu"),
    ("-m", "benchmarks.api_process", f"{RESULTS}/api_process.json", "COMMIT", "--cpu"),
    ("-m", "benchmarks.recovery", f"{RESULTS}/recovery.json", "COMMIT", "--cpu"),
)


def main() -> int:
    at, failed = commit("hiserve", "benchmarks"), []
    for suite in SUITES:
        print(f"--- python {' '.join(suite)}", flush=True)
        begin = time.monotonic()
        arguments = [at if each == "COMMIT" else each for each in suite]
        if subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode:
            failed.append(" ".join(suite))
        print(f"took {time.monotonic() - begin:.0f} s", flush=True)
    subprocess.run([sys.executable, "benchmarks/readme.py"], cwd=ROOT, check=True)
    for each in failed:
        print(f"failed, or missed a bar: python {each}")
    print(f"{len(SUITES) - len(failed)} of {len(SUITES)} benchmarks ran and met their bars")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
