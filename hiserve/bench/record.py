"""The result file: command, machine, every figure, and the raw samples."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hiserve.bench.summary import ttft_s
from hiserve.bench.workload import Run, Sample
from hiserve.errors import ConfigError

PACKAGES = ("torch", "numpy", "msgspec", "httptools", "uvloop", "triton")


def about(command: str, tool: str, num_gpus: int | None = None, packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Returns date, tool, hardware and versions of this machine, and the command; ``num_gpus`` were used, None names all."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tool": tool,
        "hardware": hardware(num_gpus),
        "versions": versions(packages),
        "command": command,
    }


def hardware(num_used: int | None = None) -> str:
    """Returns the processor's name, how many of its cores are here, and the GPUs that were used; None names all."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    tool = shutil.which("nvidia-smi")
    asked = [tool, "--query-gpu=name", "--format=csv,noheader"] if tool else ["true"]
    gpus = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    if num_used is not None:
        gpus = used_of(gpus, num_used)
    return ", ".join([names[0] if names else platform.machine(), f"{len(names)} cores", *gpus])


def used_of(gpus: list[str], num_used: int) -> list[str]:
    """Returns the names of the GPUs of a machine, with a note if only the first ``num_used`` were used.

    Raises AssertionError.
    """
    assert num_used <= len(gpus), f"{num_used} GPUs were used, {gpus} are here"
    if num_used == len(gpus):
        return gpus
    kinds = " and ".join(dict.fromkeys(gpus[:num_used] or gpus))
    return [f"{num_used or 'none'} of {len(gpus)} GPUs: {kinds}"]


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def raw(run: Run) -> list[dict[str, Any]]:
    """Returns every sample with times in milliseconds: of the run for requests, of the request for chunks."""
    return [_raw(sample, run.begin_s) for sample in run.samples]


def _raw(sample: Sample, origin_s: float) -> dict[str, Any]:
    first_s = ttft_s(sample)
    return {
        "session": sample.session,
        "turn": sample.turn,
        "status": sample.status,
        "error": sample.error,
        "detail": sample.detail,
        "finish": sample.finish,
        "prompt_tokens": sample.num_prompt,
        "cached_tokens": sample.num_cached,
        "cached_by_tier": sample.cached_by_tier,
        "miss": sample.miss,
        "output_tokens": sample.num_output,
        "due_ms": _ms(sample.due_s - origin_s),
        "begin_ms": _ms(sample.begin_s - origin_s),
        "ttft_ms": None if first_s is None else _ms(first_s),
        "e2el_ms": _ms(sample.end_s - sample.begin_s),
        "chunk_ms": [_ms(time_s - sample.begin_s) for time_s in sample.chunk_s],
        "chunk_tokens": sample.chunk_tokens,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def prepare(path: Path) -> None:
    """Makes sure that a result file can be written before the time for it is spent; makes its folder.

    Raises ConfigError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"cannot write --output {path}: {error}.", param="output") from None


def discard_empty(path: Path) -> None:
    """Removes a result file to which nothing was written."""
    if path.is_file() and path.stat().st_size == 0:
        path.unlink()


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a result file; infinite numbers become null."""
    path.write_bytes(msgspec.json.encode(content, enc_hook=str) + b"\n")
