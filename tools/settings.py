"""Writes ``docs/settings.md`` from the settings themselves: ``python -m tools.settings [--check]``."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from hiserve.config.flags import Flag, flag_of
from hiserve.config.options import by_group

PATH = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Every setting is a flag of `hiserve serve`, `chat`, `generate`, `config`, `doctor` and `bench offline`, a key of the YAML
file given with `--config` (flags win), and a keyword argument of `hiserve.LLM`. This page is written by
`python -m tools.settings` from the sections in `hiserve/config/`.
"""
DEBUG_NOTE = "For measurements, tests and searches for errors; `--help` leaves these out.\n\n"


def takes(setting: Flag) -> str:
    """Returns the values of a setting, in words."""
    if setting.kind == "bool":
        return "on if given"
    if setting.kind in ("int", "float"):
        number = f"{setting.least:,} to {setting.most:,}" + (f" {setting.unit}" if setting.unit else "")
        return " or ".join([number, *(f"`{word}`" for word in setting.choices)])
    if setting.choices:
        return ", ".join(f"`{word}`" for word in setting.choices)
    return "text, several times" if setting.is_list else "text"


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    for section, members in groupby(by_group(), key=lambda setting: setting.group):
        note = DEBUG_NOTE if section == "debug" else ""
        parts.append(f"\n## {section.capitalize()}\n\n{note}| flag | values | default | meaning |\n|---|---|---|---|\n")
        for setting in members:
            name = "MODEL" if setting.name == "model" else flag_of(setting.name)
            default = f"`{setting.default}`" if setting.has_default else ""
            parts.append(f"| `{name}` | {takes(setting)} | {default} | {setting.help} |\n")
    return "".join(parts)


def main() -> int:
    """Writes the page; with ``--check``, returns 1 if it is out of date."""
    if "--check" in sys.argv:
        return int(not PATH.is_file() or PATH.read_text() != page())
    PATH.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
