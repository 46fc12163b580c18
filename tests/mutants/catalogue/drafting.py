"""Guards of drafting with heads, eagerly and as graphs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HEAD = "hiserve/spec/head.py"
LAYOUT = "hiserve/spec/layout.py"
GRAPHS = "hiserve/runners/draft_graphs.py"
STEP = "hiserve/runners/step.py"
OF_HEAD = "tests/e2e/test_spec_parity.py::test_drafts_are_those_of_the_head_wherever_the_prompt_came_from"
OF_GRAPHS = "tests/unit/runners/test_draft_graphs.py::test_drafts_behind_graphs_are_those_of_eager_steps"
OF_DRAFTS = "tests/e2e/test_spec_drafts.py::test_a_model_that_drafts_for_itself_is_right_every_time"

MUTANTS = [
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
        old="        torch.sub(forward.kv_lens, width, out=first)\n",
        new="",
        test=OF_GRAPHS,
    ),
    Mutant(
        name="no draft is computed before the next is drawn from a graph",
        file=GRAPHS,
        old="            if index:\n                self.extend.replay()\n",
        new="",
        test=OF_GRAPHS,
    ),
    Mutant(
        name="graphs draw the likeliest drafts for every row",
        file=GRAPHS,
        old="self.draws[is_greedy].replay()",
        new="self.draws[True].replay()",
        test=OF_GRAPHS,
    ),
    Mutant(
        name="drafts begin behind the step, not where it began",
        file=STEP,
        old="first=inputs.forward.kv_lens[:num_rows] - starts.diff()",
        new="first=inputs.forward.kv_lens[:num_rows]",
        test=OF_HEAD,
    ),
]
