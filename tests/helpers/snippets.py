"""The fenced blocks of documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = "http://localhost:8000"  # the server of the page for agents
NEEDS_AGENTS = "import agents\n"  # its package wants a newer openai: tests/clients runs it


def snippets(page: str) -> list[tuple[str, str]]:
    """Language and text of each block of a page."""
    return FENCE.findall((ROOT / page).read_text())


def of_agents(language: str) -> list[str]:
    """The blocks of the page for agents in a language."""
    return [text for each, text in snippets("docs/agents.md") if each == language]
