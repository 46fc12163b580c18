"""Guards of attention of few tokens a row: what is read, what is seen, how rows are split and joined."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DECODE = "hiserve/kernels/attention_decode.py"
SCHEDULE = "hiserve/kernels/attention_schedule.py"
BACKEND = "hiserve/attention/triton.py"
TESTS = "tests/unit/kernels/test_attention_decode.py::"
ORACLE = TESTS + "test_equals_the_oracle_and_reads_nothing_that_a_row_does_not_own"
EDGES, WINDOWS, WIDTHS = (f"{ORACLE}[{name}]" for name in ("edges", "windows", "trees"))
SPLITS = TESTS + "test_long_rows_are_split_first_into_parts_of_at_most_a_share"
LAUNCHES = TESTS + "test_rows_alike_fill_the_device_once_whatever_their_number"
PADDING = TESTS + "test_rows_that_pad_a_batch_change_not_one_bit_of_the_others"
REPLAYS = TESTS + "test_a_graph_splits_rows_by_the_lengths_of_each_replay"

MUTANTS = [
    Mutant(
        name="a slot is found by 32 bits",
        file="hiserve/kernels/attention_decode.py",
        old="(page.to(tl.int64) * SHAPE.page_size",
        new="(page * SHAPE.page_size",
        test="tests/unit/kernels/test_large_pools.py::test_slots_beyond_what_32_bits_count_are_found",
    ),
    # --- attention ---
    Mutant(
        name="decode: keys past the end of a row are read",
        file=DECODE,
        old="        is_key = (key >= begin) & (key < end)\n",
        new="        is_key = key >= begin\n",
        test=EDGES,
    ),
    Mutant(
        name="decode: keys before the first that is seen are read",
        file=DECODE,
        old="        is_key = (key >= begin) & (key < end)\n",
        new="        is_key = key < end\n",
        test=WINDOWS,
    ),
    Mutant(
        name="decode: a token does not see itself",
        file=DECODE,
        old="sees = key[None, :] <= token[:, None]",
        new="sees = key[None, :] < token[:, None]",
        test=EDGES,
    ),
    Mutant(
        name="decode: a window is one key too wide",
        file=DECODE,
        old="sees &= key[None, :] > depth[:, None] - window",
        new="sees &= key[None, :] >= depth[:, None] - window",
        test=WINDOWS,
    ),
    Mutant(
        name="decode: a window in a tree is counted from the token's number",
        file=DECODE,
        old="depth = tl.sum((seen[:, None] >> tl.arange(0, 64)[None, :]) & 1, 1).to(tl.int32) - 1",
        new="depth = token",
        test=WIDTHS,
    ),
    Mutant(
        name="decode: a tree's mask hides the prefix",
        file=DECODE,
        old="sees = (key < 0)[None, :] | (((seen[:, None] >> bit[None, :]) & 1) != 0)",
        new="sees = ((seen[:, None] >> bit[None, :]) & 1) != 0",
        test=WIDTHS,
    ),
    Mutant(
        name="decode: a block in which nothing is seen gives NaN",
        file=DECODE,
        old='        offset = tl.where(higher == float("-inf"), 0.0, higher)\n        weights, rescale = tl.exp2(scores',
        new="        offset = higher\n        weights, rescale = tl.exp2(scores",
        test=WINDOWS,
    ),
    Mutant(
        name="decode: a token that sees nothing gets NaN",
        file=DECODE,
        old="divisor = tl.where(total > 0, total, 1.0)",
        new="divisor = total",
        test=WINDOWS,
    ),
    Mutant(
        name="decode: parts that there are not blank the first row",
        file=DECODE,
        old="    if (num_parts == 0) | (q_len == 0):\n        return\n",
        new="    num_parts = tl.maximum(num_parts, 1)\n    q_len = tl.maximum(q_len, 1)\n",
        test=EDGES,
    ),
    Mutant(
        name="join: the last but one to finish joins",
        file=DECODE,
        old='sem="acq_rel") == num_parts - 1:',
        new='sem="acq_rel") == num_parts - 2:',
        test=EDGES,
    ),
    Mutant(
        name="join: the next layer counts on",
        file=DECODE,
        old="            tl.store(count, 0)  # for the next layer\n",
        new="",
        test=EDGES,
    ),
    Mutant(
        name="join: a row's missing tokens are written over the next row's",
        file=DECODE,
        old="    is_query, dim = token < q_len, tl.arange(0, SHAPE.block_dim)\n",
        new="    is_query, dim = token < MAX_QUERIES, tl.arange(0, SHAPE.block_dim)\n",
        test=WIDTHS,
    ),
    Mutant(
        name="join: parts of other rows are read",
        file=DECODE,
        old="is_part = (part < num_parts)[:, None]",
        new="is_part = (part < num_parts + 1)[:, None]",
        test=EDGES,
    ),
    Mutant(
        name="join: later parts leave earlier ones at their scale",
        file=DECODE,
        old="mixed = mixed * rescale[:, None] + tl.sum(found * weights[:, :, None], 0)",
        new="mixed = mixed + tl.sum(found * weights[:, :, None], 0)",
        test=EDGES,
    ),
    Mutant(
        name="join: sinks are in every part",
        file=DECODE,
        old="        mixed, log_total = _close(mixed, top, total, None)\n",
        new="""        sink = None
        if results.sinks is not None:
            sink = tl.load(results.sinks + head, is_query, other=0.0)
        mixed, log_total = _close(mixed, top, total, sink)
""",
        test=WIDTHS,
    ),
    # --- the schedule ---
    Mutant(
        name="schedule: rows of one block count, so padding moves the cuts",
        file=SCHEDULE,
        old="        num_more += num_blocks - 1\n",
        new="        num_more += tl.where(row < num_rows, num_blocks, 0)\n",
        test=PADDING,
    ),
    Mutant(
        name="schedule: as few parts as always are few enough",
        file=SCHEDULE,
        old="tl.min(tl.where(num_needed <= num_extra, share, most))",
        new="most",
        test=SPLITS,
    ),
    Mutant(
        name="schedule: one part too many",
        file=SCHEDULE,
        old="num_needed <= num_extra, share",
        new="num_needed <= num_extra + 1, share",
        test=SPLITS,
    ),
    Mutant(
        name="schedule: short rows come first",
        file=SCHEDULE,
        old="(others_blocks > num_blocks)",
        new="(others_blocks < num_blocks)",
        test=SPLITS,
    ),
    Mutant(
        name="schedule: keys behind a window are somebody's part",
        file=SCHEDULE,
        old="first = tl.maximum(first, prefix + 1 - window)",
        new="first = tl.maximum(first, prefix + 1 - 2 * window)",
        test=SPLITS,
    ),
    Mutant(
        name="schedule: parts of rows alike need a second wave",
        file=SCHEDULE,
        old="    if num_rows > num_at_once:\n        num_extra = num_at_once\n",
        new="    if num_rows > num_at_once:\n        num_extra = 2 * num_at_once\n",
        test=LAUNCHES,
    ),
    Mutant(
        name="schedule: short rows launch as many parts as long ones",
        file=SCHEDULE,
        old="max(1, min(num_extra, num_more_blocks))",
        new="max(1, num_extra)",
        test=LAUNCHES,
    ),
    Mutant(
        name="triton: a graph keeps the cuts of its capture",
        file=BACKEND,
        old="        if layer in self._splits_at:\n",
        new="        if window not in self._schedules:\n",
        test=REPLAYS,
    ),
]
