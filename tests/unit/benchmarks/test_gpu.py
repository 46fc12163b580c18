"""What the benchmark of the GPU compares with is right, whatever the machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme
from benchmarks.gpu.driving import Bench
from benchmarks.gpu.figures import Figure, Limits, replays, share_of_eligible, share_replayed, table
from benchmarks.gpu.profiling import NUM_STEPS, PLANNER_CALLS, on_device
from benchmarks.gpu.sizes import FULL, PEER_CEILINGS, TINY
from benchmarks.gpu.workloads import against_peer
from benchmarks.served import write_tokenizer
from hiserve.engine.planner import Planner
from hiserve.ipc.messages import GateCounts
from hiserve.models.builtin_shapes import shape_config
from hiserve.text.tokens.tokenizer import Tokenizer


def test_a_decode_step_reads_all_weights_but_the_embedding_and_the_keys_and_values_of_its_rows() -> None:
    limits = Limits.of(shape_config("llama-8b"), "bfloat16")
    assert limits.weight_bytes == pytest.approx(15.01e9, rel=1e-3)
    assert limits.kv_bytes == 128 * 1024
    assert limits.decode_bytes(32 * 1024) - limits.weight_bytes == 4 << 30


def test_an_embedding_that_is_the_output_head_too_is_read_by_every_step() -> None:
    limits = Limits.of(shape_config("qwen3-0.6b"), "bfloat16")
    assert limits.weight_bytes == pytest.approx(1.19e9, rel=2e-3)
    assert limits.linear_params == pytest.approx(0.440e9, rel=2e-3)


def test_operations_of_a_prompt_are_its_products_and_half_a_square_of_attention() -> None:
    limits = Limits.of(shape_config("llama-8b"), "bfloat16")
    n, layers, heads, head_dim = 8192, 32, 32, 128
    expected = 2 * 6.979e9 * n + 2 * layers * heads * head_dim * n**2
    assert limits.prefill_flop(n) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("ratio", "verdict"), [(0.75, "ok"), (0.749, "MISSED"), (None, "MISSED")])
def test_a_bar_is_met_by_a_ratio_that_reaches_it(ratio: float | None, verdict: str) -> None:
    figure = Figure("decode", 4.7, "ms", ratio, 0.75, "limit")
    assert figure.verdict == verdict
    assert table([asdict(figure)]).splitlines()[-1].endswith(verdict)


def test_a_peer_is_scaled_by_what_both_machines_could_do() -> None:
    faster = {"copy_bytes_per_s": 2 * PEER_CEILINGS["copy_bytes_per_s"]}
    figure = against_peer(Bench(TINY, faster, {}), "rows", 300.0, 100.0, "copy_bytes_per_s")
    assert figure.ratio == pytest.approx(1.5)


def test_time_that_two_activities_of_the_device_share_is_busy_once() -> None:
    events: list[dict[str, Any]] = [
        {"name": "gemm", "ts": 0.0, "dur": 40.0},
        {"name": "fill", "ts": 5.0, "dur": 5.0},
        {"name": "copy", "ts": 20.0, "dur": 40.0},
        {"name": "norm", "ts": 65.0, "dur": 10.0},
        {"name": "gemm", "ts": 175.0, "dur": 25.0},
    ]
    found = on_device(list(reversed(events)))
    assert found["span_us"] == pytest.approx(200 / NUM_STEPS)
    assert found["busy_share"] == pytest.approx((60 + 10 + 25) / 200)
    assert found["gaps_below_20_us"] == pytest.approx(5 / NUM_STEPS)
    assert found["longest_gaps"][0] == (100.0, "gemm")
    own = {each["name"]: each["own_us_a_step"] for each in found["top"]}
    assert own == pytest.approx({"gemm": 65 / NUM_STEPS, "copy": 20 / NUM_STEPS, "norm": 10 / NUM_STEPS, "fill": 0.0})
    assert [each["us_a_call"] for each in found["top"]] == [32.5, 40.0, 10.0, 5.0]
    assert on_device([]) == {}


def test_the_calls_that_a_profile_times_are_those_of_the_planner() -> None:
    assert [name for name in PLANNER_CALLS if not hasattr(Planner, name)] == []


def test_only_what_a_graph_was_made_for_counts_against_the_gate() -> None:
    gate = {
        "replay": {"decode": 90, "piecewise": 6},
        "eager": {"tokens": 40, "strict_load": 1, "capture_failed": 1, "step_failed": 1},
        "defer": {"load_failed": 1},
    }
    assert share_of_eligible(gate) == pytest.approx(0.96)
    assert share_replayed(gate) == pytest.approx(96 / 140)
    assert share_of_eligible({"eager": {"graphs_off": 5}}) is None


def test_a_run_with_larger_steps_beside_it_cannot_make_up_for_replays_that_were_lost() -> None:
    """What was compared before: 0.952 of steps with a tier, 0.829 without, as a graph is made for fewer of those."""
    whole: GateCounts = {"replay": {"decode": 225, "mixed": 26, "piecewise": 5}, "eager": {"tokens": 13}}
    figure = replays(whole, 0.98)
    assert (figure.value, figure.ratio, figure.is_met) == (pytest.approx(0.952, abs=1e-3), 1.0, True)
    for reason in ("strict_load", "capture_failed", "step_failed"):
        lost: GateCounts = {"replay": {"decode": 215, "mixed": 26, "piecewise": 5}, "eager": {"tokens": 13, reason: 10}}
        assert replays(lost, 0.98).ratio == pytest.approx(246 / 256)
        assert not replays(lost, 0.98).is_met
    assert not replays({"eager": {"graphs_off": 269}}, 0.98).is_met, "nothing was replayed at all"


def test_the_readme_counts_the_gates_own_reasons_whatever_ratio_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = asdict(
        Figure("replayed steps under host traffic", 0.9, "of steps", 1.15, 0.98, "of steps without a tier")
    )
    gate = {"replay": {"decode": 90}, "eager": {"tokens": 5, "strict_load": 5}}
    part = {"figures": [written], "samples": {"host": {"gate": gate}}}
    about = {"hardware": "H", "command": "c", "date": "today"}
    (tmp_path / "gpu.json").write_text(json.dumps(about | {"parts": {"traffic": part}}))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    ((_, figure, _),) = readme.gpu()
    assert figure.endswith("0.9 of steps, 0.95 (≥ 0.98: missed)")


def test_every_token_of_a_shape_is_a_piece_of_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 5000)
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.vocab) == 5000
    assert tokenizer.decode([4096, 4999]) == " w4096 w4999"
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 5000


def test_short_rows_of_the_largest_batch_come_first_so_that_others_find_them_in_the_cache() -> None:
    for shape in FULL.shapes:
        cases = [case for case in FULL.decode if case.shape == shape]
        assert cases[0].rows == max(case.rows for case in cases)
        assert cases[0].context == min(case.context for case in cases)
        held = sum(-(-max(case.context for case in cases if case.rows > row) // 16) + 5 for row in range(cases[0].rows))
        assert held < FULL.shapes[shape]["kv_pages"], f"{shape}: {held} pages of text"


def test_the_readme_tells_the_later_run_of_a_part_and_flags_what_missed_its_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(name: str, ratio: float) -> None:
        missing, reached = (
            Figure("llama-8b decode, 1 x 1024", 4.2, "ms", ratio, 0.75),
            Figure("8", 5.0, "ms", 0.8, 0.75),
        )
        parts = {"decode": {"figures": [asdict(missing), asdict(reached)]}, "traffic": {"figures": []}}
        about = {"hardware": "H", "command": name, "date": "today"}
        (tmp_path / f"{name}.json").write_text(json.dumps(about | {"parts": parts}))

    write("gpu", 0.9)
    write("gpu_later", 0.5)
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    ((what, figure, run),) = readme.gpu()
    assert "Llama-8B" in what and run["command"] == "gpu_later"
    assert figure == "1 x 1024: 4.2 ms, 0.50 (≥ 0.75: missed); 8: 5 ms, 0.80 (≥ 0.75)"
