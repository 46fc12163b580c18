"""``hiserve doctor``: one line a finding, with the remedy, and an exit status that can be scripted."""

from __future__ import annotations

import resource
import socket
import tomllib
from pathlib import Path

import pytest

from hiserve.commands import doctor
from hiserve.commands.doctor import Package
from hiserve.config.options import make_options
from hiserve.core.machine import GIB, Machine

MACHINE = Machine(cores=2, memory_bytes=8 * GIB, cuda_memory_bytes=())
WITH_CUDA = Machine(cores=2, memory_bytes=8 * GIB, cuda_memory_bytes=(80 * GIB,))
TORCH = Package(version="2.13.0+cpu", import_s=1.0)
ON_CUDA = Package(version="2.11.0", import_s=1.0, cuda_build="13.0", devices=["NVIDIA H200"], capability=[9, 0])
MISSING = Package(error="ModuleNotFoundError: No module named 'x'", is_missing=True)


def packages(torch: Package, other: Package, machine: Machine) -> dict[str, tuple[str, str]]:
    found = doctor._packages(lambda name: torch if name == "torch" else other, machine)
    return {finding.name: (finding.level, finding.text) for finding in found}


def test_this_machine_can_run_hiserve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "import_package", lambda name: TORCH if name == "torch" else MISSING)
    assert doctor.run(make_options(port=0)) == 0
    names = [line[5:].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [
        *("hiserve", "python", "torch", "cuda", "triton", "flashinfer"),
        *("memory", "shared", "memlock", "port", "model"),
    ]


def test_a_port_in_use_and_an_unknown_model_are_failures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "import_package", lambda name: TORCH)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert doctor.run(make_options(port=port, model="no/such/folder/at/all")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("fail")] == ["port", "model"]
    assert f"127.0.0.1:{port} cannot be used" in lines[-2]
    assert "--port" in lines[-2]


@pytest.mark.parametrize(
    ("torch", "machine", "name", "level", "words"),
    [
        (Package(error="ImportError: libfoo.so"), MACHINE, "torch", "fail", "libfoo.so. Try: pip install 'torch>=2.11"),
        (Package(version="2.9.1"), MACHINE, "torch", "note", "not a tested version"),
        (Package(version="2.14.0"), MACHINE, "torch", "note", "not a tested version"),
        (TORCH, MACHINE, "torch", "ok", "2.13.0+cpu"),
        (TORCH, MACHINE, "cuda", "ok", "models run on the CPU"),
        (TORCH, WITH_CUDA, "cuda", "note", "torch is a CPU build"),
        (Package(version="2.11.0", cuda_build="13.0"), WITH_CUDA, "cuda", "note", "driver"),
        (ON_CUDA, WITH_CUDA, "cuda", "ok", "NVIDIA H200 (compute 9.0, 80 GiB)"),
        (TORCH, MACHINE, "triton", "ok", "only CUDA devices need it"),
        (ON_CUDA, WITH_CUDA, "flashinfer", "note", "pip install 'hiserve[gpu]'"),
    ],
)
def test_packages_are_judged_with_the_machine(
    torch: Package, machine: Machine, name: str, level: str, words: str
) -> None:
    found = packages(torch, MISSING, machine)[name]
    assert found[0] == level
    assert words in found[1]


def test_a_package_that_is_there_but_broken_is_not_called_missing() -> None:
    broken = Package(error="ImportError: undefined symbol")
    assert packages(TORCH, broken, MACHINE)["triton"] == (
        "note",
        "is installed but does not import: ImportError: undefined symbol",
    )


def test_the_range_of_torch_is_the_one_that_is_installed() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    least, below = (".".join(map(str, end)) for end in doctor.TORCH_RANGE)
    assert f"torch>={least},<{below}" in project["dependencies"]
    assert project["requires-python"] == ">=" + ".".join(map(str, doctor.LEAST_PYTHON))


def test_imports_happen_in_another_process() -> None:
    found = doctor.import_package("msgspec")
    assert found.error is None
    assert found.version
    assert doctor.import_package("no_such_package_here").is_missing


def test_little_memory_little_shared_memory_and_locked_memory_are_noted(tmp_path: Path) -> None:
    little = Machine(cores=1, memory_bytes=GIB, cuda_memory_bytes=())
    assert doctor._memory(little).level == "note"
    assert doctor._memory(MACHINE).level == "ok"
    assert doctor._shared_memory(tmp_path / "none").level == "note"
    assert doctor._locked_memory(8 << 20, has_cuda=True).level == "note"
    assert doctor._locked_memory(8 << 20, has_cuda=False).level == "ok"
    assert doctor._locked_memory(resource.RLIM_INFINITY, has_cuda=True).level == "ok"
