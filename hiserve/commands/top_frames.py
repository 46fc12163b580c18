"""The state of a server for ``hiserve top``: ``/metrics``, and ``/server_info`` for its workers."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from hiserve.errors import UnavailableError
from hiserve.ipc.cache_stats import CacheStats

PREFIX = "hiserve:"
WINDOW_S = 10.0  # of rates
Series = dict[str, list[tuple[dict[str, str], float]]]


class TopStats(msgspec.Struct, frozen=True, kw_only=True):
    """The shown part of ``WorkerStats``."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    generated_tokens: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    cache: CacheStats = CacheStats()


class TopWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The shown part of ``WorkerFacts``."""

    replica: int = 0
    pid: int = 0
    incarnation: int = 0
    num_pages: int = 0
    stats: TopStats = TopStats()


class TopServer(msgspec.Struct, frozen=True, kw_only=True):
    """The shown part of ``/server_info``."""

    version: str = ""
    served_model_name: str = ""
    not_ready_because: str | None = None
    engine_error: str | None = None
    config: dict[str, dict[str, Any] | None] = {}
    workers: list[TopWorker] = []


class Frame(NamedTuple):
    """The state of a server at one time.

    Attributes:
        at_s: By ``time.monotonic``.
        info: None if the server does not show it.
        series: Labels and values of each metric of ``/metrics``, by its name without ``hiserve:`` and ``_total``.
        hidden: A sentence for each part that the server does not show.
    """

    at_s: float
    info: TopServer | None
    series: Series
    hidden: tuple[str, ...] = ()

    @property
    def workers(self) -> list[TopWorker]:
        """The workers, if the server shows them."""
        return self.info.workers if self.info else []

    @property
    def shows_requests(self) -> bool:
        """Whether it has the metrics of requests and cache; a server shows them to some keys only."""
        return "prompt_tokens" in self.series

    def worker(self, replica: int) -> TopStats:
        """Returns a worker's counters; zeros if it is not there."""
        return next((worker.stats for worker in self.workers if worker.replica == replica), TopStats())

    def by(self, label: str, name: str, **where: str) -> dict[str, float]:
        """Sums the series of a metric with the labels ``where``, by the values of a label; the largest first."""
        found: dict[str, float] = defaultdict(float)
        for labels, value in self.series.get(name, ()):
            if where.items() <= labels.items():
                found[labels.get(label, "")] += value
        return {key: found[key] for key in sorted(found, key=found.__getitem__, reverse=True)}

    def value(self, name: str, **where: str) -> float:
        """Sums the series of a metric with these labels; 0 if there is none."""
        return sum(self.by("", name, **where).values())

    def pages(self, name: str, **where: str) -> float:
        """Returns the same in pages, for a metric that counts tokens."""
        sizes = [labels["page_size"] for labels, _ in self.series.get("cache_config_info", ()) if "page_size" in labels]
        return self.value(name, **where) / int(sizes[0] if sizes else 1)


def read_frame(client: httpx.Client) -> Frame:
    """Asks a server for its state.

    Args:
        client: Bound to the server, with the key if one is needed.

    Raises:
        UnavailableError: The server cannot be reached, or is not hiserve.
    """
    answers = {path: _get(client, path) for path in ("/server_info", "/metrics")}
    info, metrics = answers.values()
    if metrics.status_code != 200 and info.status_code != 200:
        codes = ", ".join(f"{path} answers {answer.status_code}" for path, answer in answers.items())
        raise UnavailableError(
            f"{client.base_url} shows nothing: {codes}. Give a key with --api-key-file, or another --url."
        )
    hidden = [f"{path} {_refusal(answer)}" for path, answer in answers.items() if answer.status_code != 200]
    try:
        read = msgspec.json.decode(info.content, type=TopServer, strict=False) if info.status_code == 200 else None
    except msgspec.DecodeError as error:
        raise UnavailableError(f"/server_info of {client.base_url} is not hiserve's: {error}.") from None
    try:
        series = read_series(metrics.text) if metrics.status_code == 200 else {}
    except ValueError as error:
        raise UnavailableError(f"/metrics of {client.base_url} is not hiserve's: {error}.") from None
    frame = Frame(time.monotonic(), read, series, tuple(hidden))
    if metrics.status_code == 200 and not frame.shows_requests:
        return frame._replace(hidden=(*hidden, "/metrics shows requests and cache to the admin key alone"))
    return frame


def read_series(text: str) -> Series:
    """Returns the series of hiserve in a text of Prometheus.

    Raises:
        ValueError: It is no such text.
    """
    series: Series = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name.startswith(PREFIX):
                series[name.removeprefix(PREFIX).removesuffix("_total")].append((labels, value))
    return series


def _refusal(answer: httpx.Response) -> str:
    return "needs the admin key" if answer.status_code in (401, 403) else f"answers {answer.status_code}"


def _get(client: httpx.Client, path: str) -> httpx.Response:
    try:
        return client.get(path)
    except httpx.HTTPError as error:
        raise UnavailableError(f"cannot reach the server at {client.base_url}: {str(error).rstrip('.')}.") from None


class FrameHistory:
    """The frames of the last ``WINDOW_S`` seconds.

    Attributes:
        newest: The last one.
    """

    def __init__(self, first: Frame) -> None:
        self.newest = first
        self._frames = deque([first])

    def add(self, frame: Frame) -> None:
        """Adds a frame; drops those that are too old, but for one."""
        self.newest = frame
        self._frames.append(frame)
        while len(self._frames) > 2 and self._frames[1].at_s <= frame.at_s - WINDOW_S:
            self._frames.popleft()

    def growth(self, value: Callable[[Frame], float]) -> float | None:
        """Returns the growth of a number in this time; None with a single frame, 0 if it fell."""
        if len(self._frames) < 2:
            return None
        return max(0.0, value(self.newest) - value(self._frames[0]))

    def rate(self, value: Callable[[Frame], float]) -> float | None:
        """Returns the growth per second."""
        grown = self.growth(value)
        return None if grown is None else grown / max(self.newest.at_s - self._frames[0].at_s, 1e-9)
