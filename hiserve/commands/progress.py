"""Progress bar of a long command: number, rate, time left, and figures so far."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from hiserve.bench.load import Advance, Begin


class _Rate(ProgressColumn):
    """Steps a second, over the last ones."""

    def render(self, task: Task) -> Text:
        """Returns the rate; nothing until there is one."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f}/s", style="progress.data.speed")


@contextlib.contextmanager
def progress(unit: str) -> Iterator[Begin]:
    """Shows a bar on standard error where that is a terminal, so that results may go into a pipe or a file.

    Args:
        unit: Name of the things that are counted.

    Yields:
        A function to call with the number of things, None if it is unknown; it returns a function to call after each.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[so_far]}"),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("preparing", total=None, so_far="")

        def begin(total: int | None) -> Advance:
            bar.update(task, description=unit, total=total)
            return lambda so_far: bar.update(task, advance=1, so_far=escape(so_far))

        yield begin
