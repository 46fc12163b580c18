"""Guards of drafting with heads, eagerly and as graphs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HEAD = "hiserve/spec/head.py"
LAYOUT = "hiserve/spec/layout.py"
GRAPHS = "hiserve/runners/draft_graphs.py"
STEP = "hiserve/runners/step.py"
OF_HEAD = "tests/e2e/test_spec_parity.py::test_drafts_are_those_of_the_head_wherever_the_prompt_came_from"
OF_CAPTURE = "tests/unit/runners/test_draft_graphs.py::"
OF_SHARED = OF_CAPTURE + "test_what_follows_steps_of_all_widths_is_captured_once_and_only_if_it_may_be_replayed"
OF_GRAPHS = "tests/unit/runners/test_draft_graphs.py::test_drafts_behind_graphs_are_those_of_eager_steps"
OF_DRAFTS = "tests/e2e/test_spec_drafts.py::test_a_model_that_drafts_for_itself_is_right_every_time"

OF_PAUSES = OF_CAPTURE + "test_steps_behind_which_nothing_is_drafted_leave_what_later_drafts_need"

MUTANTS = [
    Mutant(
        name="a step behind which nothing is drafted stores no keys and values of the head",
        file="hiserve/models/draft.py",
        old="            self.layer.attention.store(x, inputs, rotation, kv)\n",
        new="",
        test=OF_PAUSES,
    ),
    Mutant(
        name="a captured step behind which nothing is drafted is not taken in",
        file=GRAPHS,
        old="            self.keep.replay()\n",
        new="",
        test=OF_PAUSES,
    ),
    Mutant(
        name="a draft is computed from the state of the first",
        file=HEAD,
        old="        chain.carried.copy_(carried)\n",
        new="",
        test=OF_HEAD,
    ),
    Mutant(
        name="features of a step are forgotten",
        file=HEAD,
        old="        self._ops.keep_features(shown, self._state)\n",
        new="",
        test=OF_HEAD,
    ),
    Mutant(
        name="the first draft is that of the last computed place, drafts or not",
        file=HEAD,
        old="last = torch.minimum(last.clamp_(min=0), layout.num_tokens - 1) + layout.qo_indptr[:-1]",
        new="last = layout.qo_indptr[1:] - 1",
        test=OF_HEAD,
    ),
    Mutant(
        name="drafts are drawn with the noise of another place",
        file=HEAD,
        old="chain.logits, temperature, seed, choice, chain.places, temperature > 0",
        new="chain.logits, temperature, seed, choice, chain.places + 1, temperature > 0",
        test=OF_DRAFTS,
    ),
    Mutant(
        name="drafts of rows that failed their check stand in row 0",
        file=HEAD,
        old="torch.where(has_place, drafts, 0).int()",
        new="drafts.int()",
        test=OF_GRAPHS,
    ),
    Mutant(
        name="all drafts stand in one place",
        file=HEAD,
        old="        places.add_(1)\n",
        new="",
        test=OF_DRAFTS,
    ),
    Mutant(
        name="a step's features are found by the tokens of the draft forward",
        file=LAYOUT,
        old="own = (indptr - np.arange(indptr.size)).astype(np.int32)",
        new="own = indptr.astype(np.int32)",
        test=OF_HEAD,
    ),
    Mutant(
        name="graphs of drafts begin where the captured step began",
        file=GRAPHS,
        old="            torch.sub(forward.kv_lens, width, out=first)\n",
        new="",
        test=OF_GRAPHS,
    ),
    Mutant(
        name="no draft is computed before the next is drawn from a graph",
        file=GRAPHS,
        old="                self.further.extend.replay()\n",
        new="",
        test=OF_GRAPHS,
    ),
    Mutant(
        name="graphs draw the likeliest drafts for every row",
        file=GRAPHS,
        old="self.further.draws[is_greedy].replay()",
        new="self.further.draws[True].replay()",
        test=OF_GRAPHS,
    ),
    Mutant(
        name="drafts begin behind the step, not where it began",
        file=STEP,
        old="first=inputs.forward.kv_lens[:num_rows] - starts.diff()",
        new="first=inputs.forward.kv_lens[:num_rows]",
        test=OF_HEAD,
    ),
    Mutant(
        name="eager steps draft as if all rows took the likeliest token",
        file="hiserve/runners/dispatch.py",
        old="verdict.sampling == Drawing.GREEDY.value",
        new="True",
        test=OF_DRAFTS,
    ),
    Mutant(
        name="replays are compared over rows that pad a batch, whose tokens share the sink's places",
        file="hiserve/runners/graph.py",
        old="            rows.rehearse(self._width + 1 + NUM_REHEARSED)",
        new="            pass",
        test=OF_CAPTURE + "test_no_two_tokens_of_a_row_are_stored_in_one_place_while_replays_are_compared",
    ),
    Mutant(
        name="rows that replays were compared over stay somebody's",
        file="hiserve/runners/graph.py",
        old="            self._rows.forget()\n",
        new="",
        test=OF_CAPTURE + "test_no_two_tokens_of_a_row_are_stored_in_one_place_while_replays_are_compared",
    ),
    Mutant(
        name="what follows steps is captured for each width anew",
        file=GRAPHS,
        old="        further = self._further.get(num_rows)\n",
        new="        further = None\n",
        test=OF_SHARED,
    ),
    Mutant(
        name="a second draft is captured where there is never one",
        file=GRAPHS,
        old="if self._max_draft > 1 else None",
        new="if self._max_draft > 0 else None",
        test=OF_SHARED,
    ),
    Mutant(
        name="the token behind a row's last place attends past the row's pages",
        file=LAYOUT,
        old="np.minimum(step.kv_bounds + np.int32(1), np.int32(max_kv_len))",
        new="step.kv_bounds + np.int32(1)",
        test="tests/unit/worker/test_profile.py::test_what_drafts_behind_the_largest_steps_runs_too",
    ),
]
