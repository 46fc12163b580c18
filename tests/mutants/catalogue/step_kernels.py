"""Guards of the step kernels: who may run, what is accepted, how rows advance, which token is chosen."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TWINS = "hiserve/kernels/step_reference.py"
STEP = "hiserve/kernels/step.py"
DRAW = "hiserve/kernels/draw.py"
OF_STEP = "tests/unit/kernels/test_step.py::"
OF_DRAW = "tests/unit/kernels/test_draw.py::"
RULES = OF_STEP + "test_rows_are_legal_by_the_rules_and_the_others_work_in_the_sink"
ACCEPTANCE = OF_STEP + "test_a_row_emits_its_drafts_up_to_the_first_that_was_not_drawn"
ADVANCE = OF_STEP + "test_rows_advance_by_what_was_emitted_and_faulted_ones_forget"
TRITON_STEP = OF_STEP + "test_triton_does_what_the_twins_do"
TRITON_DRAW = OF_DRAW + "test_triton_chooses_the_tokens_that_the_twins_choose"

MUTANTS = [
    # --- twins ---
    Mutant(
        name="twin: an entry of a row's table may be no page",
        file="hiserve/kernels/reference.py",
        old="is_own = is_page & (page_owner[page_table.clamp(0, last_page).long()] == entry_owner)",
        new="is_own = page_owner[page_table.clamp(0, last_page).long()] == entry_owner",
        test=RULES,
    ),
    Mutant(
        name="twin: whose page it is, is asked of pages that there are not",
        file="hiserve/kernels/reference.py",
        old="page_owner[page_table.clamp(0, last_page).long()]",
        new="page_owner[page_table.long()]",
        test=RULES,
    ),
    Mutant(
        name="twin: a length may be negative",
        file=TWINS,
        old="        & (computed_len >= 0)\n",
        new="",
        test=RULES,
    ),
    Mutant(
        name="kernel: an entry of a row's table may be no page",
        file=STEP,
        old="other=0) != owner) | ~is_page",
        new="other=0) != owner) & is_page",
        test=TRITON_STEP,
    ),
    Mutant(
        name="kernel: a length may be negative",
        file=STEP,
        old="is_legal = (computed >= 0) & is_placed",
        new="is_legal = is_placed",
        test=TRITON_STEP,
    ),
    Mutant(
        name="twin: drafts count as known",
        file=TWINS,
        old="(end - columns.num_draft == known_len)",
        new="(end - columns.num_draft <= known_len)",
        test=RULES,
    ),
    Mutant(
        name="twin: the last token emitted may have no place",
        file=TWINS,
        old="(end < state.tokens.shape[1])",
        new="(end <= state.tokens.shape[1])",
        test=RULES,
    ),
    Mutant(
        name="twin: the last computed token may lie in the sink",
        file=TWINS,
        old="        is_last_loc_legal(location, computed_len, page_size, state.page_owner.shape[0] * page_size)\n        & ",
        new="        ",
        test=RULES,
    ),
    Mutant(
        name="twin: a row may be longer than the plan's bound",
        file=TWINS,
        old="        & (end <= columns.max_len)\n",
        new="",
        test=RULES,
    ),
    Mutant(
        name="twin: an illegal row keeps its page table",
        file=TWINS,
        old="table = torch.where(legal[:, None], table, SINK_PAGE)",
        new="table = table.clone()",
        test=RULES,
    ),
    Mutant(
        name="twin: a graph's page table is written past the last page",
        file=TWINS,
        old="SINK_PAGE if out is None else out.page_table",
        new="SINK_PAGE",
        test=OF_STEP + "test_buffers_of_a_graph_get_the_same_but_past_the_last_page_keep_theirs",
    ),
    Mutant(
        name="twin: a draft after one that was refused is accepted",
        file=TWINS,
        old="agrees.to(torch.int64).cumprod(1)",
        new="agrees.to(torch.int64)",
        test=ACCEPTANCE,
    ),
    Mutant(
        name="twin: what lies behind the drafts is accepted",
        file=TWINS,
        old=" & (index < num_draft[:, None])",
        new="",
        test=ACCEPTANCE,
    ),
    Mutant(
        name="twin: refused drafts count as computed",
        file=TWINS,
        old="(kv_lens - num_refused) * legal",
        new="kv_lens * legal",
        test=ADVANCE,
    ),
    Mutant(
        name="twin: tokens that were not emitted are written",
        file=TWINS,
        old="is_emitted = index < counts[:, None]",
        new="is_emitted = (index < counts[:, None] + 1) & (counts[:, None] > 0)",
        test=ADVANCE,
    ),
    Mutant(
        name="twin: a faulted row keeps its tokens",
        file=TWINS,
        old="known_len * legal)",
        new="known_len)",
        test=ADVANCE,
    ),
    Mutant(
        name="twin: a greedy row draws",
        file=TWINS,
        old="scores if is_drawn is None else torch.where(is_drawn[:, None], scores, wide)",
        new="scores",
        test=OF_DRAW + "test_a_free_draw_is_the_samplers",
    ),
    Mutant(
        name="twin: scaled logits are not taken from the maximum",
        file=TWINS,
        old="(wide - wide.amax(-1, keepdim=True)).div_",
        new="wide.clone().div_",
        test=OF_DRAW + "test_a_free_draw_is_the_samplers",
    ),
    # --- Triton ---
    Mutant(
        name="kernel: a stale page is no fault",
        file=STEP,
        old="is_legal = is_legal & (num_stale == 0)",
        new="is_legal = is_legal & (num_stale >= 0)",
        test=TRITON_STEP,
    ),
    Mutant(
        name="kernel: the last computed token may lie in the sink",
        file=STEP,
        old="(last_page != SINK) & ",
        new="",
        test=TRITON_STEP,
    ),
    Mutant(
        name="kernel: an illegal row reads its own pages",
        file=STEP,
        old="mask=mask & is_legal, other=SINK)",
        new="mask=mask, other=SINK)",
        test=TRITON_STEP,
    ),
    Mutant(
        name="kernel: an illegal row's table is its own",
        file=STEP,
        old="num_read = tl.where(is_legal, num_used, 0)",
        new="num_read = num_used",
        test=TRITON_STEP,
    ),
    Mutant(
        name="kernel: a faulted row emits",
        file=STEP,
        old="count = tl.where(is_legal, tl.load(counts + which), 0)",
        new="count = tl.load(counts + which)",
        test=TRITON_STEP,
    ),
    Mutant(
        name="kernel: of equal values any may win",
        file=DRAW,
        old="is_better = x > best",
        new="is_better = x >= best",
        test=TRITON_DRAW,
    ),
    Mutant(
        name="kernel: of equal parts the last wins",
        file=DRAW,
        old="tl.min(tl.where(is_best, entry, 2**31 - 1), 0)",
        new="tl.max(tl.where(is_best, entry, -1), 0)",
        test=TRITON_DRAW,
    ),
    Mutant(
        name="kernel: a value that is no number never wins",
        file=DRAW,
        old='x = tl.where(x != x, float("inf"), x)',
        new="x = x + 0.0",
        test=TRITON_DRAW,
    ),
    Mutant(
        name="kernel: words of noise out of order",
        file=DRAW,
        old="tl.join(tl.join(a, c), tl.join(b, d))",
        new="tl.join(tl.join(a, b), tl.join(c, d))",
        test=TRITON_DRAW,
    ),
]
