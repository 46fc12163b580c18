"""What the linters cannot say: sizes, docstrings, imports between tests, what importing costs, versions, no environment."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import hiserve
from hiserve.cli import COMMANDS

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "hiserve").rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

TORCH_FREE = (
    "hiserve",
    "hiserve.cli",
    *(module for module, _, _ in COMMANDS.values()),
    "hiserve.scheduler.process",
    "hiserve.server.app",
    "hiserve.spec.adaptive",
    "hiserve.engine.planner",
    "hiserve.engine.service",
)
HEAVY = {"torch", "triton", "flashinfer", "transformers"}
# What each module has loaded of these, with all that were imported before it: if one loads any, the first that does is told.
LISTING = """
import importlib, sys
heavy, *modules = sys.argv[1:]
for module in modules:
    importlib.import_module(module)
    print(module, *(name for name in heavy.split() if name in sys.modules))
"""


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, the docstring not counted."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


# Shows each worker its device in the one way that CUDA knows, a variable in its environment.
HANDS_ON_ENVIRONMENT = "hiserve/core/devices.py"


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_package_is_where_the_test_looks() -> None:
    assert Path(hiserve.__file__) in FILES
    assert len(FILES) > 50


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {named(path): ast.parse(path.read_text()) for path in FILES}


def test_files_say_what_they_are_for_and_stay_short(trees: dict[str, ast.Module]) -> None:
    assert [name for name, tree in trees.items() if not ast.get_docstring(tree)] == [], "they have no docstring"
    long = {named(path): lines for path in FILES if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert long == {}
    sizes = {(name, function.name): num_lines(function) for name, tree in trees.items() for function in functions(tree)}
    assert {place: lines for place, lines in sizes.items() if lines > MAX_FUNCTION_LINES} == {}


def test_nothing_reads_the_environment(trees: dict[str, ast.Module]) -> None:
    found: dict[str, set[str]] = {}
    for name, tree in trees.items():
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        found[name] = (attributes | imported) & {"environ", "environb", "getenv", "getenvb"}
    assert [name for name, words in found.items() if words] == [HANDS_ON_ENVIRONMENT]


def test_importing_the_planning_half_and_the_front_end_loads_no_torch() -> None:
    command = [sys.executable, "-c", LISTING, " ".join(HEAVY), *TORCH_FREE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(TORCH_FREE), "each module, and behind it nothing heavy"


INDEX = ROOT / "hiserve/cache/index"


def test_every_file_of_the_index_but_its_contract_is_protected() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [each for each in contracts if each["id"] == "index-one-contract"]
    files = {f"hiserve.cache.index.{path.stem}" for path in INDEX.glob("*.py")} - {"hiserve.cache.index.__init__"}
    assert files - set(contract["protected_modules"]) == {"hiserve.cache.index.prefix_cache"}
    assert set(contract["protected_modules"]) <= files


def parts_of_the_index() -> set[str]:
    """What ``PrefixCache`` is made of: public for checks, and no part of the contract, but for ``store``."""
    tree = ast.parse((INDEX / "prefix_cache.py").read_text())
    (init,) = [each for each in functions(tree) if each.name == "__init__"]
    made = [node for node in ast.walk(init) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    targets = [target.attr for node in made for target in node.targets if isinstance(target, ast.Attribute)]
    return {name for name in targets if not name.startswith("_")} - {"store"}


def reached(text: str) -> set[str]:
    """The parts of the index that a file reads on a ``cache``, past the contract."""
    attributes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    names = [(node.attr, getattr(node.value, "attr", getattr(node.value, "id", ""))) for node in attributes]
    return {attr for attr, value in names if value.endswith("cache") and attr in parts_of_the_index()}


def test_nothing_reaches_into_the_index_past_its_contract() -> None:
    users = [path for path in FILES if INDEX not in path.parents and "prefix_cache import" in path.read_text()]
    assert len(users) >= 8
    assert {named(path): parts for path in users if (parts := reached(path.read_text()))} == {}
    assert reached("self._cache.tiers.clock += cache.device.pages.num_free") == {"tiers", "device"}


def test_no_test_module_imports_from_another() -> None:
    """Programs inside strings count too. The mutants name test modules as the addresses of their tests."""
    tests = ROOT / "tests"
    folder = r"tests(?:\.\w+)*"
    imported = re.compile(
        rf"^\s*(?:from|import) {folder}\.test_\w+|^\s*from {folder} import .*\btest_\w+", re.MULTILINE
    )
    found = [
        f"{path.relative_to(tests)}: {line[0].strip()}"
        for path in sorted(tests.rglob("*.py"))
        if not path.is_relative_to(tests / "mutants")
        for line in imported.finditer(path.read_text())
    ]
    assert not found, "what tests share lives in tests/helpers or in a module beside them: " + "; ".join(found)


def test_the_changelog_and_the_project_file_know_the_version() -> None:
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert released[0] == hiserve.__version__
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'^version = "([^"]+)"$', project, flags=re.MULTILINE) == [hiserve.__version__]
