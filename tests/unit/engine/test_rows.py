"""The order of a row's lengths, which ``check`` asserts after each step of other tests, and who writes them."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from hiserve.core.usage import CacheUse
from hiserve.engine import rows as module
from hiserve.engine.queue import Request
from hiserve.ipc.updates import RequestFacts
from tests.helpers.steps import Steps

PAGE = 4


def in_flight(num_draft: int) -> Steps:
    """Two rows after a step, another in flight."""
    steps = Steps(num_pages=40, page_size=PAGE, num_draft=num_draft, budget=64)
    for uid in (1, 2):
        steps.add(uid, np.random.default_rng(uid).integers(3, 200, 9).astype(np.int32), max_tokens=20)
    steps.step()
    steps.plan()
    steps.rows.check()
    return steps


@pytest.mark.parametrize("num_draft", [0, 3])
@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("num_published", 1),  # of pages
        ("num_published", -3),
        ("settled", -2),
        ("settled", 9),
        ("computed", -9),
        ("computed", 9),
        ("pending", -9),
        ("pending", 20),
        ("known", 30),
        ("limit", -30),
        ("limit", 100),
        ("drafted", 1),
        ("drafted", -4),
    ],
)
def test_a_length_out_of_order_is_found(column: str, change: int, num_draft: int) -> None:
    rows = in_flight(num_draft).rows
    getattr(rows, column)[2] += change
    with pytest.raises(AssertionError, match="row 2, published="):
        rows.check()


def test_a_row_without_the_pages_that_it_computes_is_found() -> None:
    rows = in_flight(0).rows
    rows.tables.num_pages[1] -= 1
    with pytest.raises(AssertionError, match=r"row 1, .* held=8"):
        rows.check()


def test_a_row_that_is_free_and_live_is_found() -> None:
    rows = in_flight(0).rows
    rows._free.append(2)
    with pytest.raises(AssertionError, match="free"):
        rows.check()


@pytest.mark.parametrize("num_draft", [0, 3])
def test_lengths_are_in_order_from_admission_to_release(num_draft: int) -> None:
    steps = in_flight(num_draft)
    rows, row = steps.rows, steps.row(1)
    assert rows.settled[row] < rows.computed[row] < rows.known[row] + rows.pending[row]
    steps.finish()
    rows.check()
    assert not rows.active.size
    assert len(steps.said[1]) == len(steps.said[2]) == 20


def written(path: Path, columns: set[str], base: str) -> set[str]:
    """Columns that a file assigns to, whole or in part, by line; ``base`` is what their owner's name ends with."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for each in (part for target in targets for part in getattr(target, "elts", [target])):
            column = each.value if isinstance(each, ast.Subscript) else each
            if not isinstance(column, ast.Attribute) or column.attr not in columns:
                continue
            if ast.unparse(column.value).endswith(base):
                found.add(f"{path.name}:{column.lineno} {column.attr}")
    return found


@pytest.mark.parametrize("num_draft", [0, 3])
def test_no_page_is_kept_for_tokens_after_the_longest_row(num_draft: int) -> None:
    rows = Steps(num_pages=40, page_size=PAGE, num_draft=num_draft, budget=64).rows
    longest = rows.tokens.shape[1]
    assert longest % PAGE == 0
    known = np.array([1, longest - 5, longest - 4, longest - 1, longest])
    most = [min(length + max(1, num_draft), longest) for length in known.tolist()]
    assert rows.num_pages_for(known).tolist() == [-(-length // PAGE) for length in most]


def test_no_other_file_of_the_engine_writes_a_column(tmp_path: Path) -> None:
    state = in_flight(0).rows
    columns = {name for name, value in vars(state).items() if isinstance(value, np.ndarray)}
    home = Path(module.__file__)
    assert len(written(home, columns, "self")) > len(columns) > 15
    planted = tmp_path / "planted.py"
    planted.write_text("state.known[row] += 1\nnum = state.known.sum()\nself._rows.uid[row], state.known = 1, 2\n")
    paths = [planted, *(path for path in home.parent.glob("*.py") if path != home)]
    found = {line for path in paths for base in ("state", "rows") for line in written(path, columns, base)}
    assert found == {"planted.py:1 known", "planted.py:3 known", "planted.py:3 uid"}


def test_facts_about_a_request_outlive_its_row_and_are_reported_once() -> None:
    steps = in_flight(0)
    rows = steps.rows

    def admit(request: Request) -> int:
        found = rows._cache.match(request.tenant, request.prefix_key)
        return rows.admit(request, rows._cache.lock(found).detach(), found)

    assert rows.take_facts(rows.active) == {}, "the first report had those of the admission"
    request = rows.release(1)
    request.note(RequestFacts(queue_s=0.5))
    request.note(RequestFacts(cached=CacheUse(4)))
    facts = RequestFacts(queue_s=0.5, cached=CacheUse(4))
    assert rows.release(admit(request)).facts == facts
    row = admit(request)
    assert rows.take_facts(rows.active) == {rows.active.tolist().index(row): facts}
    assert rows.take_facts(rows.active) == {} and rows.release(row).facts is None
    other = rows.release(admit(request))
    other.note(facts)
    rows.release(admit(other))
    other.facts = None
    admit(other)
    assert rows.take_facts(rows.active) == {}, "those of the request before, which were never reported"
