"""Two trees in turns: each round both, in changing order; what has become dearer than the bar is counted, clocks aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import interleave

TREES = Path("old"), Path("new")


def test_every_round_runs_both_trees_and_changes_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str]] = []

    def measure(name: str, tree: Path) -> dict[str, float]:
        ran.append((name, tree.name))
        return {"cost": len(ran)}

    monkeypatch.setattr(interleave, "measure", measure)
    samples = interleave.take_turns(["planner", "radix"], TREES, 3)
    there = [("planner", "old"), ("planner", "new"), ("radix", "old"), ("radix", "new")]
    back = [("planner", "new"), ("planner", "old"), ("radix", "new"), ("radix", "old")]
    assert ran == there + back + there
    assert samples == {"planner: cost": ([1, 6, 9], [2, 5, 10]), "radix: cost": ([3, 8, 11], [4, 7, 12])}


@pytest.mark.parametrize(
    ("ratio", "name", "num_slower"), [(1.03, "a", 1), (1.01, "a", 0), (0.5, "a", 0), (2.0, "a (wall)", 0)]
)
def test_what_costs_more_than_the_bar_is_counted_by_the_median_of_the_rounds(
    ratio: float, name: str, num_slower: int
) -> None:
    old = [1.0, 2.0, 4.0]  # rounds are compared with themselves: the machine changed between them
    lines, found = interleave.table({name: (old, [ratio * each for each in old])})
    assert found == num_slower
    assert ("SLOWER" in lines[1]) == bool(num_slower)
    assert f"{ratio:.3f} [{ratio:.3f} – {ratio:.3f}]" in lines[1]


def test_a_folder_is_a_tree_and_a_commit_becomes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[tuple[str, Path]] = []
    monkeypatch.setattr(interleave, "unpack", lambda commit, folder: unpacked.append((commit, folder)))
    assert interleave.tree_of(str(tmp_path), tmp_path / "old") == tmp_path.resolve()
    assert not unpacked
    assert interleave.tree_of("abc1234", tmp_path / "old") == tmp_path / "old"
    assert unpacked == [("abc1234", tmp_path / "old")]


def test_a_tree_is_unpacked_and_measured_with_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    (tree / "benchmarks").mkdir(parents=True)
    (tree / "benchmarks" / "__init__.py").write_text("")
    (tree / "benchmarks" / "planner.py").write_text(
        "def measure(rows, steps, *, has_host): return {'median': {'plan_and_commit_us': rows}}\n"
        "def measure_nodes(pages, nodes): return {'median': {'publish_and_store_us': 7.0}}\n"
    )
    assert interleave.measure("planner", tree) == {
        "step of 32 rows, us": 32,
        "step of 256 rows, us": 256,
        "node of 16 pages, us": 7.0,
    }
