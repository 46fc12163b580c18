"""The tables on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hiserve.bench.goodput import Goodput
from hiserve.bench.multiturn import Round
from hiserve.bench.offline import OfflineSummary
from hiserve.bench.summary import Spread, Summary
from hiserve.bench.workload import Run, Workload

# Above this share of a core the load generator may be what is measured.
BUSY_CLIENT = 0.7
MAX_SHOWN_ERRORS = 5


def show_run(console: Console, title: str, summary: Summary) -> None:
    """Shows throughput, then latencies."""
    table = pairs(title)
    table.add_row("requests that ended well", f"{summary.num_ok:,} of {summary.num_requests:,}")
    for kind, count in summary.errors.items():
        table.add_row(f"[red]failed: {escape(kind)}[/red]", f"[red]{count:,}[/red]")
    if summary.num_silent:
        table.add_row("[yellow]replies without text (no TTFT)[/yellow]", f"{summary.num_silent:,}")
    table.add_row("duration", f"{summary.duration_s:.2f} s")
    table.add_row("input tokens", f"{summary.num_prompt:,}")
    share = summary.cached_share
    table.add_row("  of these cached", "not told" if share is None else f"{summary.num_cached:,} ({share:.1%})")
    table.add_row("output tokens", f"{summary.num_output:,}{'' if summary.has_usage else ' (chunks; no usage told)'}")
    table.add_section()
    table.add_row("request throughput", f"{summary.requests_per_s:.2f} requests/s")
    table.add_row("input throughput", f"{summary.input_tokens_per_s:,.1f} tokens/s")
    table.add_row("[bold]output throughput[/bold]", f"[bold]{summary.output_tokens_per_s:,.1f} tokens/s[/bold]")
    if summary.steady is not None:
        steady = summary.steady
        span = f"{steady.begin_s:.1f} to {steady.end_s:.1f} s, ≥ {steady.min_in_flight} in flight"
        table.add_row("  without ramp and tail", f"{steady.output_tokens_per_s:,.1f} tokens/s ({span})")
    table.add_row("total throughput", f"{summary.total_tokens_per_s:,.1f} tokens/s")
    table.add_row("in flight, peak and mean", f"{summary.peak_in_flight} and {summary.mean_in_flight:.1f}")
    busy = f"{summary.client_cpu_share:.1%} of a core"
    table.add_row("load generator", f"[red]{busy}: too busy[/red]" if summary.client_cpu_share > BUSY_CLIENT else busy)
    console.print(table)
    console.print(_latencies(summary))


def _latencies(summary: Summary) -> Table:
    table = columns("milliseconds", "", "mean", "median", "p90", "p99", "values")
    _add_spread(table, "TTFT (first token)", summary.ttft_ms)
    _add_spread(table, "TPOT (per request)", summary.tpot_ms)
    _add_spread(table, "ITL per chunk", summary.itl_chunk_ms)
    _add_spread(table, "ITL per token", summary.itl_token_ms)
    _add_spread(table, "E2EL (whole request)", summary.e2el_ms)
    _add_spread(table, "waited to be sent", summary.late_ms)
    return table


def _add_spread(table: Table, name: str, spread: Spread | None) -> None:
    if spread is None or not spread.count:
        table.add_row(name, *["–"] * 4, "not told" if spread is None else "0")
        return
    values = (spread.mean, spread.median, spread.p90, spread.p99)
    table.add_row(name, *(f"{value:,.2f}" for value in values), f"{spread.count:,}")


def show_errors(console: Console, run: Run) -> None:
    """Shows what failures said, the most frequent first."""
    said = Counter((sample.error, sample.detail) for sample in run.samples if sample.error)
    for (kind, detail), count in said.most_common(MAX_SHOWN_ERRORS):
        console.print(f"[red]{count:,} × {escape(kind)}:[/red] {escape(detail)}", soft_wrap=True)


def show_notes(console: Console, workload: Workload) -> None:
    """Shows what was done to the data."""
    if workload.notes:
        done = ", ".join(f"{name.replace('_', ' ')}: {count:,}" for name, count in workload.notes.items())
        console.print(
            f"{workload.name}, {workload.num_turns:,} requests in {len(workload.sessions):,} sessions; {done}"
        )


def show_goodput(console: Console, found: Goodput) -> None:
    """Shows goodput and how many requests met each objective."""
    table = pairs("goodput")
    table.add_row("[bold]goodput[/bold]", f"[bold]{found.requests_per_s:.2f} requests/s[/bold]")
    table.add_row("requests that met all", f"{found.num_good:,} ({found.attainment:.1%})")
    for name, limit_ms in found.objectives_ms.items():
        table.add_row(f"  {name.upper()} ≤ {limit_ms:g} ms", f"{found.attainment_of[name]:.1%}")
    console.print(table)


def show_rounds(console: Console, rounds: Sequence[Round], num_without_ids: int) -> None:
    """Shows TTFT and hit rate, round by round."""
    names = ("round", "ok", "TTFT median ms", "p90", "p99", "prompt tokens", "hit rate", "best possible")
    table = columns("rounds", *names)
    for each in rounds:
        ttft = each.ttft_ms
        hit = "not told" if each.hit_rate is None else f"{each.hit_rate:.1%}"
        cells = (f"{ttft.median:,.2f}", f"{ttft.p90:,.2f}", f"{ttft.p99:,.2f}", f"{each.num_prompt:,}")
        table.add_row(str(each.number), f"{each.num_ok:,}", *cells, hit, f"{each.best_hit_rate:.1%}")
    console.print(table)
    if num_without_ids:
        console.print(
            f"[yellow]{num_without_ids:,} replies came without token ids; later prompts go on without them.[/yellow]"
        )


def show_offline(console: Console, title: str, summary: OfflineSummary) -> None:
    """Shows throughput."""
    table = pairs(title)
    table.add_row("requests", f"{summary.num_requests:,}")
    table.add_row("duration", f"{summary.duration_s:.2f} s")
    table.add_row("input tokens", f"{summary.num_prompt:,}")
    table.add_row("  of these cached", f"{summary.num_cached:,}")
    table.add_row("output tokens", f"{summary.num_output:,}")
    table.add_section()
    table.add_row("request throughput", f"{summary.requests_per_s:.2f} requests/s")
    table.add_row("input throughput", f"{summary.input_tokens_per_s:,.1f} tokens/s")
    table.add_row("[bold]output throughput[/bold]", f"[bold]{summary.output_tokens_per_s:,.1f} tokens/s[/bold]")
    table.add_row("total throughput", f"{summary.total_tokens_per_s:,.1f} tokens/s")
    console.print(table)


def columns(title: str, *names: str, left: str = "") -> Table:
    """Returns a table with a name over each column; numbers stand right, the column named ``left`` does not."""
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name == left else "right")
    return table


def pairs(title: str) -> Table:
    """Returns a table of names and values."""
    table = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    return table
