"""Guards of ``hiserve bench spec``: what its numbers rest on, and that equality is really checked."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINE = "hiserve/bench/spec/engine.py"
EQUALITY = "hiserve/bench/spec/equality.py"
FIGURES = "hiserve/bench/spec/figures.py"
RUN = "hiserve/bench/spec/run.py"
MARGIN = "hiserve/bench/margin.py"
OF_FIGURES = "tests/unit/bench/spec/test_figures.py::"
OF_EQUALITY = "tests/unit/bench/spec/test_equality.py::"
OF_RUN = "tests/unit/bench/spec/test_run.py::"

MUTANTS = [
    # --- figures ---
    Mutant(
        name="the first token of a reply is decoded",
        file=ENGINE,
        old="num_decoded=sum(len(choice.token_ids) - 1 for choice in choices)",
        new="num_decoded=sum(len(choice.token_ids) for choice in choices)",
        test=OF_FIGURES + "test_a_batch_is_timed_behind_its_first_token_and_counts_steps_of_the_slowest_request",
    ),
    Mutant(
        name="accepted drafts take steps",
        file=ENGINE,
        old="len(choice.token_ids) - 1 - use.accepted",
        new="len(choice.token_ids) - 1",
        test=OF_FIGURES + "test_a_batch_is_timed_behind_its_first_token_and_counts_steps_of_the_slowest_request",
    ),
    Mutant(
        name="acceptance is of all drafts",
        file=FIGURES,
        old="[accepted / steps for accepted",
        new="[accepted / max(1, drafts.proposed) for accepted",
        test=OF_FIGURES + "test_accept_length_and_acceptance_are_of_all_verifying_steps",
    ),
    Mutant(
        name="accept length counts one run",
        file=FIGURES,
        old="sum((run.drafts for run in self.spec), DraftUse())",
        new="self.spec[0].drafts",
        test=OF_FIGURES + "test_accept_length_and_acceptance_are_of_all_verifying_steps",
    ),
    Mutant(
        name="the speed-up is plain decoding's over speculation's",
        file=FIGURES,
        old="spec.tokens_per_s / plain.tokens_per_s",
        new="plain.tokens_per_s / spec.tokens_per_s",
        test=OF_FIGURES + "test_figures_are_medians_of_pairs_of_runs",
    ),
    Mutant(
        name="speculation crosses over where it loses first",
        file=FIGURES,
        old="sorted(speedups, reverse=True)",
        new="sorted(speedups)",
        test=OF_FIGURES + "test_speculation_stops_paying_at_the_batch_from_which_all_larger_ones_lose",
    ),
    Mutant(
        name="a proposer of which nothing is accepted goes through",
        file=FIGURES,
        old="if drafts.accepted or (",
        new="if drafts.proposed or (",
        test=OF_FIGURES + "test_drafts_of_which_none_was_accepted_are_an_error_with_a_remedy",
    ),
    Mutant(
        name="the sweep asks nobody whether anything was accepted",
        file=RUN,
        old="                check_accepted(cases[first:])\n",
        new="",
        test=OF_RUN + "test_a_proposer_of_which_nothing_is_accepted_ends_the_sweep",
    ),
    Mutant(
        name="a cycle extends nothing",
        file=FIGURES,
        old="(self.verify_s + self.extend_s + self.draft_s)",
        new="(self.verify_s + self.draft_s)",
        test=OF_FIGURES + "test_the_cost_of_a_cycle_is_what_verifies_extends_and_drafts_over_a_plain_step",
    ),
    # --- sources ---
    Mutant(
        name="a host hit finds its prompts on the device",
        file=ENGINE,
        old='        engine.flush(("device",))\n',
        new="        pass\n",
        test=OF_FIGURES + "test_prompts_are_where_the_source_says",
    ),
    Mutant(
        name="prompts may come from anywhere",
        file=ENGINE,
        old="    if bool(found) == (source == COLD):\n",
        new="    if False:\n",
        test=OF_FIGURES + "test_prompts_are_where_the_source_says",
    ),
    # --- equality ---
    Mutant(
        name="a changed token is the same",
        file=EQUALITY,
        old="if pair[0] != pair[1]]",
        new="if len(pair[0]) != len(pair[1])]",
        test=OF_EQUALITY + "test_one_changed_token_is_a_difference_where_arithmetic_is_exact",
    ),
    Mutant(
        name="float64 has a margin",
        file=EQUALITY,
        old='ROUNDING = ("float32",',
        new='ROUNDING = ("float64", "float32",',
        test=OF_EQUALITY + "test_one_changed_token_is_a_difference_where_arithmetic_is_exact",
    ),
    Mutant(
        name="any token is within the margin",
        file=MARGIN,
        old="return self.worst <= self.epsilon",
        new="return True",
        test=OF_EQUALITY + "test_a_near_tie_is_within_the_margin_and_anything_else_is_not",
    ),
    Mutant(
        name="any number of near ties is let pass",
        file=MARGIN,
        old="return self.num_needed <= MAX_SHARE * self.num_positions",
        new="return True",
        test=OF_EQUALITY + "test_more_than_a_few_near_ties_over_all_comparisons_are_a_difference",
    ),
    Mutant(
        name="only the last run is compared",
        file=RUN,
        old="for both in replies]",
        new="for both in replies[-1:]]",
        test=OF_RUN + "test_a_changed_token_is_found_whichever_run_it_was_in",
    ),
    Mutant(
        name="the plain run is taken for the speculative one",
        file=RUN,
        old="    for _ in range(repeats):\n        (plain, expected), (spec, drafted) = (",
        new="    for _ in range(repeats):\n        (spec, drafted), (plain, expected) = (",
        test=OF_RUN + "test_a_changed_token_is_found_whichever_run_it_was_in",
    ),
]
