"""Guards of supervision: what a worker may be told, what it keeps to tell, and who starts and ends it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SERVICE, OUTBOX = "hiserve/worker/service.py", "hiserve/worker/outbox.py"

MUTANTS = [
    Mutant(
        name="a second configuration is obeyed like a stop",
        file=SERVICE,
        old='                raise MalformedError(f"a second Configure, for incarnation {configure.incarnation}")\n',
        new="                self._is_stopped = configure.incarnation > 0\n",
        test="tests/unit/worker/test_service.py::"
        "test_a_second_configuration_ends_the_loop_as_a_breach_of_the_protocol",
    ),
    Mutant(
        name="pages that came and went are kept for a slow scheduler",
        file=OUTBOX,
        old="            if count:\n                self._late_pages[digest] = count\n",
        new="            if count is not None:\n                self._late_pages[digest] = count\n",
        test="tests/unit/worker/test_outbox.py::test_pages_that_come_and_go_while_the_scheduler_is_slow_take_no_memory",
    ),
]
