"""Guards of the executing half: rows, inputs, kernels, executor, pool."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROWS = "hiserve/runners/rows.py"
INPUTS = "hiserve/runners/inputs.py"
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
        file=ROWS,
        old="known_len * legal)",
        new="known_len)",
        test=OF_INPUTS + "test_a_step_already_launched_for_a_faulted_row_faults_too",
    ),
    # --- inputs ---
    Mutant(
        name="an illegal row keeps its page table",
        file=INPUTS,
        old="table = table * legal[:, None]",
        new="table = table * 1",
        test=OF_INPUTS + "test_a_stale_entry_read_or_written_sends_the_whole_row_to_the_sink",
    ),
    Mutant(
        name="nobody checks who owns a row's pages",
        file=INPUTS,
        old="        & is_table_owned(table, owners, rows.page_owner, end, rows.page_size)\n",
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
    # --- executor ---
    Mutant(
        name="a faulted row's token counts",
        file="hiserve/worker/executor.py",
        old="counts=legal[plan.samples].astype(np.int32)",
        new="counts=np.ones(int(plan.samples.sum()), dtype=np.int32)",
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
