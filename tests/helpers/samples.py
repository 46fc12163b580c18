"""Samples of measured requests whose times are chosen."""

from __future__ import annotations

from typing import Any

from hiserve.bench.workload import Run, Sample


def sample(begin: float, *chunks: float, tokens: list[int] | None = None, **more: Any) -> Sample:
    """A request whose chunks arrive at these times, one token each unless ``tokens`` counts them."""
    counts = list(range(1, len(chunks) + 1)) if tokens is None else tokens
    fields: dict[str, Any] = {"due_s": begin, "begin_s": begin, "chunk_s": list(chunks), "chunk_tokens": counts}
    fields |= {"end_s": chunks[-1] if chunks else begin, "num_output": max(counts, default=0)}
    fields |= {"num_prompt": 10, "num_cached": 4, "has_usage": True, "finish": "length", "status": 200}
    return Sample(**fields | more)


def run_of(*samples: Sample, begin: float = 0.0, end: float | None = None) -> Run:
    last = max(each.end_s for each in samples) if end is None else end
    return Run(begin_s=begin, end_s=last, samples=list(samples), client_cpu_s=0.5)
