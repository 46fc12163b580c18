"""Guards of the draft kernels: whose pages are read and written, which features are taken and kept, what is looked up."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TWINS = "hiserve/kernels/draft_reference.py"
DRAFT = "hiserve/kernels/draft.py"
NGRAM = "hiserve/kernels/ngram.py"
OF_DRAFT = "tests/unit/kernels/test_draft.py::"
OF_NGRAM = "tests/unit/kernels/test_ngram.py::"
OF_VARIANTS = "tests/unit/kernels/test_variants.py::test_views_of_an_upload_or_of_a_batch_may_begin_anywhere"
INPUTS = OF_DRAFT + "test_draft_tokens_stand_in_the_pages_of_their_rows_and_else_in_the_sink"
TAKEN = OF_DRAFT + "test_a_draft_token_takes_what_the_model_showed_of_the_token_before_it"
KEPT = OF_DRAFT + "test_a_step_keeps_what_the_model_showed_of_the_last_token_computed_and_of_ends_of_pages"
TRITON_DRAFT = OF_DRAFT + "test_triton_does_what_the_twins_do"
LOOKED_UP = OF_NGRAM + "test_drafts_are_what_a_plain_search_finds"
TRITON_NGRAM = OF_NGRAM + "test_triton_writes_the_drafts_that_the_twin_writes"

MUTANTS = [
    # --- twins: inputs ---
    Mutant(
        name="draft twin: a page that changed hands is read",
        file=TWINS,
        old="    is_own &= state.page_owner[table.clamp(0, num_pages - 1).long()] == owners\n",
        new="",
        test=INPUTS,
    ),
    Mutant(
        name="draft twin: an entry may be no page",
        file=TWINS,
        old="(table >= 0) & (table < num_pages) & legal[:, None]",
        new="(owners == owners) & legal[:, None]",
        test=INPUTS,
    ),
    Mutant(
        name="draft twin: an illegal row keeps its pages",
        file=TWINS,
        old="(table < num_pages) & legal[:, None]\n",
        new="(table < num_pages)\n",
        test=INPUTS,
    ),
    Mutant(
        name="draft twin: an illegal row starts where it stood",
        file=TWINS,
        old="    first = first * legal\n    kv_lens",
        new="    first = first.clamp(min=0)\n    kv_lens",
        test=INPUTS,
    ),
    Mutant(
        name="draft twin: tokens past the row's end are stored in its last page",
        file=TWINS,
        old="places >= min(row_len, num_places)",
        new="places >= num_places",
        test=INPUTS,
    ),
    Mutant(
        name="draft twin: tokens past the table's end are stored in its last page",
        file=TWINS,
        old="places >= min(row_len, num_places)",
        new="places >= row_len",
        test=INPUTS,
    ),
    Mutant(
        name="draft twin: a row may attend past its table",
        file=TWINS,
        old="(first + num).clamp_(max=num_places)",
        new="first + num",
        test=INPUTS,
    ),
    Mutant(
        name="draft twin: a graph's page table is written past the last page",
        file=TWINS,
        old="SINK_PAGE if out is None else out.page_table",
        new="SINK_PAGE",
        test=OF_DRAFT + "test_buffers_of_a_graph_get_the_same_but_past_the_last_page_keep_theirs",
    ),
    # --- twins: features ---
    Mutant(
        name="draft twin: where a page begins the row's own features are taken",
        file=TWINS,
        old="first % step.page_size == 0",
        new="first % step.page_size < 0",
        test=TAKEN,
    ),
    Mutant(
        name="draft twin: a new row takes what its place held before",
        file=TWINS,
        old="    before.masked_fill_((first == 0)[:, None], 0)\n",
        new="",
        test=TAKEN,
    ),
    Mutant(
        name="draft twin: a token takes its own features",
        file=TWINS,
        old="index_select(0, step.token_rows) + step.offsets - 1\n",
        new="index_select(0, step.token_rows) + step.offsets\n",
        test=TAKEN,
    ),
    Mutant(
        name="draft twin: features of a refused draft are kept for the row",
        file=TWINS,
        old="(step.qo_indptr[:-1] + computed_len - 1 - first)",
        new="(step.qo_indptr[1:] - 1)",
        test=KEPT,
    ),
    Mutant(
        name="draft twin: features of a refused draft are kept with a page",
        file=TWINS,
        old=" & (ends <= computed_len.index_select(0, token_rows))",
        new="",
        test=KEPT,
    ),
    Mutant(
        name="draft twin: every token's features are kept with its page",
        file=TWINS,
        old="is_end = (ends % step.page_size == 0) & ",
        new="is_end = ",
        test=KEPT,
    ),
    Mutant(
        name="draft twin: an illegal row keeps features",
        file=TWINS,
        old="features.index_select(0, index), legal)",
        new="features.index_select(0, index), rows > 0)",
        test=KEPT,
    ),
    Mutant(
        name="draft twin: the sink keeps features",
        file=TWINS,
        old="is_end & (pages != SINK_PAGE)",
        new="is_end",
        test=KEPT,
    ),
    # --- twins: lookups ---
    Mutant(
        name="ngram twin: a row's end agrees with itself",
        file=TWINS,
        old="agrees = ends < known_len - 1",
        new="agrees = ends < known_len",
        test=LOOKED_UP,
    ),
    Mutant(
        name="ngram twin: tokens agree that are not adjacent",
        file=TWINS,
        old="agrees[:, back:] &= tokens[:, : width - back] == wanted",
        new="agrees[:, back:] = (ends[back:] < known_len - 1) & (tokens[:, : width - back] == wanted)",
        test=LOOKED_UP,
    ),
    Mutant(
        name="ngram twin: tokens before a row's start agree",
        file=TWINS,
        old="        agrees[:, :back] = False\n",
        new="",
        test=LOOKED_UP,
    ),
    Mutant(
        name="ngram twin: the latest wins, however short",
        file=TWINS,
        old="score.mul_(width).add_(ends)",
        new="score.clamp_(max=1).mul_(width).add_(ends)",
        test=LOOKED_UP,
    ),
    Mutant(
        name="ngram twin: fewer tokens than asked for agree",
        file=TWINS,
        old="best < min_ngram * width",
        new="best < width",
        test=LOOKED_UP,
    ),
    Mutant(
        name="ngram twin: drafts are written past the row's end",
        file=TWINS,
        old="(known_len > 0)[:, None] & (places < row_len)",
        new="(known_len > 0)[:, None] & (places < state.tokens.numel() - rows[:, None] * row_len)",
        test=LOOKED_UP,
    ),
    Mutant(
        name="ngram twin: a row that knows nothing gets drafts",
        file=TWINS,
        old="(known_len > 0)[:, None] & (places < row_len)",
        new="places < row_len",
        test=LOOKED_UP,
    ),
    # --- Triton ---
    Mutant(
        name="draft kernel: a page that changed hands is read",
        file=DRAFT,
        old="    is_own = is_own & (owner == tl.load(entry_owner + flat, mask=mask, other=0))\n",
        new="",
        test=TRITON_DRAFT,
    ),
    Mutant(
        name="draft kernel: an illegal row's table is its own",
        file=DRAFT,
        old="num_read = tl.where(is_legal, num_used, 0)",
        new="num_read = num_used",
        test=TRITON_DRAFT,
    ),
    Mutant(
        name="draft kernel: tokens past the row's end are stored",
        file=DRAFT,
        old="may_read & (place < row_len) & ",
        new="may_read & ",
        test=TRITON_DRAFT,
    ),
    Mutant(
        name="draft kernel: tokens past the table's end are stored",
        file=DRAFT,
        old=" & (place < width * PAGE_SIZE)",
        new="",
        test=TRITON_DRAFT,
    ),
    Mutant(
        name="draft kernel: where a page begins the row's own features are taken",
        file=DRAFT,
        old="mask=in_page, other=value)",
        new="mask=in_page & ~in_row, other=value)",
        test=TRITON_DRAFT,
    ),
    Mutant(
        name="draft kernel: features of a refused draft are kept with a page",
        file=DRAFT,
        old="is_computed & (end <= computed) & ",
        new="is_computed & ",
        test=TRITON_DRAFT,
    ),
    Mutant(
        name="draft kernel: the sink keeps features",
        file=DRAFT,
        old="    ends_page = ends_page & (page != SINK)\n",
        new="",
        test=TRITON_DRAFT,
    ),
    Mutant(
        name="draft kernel: a variant for each place in an upload",
        file=DRAFT,
        old='*("rows", "first", "num", "legal", ',
        new='*("rows", "num", "legal", ',
        test=OF_VARIANTS,
    ),
    Mutant(
        name="ngram kernel: a row's start agrees with what stands before it",
        file=NGRAM,
        old="            agrees = agrees & (end >= back)\n",
        new="",
        test=TRITON_NGRAM,
    ),
    Mutant(
        name="ngram kernel: of equals the first of a block wins",
        file=NGRAM,
        old="num_equal * row_len + end, -1)",
        new="num_equal * row_len + start, -1)",
        test=TRITON_NGRAM,
    ),
    Mutant(
        name="ngram kernel: drafts are written past the row's end",
        file=NGRAM,
        old="tl.minimum(num_draft, row_len - known)",
        new="num_draft",
        test=TRITON_NGRAM,
    ),
    # --- the proposer ---
    Mutant(
        name="ngram: rows in the midst of a prompt get drafts",
        file="hiserve/spec/ngram.py",
        old="step.rows.index_select(0, step.sampling)",
        new="step.rows",
        test="tests/unit/spec/test_ngram.py::test_rows_that_sample_get_drafts_and_the_others_none",
    ),
    Mutant(
        name="ngram: the token drawn last is not looked at",
        file="hiserve/spec/ngram.py",
        old="int(step.kv_bounds.max()) + 1,",
        new="int(step.kv_bounds.max()),",
        test="tests/unit/spec/test_ngram.py::test_rows_that_sample_get_drafts_and_the_others_none",
    ),
]
