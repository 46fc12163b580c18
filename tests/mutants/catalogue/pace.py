"""Guards of when the next step is planned."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOOP = "hiserve/worker/loop.py"
PACE = "hiserve/worker/pace.py"
OF_PACE = "tests/unit/worker/test_pace.py::"
LATE = "tests/unit/worker/test_engine_loop.py::test_while_rows_wait_for_loads_the_next_plan_is_made_as_late_as_can_be"

MUTANTS = [
    Mutant(
        name="overlap: a step is waited for before the next is planned",
        file=LOOP,
        old="(plan is None or len(self._in_flight) > self._depth)",
        new="(plan is None or self._in_flight)",
        test="tests/unit/worker/test_engine_loop.py::test_overlap_plans_a_step_while_the_one_before_executes",
    ),
    Mutant(
        name="pace: plans wait though nobody waits for a load",
        file=LOOP,
        old="if self._planner.is_loading and (slack_s",
        new="if (slack_s",
        test=LATE,
    ),
    Mutant(
        name="pace: a wait keeps messages waiting, however long it is",
        file=LOOP,
        old="take_acks(min(slack_s, MAX_ACK_WAIT_S))",
        new="take_acks(slack_s)",
        test=LATE,
    ),
    Mutant(
        name="pace: steps that wait for loads say how long others take",
        file=PACE,
        old="None if plan.waits else _size(plan.num_tokens)",
        new="_size(plan.num_tokens)",
        test=OF_PACE + "test_nobody_knows_how_long_a_new_size_takes_or_one_that_waits",
    ),
    Mutant(
        name="pace: a step begins when it is launched",
        file=PACE,
        old="begin_s, self._last_end_s = max(begin_s, self._last_end_s), self._clock()",
        new="self._last_end_s = self._clock()",
        test=OF_PACE + "test_a_step_begins_when_the_one_before_it_ends",
    ),
]
