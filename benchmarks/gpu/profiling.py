"""The time of a decode step, kernel by kernel on the device and call by call on the host."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.drive import Drive
from benchmarks.gpu.ceilings import clocked
from benchmarks.gpu.driving import Bench, Part, decode
from benchmarks.gpu.sizes import LARGE

NUM_STEPS = 5
NUM_TOP = 14
PLANNER_CALLS = ("plan", "commit", "complete_transfers", "take_report")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def measure_profile(bench: Bench, shape: str) -> Part:
    """Profiles steady decoding of the fewest and the most rows, at the shortest context; then steps of long prompts."""
    part, drive = Part(), bench.engine(shape)
    context = min(case.context for case in bench.sizes.decode if case.shape == shape)
    counts = [case.rows for case in bench.sizes.decode if case.shape == shape and case.context == context]
    for rows in sorted({max(counts), min(counts)}, reverse=True):
        found = part.samples[f"{shape}, {rows} x {context}"] = {}
        decode(bench, drive, rows, context, during=partial(watch, bench, drive, found, bench.sizes.steps))
    if shape == LARGE:
        num_prompts, length = bench.sizes.prefill
        found = part.samples[f"{shape}, prefill {num_prompts} x {length}"] = {}
        drive.engine.flush()
        prompts = [drive.add(bench.prompt(drive, length), 1) for _ in range(num_prompts)]
        watch(bench, drive, found, 2, drive.step)  # few: the largest budget leaves eight steps
        drive.finish(*prompts)
    part.notes += [line for name, each in part.samples.items() for line in lines(name, each)]
    return part


def watch(bench: Bench, drive: Drive, found: dict[str, Any], num_steps: int, step: Callable[[], None]) -> None:
    """Times the calls of some steps; on a CUDA device profiles some more of them."""
    with timed_calls(drive) as calls:
        seconds = [clocked(step) for _ in range(num_steps)]
    found["step_us"] = 1e6 * statistics.median(seconds)
    found["host_us"] = {call: 1e6 * statistics.median(times) for call, times in calls.items() if times}
    found["device"] = profiled(step) if bench.sizes.settings["device"] == "cuda" else {}


@contextmanager
def timed_calls(drive: Drive) -> Iterator[dict[str, list[float]]]:
    """Gives the seconds of every call that an engine's step makes; ``wait`` is for a step's result."""
    engine: Any = drive.engine
    planner, executor = engine._planner, engine._executor
    calls: dict[str, list[float]] = {name: [] for name in ("submit", "wait", *PLANNER_CALLS)}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments)
            calls[name].append(time.perf_counter() - begin)
            return result

        return wrapped

    submit = timed("submit", executor.submit)

    def watched_submit(plan: Any) -> Any:
        future = submit(plan)
        future.result = timed("wait", future.result)
        return future

    before = executor.submit
    vars(planner).update({name: timed(name, getattr(planner, name)) for name in PLANNER_CALLS})
    executor.submit = watched_submit
    try:
        yield calls
    finally:
        executor.submit = before
        for name in PLANNER_CALLS:
            delattr(planner, name)


def profiled(step: Callable[[], None]) -> dict[str, Any]:
    """Returns what the device did in some steps, per step in microseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(NUM_STEPS):
                step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return on_device([event for event in events if event.get("cat") in ON_DEVICE])


def on_device(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums up the device's activities in a trace, ``ts`` and ``dur`` in microseconds; nothing if the profiler saw nothing.

    A kernel that is launched early waits for others: ``own_us`` of it is the time in which none that began before it ran.
    """
    if not events:
        return {}
    events = sorted(events, key=lambda event: event["ts"])
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    busy_us, end = 0.0, spans[0][0]
    gaps: list[tuple[float, str]] = []
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event, (begin, stop) in zip(events, spans, strict=True):
        if begin > end:
            gaps.append((begin - end, event["name"]))
        own_us = max(0.0, stop - max(begin, end))
        times[event["name"]].append((own_us, event["dur"]))
        busy_us += own_us
        end = max(end, stop)
    span_us = end - spans[0][0]
    top = sorted(times.items(), key=lambda item: -sum(own for own, _ in item[1]))[:NUM_TOP]
    return {
        "span_us": span_us / NUM_STEPS,
        "busy_share": busy_us / span_us,
        "launches": len(events) / NUM_STEPS,
        "gaps_below_20_us": sum(us for us, _ in gaps if us < 20) / NUM_STEPS,
        "longest_gaps": [(round(us, 1), name[:60]) for us, name in sorted(gaps, reverse=True)[:6]],
        "top": [
            {
                "name": name,
                "own_us_a_step": sum(own for own, _ in each) / NUM_STEPS,
                "calls_a_step": len(each) / NUM_STEPS,
                "own_us_a_call": statistics.median(own for own, _ in each),
                "us_a_call": statistics.median(whole for _, whole in each),
            }
            for name, each in top
        ],
    }


def lines(name: str, found: dict[str, Any]) -> list[str]:
    host = ", ".join(f"{call} {us:.0f}" for call, us in found["host_us"].items())
    said = [f"{name}: step {found['step_us']:.0f} us; host, medians in us: {host}"]
    if device := found["device"]:
        told = {key: round(device[key], 3) for key in ("span_us", "busy_share", "launches", "gaps_below_20_us")}
        said.append(f"  device, a step: {told}; longest gaps, before: {device['longest_gaps']}")
        said += [
            f"  {each['own_us_a_step']:8.1f} us {each['calls_a_step']:6.1f} x {each['own_us_a_call']:7.2f} us"
            f" (with waits {each['us_a_call']:7.2f})  {each['name'][:90]}"
            for each in device["top"]
        ]
    return said
