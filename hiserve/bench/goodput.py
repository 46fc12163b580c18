"""Goodput: requests per second that met every objective (after DistServe, OSDI'24)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hiserve.bench.summary import tpot_s, ttft_s
from hiserve.bench.workload import Run, Sample
from hiserve.errors import ConfigError

OBJECTIVES = ("ttft", "tpot", "e2e")


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests were good enough."""

    objectives_ms: dict[str, float]  # the limits; a request must meet all of them
    num_good: int  # requests that did. Failed ones and ones without text do not
    requests_per_s: float  # these, per second of the whole run
    attainment: float  # these, as a share of all requests
    attainment_of: dict[str, float]  # for each objective alone, the share of all requests that met it


def parse_objectives(given: Sequence[str]) -> dict[str, float]:
    """Reads objectives like ``ttft:200``, in milliseconds. Raises ConfigError."""
    found: dict[str, float] = {}
    for item in given:
        name, _, limit = item.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            found[name] = -1.0
        if name not in OBJECTIVES or not found[name] > 0:
            raise ConfigError(
                f"--goodput {item!r} is no objective; give milliseconds like ttft:200 tpot:50 e2e:5000.",
                param="goodput",
            )
    return found


def goodput(run: Run, objectives_ms: dict[str, float]) -> Goodput:
    met = [
        {name for name, limit_ms in objectives_ms.items() if _meets(sample, name, limit_ms)} for sample in run.samples
    ]
    num_requests = max(1, len(run.samples))
    num_good = sum(len(names) == len(objectives_ms) for names in met)
    return Goodput(
        objectives_ms=objectives_ms,
        num_good=num_good,
        requests_per_s=num_good / max(run.end_s - run.begin_s, 1e-9),
        attainment=num_good / num_requests,
        attainment_of={name: sum(name in names for names in met) / num_requests for name in objectives_ms},
    )


def _meets(sample: Sample, name: str, limit_ms: float) -> bool:
    if sample.error or not sample.chunk_s:
        return False
    if name == "e2e":
        seconds: float | None = sample.end_s - sample.begin_s
    else:
        seconds = ttft_s(sample) if name == "ttft" else tpot_s(sample)
    return seconds is None or seconds * 1e3 <= limit_ms  # a single token has no TPOT to miss
