"""The page of figures and the README's table are those of the result files; each figure says whether its code has changed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import readme, record
from benchmarks.record import spread, spread_text

ROOT = Path(__file__).parents[1]
SOURCE = '''"""Adds."""

SIGN = "#"  # of a comment


def add(a, b):
    """Returns a + b."""
    return a + b  # at once
'''
STALE = "the code has changed since"


def write(root: Path, source: str, data: bytes = b"7") -> dict[str, Any]:
    (root / "code").mkdir(exist_ok=True)
    (root / "code" / "adder.py").write_text(source)
    (root / "code" / "weights.bin").write_bytes(data)
    record.digest.cache_clear()
    return record.measured("code", root=root)


def test_the_page_of_figures_and_the_table_of_the_readme_are_those_of_the_result_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails when a result file is new, and when code has changed that a figure measures and the page does not say so."""
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    assert readme.main() == 0, (
        "run `make bench`, or `python benchmarks/readme.py` to say which figures are older than the code"
    )


def test_each_figure_says_its_commit_and_whether_it_is_older_than_what_it_measures() -> None:
    found = {"hardware": "H", "command": "c", "date": "today", "commit": "abc1234"}
    assert readme.source(found) == f"H; `c`, today at abc1234; **{STALE}**"
    found["measured"] = record.measured("benchmarks/record.py")  # type: ignore[assignment]
    assert readme.source(found) == "H; `c`, today at abc1234"
    found["measured"] |= {"digest": "0" * 16}  # type: ignore[operator]
    assert STALE in readme.source(found)
    found["measured"] = {"paths": ["hiserve/no_longer_there.py"], "digest": ""}  # type: ignore[assignment]
    assert STALE in readme.source(found)


def test_code_is_the_same_whatever_is_said_of_it_and_no_longer_when_it_does_something_else(tmp_path: Path) -> None:
    before = write(tmp_path, SOURCE)
    assert record.is_current({"measured": before}, tmp_path)
    said = SOURCE.replace("Adds.", "Adds two\n\nnumbers.").replace("  # at once", "").replace("Returns", "Gives")
    assert ast.dump(ast.parse(said)) != ast.dump(ast.parse(SOURCE)), "a docstring is part of the tree"
    for same in (said, SOURCE.replace("\n\n\n", "\n\n# -----\n\n")):
        assert write(tmp_path, same) == before, same
    for other in (SOURCE.replace("a + b  #", "a - b  #"), SOURCE.replace('"#"', '"##"')):
        assert write(tmp_path, other) != before, other
        assert not record.is_current({"measured": before}, tmp_path)
    assert write(tmp_path, SOURCE, b"8") != before, "data counts too"
    (tmp_path / "code" / "weights.bin").rename(tmp_path / "code" / "other.bin")
    write(tmp_path, SOURCE)
    assert not record.is_current({"measured": before}, tmp_path), "there is one file more"


def test_every_result_of_a_run_says_which_code_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "commit", lambda *paths: "abc1234")
    said = record.about("c", "hiserve/core", "benchmarks/record.py")
    assert said["measured"] == record.measured("hiserve/core", "benchmarks/record.py")
    assert record.is_current(said)
    calls = [
        (path, call)
        for path in (ROOT / "benchmarks").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("Record", "Record.of")
    ]
    assert len(calls) >= 16
    assert [str(path) for path, call in calls if len(call.args) < 3] == [], "they do not say which code they measure"


def test_make_bench_records_every_cpu_figure_of_the_page_but_those_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others take half an hour each, or training data that is not here."""
    others = {"nano_acceptance", "reply_drafts", "soak", "soak_calm"}
    quoted: dict[str, Any] = {}
    read = readme.result
    monkeypatch.setattr(readme, "result", lambda name: quoted.setdefault(name, read(name)))
    readme.rows()
    commands = [" ".join(each for each in suite if each != "-m").replace("/", ".") for suite in bench.SUITES]
    recorded = {name for name in quoted if any(f".{name}" in command for command in commands)}
    on_cpu = {name for name, found in quoted.items() if "NVIDIA" not in found["hardware"]}
    assert {"offline", "serving", "recovery"} <= recorded
    assert on_cpu - others == recorded


def test_no_figure_of_a_peer_passes_for_one_of_the_same_run() -> None:
    lines = [line for line in readme.PAGE.read_text().splitlines() if "vLLM" in line]
    assert lines
    assert all(readme.THEN in line for line in lines)
    assert "vLLM" not in (ROOT / "README.md").read_text().split(readme.START)[1].split(readme.END)[0]


def test_the_table_of_the_readme_has_the_steps_and_prompts_of_one_run_with_their_shares_of_its_limits() -> None:
    run = readme.result("gpu")
    _, _, *rows = [line for line in readme.limit_rows() if line.startswith("|")]
    figures = [each for part in ("decode", "prefill") for each in run["parts"][part]["figures"]]
    figures = [each for each in figures if each["against"] in ("bandwidth limit", "matrix product")]
    assert len(rows) == len(figures) == 8
    for row, figure in zip(rows, figures, strict=True):
        workload, value, ratio, _ = (cell.strip() for cell in row.strip("|").split("|"))
        assert float(ratio) == round(figure["ratio"], 2)
        number, unit = value.replace(",", "").split(maxsplit=1)
        assert unit == figure["unit"] and float(number) == pytest.approx(figure["value"], rel=2e-3)
        assert [word.replace(",", "") for word in workload.split() if word[0].isdigit()] == [
            word for word in figure["name"].split(", ")[-1].split() if word.isdigit()
        ]
    table = "\n".join(readme.limit_rows())
    assert (STALE in table.lower()) != record.is_current(run)


def test_a_spread_is_of_the_samples_and_a_single_one_is_said_to_be_one() -> None:
    assert spread([5.0, 1.0, 3.0]) == pytest.approx((3.0, 1.4, 4.6))
    assert spread_text([5.0, 1.0, 3.0], ".1f", " ms") == "3.0 ms [1.4 – 4.6]"
    assert spread_text([3.0], ".0f") == "3 [one sample]"
