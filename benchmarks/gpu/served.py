"""What the way over HTTP costs on a GPU: requests at so many streams, against the same ones in one process.

The server's tokenizer knows as many tokens as the shape has, so that each of them is a piece of text and an event.
"""

from __future__ import annotations

import statistics

from benchmarks.gpu.driving import Batch, Bench, Part, run
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.sizes import BARS
from benchmarks.served import bench_serve, serving_shape


def measure_http(bench: Bench, shape: str) -> Part:
    """Runs the workload in this process, then over HTTP, on engines of the same settings; first runs are not counted."""
    case, settings = bench.sizes.http, bench.settings(shape)
    batches, vocab_size = in_process(bench, shape)
    offline = statistics.median(batch.output_tokens / batch.seconds for batch in batches[1:])
    bench.close()
    options = {"input_length": case.prompt, "output_length": case.output, "num_prompts": case.requests}
    options["max_concurrency"] = case.streams
    with serving_shape(settings, vocab_size) as server:
        summaries = [bench_serve(server.url, **options, seed=seed) for seed in range(case.runs + 1)]
    http = statistics.median(summary["output_tokens_per_s"] for summary in summaries[1:])
    name = f"{shape} over HTTP, {case.streams} streams"
    figure = Figure(name, http, "tokens/s", http / offline, BARS["http"], "offline in one process")
    runs = {"offline": [batch.told() for batch in batches], "http": summaries, "ready_s": server.ready_s}
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
