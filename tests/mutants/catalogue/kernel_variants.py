"""Guards of how many variants of a kernel there are to compile."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TEST = "tests/unit/kernels/test_variants.py::test_views_of_an_upload_or_of_a_batch_may_begin_anywhere"

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
]
