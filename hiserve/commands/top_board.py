"""How ``hiserve top`` looks: tiers, hit rates, copies, requests and workers of one server."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hiserve.commands.top_frames import TIERS, Frame, FrameHistory, WorkerInfo, number

# Columns of a terminal that a whole board needs; on a narrower one bars are shorter and some columns go.
FULL_WIDTH = 120
BAR_WIDTH, SHORT_BAR_WIDTH = 36, 12
# What a part of a bar looks like, and its colour.
USED, EVICTABLE, FREE = ("█", "blue"), ("▒", "cyan"), ("·", "bright_black")
COPIES = {"loads": "host → device", "stores": "device → host", "prefetches": "store → host", "uploads": "host → store"}
GIB = 1 << 30
# What a store counts, in words.
STORE_COUNTS = {
    "delivered": "num_hits",
    "not delivered": "num_misses",
    "written": "num_stored",
    "refused": "num_refused",
    "damaged": "num_corrupt",
    "failed operations": "num_errors",
}
MAX_MISSES = 8
LEAST_WANTED = 100  # pages, before a tier is judged
# Verdicts of the gate, in words.
VERDICTS = {"replay": "replayed as graphs", "eager": "eager", "defer": "deferred"}


def draw(history: FrameHistory, url: str, width: int = FULL_WIDTH) -> RenderableType:
    """Returns the board.

    Args:
        history: The last frames; rates need two.
        url: Of the server.
        width: Of the terminal, in columns. At 80 nothing that matters is cut.
    """
    frame = history.newest
    is_narrow = width < FULL_WIDTH
    tiers, workers = _tiers(history, is_narrow=is_narrow), _workers(history, is_narrow=is_narrow)
    parts = [_head(frame, url), Text(), _requests(history), Text(), tiers, Text(), _copies(history)]
    if frame.workers:
        parts += [Text(), workers]
    return Group(*parts)


def _head(frame: Frame, url: str) -> RenderableType:
    info = frame.info
    named = f"hiserve {info.version}, {info.served_model_name}" if info else "hiserve"
    text = f"[bold]{escape(named)}[/bold] at {escape(url)}"
    if info and (trouble := info.not_ready_because or info.engine_error):
        text += f"  [yellow]not ready: {escape(trouble)}[/yellow]"
    for path, status in frame.hidden.items():
        why = "needs the admin key" if status in (401, 403) else f"answers {status}"
        text += f"\n[yellow]{path} {why}[/yellow]"
    return Text.from_markup(text)


def _requests(history: FrameHistory) -> RenderableType:
    frame = history.newest
    waiting = sum(load.num_waiting_reqs for load in frame.load)
    running = sum(load.num_reqs for load in frame.load) - waiting
    table = _table("requests", "", "prompt", "cached", "generated", "steps")
    table.add_row(
        "[bold]per second[/bold]",
        _plain(history.rate(lambda each: each.counter("prompt_tokens_total")), " tokens"),
        _plain(history.rate(lambda each: each.counter("prefix_cache_hits_total")), " tokens"),
        f"[bold]{_plain(history.rate(lambda each: each.counter('generation_tokens_total')), ' tokens')}[/bold]",
        _plain(history.rate(lambda each: each.counter("engine_steps_total"))),
    )
    table.add_row(
        "in all",
        *(
            f"{frame.counter(f'{name}_total'):,.0f}"
            for name in ("prompt_tokens", "prefix_cache_hits", "generation_tokens", "engine_steps")
        ),
    )
    state = f"[bold]{running:,}[/bold] running, [bold]{waiting:,}[/bold] waiting"
    if frame.counter("num_preemptions_total"):
        state += f", {frame.counter('num_preemptions_total'):,.0f} preempted so far"
    return Group(Text.from_markup(state), table, *_graphs(frame), *_drafts(frame))


def _graphs(frame: Frame) -> list[Text]:
    """Says how steps were run, and why so; nothing where no worker replays any."""
    if not frame.verdicts("replay"):
        return []
    found = {word: frame.verdicts(verdict) for verdict, word in VERDICTS.items()}
    num_steps = sum(counts.total() for counts in found.values())
    words = [
        f"{counts.total() / num_steps:.1%} {word} ({', '.join(f'{why} {count:,}' for why, count in counts.most_common())})"
        for word, counts in found.items()
        if counts
    ]
    return [Text("steps: " + ", ".join(words))]


def _drafts(frame: Frame) -> list[Text]:
    """Says how many drafts were accepted; nothing where none was verified."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    num_steps, num_proposed, num_accepted = (frame.counter(f"spec_decode_num_{name}_total") for name in names)
    if not num_steps:
        return []
    length = 1 + num_accepted / num_steps
    return [Text(f"drafts: {num_accepted:,.0f} of {num_proposed:,.0f} accepted, {length:.2f} tokens a verifying step")]


def _tiers(history: FrameHistory, *, is_narrow: bool) -> RenderableType:
    """Shows every tier; a narrow board says below the table how many pages were evicted."""
    frame = history.newest
    legend = " ".join(f"[{colour}]{sign}[/{colour}] {name}" for (sign, colour), name in _PARTS)
    hit_names = ("hits 10 s", "in all") if is_narrow else ("evicted", "hits 10 s", "hits in all")
    table = _table(f"cache: {legend}", "", "", "used", "evictable", "free", *hit_names)
    evicted = {}
    for tier in TIERS:
        pages = frame.tier(tier)
        if not pages:
            continue
        free, evictable = pages.get("num_free", 0), pages.get("num_evictable", 0)
        known = "num_free" in pages  # a store tells only what it holds
        used = pages.get("num_ready", pages.get("num_pages", 0)) - free - evictable
        cells = [f"{used:,.0f}", f"{evictable:,.0f}", f"{free:,.0f}"] if known else [f"{used:,.0f}", "", ""]
        bar = _bar(used, evictable, free, SHORT_BAR_WIDTH if is_narrow else BAR_WIDTH) if known else Text(_size(frame))
        hits = [_share(_hits(history.growth, tier)), _share(_hits(lambda value: value(frame), tier))]
        evicted[tier] = f"{pages.get('num_evicted', 0):,.0f}"
        table.add_row(tier, bar, *cells, *([] if is_narrow else [evicted[tier]]), *hits)
    table.add_row(*[""] * (4 if is_narrow else 5), "[bold]together[/bold]", *_together(history))
    lines = (
        ["evicted: " + ", ".join(f"{tier} {count}" for tier, count in evicted.items())] if is_narrow and evicted else []
    )
    lines += [_store_line(frame)] if frame.tier("store") else []
    lines += [f"{name} does not help: {reason}" for name, reason in _idle_tiers(frame)]
    if missed := frame.misses().most_common(MAX_MISSES):
        lines.append("requests that missed: " + ", ".join(f"{reason} {count:,}" for reason, count in missed))
    return Group(table, *map(Text, lines))


def _size(frame: Frame) -> str:
    """Says how much a store takes, and of what if the server tells."""
    gib = number(frame.info.config.get("cache") or {}, "store_gib") if frame.info else 0
    return f"{frame.tier('store').get('num_bytes', 0) / GIB:,.2f} " + (f"of {gib:g} GiB" if gib else "GiB")


def _store_line(frame: Frame) -> str:
    """Says what became of the pages that the store was asked for or given, and what went wrong."""
    store = frame.tier("store")
    counts = {word: store.get(key, 0) for word, key in STORE_COUNTS.items()}
    words = [f"{word} {count:,.0f}" for word, count in counts.items() if count]
    if errors := frame.store_errors():
        words.append(f"the last error: {errors[0]}")
    return "pages of the store: " + (", ".join(words) or "none asked for or written yet")


def _idle_tiers(frame: Frame) -> list[tuple[str, str]]:
    """Returns the tiers of which pages were wanted and next to none came, and the most frequent reason."""
    idle = []
    for name, kind in (("the host", "loads"), ("the store", "prefetches")):
        copies = frame.copies(kind)
        if copies.unfulfilled and copies.num_wanted >= LEAST_WANTED and copies.num_fulfilled < copies.num_wanted / 100:
            reason, count = max(copies.unfulfilled.items(), key=lambda each: each[1])
            idle.append((name, f"{reason} for {count:,} of {copies.num_wanted:,} pages wanted of it"))
    return idle


def _together(history: FrameHistory) -> list[str]:
    frame = history.newest
    return [_share(_hits(history.growth, None)), _share(_hits(lambda value: value(frame), None))]


def _hits(measure: Callable[[Callable[[Frame], float]], float | None], tier: str | None) -> float | None:
    """Returns the share of prompt tokens that came from a tier, or from any; None when none were looked up.

    Args:
        measure: Turns what a frame says into one number.
        tier: Which one; None for all of them.
    """
    labels = {} if tier is None else {"cache_source": tier}
    num_asked = measure(lambda frame: frame.counter("prefix_cache_queries_total"))
    num_found = measure(lambda frame: frame.counter("cached_tokens_total", **labels))
    return num_found / num_asked if num_asked and num_found is not None else None


def _copies(history: FrameHistory) -> RenderableType:
    """Shows copies by kind, and in lines of their own why some were not done."""
    frame = history.newest
    table = _table("copies", "", "MB/s", "pages/s", "pages", "on the way", "GB/s while copying")
    lines = []
    for kind, name in COPIES.items():
        copies = frame.copies(kind)
        if not copies.num_wanted:
            continue
        num_bytes = history.rate(lambda each, kind=kind: each.copies(kind).num_bytes / 1e6)  # type: ignore[misc]
        num_pages = history.rate(lambda each, kind=kind: each.copies(kind).num_fulfilled)  # type: ignore[misc]
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in copies.unfulfilled.items() if count)
        lines += [f"{name}, pages not copied: {reasons}"] if reasons else []
        speed = f"{copies.num_bytes / copies.seconds / 1e9:,.2f}" if copies.seconds else "–"
        counts = (f"{copies.num_fulfilled:,}", f"{copies.num_in_flight:,}")
        table.add_row(name, _plain(num_bytes), _plain(num_pages), *counts, speed)
    if not table.row_count:
        return Text("no copies between tiers yet", style="bright_black")
    return Group(table, *map(Text, lines))


def _workers(history: FrameHistory, *, is_narrow: bool) -> RenderableType:
    """Shows every worker; a narrow board leaves out its process id and what the tiers show of all workers."""
    names = ("life", "running", "waiting", "steps/s", "tokens/s", "pages free")
    table = _table("workers", "worker", *names, *([] if is_narrow else ["evictable", "process"]))
    for worker in history.newest.workers:
        stats = worker.stats
        table.add_row(
            str(worker.replica),
            str(worker.incarnation) if worker.incarnation < 2 else f"[yellow]{worker.incarnation}[/yellow]",
            f"{number(stats, 'running'):,.0f}",
            f"{number(stats, 'waiting'):,.0f}",
            _plain(_worker_rate(history, worker, "steps")),
            _plain(_worker_rate(history, worker, "generated_tokens")),
            f"{number(stats, 'free_pages'):,.0f} of {worker.num_pages:,}",
            *([] if is_narrow else [f"{number(stats, 'evictable_pages'):,.0f}", str(worker.pid)]),
        )
    return table


def _worker_rate(history: FrameHistory, worker: WorkerInfo, name: str) -> float | None:
    """Returns how fast one worker's counter grows."""

    def value(frame: Frame) -> float:
        return sum(number(each.stats, name) for each in frame.workers if each.replica == worker.replica)

    return history.rate(value)


_PARTS = ((USED, "used"), (EVICTABLE, "evictable"), (FREE, "free"))


def _bar(used: float, evictable: float, free: float, width: int) -> Text:
    """Returns the parts of a tier in proportion; what is there at all is at least one cell wide."""
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


def _plain(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:,.0f}{unit}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
