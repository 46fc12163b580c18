"""What a worker measured reaches its successor unchanged."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from hiserve.core.startup_measurements import StartupMeasurements
from hiserve.engine.draft_times import pack, unpack
from hiserve.spec.adaptive import StepCosts

COSTS = StepCosts(
    rows=np.array([1, 8]),
    tiers=np.array([0, 1, 3]),
    verify=np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]),
    follow=np.array([[0.0, 0.1, 0.1], [0.0, 0.2, 0.2]]),
    draft=np.array([0.01, 0.02]),
    verify_token=np.float64(1e-9),
    draft_token=2e-9,
    times_own_drafts=True,
)


def test_costs_are_the_same_on_the_other_side() -> None:
    measurements = StartupMeasurements(free_bytes=7, draft_times=pack(COSTS))
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(measurements), type=StartupMeasurements)
    assert got == measurements
    assert got.draft_times is not None
    back = dataclasses.asdict(unpack(got.draft_times))
    for name, value in dataclasses.asdict(COSTS).items():
        np.testing.assert_array_equal(back[name], value)
        assert isinstance(back[name], np.ndarray) == isinstance(value, np.ndarray)
