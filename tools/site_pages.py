"""A hook of mkdocs: takes pages of the repository's root into the site, and points links at their place there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING")
NAMES = "|".join(PAGES)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds each page of the root, its links relative to ``docs``."""
    for name in PAGES:
        text = (ROOT / f"{name}.md").read_text().replace("](docs/", "](")
        files.append(File.generated(config, f"{name.lower()}.md", content=_lowered(text, "")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to a page of the root at that page of the site, which is one folder nearer."""
    return _lowered(markdown, r"\.\./")


def _lowered(text: str, above: str) -> str:
    """Renames links to pages of the root; drops ``above``, a pattern, before each name."""
    return re.sub(rf"\]\(((?:\.\./)*){above}({NAMES})\.md", lambda found: f"]({found[1]}{found[2].lower()}.md", text)
