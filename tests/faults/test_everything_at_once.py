"""Everything at once: a loaded server, struck from outside by a soak and broken from inside by its own workers.

``make test-long`` does it for longer than half an hour. ``pytest -m long tests/faults/test_everything_at_once.py`` takes
``--soak-seconds`` and ``--soak-result``, a file for what was found (benchmarks/results/soak.json).
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from hiserve.bench.options import SoakOptions
from hiserve.bench.record import about
from hiserve.bench.soak.soak_run import SoakOutcome, soak
from hiserve.bench.soak.soak_summary import REFUSALS
from hiserve.config.options import Options, make_options
from tests.helpers.forks import forked_programs
from tests.helpers.small_model import small_model

LONG_S = 2000.0
SEED = 90
# A step that is a worker's last one (the first breaks while replies are recorded); a disk that fails and lies; for long also a worker that hangs, or gets no memory.
BROKEN = "tests.faults.worker fatal=15:45,failing=0.02,lying=0.02"
BROKEN_LATER = "tests.faults.worker fatal=1000:6000,hang=2000:8000,starved=500:3000,failing=0.02,lying=0.02"
SHORT_S = (6.0, 30.0, 240.0)  # one after the other until enough has happened: a busy machine needs longer
SHORT = SoakOptions(
    recovery_limit=300,
    timeout=600,
    users=5,
    num_dialogues=3,
    num_agents=2,
    num_turns=3,
    prefix_length=96,
    output_length=12,
    cancelled=0.3,
    bad=0.2,
    burst_size=100,
    burst_every=4,
    faults=("kill-worker", "kill-scheduler", "flip-host", "flip-store"),
    fault_every=0.4,
    seed=SEED,
)
LONG = msgspec.structs.replace(
    SHORT,
    faults=(),
    duration=LONG_S,
    recovery_limit=60,
    timeout=120,
    num_dialogues=12,
    num_agents=6,
    output_length=24,
    burst_every=30,
    fault_every=12.0,
)


def config(folder: Path) -> Options:
    """Tiers that are far too small, a queue that is soon full, and a check of everything that is read."""
    return make_options(
        model=small_model(),
        dtype="float64",
        cpu_threads=1,
        page_size=16,
        max_model_len=512,
        max_running_requests=4,
        max_queued_requests=6,
        kv_pages=50,
        host_cache_gib=0.0025,
        cache_verify="all",
        kv_canary=True,
        store=f"file:{folder}/store",
        store_gib=0.005,
        step_timeout_s=5,
        log_level="warning",
    )


def survive(folder: Path, options: SoakOptions, worker: str) -> SoakOutcome:
    """Soaks a server of such workers."""
    print(f"seed {options.seed}")
    program = (sys.executable, "-m", "tests.faults.serve", worker)
    outcome = asyncio.run(soak(config(folder), options, lambda _: lambda _: None, program))
    print(msgspec.json.format(msgspec.json.encode(outcome.figures)).decode(), "\n".join(outcome.log_tail))
    return outcome


def test_everything_at_once(tmp_path: Path) -> None:
    for seconds in SHORT_S:
        folder = tmp_path / f"{seconds:.0f}"
        folder.mkdir()
        with forked_programs():  # of 1.3 s of CPU that a worker needs to be back, 1 s would be imports
            found = survive(folder, msgspec.structs.replace(SHORT, duration=seconds), BROKEN).figures
        assert not found.violations
        kills = sum(fault.fault.startswith("kill") for fault in found.faults)
        num_refused = sum(found.outcomes.get(each, 0) for each in REFUSALS.values())
        if (
            len({fault.fault for fault in found.faults}) >= 3
            and found.num_processes["worker"] > kills > 0
            and found.outcomes.get("answered", 0) > 5
            and num_refused > 50
        ):
            return
    raise AssertionError(f"too little happens in {seconds} s: {found.outcomes}, {found.faults}, {found.num_processes}")


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_S)
def test_everything_at_once_for_long(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--soak-seconds", LONG_S)
    outcome = survive(tmp_path, msgspec.structs.replace(LONG, duration=seconds), BROKEN_LATER)
    found = outcome.figures
    path = request.config.getoption("--soak-result", None)
    if path is not None:
        content = about("pytest -m long tests/faults/test_everything_at_once.py", "hiserve bench soak")
        content |= {"config": config(Path("DIR")), "server": outcome.target, "soak": found}
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    assert not found.violations
    counts = Counter(fault.fault for fault in found.faults)
    assert set(counts) == {"kill-worker", "hang-worker", "kill-scheduler", "flip-host", "flip-store"}
    assert {grown.role for grown in found.growth if grown.is_judged} >= ({"api"} if seconds >= LONG_S else set())
