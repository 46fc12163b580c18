"""The benchmark of the gated delta rule measures what it says, at the size of a test."""

from __future__ import annotations

import torch

from benchmarks.kernels.delta import SHAPE, TINY_SHAPE, Layers, measure_delta, step_bytes


def test_decode_verify_and_prompts_are_measured() -> None:
    torch.set_num_threads(1)
    part = measure_delta("cpu", {"copy_bytes_per_s": 1e10, "matmul_flop_per_s": 1e10})
    assert [figure.name for figure in part.figures] == [
        "delta decode, 1",
        "delta verify, 1 x 4",
        "delta decode, 2",
        "delta verify, 2 x 4",
        "delta prompts, 2 x 24, one by one",
        "delta prompts, 2 x 24, all in each step",
    ]
    assert all(figure.value > 0 for figure in part.figures)


def test_the_limit_counts_each_state_twice_and_inputs_once() -> None:
    assert step_bytes(SHAPE, 32, 32) == 32 * (2 * 32 * 128 * 128 * 4 + 2 * (8192 + 64 + 4096))


def test_states_stay_finite_however_often_a_step_is_repeated() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers = Layers.of(TINY_SHAPE, torch.device("cpu"), 2)
    layers.seconds([4, 4], 3, 2)
    assert all(pools.state[1:].isfinite().all() for pools in layers.pools)
