"""A result says which of the GPUs of its machine it was measured on."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from benchmarks.record import about
from hiserve.bench import record

H200, H100 = "NVIDIA H200", "NVIDIA H100"


@pytest.mark.parametrize(
    ("gpus", "num_used", "said"),
    [
        ([], 0, ""),
        ([H200], 1, H200),
        ([H200], 0, f"none of 1 GPUs: {H200}"),
        ([H200, H200], 1, f"1 of 2 GPUs: {H200}"),
        ([H200, H200], 2, f"{H200}, {H200}"),
        ([H200, H200, H100, H100], 3, f"3 of 4 GPUs: {H200} and {H100}"),
        ([H200, H200], None, f"{H200}, {H200}"),
    ],
)
def test_where_several_gpus_are_seen_it_is_said_how_many_were_used(
    gpus: list[str], num_used: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    listed = SimpleNamespace(stdout="".join(f"{name}\n" for name in gpus))
    monkeypatch.setattr(subprocess, "run", lambda *command, **settings: listed)
    hardware = record.hardware(num_used)
    assert hardware.partition(" cores")[2].removeprefix(", ") == said
    if num_used is not None:
        assert about("c", at_commit="abc", num_gpus=num_used)["hardware"] == hardware


def test_more_than_are_there_cannot_have_been_used() -> None:
    with pytest.raises(AssertionError, match="2 GPUs were used"):
        record.used_of([H200], 2)
