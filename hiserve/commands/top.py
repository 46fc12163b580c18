"""``hiserve top``: a live board of a running server's tiers, hits, copies, requests and workers."""

from __future__ import annotations

import argparse
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hiserve.commands.top_frames import Frame, FrameHistory, read_frame
from hiserve.config.options import Options
from hiserve.core.machine import GIB
from hiserve.errors import HiserveError, UnavailableError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
MIN_INTERVAL_S = 0.05
# Columns of a terminal that a whole board needs; on a narrower one bars are shorter and some columns go.
FULL_WIDTH = 120
BAR_WIDTH, SHORT_BAR_WIDTH = 36, 12
# The signs of a bar and their colours.
USED, EVICTABLE, FREE = ("█", "blue"), ("▒", "cyan"), ("·", "bright_black")
LEGEND = " ".join(
    f"[{colour}]{sign}[/{colour}] {name}"
    for (sign, colour), name in ((USED, "used"), (EVICTABLE, "evictable"), (FREE, "free"))
)
COPIES = {"load": "host → device", "offload": "device → host", "prefetch": "store → host", "upload": "host → store"}
STORE_RESULTS = {
    "hit": "delivered",
    "miss": "not delivered",
    "stored": "written",
    "refused": "refused",
    "corrupt": "damaged",
}
DECISIONS = {"replay": "replayed as graphs", "eager": "eager", "defer": "deferred"}
# The device's pages of layers with a window, and slots of snapshots: the metric of each.
TAIL_POOLS = {"windows": "cache_window_pages", "snapshots": "cache_snapshot_slots"}
MAX_MISSES = 8
LEAST_WANTED = 100  # pages, before a tier is judged


def add_arguments(parser: argparse.ArgumentParser, _: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds the command's arguments; it has no use for settings."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"Address of the server (default: {DEFAULT_URL}).")
    parser.add_argument(
        "--api-key-file", dest="key", type=_key, metavar="PATH", help="File that holds the server's admin key."
    )
    parser.add_argument(
        "--interval-s", type=_interval, default=1.0, metavar="N", help="Between frames [s] (default: 1)."
    )
    parser.add_argument("--once", action="store_true", help="Print one frame and end.")


def run(_: Options, url: str, key: str | None, interval_s: float, once: bool) -> int:
    """Shows the board until Ctrl-C.

    Args:
        url: Of the server.
        key: Its admin key, or None.
        interval_s: Between frames, seconds.
        once: Print one frame.

    Returns:
        The exit status.

    Raises:
        HiserveError: The server cannot be reached, or has gone away.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    console = Console(highlight=False)
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        history = FrameHistory(read_frame(client))
        if once:
            console.print(draw(history, url, console.width))
            return 0
        live = Live(console=console, screen=console.is_terminal, auto_refresh=False)
        with _blocked(), _Reader(client, interval_s) as reader, live:
            live.update(draw(history, url, console.width), refresh=True)
            while signal.sigtimedwait({signal.SIGINT}, interval_s) is None:
                for frame in reader.take():
                    history.add(frame)
                live.update(draw(history, url, console.width), refresh=True)
    return 0


@contextmanager
def _blocked() -> Iterator[None]:
    """Within, Ctrl-C interrupts nothing, and is waited for: a KeyboardInterrupt is lost where a finalizer runs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Reader(threading.Thread):
    """Reads frames aside: a server may be slow to answer. The process does not wait for its end.

    Args:
        client: Of the server.
        interval_s: Between frames, seconds.
    """

    def __init__(self, client: httpx.Client, interval_s: float) -> None:
        super().__init__(name="hiserve-top", daemon=True)
        self._client = client
        self._interval_s = interval_s
        self._read = queue.SimpleQueue[Frame | HiserveError]()
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        """Starts it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Asks it to end."""
        self._is_over.set()

    def run(self) -> None:
        """Reads until it is asked to end, or fails."""
        try:
            while not self._is_over.wait(self._interval_s):
                self._read.put(read_frame(self._client))
        except HiserveError as error:
            self._read.put(error)

    def take(self) -> Iterator[Frame]:
        """Yields the frames that came since the last call.

        Raises:
            UnavailableError: The server has gone away.
        """
        has_ended = not self.is_alive()
        while not self._read.empty():
            found = self._read.get()
            if isinstance(found, HiserveError):
                raise UnavailableError(f"the server has gone away: {found.message}") from None
            yield found
        assert not has_ended, "the thread that reads frames has ended without an error"


def _key(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not value >= MIN_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text} is out of range; the least is {MIN_INTERVAL_S}")
    return value


def draw(history: FrameHistory, url: str, width: int = FULL_WIDTH) -> RenderableType:
    """Returns the board.

    Args:
        history: The last frames; rates need two.
        url: Of the server.
        width: Of the terminal, in columns. At 80 nothing that matters is cut.
    """
    frame, is_narrow = history.newest, width < FULL_WIDTH
    parts = [_head(frame, url)]
    if "num_requests_running" in frame.series:
        parts.append(_requests(history))
    if frame.shows_requests:
        parts += [_tiers(history, is_narrow=is_narrow), _copies(history)]
    if frame.workers:
        parts.append(_workers(history, is_narrow=is_narrow))
    return Group(*(each for part in parts for each in (part, Text())))


def _head(frame: Frame, url: str) -> RenderableType:
    info = frame.info
    named = f"hiserve {info.version}, {info.served_model_name}" if info else "hiserve"
    text = f"[bold]{escape(named)}[/bold] at {escape(url)}"
    if info and (trouble := info.not_ready_because or info.engine_error):
        text += f"  [yellow]not ready: {escape(trouble)}[/yellow]"
    return Text.from_markup("".join([text, *(f"\n[yellow]{hidden}[/yellow]" for hidden in frame.hidden)]))


def _requests(history: FrameHistory) -> RenderableType:
    frame = history.newest
    running, waiting = frame.value("num_requests_running"), frame.value("num_requests_waiting")
    state = f"[bold]{running:,.0f}[/bold] running, [bold]{waiting:,.0f}[/bold] waiting"
    if num_preempted := frame.value("num_preemptions"):
        state += f", {num_preempted:,.0f} preempted so far"
    if not frame.shows_requests:
        return Text.from_markup(state)
    names = ("prompt_tokens", "prefix_cache_hits", "generation_tokens", "engine_steps")
    table = _table("requests", "", "prompt", "cached", "generated", "steps")
    *rates, steps = (history.rate(lambda each, name=name: each.value(name)) for name in names)  # type: ignore[misc]
    table.add_row("[bold]per second[/bold]", *(_plain(rate, " tokens") for rate in rates), _plain(steps))
    table.add_row("in all", *(f"{frame.value(name):,.0f}" for name in names))
    return Group(Text.from_markup(state), table, *map(Text, (*_graphs(frame), *_drafts(frame))))


def _graphs(frame: Frame) -> list[str]:
    """Returns a line about how steps were run, and why; none where no worker replays any."""
    counts = frame.by("decision", "graph_gate")
    if not counts.get("replay"):
        return []
    reasons = {decision: frame.by("reason", "graph_gate", decision=decision) for decision in counts}
    shares = [
        f"{counts[decision] / sum(counts.values()):.1%} {word} ({_counts(reasons[decision])})"
        for decision, word in DECISIONS.items()
        if counts.get(decision)
    ]
    return ["steps: " + ", ".join(shares)]


def _drafts(frame: Frame) -> list[str]:
    """Returns a line about the drafts that were accepted; none where none was verified."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    num_steps, num_proposed, num_accepted = (frame.value(f"spec_decode_num_{name}") for name in names)
    if not num_steps:
        return []
    length = 1 + num_accepted / num_steps
    return [f"drafts: {num_accepted:,.0f} of {num_proposed:,.0f} accepted, {length:.2f} tokens a verifying step"]


def _tiers(history: FrameHistory, *, is_narrow: bool) -> RenderableType:
    """Returns the tiers; a narrow board has the evicted pages in a line below the table."""
    frame = history.newest
    names = ("used", "evictable", "free", "evicted", "hits 10 s", "hits in all")
    table = _table(f"cache: {LEGEND}", "", "", *(name for name in names if name != "evicted" or not is_narrow))
    evicted: dict[str, str] = {}
    cells: list[Text | str]
    for tier in ("device", *TAIL_POOLS, "host", "store"):
        of_tails = TAIL_POOLS.get(tier)
        pages = frame.by("state", of_tails) if of_tails else frame.by("state", "cache_pages", tier=tier)
        if tier == "store" and _has_store(frame):
            cells = [Text(_size(frame)), f"{frame.value('store_pages'):,.0f}", "", ""]
        elif sum(pages.values()):
            held, evictable, free = (pages.get(state, 0) for state in ("held", "evictable", "free"))
            bar = _bar(held, evictable, free, SHORT_BAR_WIDTH if is_narrow else BAR_WIDTH)
            cells = [bar, f"{held:,.0f}", f"{evictable:,.0f}", f"{free:,.0f}"]
        else:
            continue
        evicted[tier] = f"{frame.pages('evicted_tokens', tier=tier):,.0f}"
        if of_tails:
            evicted[tier] = f"{frame.value('evicted_tails'):,.0f} tails"
        hits = ["", ""] if of_tails else _hits(history, cache_source=tier)
        table.add_row(tier, *cells, *([] if is_narrow else [evicted[tier]]), *hits)
    table.add_row(*[""] * (4 if is_narrow else 5), "[bold]together[/bold]", *_hits(history))
    lines = [f"evicted: {', '.join(f'{tier} {count}' for tier, count in evicted.items())}"] if is_narrow else []
    lines += [f"tails: {frame.value('cache_tails'):,.0f}"] if TAIL_POOLS.keys() & evicted.keys() else []
    lines += [_store_line(frame)] if "store" in evicted else []
    lines += _idle_tiers(frame)
    if misses := frame.by("reason", "cache_misses"):
        lines.append(f"why no more was cached: {_counts(misses, MAX_MISSES)}")
    return Group(table, *map(Text, lines))


def _has_store(frame: Frame) -> bool:
    return bool(frame.value("store_pages") or (frame.info and (frame.info.config.get("cache") or {}).get("store")))


def _size(frame: Frame) -> str:
    """Returns the size of the store, and its limit if the server shows that."""
    limit = (frame.info.config.get("cache") or {}).get("store_gib") if frame.info else None
    return f"{frame.value('store_bytes') / GIB:,.2f} " + (f"of {limit:g} GiB" if limit else "GiB")


def _store_line(frame: Frame) -> str:
    """Returns a line about the pages that the store was asked for or given, and about its errors."""
    counts = {word: frame.pages("store_tokens", result=result) for result, word in STORE_RESULTS.items()}
    counts["failed operations"] = frame.value("store_errors")
    words = [f"{word} {count:,.0f}" for word, count in counts.items() if count]
    stores = [worker.stats.cache.store for worker in frame.workers]
    words += [f"the last error: {store.last_error}" for store in stores if store and store.last_error][:1]
    return "pages of the store: " + (", ".join(words) or "none asked for or written yet")


def _idle_tiers(frame: Frame) -> Iterator[str]:
    """Yields a line about each tier of which pages were wanted and next to none came, with the most frequent reason."""
    for tier, copy in (("host", "load"), ("store", "prefetch")):
        num_wanted = frame.pages("cache_wanted_tokens", copy=copy)
        num_fulfilled = frame.pages("cache_fulfilled_tokens", copy=copy)
        for reason in list(frame.by("reason", "cache_unfulfilled_tokens", copy=copy))[:1]:
            if num_wanted >= LEAST_WANTED and num_fulfilled < num_wanted / 100:
                count = frame.pages("cache_unfulfilled_tokens", copy=copy, reason=reason)
                yield f"the {tier} does not help: {reason} for {count:,.0f} of {num_wanted:,.0f} pages wanted of it"


def _hits(history: FrameHistory, **where: str) -> list[str]:
    """Returns the shares of prompt tokens that came from a tier, or from any: of the last seconds, and of all."""

    def share(measure: Callable[[Callable[[Frame], float]], float | None]) -> str:
        num_asked = measure(lambda frame: frame.value("prefix_cache_queries"))
        num_found = measure(lambda frame: frame.value("cached_tokens", **where))
        return f"{num_found / num_asked:.1%}" if num_asked and num_found is not None else "–"

    return [share(history.growth), share(lambda value: value(history.newest))]


def _copies(history: FrameHistory) -> RenderableType:
    """Returns the copies by kind, and lines about those that were not done."""
    frame = history.newest
    table = _table("copies", "", "MB/s", "pages/s", "pages", "on the way", "GB/s while copying")
    lines = []
    for copy, name in COPIES.items():
        if not frame.value("cache_wanted_tokens", copy=copy):
            continue
        num_bytes, seconds = (frame.value(f"kv_offload_total_{unit}", copy=copy) for unit in ("bytes", "time"))
        table.add_row(
            name,
            _plain(history.rate(lambda each, copy=copy: each.value("kv_offload_total_bytes", copy=copy) / 1e6)),  # type: ignore[misc]
            _plain(history.rate(lambda each, copy=copy: each.pages("cache_fulfilled_tokens", copy=copy))),  # type: ignore[misc]
            f"{frame.pages('cache_fulfilled_tokens', copy=copy):,.0f}",
            f"{frame.pages('cache_in_flight_tokens', copy=copy):,.0f}",
            f"{num_bytes / seconds / 1e9:,.2f}" if seconds else "–",
        )
        if reasons := frame.by("reason", "cache_unfulfilled_tokens", copy=copy):
            counts = {reason: frame.pages("cache_unfulfilled_tokens", copy=copy, reason=reason) for reason in reasons}
            lines.append(f"{name}, pages not copied: {_counts(counts)}")
    if not table.row_count:
        return Text("no copies between tiers yet", style="bright_black")
    return Group(table, *map(Text, lines))


def _workers(history: FrameHistory, *, is_narrow: bool) -> RenderableType:
    """Returns the workers; a narrow board leaves out process ids and evictable pages."""
    names = ("life", "running", "waiting", "steps/s", "tokens/s", "pages free")
    table = _table("workers", "worker", *names, *([] if is_narrow else ["evictable", "process"]))
    for worker in history.newest.workers:
        stats = worker.stats
        table.add_row(
            str(worker.replica),
            str(worker.incarnation) if worker.incarnation < 2 else f"[yellow]{worker.incarnation}[/yellow]",
            f"{stats.running:,}",
            f"{stats.waiting:,}",
            _plain(history.rate(lambda each, index=worker.replica: each.worker(index).steps)),  # type: ignore[misc]
            _plain(history.rate(lambda each, index=worker.replica: each.worker(index).generated_tokens)),  # type: ignore[misc]
            f"{stats.free_pages:,} of {worker.num_pages:,}",
            *([] if is_narrow else [f"{stats.evictable_pages:,}", str(worker.pid)]),
        )
    return table


def _bar(used: float, evictable: float, free: float, width: int) -> Text:
    """Returns the parts of a tier in proportion; a part that is not 0 is at least one cell wide."""
    whole = max(1.0, used + evictable + free)
    bar = Text()
    edge = 0.0
    for (sign, colour), count in ((USED, used), (EVICTABLE, evictable)):
        edge += max(count / whole * width, 1.0 if count else 0.0)
        bar.append(sign * (min(round(edge), width) - len(bar)), style=colour)
    return bar.append(FREE[0] * (width - len(bar)), style=FREE[1])


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True, header_style="bright_black")
    return table


def _counts(counts: dict[str, float], most: int | None = None) -> str:
    return ", ".join(f"{name} {count:,.0f}" for name, count in list(counts.items())[:most] if count)


def _plain(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:,.0f}{unit}"
