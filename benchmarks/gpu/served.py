"""What the way over HTTP costs on a GPU: requests at so many streams, against the same ones in one process.

The server's tokenizer knows as many tokens as the shape has, so that each of them is a piece of text and an event.
"""

from __future__ import annotations

import json
import re
import shutil
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

from benchmarks.gpu.driving import Batch, Bench, Part, run
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.sizes import BARS, HttpCase
from hiserve.config import flag_of
from hiserve.models.model_config import NANO, find_model

HISERVE = (sys.executable, "-m", "hiserve.cli")


def measure_http(bench: Bench, shape: str) -> Part:
    """Runs the workload in this process, then over HTTP, on engines of the same settings; first runs are not counted."""
    case, settings = bench.sizes.http, bench.settings(shape)
    batches, vocab_size = in_process(bench, shape)
    offline = statistics.median(batch.output_tokens / batch.seconds for batch in batches[1:])
    bench.close()
    with tempfile.TemporaryDirectory() as folder, serving(settings, Path(folder), vocab_size) as (url, ready_s):
        summaries = [over_http(url, case, seed) for seed in range(case.runs + 1)]
    http = statistics.median(summary["output_tokens_per_s"] for summary in summaries[1:])
    name = f"{shape} over HTTP, {case.streams} streams"
    figure = Figure(name, http, "tokens/s", http / offline, BARS["http"], "offline in one process")
    runs = {"offline": [batch.told() for batch in batches], "http": summaries, "ready_s": ready_s}
    return Part([figure], {"offline_tokens_per_s": offline} | runs)


def in_process(bench: Bench, shape: str) -> tuple[list[Batch], int]:
    """Returns the runs of the workload in this process, and the shape's vocabulary; keeps no engine."""
    drive, case = bench.engine(shape), bench.sizes.http
    batches = []
    for _ in range(case.runs + 1):
        drive.engine.flush()
        prompts = [bench.prompt(drive, case.prompt) for _ in range(case.requests)]
        batches.append(run(drive, prompts, case.output, case.streams))
    return batches, drive.vocab_size


@contextmanager
def serving(settings: dict[str, Any], folder: Path, vocab_size: int) -> Iterator[tuple[str, float]]:
    """Starts ``hiserve serve`` on a free port; gives its address and the seconds until it was ready.

    Args:
        settings: Of the engine.
        folder: Takes the tokenizer of a built-in shape.
        vocab_size: Of the shape.
    """
    flags = [word for name, value in settings.items() if name != "model" for word in (flag_of(name), str(value))]
    if "shape" in settings:
        write_tokenizer(folder, vocab_size)
    model = str(folder) if "shape" in settings else settings["model"]
    begin = time.perf_counter()
    command = (*HISERVE, "serve", "--port", "0", "--log-level", "warning", model, *flags)
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


def over_http(url: str, case: HttpCase, seed: int) -> dict[str, Any]:
    """Returns the summary of one run of ``hiserve bench serve``."""
    lengths = ("--input-length", case.prompt, "--output-length", case.output)
    numbers = ("--num-prompts", case.requests, "--max-concurrency", case.streams, "--seed", seed)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = (*HISERVE, "bench", "serve", "--url", url, *map(str, lengths + numbers), "--output", str(out))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads(out.read_text())["summary"]
    assert not summary["errors"], summary["errors"]
    return summary
