"""Reading weights, cold against ``dd``, and from the page cache against the link to the device.

Usage: ``python -m benchmarks.weights OUT.json COMMIT [--gib 2] [--device cpu|cuda] [--folder /tmp] [--rounds 5]``. A
checkpoint of the Llama-8B shape is written with as many layers as the size asks for. In turns, in one run: ``dd`` over the
files; a plain read into fresh memory; and ``load_parameters``.
Cold means that the pages of the files are dropped (posix_fadvise DONTNEED) and that the kernel says how much came from the
disk. Bars: at least 0.8 of ``dd`` cold; from the cache at least 0.8 of a copy from pinned memory on CUDA, and on a CPU of a
plain read into fresh memory, for ``dd`` fills one buffer again and again.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.gpu.ceilings import link_rates
from benchmarks.record import Record, judge, medians
from benchmarks.widen import write_shards
from hiserve.models.builtin_shapes import shape_config
from hiserve.models.model_config import ModelConfig
from hiserve.models.names import parameter_table
from hiserve.models.weights import load_parameters

SEED = 20261122
BAR = 0.8
SHARD_BYTES = 1 << 30
LINK_BYTES = 1 << 30


def make_checkpoint(folder: Path, gib: float) -> ModelConfig:
    """Writes a checkpoint of about a size; returns its shape, of layers of Llama-8B and a small vocabulary."""
    shape = msgspec.structs.replace(shape_config("llama-8b"), vocab_size=4096)
    layer = (
        msgspec.structs.replace(shape, num_layers=2).num_params
        - msgspec.structs.replace(shape, num_layers=1).num_params
    )
    shape = msgspec.structs.replace(shape, num_layers=max(1, round(gib * 2**30 / 2 / layer)))
    drawn = torch.randn(64 << 20, generator=torch.Generator().manual_seed(SEED)).to(torch.bfloat16)
    pieces = chain.from_iterable(parameter_table(shape).values())
    tensors = ((each.source, drawn[: math.prod(each.shape)].view(each.shape).clone()) for each in pieces)
    write_shards(tensors, folder, SHARD_BYTES)
    for path in folder.glob("*.safetensors"):  # pages that are not on the disk cannot be dropped
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return shape


def drop(files: list[Path]) -> None:
    """Drops the files from the page cache, as far as the kernel does it."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes() -> int:
    """Returns what this process and the children it waited for have read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def dd(files: list[Path]) -> None:
    for path in files:
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M"], check=True, capture_output=True)


def into_fresh_memory(files: list[Path]) -> None:
    """Reads the files, 16 MiB at a time, into memory that was not there: the least that a CPU must do for weights it keeps."""
    for path in files:
        memory = memoryview(torch.empty(path.stat().st_size, dtype=torch.uint8).numpy())
        with path.open("rb", buffering=0) as file:
            begin = 0
            while count := file.readinto(memory[begin : begin + (16 << 20)]):
                begin += count


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(folder: Path, shape: ModelConfig, device: torch.device, rounds: int) -> dict[str, Any]:
    """Returns the samples of each way: GiB/s cold and cached, the share of cold reads that came from the disk, CPU time."""
    files = sorted(folder.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in files)
    ways: dict[str, Callable[[], object]] = {
        "dd": lambda: dd(files),
        "fresh": lambda: into_fresh_memory(files),
        "hiserve": lambda: (load_parameters(folder, shape, torch.bfloat16, device, "auto"), settle(device)),
    }
    found: dict[str, Any] = {
        "gib": round(total / 2**30, 3),
        "files": len(files),
        "cold": {},
        "cached": {},
        "from disk": {},
        "cpu s per gib": {"cold": {}, "cached": {}},
    }
    for state in ("cold", "cached"):
        dd(files)
        for number in range(rounds):
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if state == "cold":
                    drop(files)
                before, cpu_before, begin = disk_bytes(), sum(os.times()[:4]), time.perf_counter()
                ways[name]()
                taken_s = time.perf_counter() - begin
                cpu_s = (sum(os.times()[:4]) - cpu_before) / total * 2**30
                found["cpu s per gib"][state].setdefault(name, []).append(round(cpu_s, 3))
                found[state].setdefault(name, []).append(round(total / 2**30 / taken_s, 3))
                if state == "cold":
                    found["from disk"].setdefault(name, []).append(round((disk_bytes() - before) / total, 3))
                print(f"{state} {name}: {total / 2**30 / taken_s:.2f} GiB/s", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="hiserve-weights-") as name:
        shape = make_checkpoint(Path(name), options.gib)
        found = measure(Path(name), shape, device, options.rounds)
    link = link_rates(LINK_BYTES)["pinned_to_device_bytes_per_s"] / 2**30 if device.type == "cuda" else None
    rates = {state: medians(found[state]) for state in ("cold", "cached")}
    limit = rates["cached"]["fresh"] if link is None else link
    ratios = {
        "cold against dd": rates["cold"]["hiserve"] / rates["cold"]["dd"],
        "cached against the limit": rates["cached"]["hiserve"] / limit,
    }
    is_met = not judge(ratios, least=dict.fromkeys(ratios, BAR))
    command = f"python -m benchmarks.weights OUT.json COMMIT --gib {options.gib:g} --device {options.device}"
    num_gpus = int(options.device == "cuda")
    result = Record(options.out, command, "hiserve/models", at_commit=options.commit, num_gpus=num_gpus)
    result |= {
        "seed": SEED,
        "link_gib_s": link,
        "samples_gib_s": found,
        "median_gib_s": rates,
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "bar": BAR,
        "is_met": is_met,
        "median_cpu_s_per_gib": {state: medians(each) for state, each in found["cpu s per gib"].items()},
        "load_average": os.getloadavg()[0],
    }
    result.save()
    return int(not is_met)


if __name__ == "__main__":
    raise SystemExit(main())
