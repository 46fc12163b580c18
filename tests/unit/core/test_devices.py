"""Replica r sees the r-th device alone, whatever its parent sees."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hiserve.config.settings import Settings
from hiserve.core.devices import VISIBLE_DEVICES, environment_of
from tests.helpers.settings import settings_of


def resolved(devices: str | None) -> Settings:
    settings = settings_of()
    return replace(settings, parallel=replace(settings.parallel, devices=devices))


@pytest.mark.parametrize(
    ("seen", "devices", "given"),
    [
        (None, "0,1", ["0", "1"]),
        (None, "3,1", ["3", "1"]),
        ("6,2", "0,1", ["6", "2"]),
        ("GPU-aa, GPU-bb,GPU-cc", "2,1", ["GPU-cc", "GPU-bb"]),
    ],
)
def test_each_replica_sees_its_device_alone(seen: str | None, devices: str, given: list[str]) -> None:
    environ = {"HOME": "/root"} | ({VISIBLE_DEVICES: seen} if seen else {})
    found = [environment_of(resolved(devices), replica, environ) for replica in range(2)]
    assert found == [{"HOME": "/root", VISIBLE_DEVICES: name} for name in given]


def test_groups_of_replicas_share_no_device() -> None:
    settings = resolved("4,1,0,7")
    settings = replace(settings, parallel=replace(settings.parallel, tp=2))
    found = [environment_of(settings, replica, {}) for replica in range(2)]
    assert found == [{VISIBLE_DEVICES: "4,1"}, {VISIBLE_DEVICES: "0,7"}]


def test_on_cpu_a_worker_has_the_environment_of_its_parent() -> None:
    assert environment_of(resolved(None), 0, {VISIBLE_DEVICES: "1"}) is None
