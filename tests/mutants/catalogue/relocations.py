"""Guards of the order in which plans reach the rows, and of what is known of pages that moved meanwhile."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROWS = "hiserve/runners/rows.py"

MUTANTS = [
    Mutant(
        name="an older plan is applied behind a newer one",
        file=ROWS,
        old="assert plan.relocation_version >= before, (",
        new="assert True, (",
        test="tests/unit/worker/test_executor.py::test_plans_are_applied_in_the_order_in_which_they_were_made",
    ),
    Mutant(
        name="the first plan counts as one that moved pages",
        file=ROWS,
        old="self.has_moved = 0 < before < plan.relocation_version",
        new="self.has_moved = before < plan.relocation_version",
        test="tests/unit/runners/test_rows.py::test_rows_know_whether_a_page_has_moved_since_the_plan_before",
    ),
]
