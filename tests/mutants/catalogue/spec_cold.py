"""Guards of heads that go cold."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TWINS = "hiserve/kernels/draft_reference.py"
OF_WINDOWS = "tests/unit/kernels/test_draft_window.py::"
OF_COLD = "tests/unit/spec/test_cold.py::"

MUTANTS = [
    Mutant(
        name="a cold head computes all the same",
        file="hiserve/runners/dispatch.py",
        old="if self._proposer is None or plan.is_cold:",
        new="if self._proposer is None:",
        test="tests/e2e/test_spec_cold.py::test_a_cold_head_computes_nothing_and_drafts_as_well_once_it_is_warm[eagle3]",
    ),
    Mutant(
        name="a page that is handed out keeps its mark",
        file="hiserve/runners/rows.py",
        old="self.is_drafted.index_fill_(0, new_pages, 0)",
        new="pass",
        test="tests/unit/runners/test_rows.py::test_a_page_handed_out_for_new_tokens_has_not_been_drafted",
    ),
    Mutant(
        name="a row's next tenant goes on where the head left the one before",
        file="hiserve/runners/rows.py",
        old="        self.taken_len.index_fill_(0, rows, 0)\n",
        new="",
        test="tests/unit/runners/test_rows.py::test_nothing_of_a_rows_next_tenant_was_taken_in",
    ),
    Mutant(
        name="a step that begins in a page left out sees it",
        file=TWINS,
        old="    start = torch.where(start > first_page, torch.maximum(start, behind_step), start)\n",
        new="",
        test=OF_WINDOWS + "test_no_page_with_a_token_that_the_head_left_out_is_drafted_or_attended_over",
    ),
    Mutant(
        name="pages left out are attended over",
        file=TWINS,
        old="skipped = torch.minimum(progress.start_page.index_select(0, rows), last) * legal",
        new="skipped = 0 * last",
        test=OF_WINDOWS + "test_no_page_with_a_token_that_the_head_left_out_is_drafted_or_attended_over",
    ),
    Mutant(
        name="a cold head is never tried again",
        file="hiserve/spec/adaptive.py",
        old="        warmth.save(allowed.size, self._price)\n",
        new="",
        test=OF_COLD + "test_it_comes_back_where_drafts_are_accepted_again",
    ),
    Mutant(
        name="a trial is believed by its times",
        file="hiserve/spec/adaptive.py",
        old="self._costs.seconds(bucket, allowed.size * mean_context)\n            )",
        new="self._times.expect(allowed.size, mean_context)\n            )",
        test=OF_COLD + "test_a_trial_whose_times_are_those_of_stalls_changes_nothing",
    ),
]
