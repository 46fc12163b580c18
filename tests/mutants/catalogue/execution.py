"""Guards of the executing half: rows, inputs, kernels, executor, pool."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROWS = "hiserve/runners/rows.py"
STEP = "hiserve/kernels/step_reference.py"
KERNELS = "hiserve/kernels/reference.py"
OF_ROWS = "tests/unit/runners/test_rows.py::"
OF_INPUTS = "tests/unit/runners/test_inputs.py::"
OF_KERNELS = "tests/unit/kernels/test_reference.py::"
OF_EXECUTOR = "tests/unit/worker/test_executor.py::"

MUTANTS = [
    # --- rows ---
    Mutant(
        name="a page table is written before the row is cleared",
        file=ROWS,
        old="""        if plan.release.size or plan.admit:
            self._clear(plan.release, plan.admit)
        if plan.admit:
            self._admit(plan.admit)
        if plan.table.rows.size:
            self._write_table(plan.table)
""",
        new="""        if plan.table.rows.size:
            self._write_table(plan.table)
        if plan.release.size or plan.admit:
            self._clear(plan.release, plan.admit)
        if plan.admit:
            self._admit(plan.admit)
""",
        test=OF_ROWS + "test_release_comes_before_admission_and_admission_before_the_table",
    ),
    Mutant(
        name="a released row keeps its tokens and pages",
        file=ROWS,
        old="np.concatenate((release, np.array([each.row for each in admit], dtype=np.int32)))",
        new="np.array([each.row for each in admit], dtype=np.int32)",
        test=OF_ROWS + "test_a_released_row_knows_nothing_and_owns_nothing",
    ),
    Mutant(
        name="a faulted row keeps its tokens",
        file=STEP,
        old="known_len * legal)",
        new="known_len)",
        test=OF_INPUTS + "test_a_step_already_launched_for_a_faulted_row_faults_too",
    ),
    # --- inputs ---
    Mutant(
        name="an illegal row keeps its page table",
        file=STEP,
        old="table = torch.where(legal[:, None], table, SINK_PAGE)",
        new="table = table * 1",
        test=OF_INPUTS + "test_a_stale_entry_read_or_written_sends_the_whole_row_to_the_sink",
    ),
    Mutant(
        name="nobody checks who owns a row's pages",
        file=STEP,
        old="        & is_table_owned(table, owners, state.page_owner, end, page_size)\n",
        new="",
        test=OF_EXECUTOR + "test_a_stale_entry_faults_its_row_and_leaves_the_neighbours_pages_untouched",
    ),
    # --- kernels ---
    Mutant(
        name="a last slot may disagree with the length",
        file=KERNELS,
        old="(in_range & agrees)",
        new="in_range",
        test=OF_KERNELS + "test_legal_last_locs_are_none_or_a_slot_past_the_sink_that_agrees_with_the_length",
    ),
    Mutant(
        name="a last slot may lie in the sink",
        file=KERNELS,
        old="(location >= page_size)",
        new="(location >= 0)",
        test=OF_KERNELS + "test_legal_last_locs_are_none_or_a_slot_past_the_sink_that_agrees_with_the_length",
    ),
    Mutant(
        name="noise is the same at every position",
        file=KERNELS,
        old="counter[1] = position[:, None]",
        new="counter[1] = 0",
        test="tests/unit/kernels/test_random.py::test_each_part_of_the_key_gives_other_noise",
    ),
    # --- what follows the forward ---
    Mutant(
        name="a draft is drawn at the position of the last token",
        file="hiserve/runners/step.py",
        old="(first + torch.minimum(nodes, num_draft))",
        new="(first + 0 * torch.minimum(nodes, num_draft))",
        test="tests/unit/runners/test_verify.py::test_tokens_are_those_of_plain_decoding",
    ),
    Mutant(
        name="rows with fewer drafts than others draw from beyond their tokens",
        file="hiserve/runners/inputs.py",
        old="np.minimum(np.arange(width), drafts)",
        new="np.arange(width)",
        test="tests/unit/runners/test_verify.py::test_rows_with_fewer_drafts_share_a_step_with_rows_that_have_more",
    ),
    Mutant(
        name="what is refused counts as computed",
        file=STEP,
        old="(kv_lens - num_refused) * legal)",
        new="kv_lens * legal)",
        test="tests/unit/runners/test_verify.py::test_tokens_are_those_of_plain_decoding",
    ),
    # --- executor ---
    Mutant(
        name="a faulted row's token counts",
        file=STEP,
        old="counts = counts * legal.index_select(0, sampling)",
        new="counts = counts * 1",
        test=OF_EXECUTOR + "test_a_stale_entry_faults_its_row_and_leaves_the_neighbours_pages_untouched",
    ),
    # --- pool ---
    Mutant(
        name="values lie over keys",
        file="hiserve/cache/pools/layout.py",
        old="v=planes[1]",
        new="v=planes[0]",
        test="tests/unit/pools/test_device_pool.py::test_layers_and_planes_share_no_memory",
    ),
]
