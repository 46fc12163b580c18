"""``hiserve serve`` in processes of its own, and the load of ``hiserve bench serve`` on it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiserve.config.flags import flag_of
from hiserve.models.model_config import NANO, find_model

HISERVE = (sys.executable, "-m", "hiserve.cli")


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str  # its address
    process: subprocess.Popen[str]  # of its API
    ready_s: float  # seconds from the start of the process until it was ready

    def rss_mb(self) -> float:
        """Returns the memory of the API process, in 10^6 bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024 / 1e6


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    """Starts a server on a free port with these flags, and ends it."""
    begin = time.perf_counter()
    command = (*HISERVE, "serve", "--port", "0", "--log-level", "warning", *flags)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = next((found.group() for line in process.stdout if (found := re.search(r"http://\S+", line))), None)
        assert url is not None, f"{' '.join(command)} ended with {process.wait()}"
        yield Server(url, process, time.perf_counter() - begin)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextmanager
def serving_shape(settings: dict[str, Any], vocab_size: int) -> Iterator[Server]:
    """Starts a server with an engine's settings; a built-in shape gets a tokenizer of its vocabulary."""
    flags = [word for name, value in settings.items() if name != "model" for word in (flag_of(name), str(value))]
    with tempfile.TemporaryDirectory() as folder:
        if "shape" in settings:
            write_tokenizer(Path(folder), vocab_size)
        with serving(folder if "shape" in settings else settings["model"], *flags) as server:
            yield server


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes hiserve-nano's tokenizer with words added, one token each, until there are ``vocab_size``."""
    nano = find_model(NANO)
    shutil.copy(nano / "tokenizer_config.json", folder)
    tokenizer = json.loads((nano / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"\u0120w{number}": number for number in range(len(vocab), vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((nano / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))


def bench_serve(url: str, **options: float) -> dict[str, Any]:
    """Returns the summary of one run of ``hiserve bench serve`` with these options, none of whose requests failed."""
    summary: dict[str, Any] = bench("serve", url, **options)["summary"]
    return summary


def bench(kind: str, url: str, **options: float) -> dict[str, Any]:
    """Returns the file that a kind of ``hiserve bench`` writes with these options, none of whose requests failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = (*HISERVE, "bench", kind, "--url", url, *bench_flags(options), "--output", str(out))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
    assert not found["summary"]["errors"], found["summary"]["errors"]
    return found


def bench_flags(options: dict[str, Any]) -> list[str]:
    """Returns options as ``hiserve bench`` takes them; one that is True has no value."""
    return [
        word for name, value in options.items() for word in (flag_of(name), str(value))[: 1 if value is True else 2]
    ]


def cpu_s(pid: int) -> float:
    """Returns the CPU time of a process so far, in seconds, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_cpu_s(pid: int) -> float:
    """Returns the CPU time of a process's running threads so far, in seconds, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def child_pids(pid: int) -> list[int]:
    """Returns the ids of a process's running children, theirs included."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    own = [int(each) for line in lists for each in line.split()]
    return own + [each for child in own for each in child_pids(child)]
