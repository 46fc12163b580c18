"""Guards of attention of many new tokens: what is read and seen, which pages are adjacent, how parts join."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

EXTEND = "hiserve/kernels/attention_extend.py"
BLOCKS = "hiserve/kernels/attention_blocks.py"
TESTS = "tests/unit/kernels/test_attention_extend.py::"
ORACLE = TESTS + "test_equals_the_oracle_and_follows_no_entry_that_a_row_does_not_own"
EDGES, RUNS = f"{ORACLE}[edges]", f"{ORACLE}[runs]"
PARTS = TESTS + "test_keys_are_split_where_rows_are_too_few_and_the_parts_join_to_the_whole"
FRESH = TESTS + "test_rows_without_a_prefix_read_their_own_new_keys_and_the_others_the_pool"

MUTANTS = [
    Mutant(
        name="extend: a kernel takes a Python bool, for which older interpreters of Triton have no type",
        file=EXTEND,
        old="            int(has_fresh and not is_fresh),\n",
        new="            has_fresh and not is_fresh,\n",
        test=PARTS,
    ),
    # --- what is read ---
    Mutant(
        name="extend: keys past the end of a row are read",
        file=EXTEND,
        old="        is_key = (key >= begin) & (key < end)\n",
        new="        is_key = key >= begin\n",
        test=EDGES,
    ),
    Mutant(
        name="extend: keys before the first that is seen are read",
        file=EXTEND,
        old="        is_key = (key >= begin) & (key < end)\n",
        new="        is_key = key < end\n",
        test=RUNS,
    ),
    Mutant(
        name="extend: slots are read where there is no key",
        file=BLOCKS,
        old="        tile = tl.load(at, is_key[:, None] & (dim < shape.head_dim)[None, :], other=0)\n",
        new="        tile = tl.load(at, (dim < shape.head_dim)[None, :], other=0)\n",
        test=EDGES,
    ),
    Mutant(
        name="extend: scattered pages are taken for adjacent ones",
        file=BLOCKS,
        old="    return tl.max(tl.max(shift, 1) - tl.min(shift, 1), 0) == 0\n",
        new="    return tl.max(tl.max(shift, 1) - tl.max(shift, 1), 0) == 0\n",
        test=RUNS,
    ),
    Mutant(
        name="extend: one block tells whether those behind it are adjacent",
        file=BLOCKS,
        old="    block = tl.minimum(block + tl.arange(0, RUN), end - 1)\n",
        new="    block = tl.minimum(block + tl.arange(0, RUN) * 0, end - 1)\n",
        test=RUNS,
    ),
    Mutant(
        name="extend: a run never ends",
        file=BLOCKS,
        old="    while stop < end and _are_adjacent(pages, stop, end, shape) == is_adjacent:\n",
        new="    while stop < end:\n",
        test=RUNS,
    ),
    Mutant(
        name="extend: a run passes the last block",
        file=BLOCKS,
        old="    return is_adjacent, tl.minimum(stop, end)\n",
        new="    return is_adjacent, stop\n",
        test=EDGES,
    ),
    Mutant(
        name="extend: scattered blocks stay on the page of the first",
        file=BLOCKS,
        old="tl.load(pages + (tl.minimum(number + 1, end - 1) * shape.num_keys + key)",
        new="tl.load(pages + (tl.minimum(number, end - 1) * shape.num_keys + key)",
        test=RUNS,
    ),
    Mutant(
        name="extend: adjacent blocks stay on the page of the first",
        file=BLOCKS,
        old="tl.load(pages + tl.minimum(number + 1, end - 1) * num_keys // shape.page_size)",
        new="tl.load(pages + tl.minimum(number, end - 1) * num_keys // shape.page_size)",
        test=RUNS,
    ),
    Mutant(
        name="extend: rows with a prefix are computed from their new keys",
        file=EXTEND,
        old="(shape.is_fresh and prefix > 0) or ",
        new="",
        test=FRESH,
    ),
    Mutant(
        name="extend: rows without a prefix are computed once more, from the pool",
        file=EXTEND,
        old=" or (leaves_fresh != 0 and prefix == 0)",
        new="",
        test=FRESH,
    ),
    # --- what is seen ---
    Mutant(
        name="extend: a block counts as seen by all when its first key is",
        file=EXTEND,
        old="tl.maximum(end_all // shape.num_keys, low_all)",
        new="tl.maximum(tl.cdiv(end_all, shape.num_keys), low_all)",
        test=EDGES,
    ),
    Mutant(
        name="extend: the first of some tokens says where the windows of all begin",
        file=EXTEND,
        old="tl.maximum(last - window + 1, 0)",
        new="tl.maximum(first_position - window + 1, 0)",
        test=RUNS,
    ),
    Mutant(
        name="extend: windows hide nothing in blocks that some see",
        file=EXTEND,
        old="        sees &= key[None, :] > position[:, None] - window\n",
        new="        pass\n",
        test=RUNS,
    ),
    Mutant(
        name="extend: a hidden first key takes a share",
        file=EXTEND,
        old="    if seen is not None or shape.hides_first:",
        new="    if seen is not None:",
        test=RUNS,
    ),
    Mutant(
        name="extend: tokens of a tree do not see the prefix in the block of the new ones",
        file=EXTEND,
        old="sees = (key < prefix)[None, :] | ",
        new="sees = (key < 0)[None, :] | ",
        test=EDGES,
    ),
    Mutant(
        name="extend: windows take no account of how deep in the tree a token is",
        file=EXTEND,
        old="        position = prefix - 1 + tl.sum(ones, 1).to(tl.int32)",
        new="        position = position + tl.sum(ones, 1).to(tl.int32) * 0",
        test=EDGES,
    ),
    Mutant(
        name="extend: vectors past the last whole token are computed",
        file=EXTEND,
        old="    is_query = (lane < tokens * shape.group) & (token < q_len)\n",
        new="    is_query = token < q_len\n",
        test=EDGES,
    ),
    # --- the softmax ---
    Mutant(
        name="extend: a query that has seen nothing yet gets NaN",
        file=BLOCKS,
        old='    base = tl.where(new_top == -float("inf"), 0.0, new_top)',
        new="    base = new_top",
        test=RUNS,
    ),
    Mutant(
        name="extend: a token that sees nothing gets NaN",
        file=BLOCKS,
        old="    total = tl.where(total == 0.0, 1.0, total)\n",
        new="",
        test=RUNS,
    ),
    Mutant(
        name="extend: sinks take no share",
        file=BLOCKS,
        old="total * decay + tl.exp2(sink - new_top), new_top",
        new="total * decay, new_top",
        test=RUNS,
    ),
    # --- parts ---
    Mutant(
        name="extend: blocks that all see are in every part",
        file=EXTEND,
        old="    low_all = tl.minimum(tl.maximum(low_all, low), high)\n",
        new="",
        test=PARTS,
    ),
    Mutant(
        name="extend: a part takes what is left of the row",
        file=EXTEND,
        old="    high = tl.minimum(low + share, high)\n",
        new="",
        test=PARTS,
    ),
    Mutant(
        name="extend: rows before those asked for are written",
        file=EXTEND,
        old="    is_cell = (token >= tl.load(qo_indptr)) & (token < tl.load(qo_indptr + num_rows))\n",
        new="    is_cell = token < tl.load(qo_indptr + num_rows)\n",
        test=PARTS,
    ),
    Mutant(
        name="extend: rows behind those asked for are written",
        file=EXTEND,
        old="    is_cell = (token >= tl.load(qo_indptr)) & (token < tl.load(qo_indptr + num_rows))\n",
        new="    is_cell = token >= tl.load(qo_indptr)\n",
        test=PARTS,
    ),
    Mutant(
        name="extend: a wave that is not full costs nothing",
        file=EXTEND,
        old="        num_waves = -(-num_programs * num_parts // num_sms)\n",
        new="        num_waves = num_programs * num_parts // num_sms\n",
        test=PARTS,
    ),
    Mutant(
        name="extend: a program has no room for a token of many heads",
        file=EXTEND,
        old="max(32, triton.next_power_of_2(group))",
        new="32",
        test=PARTS,
    ),
]
