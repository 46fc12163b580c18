"""Guards of what is counted and told of drafts, and of what requests may ask of speculation."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CHOICE = "hiserve/worker/draft_choice.py"
OF_CHOICE = "tests/unit/worker/test_draft_choice.py::"
PLANNER = "hiserve/worker/planner.py"
EMISSION = "hiserve/worker/emission.py"
COLUMNS = "hiserve/worker/columns.py"
COUNTS = "hiserve/worker/draft_counts.py"
REUSE = "hiserve/core/reuse.py"
REQUEST = "hiserve/core/request.py"
CLIENT = "hiserve/scheduler/stream.py"
METRICS = "hiserve/server/draft_metrics.py"
OF_COUNTS = "tests/unit/worker/test_draft_counts.py::"
OF_PLANS = "tests/unit/worker/test_planner_drafts.py::test_every_plan_is_what_its_rows_want_one_by_one"
OF_STREAM = "tests/unit/scheduler/test_stream.py::"
OF_SERVER = "tests/unit/server/test_spec.py::"
OF_HTTP = "tests/e2e/test_spec_over_http.py::"

MUTANTS = [
    # --- what is counted ---
    Mutant(
        name="drafts behind the end of a reply count as accepted",
        file=EMISSION,
        old="self._draft_counts.verified(rows, num_draft, counts)",
        new="self._draft_counts.verified(rows, num_draft, most - rejected)",
        test=OF_PLANS + "[3-64-60-0]",
    ),
    Mutant(
        name="a step without drafts counts as a verifying one",
        file=COUNTS,
        old="did = np.flatnonzero(num_draft)",
        new="did = np.arange(num_draft.size)",
        test=OF_COUNTS + "test_a_verifying_step_adds_its_drafts_and_what_it_appended_beyond_one_token",
    ),
    Mutant(
        name="the token that every step gives counts as a draft",
        file=COUNTS,
        old="positions < counts[did, None] - 1",
        new="positions < counts[did, None]",
        test=OF_COUNTS + "test_a_verifying_step_adds_its_drafts_and_what_it_appended_beyond_one_token",
    ),
    Mutant(
        name="drafts of all prompts count as those of cold ones",
        file=COUNTS,
        old="np.add.at(self._totals, columns.source[rows], new)",
        new="np.add.at(self._totals, np.zeros_like(rows), new)",
        test=OF_COUNTS + "test_drafts_count_for_the_tier_that_gave_most_of_the_prompt",
    ),
    Mutant(
        name="rows of one source count once a step",
        file=COUNTS,
        old="np.add.at(self._totals, columns.source[rows], new)",
        new="self._totals[columns.source[rows]] += new",
        test=OF_PLANS + "[3-64-60-0]",
    ),
    Mutant(
        name="a prompt's source is forgotten when it is admitted",
        file="hiserve/worker/admitter.py",
        old="request.source = request.cached.source",
        new="request.source = request.source",
        test=OF_COUNTS + "test_drafts_count_for_the_tier_that_gave_most_of_the_prompt",
    ),
    Mutant(
        name="the tier that gave least is a prompt's source",
        file=REUSE,
        old="return max(SOURCES[1:]",
        new="return min(SOURCES[1:]",
        test=OF_COUNTS + "test_the_source_of_a_prompt_is_the_tier_that_gave_most_and_the_nearest_of_several",
    ),
    Mutant(
        name="a preempted request forgets its drafts",
        file=COLUMNS,
        old="request.draft_use = self.draft_use[row].copy()",
        new="request.draft_use = None",
        test=OF_PLANS + "[3-64-13-0]",
    ),
    Mutant(
        name="a request inherits the drafts of the row's last tenant",
        file=COLUMNS,
        old="0 if request.draft_use is None else request.draft_use",
        new="self.draft_use[row]",
        test=OF_PLANS + "[3-64-60-0]",
    ),
    Mutant(
        name="a plain server tells of drafts",
        file=COUNTS,
        old="if self._totals.shape[1] == 2:",
        new="if False:",
        test=OF_COUNTS + "test_without_speculation_nothing_is_told",
    ),
    Mutant(
        name="a plain server tells each request of drafts",
        file=COLUMNS,
        old="self.has_draft_news[row] = self._num_ahead > 0",
        new="self.has_draft_news[row] = True",
        test=OF_COUNTS + "test_without_speculation_nothing_is_told",
    ),
    # --- what is told ---
    Mutant(
        name="drafts are told again with every token",
        file=COUNTS,
        old="self._rows.has_draft_news[rows[fresh]] = False",
        new="self._rows.has_draft_news[rows[fresh]] = True",
        test=OF_COUNTS + "test_a_verifying_step_adds_its_drafts_and_what_it_appended_beyond_one_token",
    ),
    Mutant(
        name="news without drafts hides those that wait",
        file="hiserve/messages/coalesce.py",
        old="row.drafts = drafts or row.drafts",
        new="row.drafts = drafts",
        test="tests/unit/messages/test_coalesce.py::test_of_drafts_the_latest_news_counts",
    ),
    Mutant(
        name="the first news of drafts that waits is told",
        file="hiserve/messages/coalesce.py",
        old="row.drafts = drafts or row.drafts",
        new="row.drafts = row.drafts or drafts",
        test="tests/unit/messages/test_coalesce.py::test_of_drafts_the_latest_news_counts",
    ),
    Mutant(
        name="news without drafts hides those that no reader took",
        file=CLIENT,
        old="self._drafts = drafts or self._drafts",
        new="self._drafts = drafts",
        test=OF_STREAM + "test_of_drafts_the_latest_news_is_told_and_once",
    ),
    Mutant(
        name="a reader is told of the same drafts twice",
        file=CLIENT,
        old="        self._drafts = None\n        return delta",
        new="        return delta",
        test=OF_STREAM + "test_of_drafts_the_latest_news_is_told_and_once",
    ),
    Mutant(
        name="a delta without drafts hides those before",
        file="hiserve/server/generation.py",
        old="self.drafts = delta.drafts or self.drafts",
        new="self.drafts = delta.drafts",
        test=OF_SERVER + "test_running_usage_tells_of_the_drafts_so_far",
    ),
    Mutant(
        name="usage tells of the first choice's drafts alone",
        file="hiserve/server/choices.py",
        old="return sum(known, DraftUse()) if known else None",
        new="return known[0] if known else None",
        test=OF_SERVER + "test_the_drafts_of_several_choices_are_summed",
    ),
    Mutant(
        name="columns of drafts of another length are accepted",
        file="hiserve/messages/codec.py",
        old="message.cached, message.drafts, words",
        new="message.cached, words",
        test="tests/unit/messages/test_codec.py::test_columns_that_contradict_each_other_are_malformed",
    ),
    Mutant(
        name="what a worker did with drafts counts at every look",
        file=METRICS,
        old="old = before.by_source.get(source, NO_DRAFTS)",
        new="old = NO_DRAFTS",
        test=OF_SERVER + "test_drafts_are_counted_by_source_and_position_and_never_fall",
    ),
    Mutant(
        name="positions count at every look",
        file=METRICS,
        old="old_count = old_accepted[position] if old_accepted else 0",
        new="old_count = 0",
        test=OF_SERVER + "test_drafts_are_counted_by_source_and_position_and_never_fall",
    ),
    Mutant(
        name="vLLM's counters of drafts are those of one source",
        file="hiserve/server/aliases.py",
        old='name, drops=("cache_source",)) for name in DRAFTS',
        new='name, where={"cache_source": "cold"}) for name in DRAFTS',
        test=OF_SERVER + "test_other_engines_names_show_drafts[vllm]",
    ),
    # --- what is asked ---
    Mutant(
        name="a request's own number of drafts is not heard",
        file=CHOICE,
        old="np.minimum(allowed, most)",
        new="np.full(rows.size, most)",
        test=OF_COUNTS + "test_a_request_verifies_no_more_drafts_than_it_asks_for",
    ),
    Mutant(
        name="drafts are proposed that nobody wants",
        file=CHOICE,
        old="most if drafted.any() else 0",
        new="most",
        test=OF_COUNTS + "test_a_request_verifies_no_more_drafts_than_it_asks_for",
    ),
    Mutant(
        name="a request cannot leave speculation",
        file=REQUEST,
        old="if self.spec.enabled is False:",
        new="if False:",
        test=OF_COUNTS + "test_a_request_verifies_no_more_drafts_than_it_asks_for",
    ),
    Mutant(
        name="more drafts than the server verifies are asked for",
        file=REQUEST,
        old="if (asked.num_steps or 0) > spec_steps:",
        new="if False:",
        test=OF_SERVER + "test_what_cannot_be_is_refused_and_says_what_can",
    ),
    Mutant(
        name="speculation is asked of a plain server",
        file=REQUEST,
        old="if not spec_steps and (asked.enabled or asked.num_steps):",
        new="if False:",
        test=OF_SERVER + "test_a_server_that_does_not_speculate_says_how_it_would",
    ),
    Mutant(
        name="any number of drafts is a number",
        file=REQUEST,
        old="if self.num_steps is not None and not 0 <= self.num_steps <= MAX_SPEC_STEPS:",
        new="if False:",
        test=OF_SERVER + "test_what_cannot_be_is_refused_and_says_what_can",
    ),
    Mutant(
        name="a misspelt field of spec is ignored",
        file="hiserve/server/sampling_fields.py",
        old="if name not in SpecParams.__struct_fields__:",
        new="if False:",
        test=OF_SERVER + "test_what_cannot_be_is_refused_and_says_what_can",
    ),
    Mutant(
        name="an offline batch asks unchecked",
        file="hiserve/llm/api.py",
        old="self._run(self._request(prompt, self._check(params)) for",
        new="self._run(self._request(prompt, params) for",
        test=OF_HTTP + "test_an_offline_batch_is_told_of_drafts_and_may_ask_for_fewer",
    ),
    Mutant(
        name="the board is silent about drafts",
        file="hiserve/commands/top_board.py",
        old="    if not num_steps:\n        return []\n    length",
        new="    if num_steps:\n        return []\n    length",
        test="tests/unit/commands/test_top.py::test_what_became_of_drafts_is_shown_where_there_are_any",
    ),
    Mutant(
        name="drafts made behind a step are taken for those made before it",
        file=CHOICE,
        old="plan.num_propose if self._controller.times_own_drafts else int(num_draft.max())",
        new="plan.num_propose",
        test=OF_CHOICE + "test_each_step_proposes_what_is_chosen_for_it_and_verifies_what_was_chosen_before",
    ),
    Mutant(
        name="the controller hears of no step",
        file=CHOICE,
        old="if self._controller is not None and rows.size and",
        new="if False and",
        test=OF_CHOICE + "test_each_step_proposes_what_is_chosen_for_it_and_verifies_what_was_chosen_before",
    ),
    Mutant(
        name="verified drafts count as a prompt in a step's time",
        file=PLANNER,
        old="num_tokens - int(share.num_draft.sum())",
        new="num_tokens",
        test=OF_CHOICE + "test_each_step_proposes_what_is_chosen_for_it_and_verifies_what_was_chosen_before",
    ),
]
