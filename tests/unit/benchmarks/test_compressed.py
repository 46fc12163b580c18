"""The benchmark of compressed attention measures what it says, at the size of a test."""

from __future__ import annotations

import torch

from benchmarks.kernels.compressed import measure_compressed


def test_each_kernel_has_a_time_and_a_limit() -> None:
    torch.set_num_threads(1)
    part = measure_compressed("cpu", {"copy_bytes_per_s": 1e10, "matmul_flop_per_s": 1e10})
    kinds = {figure.name.split(",")[0] for figure in part.figures}
    assert kinds == {"attention", "index", "compressor of 4", "compressor of 128", "mix of streams", "merge of streams"}
    assert all(figure.value > 0 and figure.ratio is not None and figure.ratio > 0 for figure in part.figures)
    assert set(part.samples) == {figure.name for figure in part.figures}
