"""Reported bugs of speculation over a hierarchical cache, made again."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLANNER = "hiserve/worker/planner.py"
TABLES = "hiserve/worker/tables.py"
COLUMNS = "hiserve/worker/columns.py"
TRANSFER = "hiserve/cache/pools/transfer.py"
TWINS = "hiserve/kernels/draft_reference.py"
SOURCES = "tests/e2e/test_spec_sources.py::"
HITS = "tests/e2e/test_spec_hits.py::"
DRAFTS = "tests/invariants/test_reported_bugs_drafts.py::"
FAULTS = "tests/e2e/test_spec_faults.py::"
ABORTS = "tests/invariants/test_spec_aborts.py"
TC_05 = DRAFTS + "test_tc_05_steps_wait_for_the_loads_that_they_read_and_for_no_others"

MUTANTS = [
    Mutant(
        name="TC-01: the head's part of a page does not leave the device",
        file=TRANSFER,
        old="for group in self._host.layout.groups:",
        new="for group in self._host.layout.groups[:1]:",
        test=SOURCES + "test_tc_01_what_was_evicted_to_the_host_and_loaded_keeps_its_drafts",
    ),
    Mutant(
        name="a page leaves the device without what the model showed of its last token",
        file=TRANSFER,
        old="for group in self._host.layout.groups:",
        new='for group in (each for each in self._host.layout.groups if each.codec != "boundary"):',
        test=SOURCES + "test_a_cached_prompt_has_the_bytes_and_the_acceptance_of_a_cold_one",
    ),
    Mutant(
        name="a prompt goes on behind a page with what another prompt's row was shown",
        file=TWINS,
        old="torch.where((first % step.page_size == 0)[:, None], at_boundary, kept)",
        new="kept.clone()",
        test=SOURCES + "test_prompts_that_part_right_behind_a_page_keep_their_acceptance",
    ),
    Mutant(
        name="pages are published whose last token is drawn and not computed",
        file=TABLES,
        old="full = np.minimum(columns.settled[rows], columns.known[rows]) // page_size",
        new="full = columns.known[rows] // page_size",
        test=SOURCES + "test_pages_that_steps_with_drafts_publish_are_those_of_plain_decoding",
    ),
    Mutant(
        name="TC-05: a step takes over the loads of the one before",
        file=PLANNER,
        old="        waits: tuple[int, ...] = ()\n",
        new="        waits = self._in_flight[-1].plan.waits if self._in_flight else ()\n",
        test=TC_05,
    ),
    Mutant(
        name="TC-05: a step waits for whatever load is on its way",
        file="hiserve/runners/gate.py",
        old="waits = tuple(op for op in plan.waits if op in loads.open)",
        new="waits = tuple(loads.open)",
        test=TC_05,
    ),
    Mutant(
        name="TC-05: a prefill keeps the empty list of loads of the steps before",
        file=PLANNER,
        old="return rows, share, self._loading.start(rows)",
        new="return rows, share, self._loading.start(rows)[:0]",
        test=TC_05,
    ),
    Mutant(
        name="TC-07: with drafts, pages are found by the tokens that follow theirs",
        file=TABLES,
        old="key = columns.tokens[row, start * page_size : end * page_size].tobytes()",
        new="key = columns.tokens[row, (ahead := min(1, columns._num_ahead)) + start * page_size :][: (end - start) * page_size]"
        ".tobytes()",
        test=HITS + "test_tc_07_speculation_does_not_defeat_prefix_reuse",
    ),
    Mutant(
        name="TC-09: a row that begins behind a cached prefix does not know its tokens",
        file="hiserve/runners/rows.py",
        old="self.tokens[each.row, : each.tokens.size].copy_(prompt)",
        new="self.tokens[each.row, each.num_computed : each.tokens.size].copy_(prompt[each.num_computed :])",
        test=HITS + "test_tc_09_lookups_in_the_text_work_over_the_host_tier",
    ),
    Mutant(
        name="TC-10: the page of rejected tokens is not returned",
        file=COLUMNS,
        old="self.page_table[row, self.num_published[row] : self.num_pages[row]]",
        new="self.page_table[row, self.num_published[row] : -(-self.known[row] // self._page_size)]",
        test=HITS + "test_tc_10_no_page_is_lost_to_rejected_tokens",
    ),
    Mutant(
        name="rows get pages for all drafts again at each step",
        file=TABLES,
        old="growing = (end > held * page_size).nonzero()[0]",
        new="end = np.minimum(end + page_size, columns._max_len)\n"
        "        growing = (end > held * page_size).nonzero()[0]",
        test=DRAFTS + "test_tc_10_the_last_page_of_rejected_tokens_is_returned",
    ),
    Mutant(
        name="a request that is aborted while its drafts are verified keeps its pages",
        file=PLANNER,
        old="        if private.size:\n            self._cache.give(private)\n",
        new="        if private.size and not columns.drafted[row]:\n            self._cache.give(private)\n",
        test=ABORTS,
    ),
    Mutant(
        name="what a step gave is taken for the row's next tenant",
        file=PLANNER,
        old="ok = columns.admission[step.rows] == step.admissions",
        new="ok = columns.admission[step.rows] > 0",
        test=ABORTS,
    ),
    Mutant(
        name="a request that is aborted while its prefix is loaded is waited for",
        file="hiserve/worker/loading.py",
        old='        """A row is given back; its copies go on without it."""\n        self._waiting.discard(row)\n',
        new='        """A row is given back; its copies go on without it."""\n',
        test=ABORTS,
    ),
    # --- rows that changed between planning and launch, or between a step and its drafts ---
    Mutant(
        name="drafts are computed in pages that changed hands meanwhile",
        file=TWINS,
        old="    is_own &= state.page_owner[table.clamp(0, num_pages - 1).long()] == owners\n",
        new="",
        test=FAULTS + "test_a_spoiled_row_works_in_the_sink_and_is_computed_again",
    ),
    Mutant(
        name="a step that drafts does not wait for the load that it reads",
        file="hiserve/worker/executor.py",
        old="        if verdict.loads:\n",
        new="        if verdict.loads and not plan.num_propose:\n",
        test=FAULTS + "test_rows_draft_behind_the_load_that_they_were_started_behind",
    ),
    Mutant(
        name="drafts attend over more than a row's table, where they pass its end",
        file="hiserve/spec/head.py",
        old="chain.layout.within(min(max_kv_len, self._max_kv_len))",
        new="chain.layout.within(max_kv_len)",
        test="tests/e2e/test_spec_drafts.py::test_rows_draft_up_to_their_end_and_beyond_it",
    ),
]
