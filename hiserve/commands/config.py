"""``hiserve config``: the settings that options resolve to on this machine, and their memory."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hiserve.config.flags import Flag, flag_of
from hiserve.config.options import Options, by_group
from hiserve.core.machine import GIB, probe
from hiserve.launch import prepare


def run(options: Options) -> int:
    """Prints every option with its value, then memory item by item, and the reason of each size."""
    launch = prepare(options, probe())
    resolved, memory = launch.resolved, launch.resolved.memory
    table = Table(title="settings")
    table.add_column("flag", no_wrap=True)
    for name in ("given", "resolved", "unit"):
        table.add_column(name, overflow="fold")
    for group, members in groupby(by_group(), key=lambda flag: flag.group):
        table.add_section()
        table.add_row(f"[bold]{group}[/bold]")
        for flag in members:
            both = (getattr(getattr(each, flag.section), flag.name) for each in (options, resolved.settings))
            # The model is the one option without a flag.
            name = "MODEL" if flag.name == "model" else flag_of(flag.name)
            table.add_row(name, *(escape(_shown(flag, value)) for value in both), flag.unit or "")
    console = Console()
    console.print(table)
    available = launch.machine.memory_bytes
    on_cpu = resolved.settings.model.device == "cpu"
    if not on_cpu:
        console.print(_memory("device memory of one worker", memory.parts, memory.free))
    console.print(_memory("memory of one worker", memory.parts if on_cpu else memory.host_parts, available))
    for line in memory.lines():
        console.print(f"- {line}")
    return 0


def _shown(flag: Flag, value: object) -> str:
    """Returns a value as text; empty if not given, and without keys."""
    if value is None or value == ():
        return ""
    return "(hidden)" if flag.is_secret else str(value)


def _memory(title: str, items: dict[str, int], available: int) -> Table:
    """Lists bytes item by item, their sum, and the memory available to all workers."""
    table = Table(title=title)
    table.add_column("item")
    table.add_column("GiB", justify="right")
    for item, num_bytes in items.items():
        table.add_row(item, f"{num_bytes / GIB:.3f}")
    table.add_row("total", f"{sum(items.values()) / GIB:.3f}", style="bold")
    table.add_row("available", f"{available / GIB:.3f}", style="dim")
    return table
