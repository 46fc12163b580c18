"""``hiserve config``: what the settings resolve to here, and the memory they take."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hiserve.config import Config, flag_of, settings
from hiserve.core.machine import probe
from hiserve.core.resolve import GIB, resolve
from hiserve.models.shapes import read_model


def run(config: Config) -> int:
    """Prints every setting with its resolved value, then memory item by item."""
    _, model = read_model(config.model)
    machine = probe()
    resolved = resolve(config, model.facts(), machine)
    table = Table(title="settings")
    for name in ("section", "flag", "given", "resolved", "unit"):
        table.add_column(name)
    for setting in settings().values():
        given, value = (getattr(getattr(each, setting.section), setting.name) for each in (config, resolved.config))
        table.add_row(setting.section, flag_of(setting.name), str(given), str(value), setting.unit or "")
    memory = Table(title="memory of one worker")
    memory.add_column("item")
    memory.add_column("GiB", justify="right")
    for item, num_bytes in resolved.memory.items():
        memory.add_row(item, f"{num_bytes / GIB:.3f}")
    memory.add_row("total", f"{sum(resolved.memory.values()) / GIB:.3f}", style="bold")
    on_cpu = resolved.config.model.device == "cpu"
    available = machine.memory_bytes if on_cpu else machine.cuda_memory_bytes
    memory.add_row("available", f"{available / GIB:.3f}", style="dim")
    console = Console()
    console.print(table)
    console.print(memory)
    return 0
