"""The documentation: generated pages are current, links and paths lead somewhere, tables name what the code has, the site builds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hiserve.cache.index.prefix_cache import MissReason
from hiserve.runners.gate import Reason
from tools import picture

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)")
PYTHON = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")
# Pages whose paths must exist. The changelog speaks of the past.
OF_CODE = [page for page in PAGES if page.name != "CHANGELOG.md"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def section(page: str, title: str) -> str:
    """The text from a heading to the next of its level."""
    text = (ROOT / page).read_text()
    level = title.split()[0]
    _, found, rest = text.partition(f"{title}\n")
    assert found, f"{page} has no section {title}"
    return rest.split(f"\n{level} ")[0]


@pytest.mark.parametrize(("page", "most"), [("README.md", 120), ("ARCHITECTURE.md", 140)])
def test_a_page_for_newcomers_stays_one_page(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_the_readme_has_no_dates_and_no_misses() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"20\d\d-\d\d|missed", text) == []


def test_the_picture_is_what_its_script_draws() -> None:
    assert picture.PATH.read_text() == picture.picture(), "run python -m tools.picture"
    assert picture.PATH.name in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_to_a_file_resolves(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", OF_CODE, ids=name_of)
def test_every_source_file_and_name_that_a_page_mentions_exists(page: Path) -> None:
    """A file is named from the root, from ``hiserve``, or by its name alone."""
    lost = []
    for path, name in PYTHON.findall(page.read_text()):
        if "NAME" in path:
            continue
        found = [each for each in (ROOT / path, ROOT / "hiserve" / path) if each.is_file()]
        found = found or [each for top in ("hiserve", "tests") for each in (ROOT / top).rglob(f"**/{path}")]
        if not any(name.split(".")[-1] in each.read_text() for each in found):
            lost.append(f"{path}:{name}")
    assert lost == []


def test_the_methods_to_implement_are_those_of_the_protocols() -> None:
    """CONTRIBUTING names a protocol as ``path:Name``; names in brackets after it are its methods or attributes."""
    found = re.findall(
        r"Implement `([\w/]+\.py):(\w+)` \(((?:`\w+`(?:, )?)+)\)", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert len(found) >= 2
    for path, name, listed in found:
        tree = ast.parse((ROOT / "hiserve" / path).read_text())
        kind = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        has = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)} | {
            target.id
            for node in kind.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        assert set(re.findall(r"\w+", listed)) <= has, f"{path}:{name}"


def test_the_tables_of_the_cache_name_each_file() -> None:
    rows = [
        line.split("|")[1]
        for line in (ROOT / "docs/design/cache.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    named = re.findall(r"`(\w+)`", " ".join(rows))
    files = [path.stem for room in ("index", "storage") for path in (ROOT / "hiserve/cache" / room).glob("[!_]*.py")]
    assert sorted(named) == sorted(files)


def test_the_tests_of_every_invariant_exist() -> None:
    rows = [line for line in (ROOT / "docs" / "invariants.md").read_text().splitlines() if re.match(r"\| H?\d", line)]
    numbers = [row.split("|")[1] for row in rows]
    assert len(numbers) == len(set(numbers)) >= 62
    for row in rows:
        paths = re.findall(r"`(tests/[\w/.]+)`", row)
        assert paths or "`hiserve bench soak`" in row, row
        assert [path for path in paths if not (ROOT / path).exists()] == [], row
        named = re.findall(r"`(tests/[\w/.]+\.py)` \(`(test_\w+)`\)", row)
        assert all(f"def {name}(" in (ROOT / path).read_text() for path, name in named), row


def test_each_reported_failure_has_a_test_of_its_number_or_a_reason() -> None:
    rows = re.findall(
        r"\| HB-(\d+) \| .* \| (.*) \|", section("docs/invariants.md", "## Reported failures of hybrid caches")
    )
    assert [int(number) for number, _ in rows] == list(range(1, 23))
    for number, guard in rows:
        paths = re.findall(r"`(tests/[\w/]+\.py)`", guard)
        assert paths or guard.startswith("does not apply yet: "), number
        assert all(f"def test_hb_{number}_" in (ROOT / path).read_text() for path in paths), number


def test_the_table_of_the_gate_names_each_reason() -> None:
    lines = [line for line in section("ARCHITECTURE.md", "## The gate").splitlines() if line.startswith("|")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(line.split("|")[3] for line in lines))) == sorted(
        reason.value for reason in Reason
    )


def test_the_api_page_names_each_reason_of_a_miss() -> None:
    named = re.findall(r"^\| `(\w+)` \|", section("docs/api.md", "### Usage"), re.MULTILINE)
    assert sorted(named) == sorted(MissReason)


def test_the_table_of_rooms_names_each_room() -> None:
    named = set(re.findall(r"`([\w/]+)`", section("ARCHITECTURE.md", "## Rooms")))
    rooms = {path.stem for path in (ROOT / "hiserve").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert rooms - {"__init__", "__pycache__", "py", "cache"} <= named
    assert {"cache/index", "cache/storage"} <= named


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert {"architecture.html", "figures.html", "index.html"} <= {page.name for page in pages}
    for page in pages:
        html = page.read_text()
        assert re.findall(r"<(?:script|img)[^>]*\ssrc=\"(?:https?:)?//[^\"]*", html) == [], page
        assert re.findall(r"<link[^>]*\shref=\"(?:https?:)?//[^\"]*", html) == [], page
