"""Guards of the choice of how many drafts a step verifies."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ADAPTIVE = "hiserve/spec/adaptive.py"
TESTS = "tests/unit/spec/test_adaptive.py"
OF_TESTS = TESTS + "::"

MUTANTS = [
    # --- what it knows ---
    Mutant(
        name="a batch costs what the next smaller one does",
        file=ADAPTIVE,
        old="np.searchsorted(self.rows[:-1], num_rows)",
        new='np.searchsorted(self.rows[1:], num_rows, side="right")',
        test=OF_TESTS + "test_a_batch_costs_what_the_next_larger_one_that_was_measured_does",
    ),
    Mutant(
        name="the first draft costs a forward of its own",
        file=ADAPTIVE,
        old="np.maximum(self.tiers - 1, 0) * (",
        new="self.tiers * (",
        test=OF_TESTS + "test_making_drafts_costs_a_forward_behind_the_step_and_one_for_each_further_draft",
    ),
    Mutant(
        name="stored tokens cost nothing in draft forwards",
        file=ADAPTIVE,
        old="(self.verify_token + self.draft_token) * num_stored",
        new="self.verify_token * num_stored",
        test=OF_TESTS + "test_making_drafts_costs_a_forward_behind_the_step_and_one_for_each_further_draft",
    ),
    Mutant(
        name="what drafts take to make is as it was measured at start",
        file=ADAPTIVE,
        old="if tier == self._kept[self._costs.bucket(counts.size)]:\n                self._times",
        new="if tier < 0:\n                self._times",
        test=OF_TESTS + "test_drafts_that_take_less_or_more_than_measured_are_found_out",
    ),
    Mutant(
        name="drafts made behind a step count as those that it verified",
        file=ADAPTIVE,
        old="seconds += float(further[tier] - further[made])",
        new="seconds += 0.0 * float(further[tier] - further[made])",
        test=OF_TESTS + "test_a_step_is_told_from_the_drafts_made_behind_it",
    ),
    Mutant(
        name="rows with fewer drafts count against those that have more",
        file=ADAPTIVE,
        old="self._reached += _num_with(np.minimum(num_draft, counts), self._max_draft)",
        new="self._reached += _num_with(counts, self._max_draft)",
        test=OF_TESTS + "test_chances_are_those_of_the_drafts",
    ),
    Mutant(
        name="a place counts as reached whatever came before it",
        file=ADAPTIVE,
        old="_num_with(np.minimum(num_draft, counts), self._max_draft)",
        new="_num_with(num_draft, self._max_draft)",
        test=OF_TESTS + "test_chances_are_those_of_the_drafts",
    ),
    Mutant(
        name="a place never reached has the chance of the first",
        file=ADAPTIVE,
        old="(accepted + PRIOR_ROWS * after)",
        new="(accepted + PRIOR_ROWS * PRIOR)",
        test=OF_TESTS + "test_a_place_that_nobody_reached_has_the_chance_of_the_one_before",
    ),
    Mutant(
        name="all drafts that were ever verified weigh the same",
        file=ADAPTIVE,
        old="share = num_rows / (WINDOW_ROWS + WINDOW_STEPS * num_rows)",
        new="share = np.zeros(self._max_draft)",
        test=OF_TESTS + "test_the_past_is_forgotten",
    ),
    Mutant(
        name="large batches forget as slowly as small ones",
        file=ADAPTIVE,
        old="share = num_rows / (WINDOW_ROWS + WINDOW_STEPS * num_rows)",
        new="share = (num_rows > 0) / WINDOW_ROWS",
        test=OF_TESTS + "test_the_past_is_forgotten",
    ),
    Mutant(
        name="tiers that were not measured are as the table says",
        file=ADAPTIVE,
        old="np.where(is_measured, factors, factors[is_measured].mean())",
        new="factors",
        test=OF_TESTS + "test_times_are_refined_by_what_steps_took",
    ),
    Mutant(
        name="times change nothing",
        file=ADAPTIVE,
        old="rate * _error(seconds, expected)",
        new="0.0 * rate * _error(seconds, expected)",
        test=OF_TESTS + "test_a_wrong_table_does_not_cost_for_ever",
    ),
    Mutant(
        name="the latest time replaces those before it",
        file=ADAPTIVE,
        old="rate = max(TIME_RATE, 1.0 / (1 + self._num_measured[bucket, tier]))",
        new="rate = 1.0",
        test=OF_TESTS + "test_noisy_times_and_stalls_do_not_mislead_it",
    ),
    Mutant(
        name="a stall weighs as much as it is long",
        file=ADAPTIVE,
        old="MAX_ERROR = 0.5",
        new="MAX_ERROR = 50.0",
        test=OF_TESTS + "test_a_stall_is_not_believed",
    ),
    # --- what it chooses ---
    Mutant(
        name="the most tokens are chosen, whatever they cost",
        file=ADAPTIVE,
        old="rates = tokens / seconds\n",
        new="rates = tokens\n",
        test=OF_TESTS + "test_work_of_one_kind_is_done_as_fast_as_with_the_best_fixed_number",
    ),
    Mutant(
        name="rows that may have no drafts count as if they had",
        file=ADAPTIVE,
        old="_num_with(allowed, self._costs.max_draft) * self._acceptance.chances",
        new="allowed.size * self._acceptance.chances",
        test=OF_TESTS + "test_rows_that_may_have_no_drafts_weigh_against_them",
    ),
    Mutant(
        name="one change follows the other",
        file=ADAPTIVE,
        old="if age >= DWELL_STEPS and rates",
        new="if rates",
        test=OF_TESTS + "test_changes_keep_their_distance",
    ),
    Mutant(
        name="any gain is worth a change",
        file=ADAPTIVE,
        old="rates[best] > (1 + needed) * rates[kept]",
        new="rates[best] > rates[kept]",
        test=OF_TESTS + "test_a_small_gain_changes_nothing_soon_and_something_late",
    ),
    Mutant(
        name="a small gain is never worth a change",
        file=ADAPTIVE,
        old="needed = max(LEAST_GAIN, MIN_GAIN * min(1.0, 5 * DWELL_STEPS / age))",
        new="needed = MIN_GAIN",
        test=OF_TESTS + "test_a_small_gain_changes_nothing_soon_and_something_late",
    ),
    Mutant(
        name="a tier is chosen that nobody may have",
        file=ADAPTIVE,
        old='np.searchsorted(self._costs.tiers, allowed.max(initial=0), side="right"))',
        new="np.searchsorted(self._costs.tiers, allowed.max(initial=0)) + 1)",
        test=OF_TESTS + "test_only_tiers_are_chosen",
    ),
    Mutant(
        name="a request that allows fewer gets none",
        file=ADAPTIVE,
        old="if kept < tokens.size else best",
        new="if kept < tokens.size else 0",
        test=OF_TESTS + "test_only_tiers_are_chosen",
    ),
    # --- probes ---
    Mutant(
        name="nothing is ever probed",
        file=ADAPTIVE,
        old="if credit[most] < losses[most]:",
        new="if True:",
        test=OF_TESTS + "test_it_leaves_drafts_that_fail_and_comes_back_when_they_are_accepted",
    ),
    Mutant(
        name="probes cost nothing",
        file=ADAPTIVE,
        old="credit[most] -= losses[most]",
        new="credit[most] -= 0.0",
        test=OF_TESTS + "test_probes_where_no_drafts_are_best_cost_what_they_may",
    ),
    Mutant(
        name="a probe of no loss follows the other",
        file=ADAPTIVE,
        old="losses = np.maximum(losses, MIN_PROBE_LOSS)",
        new="losses = np.maximum(losses, 1e-6)",
        test=OF_TESTS + "test_tiers_that_are_as_good_are_probed_now_and_then",
    ),
    Mutant(
        name="probes that went well pay for nothing",
        file=ADAPTIVE,
        old="gained = self._gain(tier, num_draft, counts, mean_context, seconds)",
        new="gained = 0.0",
        test=OF_TESTS + "test_a_probe_that_goes_well_is_followed_by_others",
    ),
    Mutant(
        name="what probes gained is saved without bound",
        file=ADAPTIVE,
        old="min(max(self._credit[tier] + gained, -MAX_CREDIT), MAX_CREDIT)",
        new="max(self._credit[tier] + gained, -MAX_CREDIT)",
        test=OF_TESTS + "test_what_was_saved_for_probes_is_bounded",
    ),
    Mutant(
        name="a stall ends probes",
        file=ADAPTIVE,
        old="min(max(self._credit[tier] + gained, -MAX_CREDIT), MAX_CREDIT)",
        new="min(self._credit[tier] + gained, MAX_CREDIT)",
        test=OF_TESTS + "test_a_stall_in_a_probe_does_not_end_probes",
    ),
    Mutant(
        name="the planner would load torch to choose",
        file=ADAPTIVE,
        old="import numpy as np\n",
        new="import numpy as np\nimport torch\n",
        test="tests/test_architecture.py::test_importing_the_planning_half_and_the_front_end_loads_no_torch",
    ),
    Mutant(
        name="what one batch keeps, all keep",
        file=ADAPTIVE,
        old="bucket, warmth = self._costs.bucket(allowed.size), self._warmth",
        new="bucket, warmth = 0, self._warmth",
        test=OF_TESTS + "test_what_one_batch_keeps_holds_no_other_back",
    ),
]
