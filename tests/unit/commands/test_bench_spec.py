"""``hiserve bench spec`` from its command line, on the embedded model: a draft model that is the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hiserve import cli

SETTINGS = ["--dtype", "float64", "--cpu-threads", "1", "--page-size", "16"]
SIZES = [
    "--steps",
    "3",
    "auto",
    "--sources",
    "cold",
    "device",
    "host",
    "--batches",
    "1",
    "--temperatures",
    "0",
    "--repeats",
    "1",
]
LENGTHS = ["--prompt-length", "40", "--output-length", "9"]
RUN = ["bench", "spec", "--proposers", "draft:hiserve-nano", *SETTINGS, *SIZES, *LENGTHS]


def test_a_model_that_drafts_for_itself_is_always_right_wherever_prompts_are(tmp_path: Path, capsys: Any) -> None:
    output, plot = tmp_path / "spec.json", tmp_path / "spec.png"
    assert cli.main([*RUN, "--output", str(output), "--plot", str(plot)]) == 0
    found = json.loads(output.read_bytes())
    cases = found["cases"]
    assert {case["source"] for case in cases} == {"cold", "device", "host"}
    assert len(cases) == 2 * 3
    for case in cases:
        assert case["equality"]["verdict"] == "same"
        spec, plain = case["spec"][0], case["plain"][0]
        assert spec["num_decoded"] == plain["num_decoded"] == 8 * case["batch"]
        assert plain["num_steps"] == 8
        if case["steps"] == "3":  # eight tokens are two whole cycles
            assert case["figures"]["accept_length"] == 4.0
            assert case["figures"]["acceptance"] == [1.0, 1.0, 1.0]
            assert spec["num_steps"] == 2
    (costs,) = found["cycle_costs"].values()
    assert {cost["steps"] for cost in costs} == {0, 1, 2, 3, 5}
    assert all(cost["plain_s"] > 0 and cost["extend_s"] > 0 for cost in costs)
    shown = capsys.readouterr().out
    for words in ("% accepted", "4.00", "100 100 100", "cost of a cycle", "6 of 6 same"):
        assert words in shown, shown
    assert plot.stat().st_size > 20_000


def test_lists_of_options_are_checked_one_by_one(capsys: Any) -> None:
    for given, words in (
        (["--batches", "1", "0"], "--batches is 0; the least is 1"),
        (["--sources", "disk"], "give one of cold, device, host"),
        (["--concurrency", "2"], "--acceptances and --concurrency are of --sweep"),
    ):
        assert cli.main(["bench", "spec", *given]) == 1
        assert words in capsys.readouterr().err


def test_rehearsed_drafts_are_right_as_often_as_asked_for(tmp_path: Path, capsys: Any) -> None:
    output, plot = tmp_path / "sweep.json", tmp_path / "sweep.png"
    sizes = ["--steps", "3", "--acceptances", "0", "1", "--concurrency", "2", "--repeats", "1"]
    lengths = ["--prompt-length", "20", "--output-length", "9"]
    run = ["bench", "spec", "--sweep", "--spec", "eagle3", *SETTINGS, *sizes, *lengths]
    assert cli.main([*run, "--output", str(output), "--plot", str(plot)]) == 0
    found = json.loads(output.read_bytes())
    assert [(case["acceptance"], case["figures"]["accept_length"]) for case in found["cases"]] == [
        (0.0, 1.0),
        (1.0, 4.0),
    ]
    assert found["proposer"] == "eagle3"
    shown = capsys.readouterr().out
    assert "tokens as without drafts: all 4 replies" in shown, shown
    assert plot.stat().st_size > 20_000
