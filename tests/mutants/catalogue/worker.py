"""The planning half of a worker: budget, admission, results, loads, faults."""

from hiserve.cache.index import store_sync
from hiserve.core import step_faults
from hiserve.engine import admission, budget, executor, loop, page_tables, planner, rows, service, stop_tokens, store_prefetch, watching
from tests.invariants import test_planner_tiers as invariants_test_planner_tiers
from tests.invariants import test_reported_bugs_life
from tests.unit.core import test_step_faults
from tests.unit.engine import (
    test_budget,
    test_executor_faults,
    test_fatal,
    test_planner,
    test_planner_pages,
    test_planner_scores,
    test_retention,
    test_rows,
    test_store_prefetch,
    test_watching,
)
from tests.unit.engine import test_planner_tiers as worker_test_planner_tiers

with budget.allocate_tokens, test_budget.test_a_step_samples_only_when_it_reaches_the_end:
    "a step samples before it reaches the end of its row"
    (num_new >= lacking) & (lacking > 0)
    num_new > 0
with budget.allocate_tokens, test_budget.test_a_row_that_may_have_reached_its_limit_in_flight_waits:
    "a row plans more tokens than its limit"
    np.where(left > 0, ahead - computed, 0)
    ahead - computed
with admission.Admission._admit, test_planner_pages.test_admission_leaves_the_pages_that_running_rows_will_need:
    "admission ignores pages promised to running rows"
    cache.num_available - self._rows.num_promised_pages()
    cache.num_available
with planner.InFlight.is_current, test_planner.test_a_late_result_never_reaches_the_next_tenant_of_a_row:
    "INV 46: a late result reaches the next request of a row"
    state.generation[self.rows] == self.generations
    state.generation[self.rows] > 0
with rows.RowState.append, test_planner.test_rejected_drafts_are_computed_again:
    "INV 1: rejected drafts count as computed in the planner"
    self.computed[rows] -= rejected
    self.computed[rows] -= 0
with rows.RowState.release, test_rows.test_facts_about_a_request_outlive_its_row_and_are_reported_once:
    "a fact that was not reported is lost with the row"
    self._facts.pop(row, None)
    None
with rows.RowState.append, test_rows.test_lengths_are_in_order_from_admission_to_release:
    "INV 71: rejected drafts stay settled"
    self.settled[rows] -= rejected
    self.settled[rows] -= 0
with stop_tokens.StopTokens.cut, test_planner.test_a_stop_token_inside_an_accepted_run_cuts_the_rest:
    "INV 1: tokens after a stop token are kept"
    counts[ends] = is_end[ends].argmax(axis=1) + 1
    pass
with rows.RowState.publish, test_planner_pages.test_filling_a_page_that_is_cached_already_moves_the_row_to_the_cached_one:
    "INV 8: the device is not told that a page moved"
    canonical is not pages
    False
with page_tables.PageTables.take_writes, test_planner_pages.test_a_move_is_dropped_when_the_row_changes_hands_before_the_next_plan:
    "page tables: a move reaches the next request of a row"
    self._generation[rows] == generations
    self._generation[rows] > 0
with rows.RowState.release, test_planner.test_an_aborted_running_request_gives_its_pages_back_and_says_nothing_more:
    "INV 2: an ended row leaks its pages"
    self._cache.free(private)
    pass
with planner.Planner.commit, test_planner_scores.test_scores_behind_a_stop_token_are_cut_with_their_tokens:
    "INV 20: scores after a stop token are reported"
    pick_scores(plan, result, ok, counts, state)
    pick_scores(plan, result, ok, result.counts, state)
with planner.Planner.plan, test_retention.test_an_idle_engine_tells_the_host_until_when_its_pages_are_retained:
    "INV 77: the host learns of retained pages with the next step of a row"
    rows.size or copies or lookups or exchanged or retained.size
    rows.size or copies or lookups or exchanged
with planner.Planner.plan, worker_test_planner_tiers.test_a_row_that_waits_for_its_load_stays_out_of_the_step_of_others:
    "INV 28: a row starts beside others before its load has ended"
    not rows.size and self._overlaps_loads
    self._overlaps_loads and self._host_loads.next_rows().size
with planner.Planner.awaits_acks, worker_test_planner_tiers.test_what_a_failed_load_gave_to_a_step_that_waited_for_it_is_not_told:
    "INV 28: a result is taken before its load is known to have arrived"
    self._host_loads.is_open(self._in_flight[0].plan.waits)
    False
with planner.Planner.commit[2], invariants_test_planner_tiers.test_steps_that_the_gate_refuses_are_planned_again:
    "INV 29: a deferred step counts as run"
    result.deferred
    result.deferred and not plan.rows.size
with loop.Engine.step, test_reported_bugs_life.test_tc_40_a_loop_that_only_decodes_takes_acks_and_returns_what_copies_held:
    "TC-40: acknowledgements of copies are read only when no row can run"
    self._executor.take_acks()
    []
with planner.Planner.has_work, test_reported_bugs_life.test_tc_41_an_engine_without_requests_has_work_until_its_copies_are_answered:
    "TC-41: an engine with copies in flight is idle"
    self._host_loads.has_copies or self._prefetcher.has_work
    self._prefetcher.has_work
with rows.RowState.release, test_reported_bugs_life.test_tc_42_a_request_aborted_at_any_step_leaves_nothing_held:
    "TC-42: an aborted request keeps its lock"
    self._cache.release(lock)
    pass
with store_sync.StoreSync.end_prefetch, test_reported_bugs_life.test_tc_43_prefetches_without_end_keep_no_memory:
    "TC-43: ended prefetches are kept in memory"
    self._begun.pop(number)
    self._begun[number]
with store_prefetch.StorePrefetcher.is_awaited, test_store_prefetch.test_tc_44_a_request_is_let_go_by_its_deadline_whatever_the_store_does:
    "TC-44: a request waits for the store without end"
    self._clock() - wanted.since < self._max_wait_s
    self._max_wait_s
with store_prefetch.StorePrefetcher._fetch, test_store_prefetch.test_a_prefetch_that_cannot_be_placed_ends_at_once:
    "a request waits for a prefetch that has no room on the host"
    self._give_up(wanted, HOST_FULL)
    pass
with store_prefetch.StorePrefetcher.found, test_store_prefetch.test_an_answer_that_comes_after_the_wait_is_counted_and_begins_nothing:
    "pages of a late answer of the store are not counted"
    self._cache_counters.not_fetched(wanted.num_left, TOO_LATE)
    pass
with (
    store_prefetch.StorePrefetcher._end_prefetch,
    test_store_prefetch.test_a_prefetch_that_fails_is_over_for_its_request_and_begun_again_for_another,
):
    "a prefetch that failed for one request is over for all"
    wanted is order.wanted and not ack.is_ok
    not ack.is_ok
with (
    store_prefetch.StorePrefetcher.is_uploading,
    test_store_prefetch.test_uploads_that_cannot_begin_are_not_waited_for_at_the_end_until_they_can,
):
    "the end waits for uploads that cannot begin"
    store.has_uploads or (store.num_to_upload > 0 and store.is_host_partial and self._may_grow)
    store.num_to_upload > 0
with store_prefetch.StorePrefetcher.is_uploading, test_store_prefetch.test_a_store_that_answers_nothing_is_given_up_at_the_end:
    "INV 65: shutdown waits for a store that never answers"
    self._clock() - max(oldest_s, self._answered_s) < STALL_S
    True
with step_faults, test_step_faults.test_nothing_else_is_contained:
    "INV 47: a CUDA error that outlives the step is contained"
    "bad_alloc"
    "CUDA error"
with (
    executor.Executor._catch_faults,
    test_executor_faults.test_a_step_for_which_memory_runs_out_says_so_and_rows_admitted_anew_are_as_if_nothing_had_been,
):
    "INV 47: out-of-memory in a step ends the worker"
    not kind
    True
with service._is_of_device, test_fatal.test_an_exit_code_tells_whether_the_device_is_lost:
    "INV 50: out-of-memory exits with the code of a lost device"
    isinstance(error, Exception) and fault_of(error)
    False
with watching.StepLog.is_over, test_watching.test_without_a_question_the_lease_ends_and_the_records_with_it:
    "a worker records steps for ever after one question"
    now_s > self._end_s
    False
