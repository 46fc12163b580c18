"""Guards of which version of a page table a plan was made for."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROWS = "hiserve/runners/rows.py"
OF_ROWS = "tests/unit/runners/test_rows.py::test_a_plan_from_before_a_relocation_does_not_make_a_table_look_older"

MUTANTS = [
    Mutant(
        name="an older plan makes a page table look older",
        file=ROWS,
        old="np.maximum.at(self.version, plan.table.rows, plan.relocation_version)",
        new="self.version[plan.table.rows] = plan.relocation_version",
        test=OF_ROWS,
    ),
    Mutant(
        name="a row's next tenant has the version of the one before",
        file=ROWS,
        old="        self.version[host_rows] = 0\n",
        new="",
        test=OF_ROWS,
    ),
]
