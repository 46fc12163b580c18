"""``hiserve bench soak`` from its command line: a short one, with a server of its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from hiserve import cli
from hiserve.bench.load import Advance
from hiserve.bench.options import SoakOptions
from hiserve.bench.soak.soak_run import SoakOutcome, soak
from hiserve.bench.soak.soak_summary import REFUSALS
from hiserve.config.options import make_options
from tests.e2e.live import DRAFTS, serve

SIZES = ["--page-size", "16", "--kv-pages", "80", "--max-model-len", "512", "--max-running-requests", "4"]
SERVER = [
    *SIZES,
    *DRAFTS,
    "--dtype",
    "float64",
    "--cpu-threads",
    "1",
    "--log-level",
    "warning",
    "--max-queued-requests",
    "6",
]
FEW = ["--num-dialogues", "2", "--num-agents", "2", "--num-turns", "2", "--prefix-length", "96", "--output-length", "8"]
LOAD = [
    "--users",
    "4",
    "--burst-size",
    "20",
    "--burst-every",
    "2",
    "--cancelled",
    "0.2",
    "--bad",
    "0.2",
    "--slow",
    "0.1",
]


def test_a_soak_strikes_its_server_and_tells_what_it_survived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds in ("5", "15", "40", "240"):  # until enough has happened: a busy machine needs longer
        output = tmp_path / f"{seconds}.json"
        tiers = ["--host-cache-gib", "0.03", "--store", f"file:{tmp_path}/{seconds}", "--cache-verify", "all"]
        faults = ["--faults", "flip-host", "flip-store", "kill-worker", "--fault-every", "0.4", "--duration", seconds]
        limits = ["--recovery-limit", "300", "--timeout", "600"]
        argv = ["bench", "soak", *SERVER, *tiers, *FEW, *LOAD, *faults, *limits, "--output", str(output)]
        assert cli.main(argv) == 0, capsys.readouterr().out
        told, found = capsys.readouterr().out, json.loads(output.read_bytes())["soak"]
        assert found["is_exact"] and not found["num_violations"]
        outcomes, struck = found["outcomes"], {fault["fault"] for fault in found["faults"]}
        fine = {"answered", "left by the user", "malformed, told so", "slow reader cut off"}
        assert set(outcomes) <= fine | set(REFUSALS.values())
        if (
            outcomes.get("answered", 0) > 2
            and outcomes.keys() & {"left by the user", "malformed, told so"}
            and struck >= {"flip-store", "kill-worker"}
        ):
            break
    else:
        raise AssertionError(f"too little happens in {seconds} s: {outcomes}, {struck}")
    (killed, *_) = [fault for fault in found["faults"] if fault["fault"] == "kill-worker"]
    assert 0 < killed["ready_s"] <= killed["recovery_s"]
    assert found["beside_faults"]["ttft_ms"]["count"] > 0
    assert {grown["role"] for grown in found["growth"]} >= {"api", "scheduler"}
    assert "violations: 0" in told and "kill-worker" in told


@pytest.mark.wide
def test_a_soak_of_a_running_server_only_loads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "soak.json"
    with serve(tmp_path, *SERVER) as live:
        argv = ["bench", "soak", "--url", live.url, *FEW, *LOAD, "--duration", "2", "--output", str(output)]
        assert cli.main(argv) == 0, capsys.readouterr().out
        assert all(worker["incarnation"] == 1 for worker in live.info()["workers"])
    found = json.loads(output.read_bytes())["soak"]
    assert found["is_exact"] and not found["faults"] and not found["growth"]
    assert found["outcomes"]["answered"]


def test_ctrl_c_ends_a_soak_with_what_was_seen(tmp_path: Path) -> None:
    options = SoakOptions(
        num_dialogues=2, num_agents=2, num_turns=2, prefix_length=96, output_length=8, duration=3600.0
    )

    async def stopped(url: str) -> SoakOutcome:
        def begin(_: int | None) -> Advance:
            seconds = iter(range(3))

            def advance(_: str) -> None:
                if next(seconds) == 2:
                    running.cancel()  # as Ctrl-C does

            return advance

        running = asyncio.ensure_future(soak(make_options(), msgspec.structs.replace(options, url=url), begin))
        return await running

    with serve(tmp_path, *SERVER) as live:
        found = asyncio.run(stopped(live.url))
    assert found.is_partial and 0 < found.figures.duration_s < 600
    assert found.figures.outcomes["answered"] and not found.figures.num_violations


def test_faults_that_nobody_would_notice_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "soak", "--faults", "flip-host"]) == 1
    assert "--cache-verify all" in capsys.readouterr().err
    assert cli.main(["bench", "soak", "--faults", "flip-store"]) == 1
    assert "needs --store" in capsys.readouterr().err
