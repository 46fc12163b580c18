"""Guards of how many variants of a kernel there are to compile."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TEST = "tests/unit/kernels/test_variants.py::test_views_of_an_upload_or_of_a_batch_may_begin_anywhere"

OF_SHORT = (
    "tests/unit/attention/test_triton.py::"
    "test_leading_rows_of_few_tokens_are_computed_together_and_all_behind_a_longer_one_by_the_other_kernel"
)
OF_REHEARSAL = "tests/unit/worker/test_rehearsal.py::"

MUTANTS = [
    Mutant(
        name="schedule: a variant for each place in an upload",
        file="hiserve/kernels/attention_schedule.py",
        old=', do_not_specialize_on_alignment=["qo_indptr", "kv_lens"]',
        new="",
        test=TEST,
    ),
    Mutant(
        name="extend: a variant of the join for each first row",
        file="hiserve/kernels/attention_extend.py",
        old=', do_not_specialize_on_alignment=["qo_indptr"]\n',
        new="\n",
        test=TEST,
    ),
    Mutant(
        name="lists of pages: a variant for each first row of a batch",
        file="hiserve/kernels/page_lists.py",
        old=', do_not_specialize_on_alignment=["page_table", "kv_lens", "rows", "indptr"]',
        new="",
        test=TEST,
    ),
    Mutant(
        name="copies of pages: a variant for each first one of some orders",
        file="hiserve/kernels/page_copy.py",
        old=', do_not_specialize_on_alignment=["indices"]',
        new="",
        test=TEST,
    ),
    Mutant(
        name="rows with other numbers of drafts go to the kernel for prompts",
        file="hiserve/attention/triton.py",
        old="return int(is_long.argmax()) if is_long.any() else len(q_lens)",
        new="return int((q_lens != q_lens[0]).argmax()) if (q_lens != q_lens[0]).any() else len(q_lens)",
        test=OF_SHORT,
    ),
    Mutant(
        name="few long rows alike go to the kernel for drafts, whatever stands behind them",
        file="hiserve/attention/triton.py",
        old=" and (q_lens == q_lens[0]).all() else 0",
        new=" else 0",
        test=OF_SHORT,
    ),
    Mutant(
        name="no row with a prefix is rehearsed",
        file="hiserve/worker/rehearsal.py",
        old="        yield [_Row(LONG, 0, bound)], num_draft\n",
        new="",
        test=OF_REHEARSAL + "test_steps_of_every_kind_run_and_leave_nothing_behind",
    ),
    Mutant(
        name="rows that verify other numbers of drafts are not rehearsed",
        file="hiserve/worker/rehearsal.py",
        old="    for drafts in range(1, num_draft + 1):",
        new="    for drafts in range(num_draft, num_draft + 1):",
        test=OF_REHEARSAL + "test_rows_with_drafts_and_without_stand_side_by_side",
    ),
    Mutant(
        name="steps larger than any are rehearsed",
        file="hiserve/worker/rehearsal.py",
        old="if sum(num_new) > max_batched_tokens or max",
        new="if max",
        test=OF_REHEARSAL + "test_steps_that_are_larger_than_any_are_left_out",
    ),
]
