"""Guards of supervision: what a worker may be told, what it keeps to tell, and who starts and ends it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SUPERVISOR, STILLNESS = "hiserve/scheduler/supervisor.py", "hiserve/scheduler/stillness.py"
SERVICE, OUTBOX = "hiserve/worker/service.py", "hiserve/worker/outbox.py"

MUTANTS = [
    Mutant(
        name="a tenant's key shows the hits of others",
        file="hiserve/server/auth.py",
        old="            self.caller(authorization)\n        return False\n",
        new="            return bool(self.caller(authorization))\n        return False\n",
        test="tests/unit/server/test_auth.py::test_metrics_tell_a_tenant_nothing_of_what_others_ask_and_find_cached",
    ),
    Mutant(
        name="workers of a scheduler that died are not counted as started again",
        file="hiserve/server/gate.py",
        old="self._engine.num_restarts + len(engine.started.workers)",
        new="self._engine.num_restarts",
        test="tests/unit/server/test_metrics.py::"
        "test_restarts_are_counted_whoever_died_and_whether_or_not_anybody_looked",
    ),
    Mutant(
        name="all replicas run on the first device",
        file="hiserve/core/devices.py",
        old="    number = devices[replica]\n",
        new="    number = devices[0]\n",
        test="tests/unit/core/test_devices.py",
    ),
    Mutant(
        name="a successor that cannot be started ends everything",
        file=SUPERVISOR,
        old="        except ResourceError as error:  # it may",
        new="        except KeyError as error:  # it may",
        test="tests/unit/scheduler/test_supervisor.py::"
        "test_a_successor_that_cannot_be_started_is_a_failed_start_and_is_tried_again",
    ),
    Mutant(
        name="a worker is charged the time in which it got no CPU",
        file=STILLNESS,
        old="computed_s if is_kept_waiting else passed_s",
        new="passed_s",
        test="tests/unit/scheduler/test_stillness.py "
        "tests/unit/scheduler/test_supervisor.py::test_a_worker_that_gets_no_cpu_is_not_taken_for_one_that_hangs",
    ),
    Mutant(
        name="a second configuration is obeyed like a stop",
        file=SERVICE,
        old='                raise MalformedError(f"a second Configure, for incarnation {configure.incarnation}")\n',
        new="                self._is_stopped = configure.incarnation > 0\n",
        test="tests/unit/worker/test_service.py::test_a_second_configuration_ends_the_loop_as_a_breach_of_the_protocol",
    ),
    Mutant(
        name="pages that came and went are kept for a slow scheduler",
        file=OUTBOX,
        old="            if count:\n                self._late_pages[digest] = count\n",
        new="            if count is not None:\n                self._late_pages[digest] = count\n",
        test="tests/unit/worker/test_outbox.py::test_pages_that_come_and_go_while_the_scheduler_is_slow_take_no_memory",
    ),
    Mutant(
        name="steps are no progress while requests run",
        file="hiserve/scheduler/incarnation.py",
        old="if stats.steps != self.stats.steps or not",
        new="if not",
        test="tests/unit/scheduler/test_stillness.py::"
        "test_steps_are_progress_whatever_else_waits_and_words_without_steps_are_none",
    ),
]
