"""What the way over HTTP costs on a GPU: requests at so many streams, against the same ones in one process."""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.driving import Bench, Part, run
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.sizes import BARS, Sizes
from hiserve.config import flag_of

HISERVE = (sys.executable, "-m", "hiserve.cli")


def measure_http(bench: Bench, shape: str) -> Part:
    """Runs the workload in this process, then over HTTP, on engines of the same settings."""
    sizes, settings = bench.sizes, bench.settings(shape)
    drive = bench.engine(shape)
    batches = []
    for _ in range(sizes.request_runs + 1):  # the first is not counted
        drive.engine.flush()
        prompts = [bench.prompt(drive, sizes.request_input) for _ in range(sizes.requests)]
        batches.append(run(drive, prompts, sizes.request_output, sizes.streams))
    offline = statistics.median(batch.output_tokens / batch.seconds for batch in batches[1:])
    bench.close()
    with serving(settings) as (url, ready_s):
        summaries = [over_http(url, sizes, seed) for seed in range(sizes.request_runs + 1)]
    http = statistics.median(summary["output_tokens_per_s"] for summary in summaries[1:])
    name = f"{shape} over HTTP, {sizes.streams} streams"
    figure = Figure(name, http, "tokens/s", http / offline, BARS["http"], "offline in one process")
    runs = {"offline": [batch.told() for batch in batches], "http": summaries, "ready_s": ready_s}
    return Part([figure], {"offline_tokens_per_s": offline} | runs)


@contextmanager
def serving(settings: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Starts ``hiserve serve`` on a free port; gives its address and the seconds until it was ready."""
    model = [settings["model"]] if "model" in settings else []
    flags = [word for name, value in settings.items() if name != "model" for word in (flag_of(name), str(value))]
    begin = time.perf_counter()
    command = (*HISERVE, "serve", "--port", "0", "--log-level", "warning", *model, *flags)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        urls = (found.group() for line in server.stdout if (found := re.search(r"http://\S+", line)))
        url = next(urls, None)
        assert url is not None, f"{' '.join(command)} ended with {server.wait()}"
        yield url, time.perf_counter() - begin
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def over_http(url: str, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Returns the summary of one run of ``hiserve bench serve``."""
    lengths = ("--input-length", sizes.request_input, "--output-length", sizes.request_output)
    numbers = ("--num-prompts", sizes.requests, "--max-concurrency", sizes.streams, "--seed", seed)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = (*HISERVE, "bench", "serve", "--url", url, *map(str, lengths + numbers), "--output", str(out))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads(out.read_text())["summary"]
    assert not summary["errors"], summary["errors"]
    return summary
