"""The tables of a cache on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hiserve.bench.cache.cache_run import CacheOutcome
from hiserve.bench.cache.cache_summary import CacheSummary
from hiserve.bench.report import columns, pairs


def show_cache(console: Console, found: CacheOutcome, summary: CacheSummary) -> None:
    """Shows hit rates beside those of an endless cache, then TTFT by kind of hit."""
    console.print(_hits(found, summary))
    console.print(_latencies(summary))
    if summary.num_above_most:
        console.print(
            f"[yellow]{summary.num_above_most:,} requests found more than an endless cache: the server's was not "
            "empty when the run began. Give --flush-cache; a store is emptied by POST /flush_cache?tier=store.[/yellow]"
        )
    if found.num_differing:
        console.print(
            f"[yellow]{found.num_differing:,} prompts are of another length to the server than to the endless "
            "cache.[/yellow]"
        )


def _hits(found: CacheOutcome, summary: CacheSummary) -> Table:
    table = pairs(f"cache, pages of {found.page_size} tokens")
    if summary.hit_rate is None:
        table.add_row("hit rate", "not told")
    else:
        table.add_row("[bold]hit rate[/bold]", f"[bold]{summary.hit_rate:.2%}[/bold]")
        for tier, rate in summary.hit_rate_of.items() if summary.tells_tiers else ():
            table.add_row(f"  {tier}", f"{rate:.2%}")
    table.add_row("endless cache", f"{summary.least_hit_rate:.2%} to {summary.most_hit_rate:.2%}")
    if summary.share_of_most is not None:
        table.add_row("  share of the most", f"{summary.share_of_most:.4f}")
    for reason, count in summary.misses.items():
        table.add_row(f"requests that missed: {escape(reason)}", f"{count:,}")
    table.add_section()
    table.add_row("input throughput", f"{summary.input_tokens_per_s:,.1f} tokens/s")
    if summary.later_input_tokens_per_s is not None:
        table.add_row("  from second requests on", f"{summary.later_input_tokens_per_s:,.1f} tokens/s")
    if any(copied.num_pages for copied in found.copies.values()):
        table.add_section()
    for kind, copied in found.copies.items():
        if copied.num_pages:
            speed = "" if copied.bytes_per_s is None else f" at {copied.bytes_per_s / 1e9:,.2f} GB/s"
            table.add_row(kind, f"{copied.num_pages:,} pages, {copied.num_bytes / 1e6:,.1f} MB{speed}")
        for reason, count in copied.unfulfilled.items():
            table.add_row(f"  not done: {escape(reason)}", f"{count:,} pages")
    for note in found.notes:
        table.add_row("[yellow]not told[/yellow]", escape(note))
    return table


def _latencies(summary: CacheSummary) -> Table:
    table = columns("TTFT by kind of hit, milliseconds", "", "median", "p90", "p99", "requests")
    for kind, spread in summary.ttft_ms.items():
        if spread.count:
            values = (spread.median, spread.p90, spread.p99)
            table.add_row(kind, *(f"{value:,.2f}" for value in values), f"{spread.count:,}")
    return table
