"""``hiserve config``: what the settings resolve to here, and the memory they take."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hiserve.cache.storage.host_segment import probe_segments
from hiserve.config import Config, Setting, flag_of, settings
from hiserve.core.devices import least_memory
from hiserve.core.machine import probe
from hiserve.core.resolve import GIB, resolve
from hiserve.models.builtin_shapes import read_model
from hiserve.models.draft_config import model_facts


def run(config: Config) -> int:
    """Prints every setting with its resolved value, then memory item by item."""
    folder, model = read_model(config.model)
    machine = probe_segments(config, probe())
    resolved = resolve(config, model_facts(config, folder, model), machine)
    table = Table(title="settings")
    table.add_column("flag", no_wrap=True)
    for name in ("given", "resolved", "unit"):
        table.add_column(name, overflow="fold")
    section = None
    for setting in settings().values():
        if setting.section != section:
            section = setting.section
            table.add_section()
            table.add_row(f"[bold]{section}[/bold]")
        given, value = (getattr(getattr(each, setting.section), setting.name) for each in (config, resolved.config))
        shown = [escape(_shown(setting, each)) for each in (given, value)]
        # The model is the one setting without a flag.
        table.add_row("MODEL" if setting.name == "model" else flag_of(setting.name), *shown, setting.unit or "")
    on_cpu = resolved.config.model.device == "cpu"
    console = Console()
    console.print(table)
    if not on_cpu:
        console.print(
            _memory(
                "device memory of one worker", resolved.memory, least_memory(resolved.config, machine.cuda_memory_bytes)
            )
        )
    items = resolved.memory if on_cpu else resolved.host_memory
    console.print(_memory("memory of one worker", items, machine.memory_bytes))
    return 0


def _shown(setting: Setting, value: object) -> str:
    """Returns a value as text; empty if not given, and without keys."""
    if value is None or value == ():
        return ""
    return "(hidden)" if setting.is_secret else str(value)


def _memory(title: str, items: dict[str, int], available: int) -> Table:
    """Lists bytes item by item, their sum, and the memory for all workers."""
    table = Table(title=title)
    table.add_column("item")
    table.add_column("GiB", justify="right")
    for item, num_bytes in items.items():
        table.add_row(item, f"{num_bytes / GIB:.3f}")
    table.add_row("total", f"{sum(items.values()) / GIB:.3f}", style="bold")
    table.add_row("available", f"{available / GIB:.3f}", style="dim")
    return table
