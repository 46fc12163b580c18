"""What the benchmark of attention says of a choice between backends: a schedule of the host counts where nothing hides it."""

from __future__ import annotations

import pytest

from benchmarks.kernels.attention import FULL, MAX_TOKENS, choice, decode


@pytest.mark.parametrize(
    ("schedule_s", "hidden", "exposed"),
    [(0.1e-3, "flashinfer", "flashinfer"), (0.5e-3, "flashinfer", "triton"), (2.5e-3, "triton", "triton")],
)
def test_the_fastest_backend_depends_on_whether_its_schedule_is_hidden(
    schedule_s: float, hidden: str, exposed: str
) -> None:
    """32 layers of 60 and 50 us: 1.92 and 1.6 ms of the device."""
    found = {
        "seconds": {"triton": 60e-6, "flashinfer": 50e-6},
        "schedule_s": {"triton": 0.0, "flashinfer": schedule_s},
    }
    made = choice(decode(8, 2048, 4), found, 32)
    assert (made["rows"], made["width"], made["context"]) == (8, 4, 2048)
    assert (made["fastest_if_hidden"], made["fastest_if_exposed"]) == (hidden, exposed)


def test_a_shape_that_failed_everywhere_names_nobody() -> None:
    made = choice(decode(1, 64), {"seconds": {}, "schedule_s": {}}, 32)
    assert made["fastest_if_hidden"] is made["fastest_if_exposed"] is None


def test_shapes_of_decode_and_verify_are_measured_on_a_grid() -> None:
    even = {(len(case.rows), case.rows[0][1], sum(case.rows[0])) for case in FULL if case.is_even}
    assert {rows for rows, width, _ in even if width == 1} == {1, 4, 8, 16, 32, 64, 128}
    assert {width for _, width, _ in even} == {1, 2, 4, 8}
    assert {context for _, _, context in even} == {1024, 2048, 8192}
    assert all(rows * context <= MAX_TOKENS for rows, _, context in even)
