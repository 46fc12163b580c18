"""Guards of what the planner does with the host tier: loads, waits, costs, verdicts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLANNER = "hiserve/worker/planner.py"
ADMITTER = "hiserve/worker/admitter.py"
LOADING = "hiserve/worker/loading.py"
LOOP = "hiserve/worker/loop.py"
COSTS = "hiserve/worker/costs.py"
OF_TIERS = "tests/unit/worker/test_planner_tiers.py::"
OF_WORKLOADS = "tests/invariants/test_planner_tiers.py::"
OF_COSTS = "tests/unit/worker/test_costs.py::"

MUTANTS = [
    Mutant(
        name="a plan begins one store however many nodes wait",
        file="hiserve/worker/loading.py",
        old="1 + self._cache.transfers.num_to_store // NODES_PER_STORE + ",
        new="1 + ",
        test="tests/unit/worker/test_loading.py::test_the_more_nodes_wait_the_more_of_them_a_plan_stores[300-3]",
    ),
    Mutant(
        name="long steps store no more than short ones",
        file="hiserve/worker/loading.py",
        old="max(MIN_STORED_PAGES, num_filled, num_to_save)",
        new="max(MIN_STORED_PAGES, num_to_save)",
        test="tests/unit/worker/test_loading.py::test_as_many_pages_are_stored_as_a_step_fills[2048-512]",
    ),
    Mutant(
        name="rows start behind their loads without pages for it",
        file="hiserve/worker/planner.py",
        old="        if not self._tables.grow(rows, share.num_new):  # stores",
        new="        if self._tables.grow(rows, share.num_new) is None:  # stores",
        test=OF_TIERS + "test_a_row_starts_behind_its_load_only_with_pages_for_its_step",
    ),
    Mutant(
        name="rows that score are not counted when they are given back",
        file="hiserve/worker/columns.py",
        old="        self._num_scoring -= bool(self.score_end[row])\n",
        new="        self._num_scoring = 0\n",
        test="tests/unit/worker/test_planner_scores.py::test_a_new_request_scores_what_running_ones_leave",
    ),
    Mutant(
        name="a row that waits for its load joins the steps of others",
        file=LOADING,
        old="return rows[~np.isin(rows, list(self._waiting))] if self._waiting else rows",
        new="return rows",
        test=OF_WORKLOADS + "test_random_workloads_over_both_tiers_match_the_oracle",
    ),
    Mutant(
        name="a row starts beside others before its load has ended",
        file=PLANNER,
        old="if not rows.size and self._overlaps_loads:",
        new="if self._overlaps_loads and self._loading.next_rows().size:",
        test=OF_TIERS + "test_a_row_that_waits_for_its_load_stays_out_of_the_step_of_others",
    ),
    Mutant(
        name="the first load waits for the last",
        file=LOADING,
        old="return rows[is_next]",
        new="return rows",
        test=OF_TIERS + "test_rows_start_in_the_order_of_their_loads_not_with_the_last_of_them",
    ),
    Mutant(
        name="a row starts before its load on a device that cannot wait",
        file=PLANNER,
        old="if not rows.size and self._overlaps_loads:",
        new="if not rows.size:",
        test=OF_TIERS + "test_a_row_that_waits_for_its_load_starts_when_nobody_else_runs_and_only_where_that_is_wanted",
    ),
    Mutant(
        name="a forward does not wait for the loads it reads",
        file=LOADING,
        old="return tuple(sorted(set[int]().union(*(self._rows.receipt(row).ops for row in rows.tolist()))))",
        new="return ()",
        test=OF_WORKLOADS + "test_random_workloads_over_both_tiers_match_the_oracle",
    ),
    Mutant(
        name="a result that read a load is taken before the load is known to have arrived",
        file=PLANNER,
        old="return self._loading.is_open(self._in_flight[0].plan.waits)",
        new="return False",
        test=OF_TIERS + "test_what_a_failed_load_gave_to_a_step_that_waited_for_it_is_not_told",
    ),
    Mutant(
        name="what a preempted row computed is not kept",
        file=PLANNER,
        old="        self._cache.keep(self._rows.receipt(row))\n",
        new="",
        test=OF_TIERS + "test_a_row_that_loses_its_place_has_its_pages_stored_at_once",
    ),
    Mutant(
        name="a step that was refused counts as run",
        file=PLANNER,
        old="        if result.deferred:\n",
        new="        if result.deferred and not plan.rows.size:\n",
        test=OF_WORKLOADS + "test_steps_that_the_gate_refuses_are_planned_again",
    ),
    Mutant(
        name="loads are ordered without bound",
        file=LOADING,
        old="return self._num_loads < MAX_LOADS",
        new="return True",
        test=OF_TIERS + "test_a_request_with_more_to_load_waits_while_too_many_loads_are_under_way",
    ),
    Mutant(
        name="every load is worth it",
        file=ADMITTER,
        old="return match.num_host_tokens if is_worth else 0",
        new="return match.num_host_tokens",
        test=OF_TIERS + "test_a_prefix_that_is_not_worth_loading_is_computed_and_said_to_be_left",
    ),
    Mutant(
        name="loads are judged before anything was measured",
        file=COSTS,
        old="        if self._prefills.num_measurements < MIN_MEASUREMENTS:\n",
        new="        if self._prefills.num_measurements < 0:\n",
        test=OF_COSTS + "test_until_both_are_measured_what_the_host_has_is_loaded",
    ),
    Mutant(
        name="loads that come first cost nothing",
        file=COSTS,
        old="fixed + (num_before + num_tokens) * per_token",
        new="fixed + num_tokens * per_token",
        test=OF_COSTS + "test_loads_that_come_first_are_waited_for_too",
    ),
    Mutant(
        name="a recomputation is one step",
        file=COSTS,
        old="-(-num_tokens // self._step_tokens) * step_fixed",
        new="step_fixed",
        test=OF_COSTS + "test_each_step_of_a_recomputation_costs_its_fixed_part",
    ),
    Mutant(
        name="a step is timed from its submission",
        file=COSTS,
        old="now - max(began, self._ended)",
        new="now - began",
        test=OF_COSTS + "test_a_step_counts_from_the_end_of_the_one_before_it_and_decoding_does_not_count",
    ),
    Mutant(
        name="a stall of the copier is believed for ever",
        file=COSTS,
        old="if self._num_left == MAX_LEFT:",
        new="if False:",
        test=OF_COSTS + "test_a_stall_is_not_believed_for_ever",
    ),
    Mutant(
        name="what was left on the host is not counted against its measurements",
        file="hiserve/worker/admitter.py",
        old="                self._costs.leave()\n",
        new="",
        test="tests/unit/worker/test_planner_tiers.py::test_a_prefix_that_is_not_worth_loading_is_computed_and_said_to_be_left",
    ),
]
