"""The simulation of a fleet: its caches, its trace, and what affinity gains."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from hiserve.cli import main
from hiserve.errors import ConfigError
from hiserve.fleet import report
from hiserve.fleet.report import FleetOptions, FleetRun, missed_bars, run_fleet
from hiserve.fleet.simulation import Arrival, FleetCase, _Fleet, endless_hit_rate, made_up, recorded, simulate


def test_a_cache_gives_up_the_ends_of_prompts_first() -> None:
    fleet = _Fleet(2, 4, has_index=True)
    assert fleet.use(0, (0, 1, 2, 3)) == 0
    assert fleet.use(0, (0, 1, 2, 3)) == 4
    assert fleet.use(0, (0, 9)) == 1
    assert fleet.use(0, (0, 1, 2, 3)) == 3, "block 3 was used longest ago, then block 2"
    assert fleet.use(1, (0, 1)) == 0


def test_the_index_knows_who_has_the_longest_prefix_and_is_not_far_busier() -> None:
    fleet = _Fleet(3, 100, has_index=True)
    fleet.use(1, (0, 1, 2, 3))
    fleet.use(2, (0, 1))
    assert fleet.longest((0, 1, 2, 3, 4)) == 1
    fleet.loads[1] = 100
    assert fleet.longest((0, 1, 2, 3, 4)) == 2
    assert fleet.longest((0, 7)) == 0, "what all share attracts nothing"


def test_times_follow_from_the_tokens_that_are_computed() -> None:
    """Two requests for one replica: the second waits for the first one's 4 blocks, and has 3 of its own 4 cached."""
    arrivals = [Arrival(0.0, (0, 1, 2, 3), 10), Arrival(0.1, (0, 1, 2, 5), 10)]
    case = simulate("round-robin", 1, arrivals, 10**6, 0)
    first, second = 4 * 512 / 3000, 5 * 512 / 3000 - 0.1
    assert case.hit_rate == 3 / 8
    assert case.ttft_p50_s == pytest.approx((first + second) / 2)
    assert endless_hit_rate(arrivals) == 3 / 8


def test_affinity_has_the_hits_of_an_exact_index_and_many_times_those_of_round_robin() -> None:
    """The bars at 16 and 48 replicas, with caches so small that they evict."""
    found = run_fleet(
        FleetOptions(sizes=(16, 48), requests_per_replica=40, cache_tokens=400_000), lambda _: lambda _: None
    )
    assert missed_bars(found) == []
    rates = {(case.num_replicas, case.policy): case.hit_rate for case in found.cases}
    for count in (16, 48):
        assert 0.2 < rates[count, "exact"] <= found.endless[count]
        assert rates[count, "two-choices"] < 0.5 * rates[count, "affinity"]


def test_missed_bars_are_named() -> None:
    cases = [
        FleetCase(count, policy, 1, rate, 0, 0, 1)
        for count in (2, 16)
        for policy, rate in (("round-robin", 0.1), ("affinity", 0.3), ("exact", 0.32))
    ]
    first, second = missed_bars(FleetRun(cases, {2: 0.4, 16: 0.4}))
    assert first == "16 replicas: affinity has 0.94 of the hits of exact, bar 0.95"
    assert second == "16 replicas: affinity has 3.00 of the hits of round-robin, bar 4"


def test_a_trace_is_copied_with_blocks_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    rows = [{"timestamp": 1000 * at, "input_length": 9, "output_length": 5, "hash_ids": [0, 1 + at]} for at in range(4)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    arrivals = recorded(path, 32, 16, seed=0)
    assert len(arrivals) == 8
    assert {arrival.blocks[0] for arrival in arrivals} == {0}
    assert len({arrival.blocks[1] for arrival in arrivals}) == 8
    assert all(one.at_s <= other.at_s <= 3 for one, other in pairwise(arrivals))
    path.write_bytes(gzip.compress(json.dumps({**rows[0], "hash_ids": []}).encode()))
    with pytest.raises(ConfigError, match="without blocks"):
        recorded(path, 16, 16, seed=0)


def test_made_up_conversations_are_those_of_their_seed() -> None:
    assert made_up(4, 30, 1) == made_up(4, 30, 1) != made_up(4, 30, 2)
    assert 0.25 < endless_hit_rate(made_up(16, 60, 1)) < 0.5


def test_the_command_shows_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "fleet.json", tmp_path / "fleet.svg"
    flags = ["--sizes", "1", "2", "--requests-per-replica", "9", "--output", str(output), "--plot", str(plot)]
    assert main(["bench", "fleet", *flags]) == 0
    assert "exact" in capsys.readouterr().out
    written = json.loads(output.read_text())
    assert [case["policy"] for case in written["cases"]] == list(report.POLICIES) * 2
    assert plot.stat().st_size > 5000
