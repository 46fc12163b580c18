"""A server's ``/metrics``, read before and after a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from prometheus_client.parser import text_string_to_metric_families

from hiserve.bench.http import Pool

HIDDEN = b"# What tells of requests is shown"  # the first words of our reply to a key that may not see them
Series = dict[str, float]
# Names of the label that holds the tokens of a page: ours and SGLang's, vLLM's.
PAGE_SIZE_LABELS = ("page_size", "block_size")


async def scrape(pool: Pool) -> bytes:
    """Returns the metrics as text; empty when the server has none, or shows this key none about requests.

    Raises:
        UnavailableError: The server cannot be reached.
    """
    status, body = await pool.read("GET", "/metrics")
    return body if status == 200 and not body.startswith(HIDDEN) else b""


def page_size_of(text: bytes) -> int | None:
    """Returns the tokens per page in a server's ``cache_config_info``, or None."""
    for name, labels, _ in _samples(text):
        if name.endswith("cache_config_info"):
            for label in PAGE_SIZE_LABELS:
                if labels.get(label, "").isdigit():
                    return int(labels[label])
    return None


def increases(before: bytes, after: bytes) -> Series:
    """Returns by how much each counter grew, by its name and labels; those that did not are left out.

    A counter is what ends with ``_total``, ``_sum`` or ``_count``. One that fell was restarted and counts from 0.
    """
    old = _counters(before)
    grown = {}
    for series, value in _counters(after).items():
        past = old.get(series, 0.0)
        grown[series] = value - past if value >= past else value
    return {series: value for series, value in grown.items() if value}


def total(series: Series, name: str, **labels: str) -> float | None:
    """Sums the series of a metric that have these labels; None when there are none.

    Args:
        series: As ``increases`` returns them.
        name: The metric's, without the engine's prefix.
        labels: Values that must be there.
    """
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    found = [
        value
        for key, value in series.items()
        if key.partition("{")[0].rpartition(":")[2] == name and all(text in key for text in wanted)
    ]
    return sum(found) if found else None


def _counters(text: bytes) -> Series:
    """Returns the counters by name and labels; the model's name, which all of them share, is left out."""
    found: Series = {}
    for name, labels, value in _samples(text):
        if name.endswith(("_total", "_sum", "_count")):
            shown = ",".join(f'{label}="{labels[label]}"' for label in sorted(labels) if label != "model_name")
            found[f"{name}{{{shown}}}"] = value
    return found


def _samples(text: bytes) -> list[tuple[str, Mapping[str, str], float]]:
    """Parses Prometheus' text format; what is none has no samples."""
    with suppress(ValueError):
        families = text_string_to_metric_families(text.decode(errors="replace"))
        return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]
    return []
