"""The benchmarks of the GPU run from end to end on the CPU, at the size of a test, and measure what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.driving import Bench
from benchmarks.gpu.sizes import BARS, FULL, TINY
from benchmarks.gpu.spec import measure_spec

ROOT = Path(__file__).parents[2]


def run(module: str, out: Path) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", module, "--tiny", str(out), "test"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.long
def test_every_part_of_the_gpu_benchmark_measures_what_it_says(tmp_path: Path) -> None:
    result, told = run("benchmarks.gpu", tmp_path / "gpu.json")
    assert result["ceilings"]["copy_bytes_per_s"] > 0
    parts = result["parts"]
    figures = [figure for part in parts.values() for figure in part["figures"]]
    assert {figure["bar"] for figure in figures} >= set(BARS.values()) | {case.bar for case in TINY.decode}
    assert all(f"{figure['name']:<46}" in told and figure["value"] >= 0 for figure in figures)
    for case in TINY.decode:
        found = parts["decode" if case.shape == "llama-8b" else "small-decode"]["samples"]
        pace = found[f"{case.shape} decode, {case.rows} x {case.context}"]
        assert len(pace["step_s"]) == TINY.steps
        assert case.context - 32 < pace["mean_context"] < case.context + 64
        assert pace["own_share"] < 0.1
    traffic = parts["traffic"]["samples"]
    assert traffic["host"]["loaded_pages"] > 0 and traffic["device"]["loaded_pages"] == 0
    assert traffic["host"]["rows_still_decoding_at_the_end"] == TINY.traffic_rows
    assert sum(group["host_tokens"] for group in parts["conversations"]["samples"]["groups"]) > 0
    chats, case = parts["chats"]["samples"]["turns"], TINY.chats
    lengths = [case.shared + (turn + 1) * case.turn_input + turn * case.turn_output for turn in range(case.turns)]
    assert [turn["input_tokens"] for turn in chats] == [case.chats * length for length in lengths]


def test_figures_of_one_row_are_of_many_held_out_prompts_and_others_of_several_runs() -> None:
    assert FULL.spec.singles >= 32
    assert FULL.spec.repeats >= 3


@pytest.mark.wide
def test_speculation_is_measured_on_a_widened_model_with_real_heads() -> None:
    torch.set_num_threads(1)
    part = measure_spec(Bench(TINY, {"copy_bytes_per_s": 1e10, "matmul_flop_per_s": 2e10}, {}))
    bars = [figure.bar for figure in part.figures]
    assert bars.count(BARS["speculation"]) == 2  # each head, alone, with the one number of drafts
    assert bars.count(BARS["adaptive"]) == 3  # each batch of each head
    same = [figure for figure in part.figures if figure.bar == BARS["same tokens"]]
    assert [figure.ratio for figure in same] == [1.0, 1.0]
    for name in ("eagle3, batch 1", "eagle3, batch 2", "mtp, batch 1"):
        modes = part.samples[name]
        for mode, steps in (("off", 0), ("0", 0), ("2", 2)):
            drafts, runs = modes[mode]["drafts"], modes[mode]["runs"]
            assert drafts["proposed"] == steps * drafts["verify_steps"], f"{name} did not hold {mode} drafts"
            num_runs = TINY.spec.singles * TINY.spec.repeats_of_one if name[-1] == "1" else TINY.spec.repeats
            assert [run["num_decoded"] for run in runs] == [(TINY.spec.output - 1) * int(name[-1])] * num_runs
            assert modes[mode]["prompts"] == (TINY.spec.singles if name[-1] == "1" else int(name[-1]))
            assert len(modes[mode]["speedup_quartiles"]) == 3
        assert modes["2"]["drafts"]["accept_length"] > 1.5  # trained heads, on what they never saw
        assert modes["2"]["least_cycle_cost"] > 1


@pytest.mark.long
def test_every_case_of_the_kernel_benchmark_runs(tmp_path: Path) -> None:
    result, _ = run("benchmarks.kernels.attention", tmp_path / "out.json")
    assert len(result["figures"]) >= 8
    assert all(figure["value"] > 0 for figure in result["figures"])


@pytest.mark.long
def test_defaults_are_measured_beside_an_engine_in_process(tmp_path: Path) -> None:
    result, told = run("benchmarks.defaults", tmp_path / "defaults.json")
    (found,) = result["shapes"].values()
    assert set(found["samples"]) == {"defaults", "in process", "no host tier"}
    assert found["ratios"]["of in process"].keys() == {"first row", "1 row", "128 rows", "64 chats of 6 turns"}
    assert "of in process" in told


@pytest.mark.long
def test_speculation_under_arrivals_is_measured_with_and_without_prompts_in_the_steps(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.spec_arrivals", "--tiny", "--requests", "4", str(out), "test"]
    subprocess.run(command, cwd=ROOT, check=True)
    modes = json.loads(out.read_text())["modes"]
    assert modes.keys() == {"off", "auto", "3"}
    for rate, each in modes["3"].items():
        assert each["ttft_s"]["p50"] <= each["ttft_s"]["p99"]
        assert rate == "at once" or each["drafts"]["eager, with prompt"] >= 1  # the CPU has no graphs
    assert not any(each.get("drafts") for each in modes["off"].values())


@pytest.mark.long
def test_grammars_are_timed_beside_free_rows(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    subprocess.run([sys.executable, "-m", "benchmarks.grammars", "--tiny", str(out), "test"], cwd=ROOT, check=True)
    cases = {name: each for name, each in json.loads(out.read_text()).items() if "rows" in name}
    assert cases.keys() == {f"overlap 1, {drafts}, {rows} rows" for drafts in ("off", "3 drafts") for rows in (1, 3)}
    for name, each in cases.items():
        ways = each["medians"]
        assert ways["free"]["masks_a_step"] == 0 < ways["constrained"]["mask_seconds_a_step"]
        if "3 rows" in name:
            assert 0 < ways["beside"]["masks_a_step"] < ways["constrained"]["masks_a_step"]
