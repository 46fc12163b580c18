"""``hiserve cache``: lists and deletes named host caches and stores, which outlive servers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hiserve.cache.storage.inventory import Leftover, delete_named_cache, delete_store, named_caches, store_in
from hiserve.cache.storage.segment import SHARED_MEMORY
from hiserve.config.options import Options
from hiserve.core.machine import GIB
from hiserve.errors import ConfigError

STORE = "file:"


def add_arguments(parser: argparse.ArgumentParser, add_settings: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds the command's own arguments; the command uses no setting of the engine."""
    parser.add_argument("action", choices=("list", "delete"), metavar="list|delete", help="What to do.")
    parser.add_argument(
        "targets",
        nargs="*",
        default=[],
        metavar="NAME|file:DIR",
        help="Host caches by --host-cache-name, stores as in --store. list shows all host caches, and the stores given.",
    )


def run(config: Options, action: str, targets: list[str], directory: Path = SHARED_MEMORY) -> int:
    """Lists or deletes; returns the exit status.

    Args:
        config: Unused.
        action: ``list`` or ``delete``.
        targets: Names of host caches, and stores as ``file:DIR``.
        directory: Directory of named host caches.

    Raises:
        ConfigError: A target does not exist or is not hiserve's; ``delete`` without a target.
        ResourceError: A server uses it.
    """
    console = Console(highlight=False, soft_wrap=True)
    if action == "delete":
        if not targets:
            raise ConfigError("name what to delete: hiserve cache delete NAME, or file:DIR for a store.")
        for target in targets:
            console.print(_delete(target, directory), markup=False)
        return 0
    names = [target for target in targets if not target.startswith(STORE)]
    found = [each for each in named_caches(directory) if not names or each.name in names]
    if missing := set(names) - {each.name for each in found}:
        raise ConfigError(f"there is no host cache named {sorted(missing)[0]!r} in {directory}.")
    found += [store_in(_directory(target)) for target in targets if target.startswith(STORE)]
    none = f"no named host cache in {directory}; give stores as file:DIR"
    console.print("\n".join(_lines(found)) if found else none, markup=False)
    return 0


def _delete(target: str, directory: Path) -> str:
    if target.startswith(STORE):
        return f"{target}: deleted, {delete_store(_directory(target))} pages"
    return f"{target}: deleted, {delete_named_cache(target, directory) / GIB:.3g} GiB of memory are free again"


def _directory(store: str) -> Path:
    return Path(store.removeprefix(STORE)).expanduser().absolute()


def _line(name: str, size: str, pages: str, used: str, state: str) -> str:
    return f"{name:32} {size:>9} {pages:>20}  {used:16}  {state}"


def _lines(found: list[Leftover]) -> list[str]:
    lines = [_line("name", "GiB", "pages", "last used", "state")]
    for each in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used_s))
        state = each.trouble or ("in use" if each.is_used else "free")
        pages = f"{each.num_pages} of {each.page_size} tokens" if each.page_size else str(each.num_pages)
        lines.append(_line(each.name, f"{each.num_bytes / GIB:.3f}", pages, used, state))
    return lines
