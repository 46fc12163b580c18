"""Sums of two GPUs that write into each other's memory: bits of NCCL, on both ranks alike, in graphs, and after a death."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.core.devices import environment_with
from tests.gpu.push_rank import REPLAYS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU; these tests need a second"),
]
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found; the second sees its own device alone, as in a group."""
    rendezvous: Path = tmp_path_factory.mktemp("push") / "rendezvous"
    ranks = [
        subprocess.Popen(
            (sys.executable, "-m", "tests.gpu.push_rank", str(rank), str(rendezvous)),
            stdout=subprocess.PIPE,
            text=True,
            env=environment_with(devices),
        )
        for rank, devices in enumerate(((0, 1), (1,)))
    ]
    try:
        return [json.loads(rank.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_sums_have_the_same_bits_on_both_ranks(found: list[dict[str, Any]]) -> None:
    """And those of NCCL, which each rank asserts."""
    assert len(found[0]["sums"]) == 28
    assert found[0]["sums"] == found[1]["sums"]


def test_graphs_with_delays_lose_no_word(found: list[dict[str, Any]]) -> None:
    first, second = (each["many"] for each in found)
    print(f"{REPLAYS} replays: {first['True s']:.2f} s pushed with delays, {first['False s']:.2f} s by NCCL without")
    assert first["push"] == second["push"] and first["push"][0] == first["nccl"][0]


def test_a_rank_may_replay_what_another_launches(found: list[dict[str, Any]]) -> None:
    assert found[0]["mixed"] == found[1]["mixed"]


def test_a_sum_that_waits_for_a_rank_that_ended_ends(found: list[dict[str, Any]]) -> None:
    alone = found[0]["alone"]
    assert alone["waited"] and alone["ended"], alone
