"""Guards of steps for which memory runs out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FAULTS = "hiserve/core/faults.py"
EXECUTOR = "hiserve/worker/executor.py"
PLANNER = "hiserve/worker/planner.py"
CONTAINMENT = "hiserve/worker/containment.py"
LIMITS = "hiserve/worker/step_limits.py"
OF_FAULTS = "tests/unit/core/test_faults.py::"
OF_EXECUTOR = "tests/unit/worker/test_executor_faults.py::"
OF_CONTAINMENT = "tests/unit/worker/test_containment.py::"
OF_LIMITS = "tests/unit/worker/test_step_limits.py::"
WORKLOADS = "tests/invariants/test_contained_faults.py::test_steps_given_up_half_done_change_no_token_and_no_score[1-2]"

MUTANTS = [
    Mutant(
        name="what stays with a CUDA context is contained",
        file=FAULTS,
        old='    "bad_alloc": OUT_OF_MEMORY,\n',
        new='    "bad_alloc": OUT_OF_MEMORY,\n    "CUDA error": OUT_OF_MEMORY,\n',
        test=OF_FAULTS + "test_nothing_else_is_contained",
    ),
    Mutant(
        name="any exception that names memory is contained",
        file=FAULTS,
        old="isinstance(error, RuntimeError) or",
        new="isinstance(error, Exception) or",
        test=OF_FAULTS + "test_nothing_else_is_contained",
    ),
    Mutant(
        name="a step without memory ends the worker",
        file=EXECUTOR,
        old="            if not kind:\n                raise",
        new="            raise",
        test=OF_EXECUTOR
        + "test_a_step_for_which_memory_runs_out_says_so_and_rows_admitted_anew_are_as_if_nothing_had_been",
    ),
    Mutant(
        name="rows that could not be written stay half written",
        file=EXECUTOR,
        old="for is_last in (False, True):",
        new="for is_last in (True,):",
        test=OF_EXECUTOR + "test_page_tables_are_written_again_when_memory_ran_out_for_them",
    ),
    Mutant(
        name="rows of a step that was given up go on as if it had run",
        file=PLANNER,
        old="            self._undo(step.rows[ok], plan.num_tokens, result.fault)\n            return",
        new="            return",
        test=WORKLOADS,
        timeout_s=60,
    ),
    Mutant(
        name="the copies of a step that was given up never begin",
        file=EXECUTOR,
        old="            self._free_memory()\n            self._step_done(plan)\n",
        new="            self._free_memory()\n",
        test=OF_EXECUTOR + "test_copies_behind_a_step_that_was_given_up_begin",
        timeout_s=60,
    ),
    Mutant(
        name="those who never get through stand in their old place",
        file=CONTAINMENT,
        old="sorted(again, key=lambda request: -request.num_undone)",
        new="again",
        test=OF_CONTAINMENT + "test_a_request_that_never_fits_keeps_others_waiting_for_two_ladders_at_most",
    ),
    Mutant(
        name="a request that got through is still suspected",
        file=CONTAINMENT,
        old="columns.tenant(row).num_undone = 0",
        new="columns.tenant(row)",
        test=OF_CONTAINMENT + "test_a_request_alone_is_tried_again_before_it_ends_and_each_time_it_got_through",
    ),
    Mutant(
        name="the smallest step is tried once",
        file=CONTAINMENT,
        old="(MAX_UNDONE if can_shrink else MAX_SMALLEST)",
        new="(MAX_UNDONE if can_shrink else 0)",
        test=OF_CONTAINMENT + "test_a_request_alone_is_tried_again_before_it_ends_and_each_time_it_got_through",
    ),
    Mutant(
        name="a step of which nobody is left shrinks those of others",
        file=CONTAINMENT,
        old="        if not requests:\n            return [], []\n",
        new="",
        test=OF_CONTAINMENT + "test_a_step_of_which_nobody_is_left_shrinks_nothing",
    ),
    Mutant(
        name="small steps have drafts",
        file=PLANNER,
        old="is_allowed=not self._limits.is_reduced",
        new="is_allowed=True",
        test=OF_CONTAINMENT + "test_the_next_steps_are_smaller_and_have_no_drafts_until_so_many_have_passed",
    ),
    Mutant(
        name="the last rung is a graph again",
        file=LIMITS,
        old="            self.may_replay = False\n",
        new="",
        test=OF_CONTAINMENT + "test_the_smallest_step_is_planned_without_a_graph_once_a_replay_of_it_has_failed",
    ),
    Mutant(
        name="steps grow back as often as they fail",
        file=LIMITS,
        old="min(2 * self._grow_after, MAX_GROW_AFTER)",
        new="self._grow_after",
        test=OF_LIMITS + "test_where_growing_fails_again_and_again_it_is_tried_ever_more_rarely_and_forgotten_at_last",
    ),
    Mutant(
        name="a graph of a step that failed is replayed",
        file="hiserve/runners/gate.py",
        old="(Reason.STEP_FAILED, not step.may_replay)",
        new="(Reason.STEP_FAILED, False)",
        test="tests/unit/runners/test_gate.py::test_a_step_that_may_not_be_replayed_runs_eagerly",
    ),
    Mutant(
        name="the time of a step that did not run is taken for what prompts cost",
        file="hiserve/worker/costs.py",
        old="        if not has_run:\n            return None\n",
        new="",
        test="tests/unit/worker/test_costs.py::test_a_step_that_did_not_run_tells_nothing_of_prefill",
    ),
    Mutant(
        name="requests whose load failed are not counted",
        file=PLANNER,
        old="            self._containment.lost_loads(len(lost))\n",
        new="            pass\n",
        test="tests/unit/worker/test_planner_tiers.py::"
        "test_what_a_failed_load_gave_to_a_step_that_waited_for_it_is_not_told",
    ),
    Mutant(
        name="a copy without memory ends all copies",
        file="hiserve/cache/pools/transfer.py",
        old="attempt(partial(self._carry_out, copy))",
        new="self._carry_out(copy)",
        test="tests/contract/test_transfers.py::test_a_copy_for_which_memory_runs_out_fails_and_those_after_it_do_not",
    ),
    Mutant(
        name="a store without memory ends all copies",
        file="hiserve/cache/pools/store_transfers.py",
        old="        if not fault_of(error):\n            raise\n        return 0",
        new="        raise",
        test="tests/unit/pools/test_store_transfers.py::"
        "test_where_memory_runs_out_for_the_store_its_pages_do_not_arrive_and_those_after_it_are_asked_for",
    ),
    Mutant(
        name="orders of copies may be lost to a lack of memory",
        file=EXECUTOR,
        old="        try:\n            self._copier.start(plan)\n        except Exception as error:\n            if not fault_of(error):",
        new="        try:\n            self._copier.start(plan)\n        except Exception as error:\n            if True:",
        test=OF_EXECUTOR + "test_orders_of_copies_are_not_lost_to_a_lack_of_memory",
    ),
]
