"""Guards of sampling: changes of logits, filters, random keys, log-probabilities."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PARAMS = "hiserve/sampling/params.py"
CHANGES = "hiserve/sampling/changes.py"
SAMPLER = "hiserve/sampling/sampler.py"
LOGPROBS = "hiserve/sampling/logprobs.py"
KERNELS = "hiserve/kernels/sampling.py"
INPUTS = "hiserve/runners/inputs.py"
STEP = "hiserve/runners/step.py"
OF_SAMPLER = "tests/unit/sampling/test_sampler.py::"
OF_PARAMS = "tests/unit/sampling/test_params.py::"
RULES = "tests/unit/sampling/test_reference.py::test_scores_less_their_noise_are_what_the_rules_say"
OF_RULES = "tests/unit/sampling/test_reference.py::"
OF_KERNELS = "tests/unit/kernels/test_sampling.py::"
OF_LOGPROBS = "tests/unit/sampling/test_logprobs.py::"
OF_SCORES = "tests/e2e/test_engine_scores.py::"

MUTANTS = [
    # --- changes ---
    Mutant(
        name="frequencies count the prompt",
        file=CHANGES,
        old="token_counts(penalties.tokens, penalties.num_prompt,",
        new="token_counts(penalties.tokens, None,",
        test=RULES,
    ),
    Mutant(
        name="repetition looks at the output alone",
        file=CHANGES,
        old="token_counts(penalties.tokens, None,",
        new="token_counts(penalties.tokens, penalties.num_prompt,",
        test=RULES,
    ),
    Mutant(
        name="a repeated token with a negative logit is favoured",
        file=CHANGES,
        old="logits * repetition)",
        new="logits / repetition)",
        test=RULES,
    ),
    Mutant(
        name="the presence penalty counts",
        file=CHANGES,
        old="presence * (in_output > 0)",
        new="presence * in_output",
        test=RULES,
    ),
    Mutant(
        name="tokens behind a position count",
        file=KERNELS,
        old="counted = positions < end[:, None]",
        new="counted = positions < tokens.shape[1] + 0 * end[:, None]",
        test=OF_RULES + "test_the_same_row_at_several_positions_knows_the_tokens_before_each",
    ),
    Mutant(
        name="a bias comes after the temperature",
        file=SAMPLER,
        old="noisy(_scaled(draws.subset.take(changed), draws), draws)",
        new="noisy(_scaled(draws.subset.take(logits), draws) + draws.subset.take(changed - logits), draws)",
        test=RULES,
    ),
    Mutant(
        name="penalties come before biases",
        file=CHANGES,
        old="    if batch.biases is not None:\n        subset = batch.biases.subset\n        logits = subset.put(logits, _biased(subset.take(logits), batch.biases))\n    if batch.penalties is not None:\n        subset = batch.penalties.subset\n        logits = subset.put(logits, _penalised(subset.take(logits), batch.penalties))\n",
        new="    if batch.penalties is not None:\n        subset = batch.penalties.subset\n        logits = subset.put(logits, _penalised(subset.take(logits), batch.penalties))\n    if batch.biases is not None:\n        subset = batch.biases.subset\n        logits = subset.put(logits, _biased(subset.take(logits), batch.biases))\n",
        test=RULES,
    ),
    Mutant(
        name="log-probabilities see the biases",
        file=CHANGES,
        old="logits.scatter_add(1,",
        new="logits.scatter_add_(1,",
        test=OF_PARAMS + "test_logits_are_not_changed_in_place",
    ),
    Mutant(
        name="a reply may end one token too early",
        file=PARAMS,
        old="admit.num_prompt + params.min_tokens)",
        new="admit.num_prompt + params.min_tokens - 1)",
        test=OF_PARAMS + "test_what_ends_a_reply_cannot_be_chosen_before_the_minimum",
    ),
    Mutant(
        name="min_tokens counts the prompt",
        file=PARAMS,
        old="admit.num_prompt + params.min_tokens)",
        new="params.min_tokens)",
        test=OF_PARAMS + "test_what_ends_a_reply_cannot_be_chosen_before_the_minimum",
    ),
    Mutant(
        name="an ignored end token is forbidden",
        file=PARAMS,
        old="(() if params.ignore_eos else self._eos_token_ids)",
        new="self._eos_token_ids",
        test=OF_PARAMS + "test_what_ends_a_reply_cannot_be_chosen_before_the_minimum",
    ),
    # --- filters and draws ---
    Mutant(
        name="top-k keeps one more",
        file=SAMPLER,
        old="torch.where(draws.top_k > 0, size - draws.top_k, 0)",
        new="torch.where(draws.top_k > 0, size - draws.top_k - 1, 0)",
        test=RULES,
    ),
    Mutant(
        name="top-p keeps one more",
        file=SAMPLER,
        old=".clamp_(max=size - 1)",
        new=".sub_(1).clamp_(0, size - 1)",
        test=OF_SAMPLER + "test_a_filter_always_leaves_the_likeliest_token",
    ),
    Mutant(
        name="top-p looks at what top-k cut",
        file=SAMPLER,
        old="ordered.masked_fill(is_cut, -torch.inf).softmax(-1)",
        new="ordered.softmax(-1)",
        test=RULES,
    ),
    Mutant(
        name="min-p is a share of the whole",
        file=SAMPLER,
        old="scaled.masked_fill(scaled < draws.log_min_p",
        new="scaled.masked_fill(scaled.log_softmax(-1) < draws.log_min_p",
        test=RULES,
    ),
    Mutant(
        name="a tiny temperature divides by zero",
        file=SAMPLER,
        old=".clamp_(min=torch.finfo(logits.dtype).tiny)",
        new="",
        test=OF_SAMPLER + "test_a_tiny_temperature_is_greedy_in_effect",
    ),
    Mutant(
        name="every choice of a request draws the same noise",
        file=PARAMS,
        old="params.seed, admit.choice,",
        new="params.seed, 0,",
        test=OF_SAMPLER + "test_seed_choice_and_position_each_change_the_stream",
    ),
    Mutant(
        name="rows get the temperatures of others",
        file=PARAMS,
        old="subset.take(floats).unbind(1)\n    top_k,",
        new="floats[: len(subset.take(floats))].unbind(1)\n    top_k,",
        test=OF_PARAMS + "test_a_row_is_untouched_by_whatever_the_others_ask_for",
    ),
    Mutant(
        name="a row keeps the wishes of the tenant before",
        file=PARAMS,
        old="self._needs[rows] = [",
        new="self._needs[rows] |= [",
        test=OF_PARAMS + "test_a_row_forgets_its_last_tenant",
    ),
    # --- log-probabilities ---
    Mutant(
        name="of equal tokens the highest comes first",
        file=KERNELS,
        old="keys.bitwise_left_shift_(32).add_(torch.arange(x.shape[1], device=x.device))",
        new="keys = (keys << 32) + (x.shape[1] - 1 - torch.arange(x.shape[1], device=x.device))",
        test=OF_KERNELS + "test_the_likeliest_come_in_order_and_equal_ones_by_entry",
    ),
    Mutant(
        name="scores are computed in sixteen bits",
        file=LOGPROBS,
        old="wide = logits.to(torch.promote_types(logits.dtype, torch.float32))",
        new="wide = logits",
        test=OF_LOGPROBS + "test_narrow_logits_are_widened_first",
    ),
    Mutant(
        name="prompt scores are shifted by one",
        file=INPUTS,
        old="positions.index_select(0, columns.scored) + 1",
        new="positions.index_select(0, columns.scored)",
        test=OF_SCORES + "test_scores_are_those_of_transformers",
    ),
    Mutant(
        name="prompt scores come from the logits of sampling rows",
        file=STEP,
        old="pack_scores(scored_logits, inputs",
        new="pack_scores(logits[: scored_logits.shape[0]], inputs",
        test=OF_SCORES + "test_scores_are_those_of_transformers",
    ),
    Mutant(
        name="a row gets no more likeliest tokens than the first wants",
        file=PARAMS,
        old="int(num_top.max(initial=-1))",
        new="int(num_top[0]) if num_top.size else -1",
        test=OF_PARAMS + "test_the_most_scores_that_any_row_wants",
    ),
]
