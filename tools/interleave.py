"""Compares the costs of two commits, in one run and in turns: ``python -m tools.interleave OLD NEW [--rounds 7] [--only NAME ...]``.

Commits are unpacked by ``git archive``; OLD and NEW may be folders that hold such trees, where there is no git. Every round runs each benchmark of ``BASELINES`` in both, the one that comes first
being second in the next round. Printed are the medians, and the median of the rounds' ratios with its 10th and 90th percentile.
The same commit twice shows the noise of the machine: 1.00 ± 2 % on a quiet one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from benchmarks.record import spread
from tools.import_path import import_path
from tools.interleave_probe import PROBES, WALL, Figures

ROOT = Path(__file__).parents[1]
PROBE = Path(__file__).parent / "interleave_probe.py"
BAR = 0.02  # of a cost, that a change of the house may add
# What is to be as fast as it was: the probe, and the benchmark in full that records the figure.
BASELINES = {
    "planner": "python -m benchmarks.planner",
    "radix": "python -m benchmarks.radix",
    "offline": "python -m benchmarks.offline --threads 1",
    "serving": "python -m benchmarks.serving",
    "second_turn": "python benchmarks/second_turn.py",
}
ON_A_GPU = "python -m benchmarks.gpu OUT.json COMMIT"
assert BASELINES.keys() == PROBES.keys()

Samples = dict[str, tuple[list[float], list[float]]]  # figure -> of the old tree, of the new one


def tree_of(given: str, folder: Path) -> Path:
    """Returns the folder that is given, or this one with the files of the commit that is given."""
    if Path(given).is_dir():
        return Path(given).resolve()
    unpack(given, folder)
    return folder


def unpack(commit: str, folder: Path) -> None:
    """Writes the files of a commit into a folder."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def measure(name: str, tree: Path) -> Figures:
    """Runs one benchmark with the code of a tree.

    Raises:
        CalledProcessError: It failed.
    """
    environment = os.environ | {"PYTHONPATH": import_path(tree), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, str(PROBE), name]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def take_turns(names: list[str], trees: tuple[Path, Path], num_rounds: int) -> Samples:
    """Returns the measurements of every round; prints the round that runs."""
    samples: Samples = {}
    for number in range(num_rounds):
        for name in names:
            print(f"round {number + 1} of {num_rounds}: {name}", file=sys.stderr, flush=True)
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                for figure, cost in measure(name, trees[which]).items():
                    samples.setdefault(f"{name}: {figure}", ([], []))[which].append(cost)
    return samples


def table(samples: Samples) -> tuple[list[str], int]:
    """Returns the lines to print, and how many costs have grown by more than the bar."""
    lines, num_slower = [f"{'cost':<48} {'old':>10} {'new':>10}   new / old"], 0
    for figure, (old, new) in samples.items():
        ratio, low, high = spread([after / before for before, after in zip(old, new, strict=True)])
        is_slower = ratio > 1 + BAR and not figure.endswith(WALL)
        num_slower += is_slower
        marks = "  SLOWER" * is_slower
        lines.append(
            f"{figure:<48} {spread(old)[0]:>10.4g} {spread(new)[0]:>10.4g}   {ratio:.3f} [{low:.3f} – {high:.3f}]{marks}"
        )
    return lines, num_slower


def main() -> int:
    """Returns 1 if something costs more than the bar allows."""
    parser = argparse.ArgumentParser(prog="python -m tools.interleave", description=__doc__)
    parser.add_argument("old", help="a commit, or a folder")
    parser.add_argument("new", help="likewise")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=PROBES, default=list(PROBES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="interleave-") as folder:
        trees = tree_of(options.old, Path(folder) / "old"), tree_of(options.new, Path(folder) / "new")
        lines, num_slower = table(take_turns(options.only, trees, options.rounds))
    print("\n".join(lines))
    print(
        f"{num_slower} of {len(lines) - 1} cost more than {1 + BAR:.2f} of what they did; on a GPU, besides: {ON_A_GPU}"
    )
    return int(num_slower > 0)


if __name__ == "__main__":
    sys.exit(main())
