"""The tables of a soak on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hiserve.bench.report import columns, pairs
from hiserve.bench.soak.soak_summary import SoakFigures

MAX_SHOWN = 8


def show_soak(console: Console, title: str, found: SoakFigures) -> None:
    """Shows what became of the requests, then the faults, latencies beside them, memory, and what must not be."""
    table = pairs(title)
    for outcome, count in found.outcomes.items():
        table.add_row(f"requests: {escape(outcome)}", f"{count:,}")
    table.add_row("duration", f"{found.duration_s:.1f} s")
    if found.num_processes:
        lived = ", ".join(f"{count} {role}" for role, count in found.num_processes.items())
        table.add_row("processes that lived", lived)
    judged = "token by token" if found.is_exact else "by their ends alone: not a server in float64"
    table.add_row("replies compared", judged)
    console.print(table)
    if found.faults:
        console.print(_faults(found))
    console.print(_latencies(found))
    if found.growth:
        console.print(_memory(found))
    if found.num_violations:
        console.print(f"[red]violations: {found.num_violations:,}[/red]")
        for violation in found.violations[:MAX_SHOWN]:
            console.print(f"[red]  {escape(violation)}[/red]", soft_wrap=True)
    else:
        console.print("[green]nothing that must not be[/green]")


def _faults(found: SoakFigures) -> Table:
    table = columns("faults", "at", "fault", "requests open", "ready again", "first new token", left="fault")
    for fault in found.faults:
        told = ["–" if seconds is None else f"{seconds:.2f} s" for seconds in (fault.ready_s, fault.recovery_s)]
        table.add_row(f"{fault.at_s:.1f} s", f"{fault.fault}: {escape(fault.what)}", f"{fault.num_open}", *told)
    return table


def _latencies(found: SoakFigures) -> Table:
    table = columns("milliseconds", "", "p50", "p99", "requests")
    for name, latencies in (("calm", found.calm), ("beside faults", found.beside_faults)):
        for kind, spread in (("TTFT", latencies.ttft_ms), ("TPOT", latencies.tpot_ms)):
            if spread.count:
                table.add_row(f"{kind}, {name}", f"{spread.median:,.2f}", f"{spread.p99:,.2f}", f"{spread.count:,}")
    return table


def _memory(found: SoakFigures) -> Table:
    table = columns("memory", "process", "over", "at the end", "growth", "")
    for grown in found.growth:
        slope = f"{grown.mib_per_min:+.2f} MiB/min"
        remark = "" if grown.is_judged else "too short to judge"
        table.add_row(f"{grown.role} {grown.pid}", f"{grown.seconds:.0f} s", f"{grown.last_mib:.0f} MiB", slope, remark)
    return table
