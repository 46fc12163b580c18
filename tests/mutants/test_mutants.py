"""Tests of the mutants' own tools: matching on the tree, the form of the catalogue, the verdicts of a run."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from tests.mutants import entries, run
from tests.mutants.mutant import Mutant

SOURCE = '''
"""Words: ä is a letter of two bytes."""

LIMIT = 3


def share(rows, left):
    """Cuts rows."""
    for row in rows:  # ä
        yield "ä", min(
            row.wanted,  # what it wants
            left,
        ) - row.done
        left -= row.done


if LIMIT:

    class Table:
        def give(self, pages):
            assert pages, "no pages"
            self.free += pages
            self.free += pages

        @property
        def num_free(self):
            def count(pages):
                return len(pages)

            return count(self.free)
'''


def made(before: str, after: str, scope: str = "share", which: int | None = None) -> Mutant:
    (pattern,) = ast.parse(before).body
    return Mutant(
        title="t",
        path="a.py",
        scope=tuple(filter(None, scope.split("."))),
        before=pattern,
        after=tuple(ast.parse(after).body),
        which=which,
        tests=(),
    )


@pytest.mark.parametrize(
    ("mutant", "old", "new"),
    [
        (made("min(row.wanted, left)", "left"), "min(\n            row.wanted,  # what it wants\n            left,\n        )", "(left)"),
        (made("row.wanted", "1 if left else 2"), "row.wanted,", "(1 if left else 2),"),
        (made("left -= row.done", "pass"), "left -= row.done", "pass"),
        (made("left -= row.done", "a = 1\nif a:\n    b"), "left -= row.done", "a = 1\n        if a:\n            b"),
        (made("rows", "rows[1:]"), "in rows:", "in (rows[1:]):"),
        (made("pages", "True", "Table.give", 1), "assert pages,", "assert (True),"),
        (made("assert pages, 'no pages'", "pass", "Table.give"), 'assert pages, "no pages"', "pass"),
        (made("len(pages)", "0", "Table.num_free.count"), "len(pages)", "(0)"),
        (made("property", "cached_property", "Table.num_free"), "@property", "@(cached_property)"),
        (made("3", "4", ""), "LIMIT = 3", "LIMIT = (4)"),
    ],
)  # fmt: skip
def test_a_match_is_replaced_and_all_else_is_kept(mutant: Mutant, old: str, new: str) -> None:
    assert SOURCE.count(old) == 1
    assert mutant.apply(SOURCE) == SOURCE.replace(old, new)


def test_the_second_of_two_matches_is_replaced_on_demand() -> None:
    changed = made("self.free += pages", "pass", "Table.give", 2).apply(SOURCE)
    assert changed.index("pass") > changed.index("self.free += pages")
    assert changed.count("self.free += pages") == 1


@pytest.mark.parametrize(
    ("mutant", "problem"),
    [
        (made("max(row.wanted, left)", "left"), "matches 0 times, not one"),
        (made("self.free += pages", "pass", "Table.give"), "matches 2 times, not one"),
        (made("self.free += pages", "pass", "Table.give", 3), "matches 2 times, not number 3"),
        (made("left -= row.done", "pass", which=1), "matches 1 times, not number 1"),
        (made("left", "0", "Table.take"), "0 definitions of Table.take"),
        (made("left", "0", "Table.give.left"), "0 definitions of Table.give.left"),
    ],
)
def test_what_does_not_match_as_often_as_it_says_is_refused(mutant: Mutant, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        mutant.apply(SOURCE)


def test_a_replacement_that_means_something_else_in_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="match a larger part"):
        made("if b:\n    c", "if b:\n    d", "f").apply("def f(a, b):\n    if a:\n        b\n    elif b:\n        c\n")


ENTRY = """
from hiserve.engine import budget as rule
from tests.unit.engine import test_budget

with rule.{function}[2], test_budget.{test}["a-1"], test_budget:
    "a step is too large"
    left - 1
    left
"""


def test_an_entry_is_read_from_its_names() -> None:
    (mutant,) = entries.read(ENTRY.format(function="Allocation.pick", test="test_x"), "worker.py")
    assert (mutant.title, mutant.path, mutant.scope) == (
        "a step is too large",
        "hiserve/engine/budget.py",
        ("Allocation", "pick"),
    )
    assert mutant.target == "hiserve.engine.budget.Allocation.pick"
    assert mutant.which == 2
    assert (ast.unparse(mutant.before), [ast.unparse(each) for each in mutant.after]) == ("left - 1", ["left"])
    assert mutant.tests == ("tests/unit/engine/test_budget.py::test_x[a-1]", "tests/unit/engine/test_budget.py")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("with gate.admit, test_gate: 'title'; a; b", "gate is not imported"),
        ("from nothing import nowhere\nwith nowhere.f, nowhere: 'title'; a; b", "no file defines"),
        ("with a: 'title'; a; b", "no `with TARGET, TEST:`"),
        ("with a, b: 'title'; a", "needs a title, what is replaced, and its replacement"),
        ("with a, b: title; a; b", "begins with its title"),
        ("a = 1", "no `with TARGET, TEST:`"),
    ],
)
def test_what_is_no_entry_is_refused_with_its_place(entry: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=rf"worker\.py:\d+: .*({problem})"):
        entries.read(entry, "worker.py")


@pytest.mark.parametrize(("function", "test"), [("no_function", "test_x"), ("share_budget", "test_that_is_not_there")])
def test_an_entry_whose_function_or_test_is_gone_is_named(function: str, test: str) -> None:
    (mutant,) = entries.read(ENTRY.format(function=function, test=test), "worker.py")
    assert function in entries.problem_of(mutant)
    assert "definitions of" in entries.problem_of(mutant) or "matches" in entries.problem_of(mutant)


def test_the_catalogue_fits_the_source_and_has_each_invariant_and_each_reported_bug() -> None:
    titles = " ".join(mutant.title for mutant in entries.load())
    invariants = re.findall(r"(?m)^\| (H?\d+) \|", (entries.ROOT / "docs" / "invariants.md").read_text())
    assert len(invariants) > 50
    assert [number for number in invariants if not re.search(rf"INV {number}\b", titles)] == []
    tests = "".join(path.read_text() for path in (entries.ROOT / "tests").rglob("test_*.py"))
    bugs = {"-".join(found).upper() for found in re.findall(r"def test_(tc|hb)_(\d+)", tests)}
    assert len(bugs) > 40
    assert sorted(bug for bug in bugs if bug not in titles) == []


def test_what_the_planning_half_is_mutated_and_tested_by_is_there() -> None:
    settings = tomllib.loads((entries.ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    for pattern in settings["only_mutate"] + settings["pytest_add_cli_args_test_selection"]:
        assert list(entries.ROOT.glob(pattern)), pattern


def test_mutants_are_chosen_by_word_and_by_what_changed() -> None:
    (mutant,) = entries.read(ENTRY.format(function="share_budget", test="test_x"), "worker.py")
    for word in ("too large", "budget.share", "engine/budget", "test_x"):
        assert run.choose([mutant], word, None) == [mutant]
    assert run.choose([mutant], "gate", None) == []
    for file in ("hiserve/engine/budget.py", "tests/unit/engine/test_budget.py"):
        assert run.choose([mutant], "", {file, "README.md"}) == [mutant]
    assert run.choose([mutant], "", {"README.md"}) == []


PROJECT = {
    "hiserve/__init__.py": "",
    "hiserve/rule.py": "def least(a, b):\n    return min(a, b)\n\n\ndef rest(a):\n    while a > 3:\n        a -= 3\n    return a\n",
    "benchmarks/__init__.py": "",
    "tools/__init__.py": "",
    "pyproject.toml": "",
    "tests/__init__.py": "",
    "tests/unit/__init__.py": "",
    "tests/unit/test_rule.py": """
        from hiserve import rule

        def test_the_least():
            assert rule.least(1, 2) == 1

        def test_any():
            assert rule.least(1, 1) == 1

        def test_the_rest():
            assert rule.rest(4) == 1
    """,
    "tests/mutants/catalogue/rules.py": """
        from hiserve import rule
        from tests.unit import test_rule

        with rule.least, test_rule.test_the_least:
            "the largest"
            min(a, b)
            max(a, b)
        with rule.least, test_rule.test_any:
            "nobody looks"
            min(a, b)
            max(a, b)
        with rule.rest, test_rule.test_the_rest:
            "no value"
            a > 3
            (yield)
        with rule, test_rule.test_any:
            "not even importable"
            def rest(a):
                while a > 3:
                    a -= 3
                return a
            raise ImportError
        with rule.rest, test_rule.test_the_rest:
            "never ends"
            a -= 3
            a += 3
    """,
    "script.py": """
        import sys
        from pathlib import Path
        from tests.mutants import run

        place, is_endless, *given = sys.argv[1:]
        if given:
            limits = map(float, given)
            run.limits = lambda mutants, copies: {run._file(test): next(limits) for mutant in mutants for test in mutant.tests}
        copies = [run.Copy(Path(place, name)) for name in "ab"]
        mutants = [mutant for mutant in run.load() if (mutant.title == "never ends") == (is_endless == "True")]
        print(run.judge(mutants, copies, print))
        for name in "ab":
            assert Path(place, name, "hiserve/rule.py").read_text() == Path("hiserve/rule.py").read_text()
    """,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project of the same shape, with the tools and a catalogue of its own."""
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    for name in ("__init__", "mutant", "entries", "run"):
        shutil.copy(Path(run.__file__).with_name(f"{name}.py"), tmp_path / "tests/mutants")
    return tmp_path


def judged(project: Path, *limits_s: float, is_endless: bool = False) -> subprocess.CompletedProcess[str]:
    """Judges the mutants of the project.

    Args:
        project: Where it is.
        limits_s: What each timing of a test gives for a limit; the real ones if left out.
        is_endless: The mutant that never ends, alone, or all others.
    """
    (project / "copies").mkdir()
    command = [sys.executable, "script.py", str(project / "copies"), str(is_endless), *map(str, limits_s)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"(?m)^(\w+(?:, late)?) +\d+\.\d s  .*: (.+)$", done.stdout)
    return {title: word for word, title in lines}


JUDGED = {"the largest": "killed", "nobody looks": "SURVIVED", "no value": "killed", "not even importable": "BROKEN"}


def test_each_mutant_gets_the_verdict_of_its_tests(project: Path) -> None:
    done = judged(project)
    assert verdicts(done) == JUDGED
    assert sorted(ast.literal_eval(done.stdout.splitlines()[-1])) == ["nobody looks", "not even importable"]


def test_a_mutant_that_never_ends_is_killed_when_its_time_is_over(project: Path) -> None:
    done = judged(project, 0.5, 0.6, is_endless=True)
    assert verdicts(done) == {"never ends": "killed, late"}
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_mutant_that_is_late_on_a_machine_that_has_become_slower_runs_again(project: Path) -> None:
    assert verdicts(judged(project, *[0.0] * len(JUDGED), *[600.0] * len(JUDGED))) == JUDGED


def test_tests_that_fail_without_a_mutant_kill_none(project: Path) -> None:
    test = project / "tests/unit/test_rule.py"
    test.write_text(test.read_text().replace("rest(4) == 1", "rest(4) == 2"))
    done = judged(project)
    assert "tests/unit/test_rule.py: failed without any mutant" in done.stderr
    assert "killed" not in done.stdout
