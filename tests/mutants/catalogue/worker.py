"""Guards of the planner, its budget, its stops, its scores, its journal and the loop."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLANNER = "hiserve/worker/planner.py"
EMISSION = "hiserve/worker/emission.py"
ADMITTER = "hiserve/worker/admitter.py"
TABLES = "hiserve/worker/tables.py"
BUDGET = "hiserve/worker/budget.py"
JOURNAL = "hiserve/worker/journal.py"
FORERUNNER = "hiserve/worker/forerunner.py"
LOOP = "hiserve/worker/loop.py"
STOPS = "hiserve/worker/stops.py"
OF_PLANNER = "tests/unit/worker/test_planner.py::"
OF_PAGES = "tests/unit/worker/test_planner_pages.py::"
OF_BUDGET = "tests/unit/worker/test_budget.py::"
OF_DRAFTS = "tests/unit/worker/test_planner_drafts.py::"
OF_LOOP = "tests/unit/worker/test_engine_loop.py::"
WAITING = "hiserve/worker/waiting.py"
SCORES = "hiserve/worker/scores.py"
OF_SCORES = "tests/unit/worker/test_planner_scores.py::"

MUTANTS = [
    # --- what is measured at start ---
    Mutant(
        name="a step that takes too much is no warning",
        file="hiserve/worker/profile.py",
        old="logging.INFO if peaks[name] <= budget_bytes else logging.WARNING",
        new="logging.INFO",
        test="tests/unit/worker/test_profile.py::test_a_step_that_takes_more_than_was_planned_is_a_warning",
    ),
    Mutant(
        name="a step without memory ends without advice",
        file="hiserve/worker/profile.py",
        old="    except torch.OutOfMemoryError as error:",
        new="    except MemoryError as error:",
        test="tests/unit/worker/test_profile.py::test_a_step_without_memory_says_what_to_lower",
    ),
    # --- who runs ---
    Mutant(
        name="prompts come before decode rows",
        file=BUDGET,
        old='np.argsort(behind > 1, kind="stable")',
        new="np.arange(behind.size)",
        test=OF_BUDGET + "test_decode_rows_come_before_prompts_wherever_they_stand",
    ),
    Mutant(
        name="a step samples before it reaches the end",
        file=BUDGET,
        old="samples = (num_new >= behind) & (behind > 0)",
        new="samples = num_new > 0",
        test=OF_BUDGET + "test_a_step_samples_only_when_it_reaches_the_end",
    ),
    Mutant(
        name="rows stand in a plan as they were admitted",
        file=BUDGET,
        old='order = np.argsort(is_long, kind="stable")',
        new="order = np.arange(is_long.size)",
        test=OF_DRAFTS + "test_every_plan_is_what_its_rows_want_one_by_one[3-11-60-0]",
    ),
    Mutant(
        name="a step in flight may append its token but not its drafts",
        file=PLANNER,
        old="columns.pending[rows] += share.samples + share.num_draft",
        new="columns.pending[rows] += share.samples",
        test=OF_DRAFTS + "test_every_plan_is_what_its_rows_want_one_by_one[3-64-60-1]",
    ),
    Mutant(
        name="a step scores whatever prompts ask for",
        file=BUDGET,
        old="scores_fit = scored.sum() <= MAX_SCORED_TOKENS",
        new="scores_fit = True",
        test=OF_BUDGET + "test_a_prompt_longer_than_a_step_may_score_comes_in_pieces",
    ),
    Mutant(
        name="new requests score beside those that run",
        file=PLANNER,
        old="MAX_SCORED_TOKENS - int(share.num_scored.sum())",
        new="MAX_SCORED_TOKENS",
        test=OF_SCORES + "test_a_new_request_scores_what_running_ones_leave",
    ),
    Mutant(
        name="a row plans beyond its limit",
        file=BUDGET,
        old="np.where(left > 0, ahead - computed, 0)",
        new="ahead - computed",
        test=OF_BUDGET + "test_a_row_that_may_have_reached_its_limit_in_flight_waits",
    ),
    Mutant(
        name="drafts leave no room for the bonus token",
        file=BUDGET,
        old="np.minimum(drafted, max_len - 1 - ahead)",
        new="np.minimum(drafted, max_len - ahead)",
        test=OF_BUDGET + "test_drafts_stop_before_the_end_of_the_context_since_a_bonus_token_follows",
    ),
    Mutant(
        name="a row drafts before it has caught up",
        file=BUDGET,
        old="np.where(behind == 1, ",
        new="np.where(behind >= 1, ",
        test=OF_BUDGET + "test_a_row_drafts_only_once_it_has_caught_up",
    ),
    Mutant(
        name="admission ignores promised pages",
        file=ADMITTER,
        old="cache.num_evictable - self._rows.num_promised_pages()",
        new="cache.num_evictable",
        test=OF_PAGES + "test_admission_leaves_the_pages_that_running_rows_will_need",
    ),
    Mutant(
        name="the first admitted is preempted",
        file=PLANNER,
        old="self._preempt(int(rows[-1]))",
        new="self._preempt(int(rows[0]))",
        test=OF_PAGES + "test_the_latest_admitted_is_preempted_and_goes_on_with_the_same_tokens",
    ),
    # --- waiting for a row ---
    Mutant(
        name="nobody waits for a row that computes the prefix",
        file=FORERUNNER,
        old="        num_pages = shared // page_size\n",
        new="        num_pages = 0\n",
        test=OF_PLANNER + "test_a_request_waits_for_a_row_that_computes_its_prefix_and_then_hits",
    ),
    Mutant(
        name="a request waits for a row of another tenant",
        file=FORERUNNER,
        old="if columns.tenant(row).tenant != request.tenant:",
        new="if False:",
        test=OF_PLANNER + "test_other_tenants_neither_wait_nor_hit",
    ),
    Mutant(
        name="a request waits for a row that was aborted",
        file=FORERUNNER,
        old="columns.admission[other.row] == other.admission",
        new="columns.admission[other.row] >= 0",
        test=OF_PLANNER + "test_nobody_waits_for_an_aborted_row",
    ),
    Mutant(
        name="a request waits for a row that was preempted",
        file=FORERUNNER,
        old="columns.admission[other.row] == other.admission",
        new="columns.admission[other.row] >= 0",
        test=OF_PLANNER + "test_nobody_waits_for_a_preempted_row",
    ),
    # --- results ---
    Mutant(
        name="a late result reaches the next tenant of a row",
        file=PLANNER,
        old="ok = columns.admission[step.rows] == step.admissions",
        new="ok = columns.admission[step.rows] > 0",
        test=OF_PLANNER + "test_a_late_result_never_reaches_the_next_tenant_of_a_row",
    ),
    Mutant(
        name="rejected drafts count as computed",
        file=EMISSION,
        old="columns.computed[rows] -= rejected",
        new="columns.computed[rows] -= 0",
        test=OF_PLANNER + "test_rejected_drafts_are_computed_again",
    ),
    Mutant(
        name="rejected drafts count as settled",
        file=EMISSION,
        old="columns.settled[rows] -= rejected",
        new="columns.settled[rows] -= 0",
        test=OF_PAGES + "test_rejected_drafts_do_not_fill_a_page",
    ),
    Mutant(
        name="what follows a stop token is kept",
        file=STOPS,
        old="counts[ends] = is_end[ends].argmax(axis=1) + 1",
        new="pass",
        test=OF_PLANNER + "test_a_stop_token_inside_an_accepted_run_cuts_the_rest",
    ),
    Mutant(
        name="a rejected draft stops a reply",
        file=STOPS,
        old="        is_end &= np.arange(tokens.shape[1]) < counts[:, None]\n",
        new="",
        test=OF_PLANNER + "test_a_rejected_draft_that_is_a_stop_token_stops_nothing",
    ),
    Mutant(
        name="ignore_eos is ignored",
        file=STOPS,
        old="        is_end &= ~self._ignores_eos[rows][:, None]\n",
        new="",
        test=OF_PLANNER + "test_a_request_that_ignores_stop_tokens_runs_to_its_limit",
    ),
    Mutant(
        name="a reply at its limit goes on",
        file=EMISSION,
        old="np.where(counts == room, int(FinishReason.LENGTH), 0)",
        new="np.zeros_like(counts)",
        test=OF_PLANNER + "test_a_reply_ends_at_its_limit_inside_an_accepted_run",
    ),
    Mutant(
        name="a stop token at the limit ends a reply for its length",
        file=EMISSION,
        old="        finishes[stops] = int(FinishReason.STOP)\n",
        new="        finishes[stops & (finishes == 0)] = int(FinishReason.STOP)\n",
        test=OF_PLANNER + "test_a_stop_token_is_reported_and_ends_the_reply_even_as_the_last_allowed_one",
    ),
    Mutant(
        name="cached tokens are reported with every token",
        file="hiserve/worker/columns.py",
        old="self.cached.pop(row, None) for row in rows.tolist()",
        new="self.cached.get(row) for row in rows.tolist()",
        test=OF_PLANNER + "test_a_request_ends_at_max_tokens",
    ),
    Mutant(
        name="cached tokens are reported again after a preemption",
        file=PLANNER,
        old="        request.cached = columns.cached.pop(row, None)\n",
        new="",
        test=OF_PAGES + "test_the_latest_admitted_is_preempted_and_goes_on_with_the_same_tokens",
    ),
    Mutant(
        name="a later admission counts as the first",
        file=ADMITTER,
        old="if not request.was_admitted:",
        new="if True:",
        test=OF_PAGES + "test_the_latest_admitted_is_preempted_and_goes_on_with_the_same_tokens",
    ),
    # --- pages ---
    Mutant(
        name="a page is published before it is computed",
        file=TABLES,
        old="np.minimum(columns.settled[rows], columns.known[rows])",
        new="columns.known[rows]",
        test=OF_PAGES + "test_a_page_is_findable_once_the_step_that_filled_it_is_committed",
    ),
    Mutant(
        name="a page is published while a step computes it",
        file=TABLES,
        old="np.minimum(columns.settled[rows], columns.known[rows])",
        new="np.minimum(columns.computed[rows], columns.known[rows])",
        test=OF_PAGES + "test_a_page_is_not_published_by_the_step_before_the_one_that_fills_it",
    ),
    Mutant(
        name="a page computed after the stop is published",
        file=TABLES,
        old="np.minimum(columns.settled[rows], columns.known[rows])",
        new="columns.settled[rows]",
        test=OF_PAGES + "test_what_was_computed_after_a_stop_is_not_published",
    ),
    Mutant(
        name="the device is not told of a move",
        file=TABLES,
        old="if canonical is not pages:",
        new="if False:",
        test=OF_PAGES + "test_filling_a_page_that_is_cached_already_moves_the_row_to_the_cached_one",
    ),
    Mutant(
        name="a move reaches the next tenant of the row",
        file=JOURNAL,
        old="live = admissions[rows] == tenancies",
        new="live = admissions[rows] > 0",
        test=OF_PAGES + "test_a_move_is_dropped_when_the_row_changes_hands_before_the_next_plan",
    ),
    Mutant(
        name="a row leaks its pages when it ends",
        file=PLANNER,
        old="            self._cache.give(private)\n",
        new="            pass\n",
        test=OF_PLANNER + "test_an_aborted_running_request_gives_its_pages_back_and_says_nothing_more",
    ),
    Mutant(
        name="a row stays locked when it ends",
        file=PLANNER,
        old="        self._cache.release(receipt)\n",
        new="",
        test=OF_PLANNER + "test_an_aborted_running_request_gives_its_pages_back_and_says_nothing_more",
    ),
    Mutant(
        name="a row does not ask for the page after its last one",
        file=TABLES,
        old="np.where(before, before + 1, SINK_PAGE)",
        new="np.where(before, before + 2, SINK_PAGE)",
        test=OF_PAGES + "test_a_row_grows_into_the_pages_after_its_last_one",
    ),
    Mutant(
        name="rows that ended are not released on the device",
        file=PLANNER,
        old="        self._released.append(row)\n",
        new="",
        test=OF_PLANNER + "test_a_late_result_never_reaches_the_next_tenant_of_a_row",
    ),
    # --- the loop ---
    Mutant(
        name="overlap never has a step in flight",
        file=LOOP,
        old="len(self._in_flight) > self._depth",
        new="len(self._in_flight) > 0",
        test=OF_LOOP + "test_a_step_is_planned_while_depth_steps_are_in_flight",
    ),
    Mutant(
        name="overlap plans one step too far",
        file=LOOP,
        old="len(self._in_flight) > self._depth",
        new="len(self._in_flight) > self._depth + 1",
        test=OF_LOOP + "test_a_step_is_planned_while_depth_steps_are_in_flight",
    ),
    # --- stop tokens and scores ---
    Mutant(
        name="a row keeps the stop tokens of the tenant before",
        file=STOPS,
        old="        self._tokens[row] = NO_TOKEN\n",
        new="",
        test=OF_PLANNER + "test_a_row_forgets_the_stop_tokens_of_the_tenant_before",
    ),
    Mutant(
        name="a scored prompt comes from the cache",
        file=WAITING,
        old="return self.tokens.size - 1 if is_scored else self.num_scored",
        new="return self.tokens.size - 1",
        test=OF_SCORES + "test_a_scored_prompt_is_computed_whole_though_it_is_cached_and_takes_no_more_pages",
    ),
    Mutant(
        name="a scored prompt that lost its row begins anew",
        file=WAITING,
        old="return self.tokens.size - 1 if is_scored else self.num_scored",
        new="return self.tokens.size - 1 if is_scored else 0",
        test=OF_SCORES + "test_a_prompt_that_loses_its_row_goes_on_where_its_scores_end",
    ),
    Mutant(
        name="a prompt is scored again with its output",
        file=WAITING,
        old="wants_scores = is_new and self.",
        new="wants_scores = self.",
        test=OF_SCORES + "test_a_request_that_comes_with_output_was_told_the_scores_of_its_prompt",
    ),
    Mutant(
        name="a scored prompt waits for a row whose work it cannot use",
        file=FORERUNNER,
        old="usable = request.num_reusable",
        new="usable = request.tokens.size - 1",
        test=OF_SCORES + "test_a_scored_prompt_waits_for_nobody",
    ),
    Mutant(
        name="every prompt is scored",
        file="hiserve/worker/columns.py",
        old="last if request.num_scored < last else 0",
        new="last",
        test=OF_SCORES + "test_the_next_tenant_of_a_row_is_told_no_scores",
    ),
    Mutant(
        name="scores told before are told again",
        file=SCORES,
        old="begin = int(ends[i]) - num_scored + told",
        new="begin = int(ends[i]) - num_scored",
        test=OF_SCORES + "test_a_prompt_that_loses_its_row_takes_no_more_from_the_cache_than_its_scores_cover",
    ),
    Mutant(
        name="scores behind a stop token are told",
        file=PLANNER,
        old="pick_scores(plan, result, ok, counts, columns)",
        new="pick_scores(plan, result, ok, result.counts, columns)",
        test=OF_SCORES + "test_scores_behind_a_stop_token_are_cut_with_their_tokens",
    ),
    Mutant(
        name="scores of a faulted row are told",
        file=SCORES,
        old="np.flatnonzero(ok & (plan.num_scored > 0))",
        new="np.flatnonzero(plan.num_scored > 0)",
        test=OF_SCORES + "test_a_fault_in_the_middle_of_a_prompt_repeats_and_loses_no_score",
    ),
    Mutant(
        name="only the first row's scores are reported",
        file="hiserve/worker/report.py",
        old='        self.scores += b"".join(scores)\n',
        new='        self.scores = b"".join(scores[:1])\n',
        test=OF_SCORES + "test_each_row_gets_as_many_likeliest_tokens_as_it_asked_for_and_the_others_none",
    ),
]
