"""Guards of draft heads, of their checkpoints, and of what the decoder shows them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DECODER = "hiserve/models/decoder.py"
DRAFT = "hiserve/models/draft.py"
CONFIG = "hiserve/models/draft_config.py"
FORMATS = "hiserve/models/draft_formats.py"
WEIGHTS = "hiserve/models/draft_weights.py"
OF_DRAFT = "tests/unit/models/test_draft.py::"
OF_CONFIG = "tests/unit/models/test_draft_config.py::"
OF_TAPS = "tests/unit/models/test_taps.py::"
PARITY = OF_DRAFT + "test_logits_and_states_of_chains_are_the_trainers"

MUTANTS = [
    # --- taps ---
    Mutant(
        name="a tap shows the stream before its layer",
        file=DECODER,
        old="                self._show(index, residual, features)",
        new="                self._show(index + 1, residual, features)",
        test=OF_TAPS + "test_taps_show_what_transformers_computes_in_the_order_asked_for",
    ),
    Mutant(
        name="the last layer's tap shows normed states",
        file=DECODER,
        old="self._show(len(self._layers) - 1, residual, features)",
        new="self._show(len(self._layers) - 1, states, features)",
        test=OF_TAPS + "test_taps_show_what_transformers_computes_in_the_order_asked_for",
    ),
    Mutant(
        name="taps stand in the order of layers",
        file=DECODER,
        old="for i, layer in enumerate(taps)",
        new="for i, layer in enumerate(sorted(taps))",
        test=OF_TAPS + "test_taps_show_what_transformers_computes_in_the_order_asked_for",
    ),
    Mutant(
        name="the last layer is shown of those tokens alone whose logits are wanted",
        file=DECODER,
        old="        if features is None or not self._shows_end:",
        new="        if True:",
        test=OF_TAPS + "test_the_stages_of_a_pass_fill_what_the_caller_holds",
    ),
    Mutant(
        name="the last layer's tap spoils the stream it was given",
        file=DECODER,
        old="residual[: mixed.shape[0]].clone()",
        new="residual[: mixed.shape[0]]",
        test=OF_TAPS + "test_the_stages_of_a_pass_fill_what_the_caller_holds",
    ),
    # --- heads ---
    Mutant(
        name="the residual stream is what is carried, normed or not",
        file=DRAFT,
        old="return logits, normed if self.carries_normed else stream",
        new="return logits, stream",
        test=PARITY,
    ),
    Mutant(
        name="EAGLE-3 carries a normed state",
        file=DRAFT,
        old="return logits, normed if self.carries_normed else stream",
        new="return logits, normed",
        test=PARITY,
    ),
    Mutant(
        name="EAGLE-3's residual stream is never normed",
        file=DRAFT,
        old="stream = normed if self._norm_before_residual else features",
        new="stream = features",
        test=PARITY,
    ),
    Mutant(
        name="EAGLE-3's residual stream is always normed",
        file=DRAFT,
        old="stream = normed if self._norm_before_residual else features",
        new="stream = normed",
        test=PARITY,
    ),
    Mutant(
        name="what EAGLE-3 fuses is not normed",
        file=DRAFT,
        old="tapped if self._fuse_norm is None else self._fuse_norm(tapped)",
        new="tapped",
        test=PARITY,
    ),
    Mutant(
        name="EAGLE-3 reads the state before the embedding",
        file=DRAFT,
        old="torch.cat((embedded, normed), -1)",
        new="torch.cat((normed, embedded), -1)",
        test=PARITY,
    ),
    Mutant(
        name="MiMo joins the embedding before the state",
        file=FORMATS,
        old="    state_first=True,\n",
        new="",
        test=PARITY,
    ),
    Mutant(
        name="MiMo's first embedding counts",
        file=FORMATS,
        old="    masks_first=True,\n",
        new="",
        test=PARITY,
    ),
    Mutant(
        name="MiMo sees normed states",
        file=FORMATS,
        old="    sees_normed=False,\n",
        new="",
        test=OF_DRAFT + "test_which_layers_a_format_sees",
    ),
    Mutant(
        name="speculators names outputs of layers",
        file=FORMATS,
        old="    names_inputs=True,\n",
        new="",
        test=OF_DRAFT + "test_which_layers_a_format_sees",
    ),
    Mutant(
        name="a head's keys and values are read while they are on their way",
        file=DRAFT,
        old="            inputs.before_layer(0)\n",
        new="            pass\n",
        test=OF_DRAFT + "test_a_layer_waits_until_its_keys_and_values_are_there",
    ),
    Mutant(
        name="tokens that a head cannot draft have logits",
        file=DRAFT,
        old="(logits.shape[0], self.vocab_size), -torch.inf)",
        new="(logits.shape[0], self.vocab_size), 0.0)",
        test=OF_DRAFT + "test_a_smaller_vocabulary_is_spread_over_the_models",
    ),
    Mutant(
        name="a head's own embedding is not used",
        file=DRAFT,
        old="torch.equal(own, target.embedding.weight)",
        new="True",
        test=OF_DRAFT + "test_a_head_may_bring_its_own_embedding",
    ),
    Mutant(
        name="a head sees the first slot, which nobody wrote",
        file="hiserve/models/attention.py",
        old="hides_first=draft.head is not None",
        new="hides_first=False",
        test=PARITY,
    ),
    Mutant(
        name="a small model does not see its first token",
        file="hiserve/models/attention.py",
        old="hides_first=draft.head is not None",
        new="hides_first=True",
        test=OF_DRAFT + "test_a_small_model_drafts_what_it_says_itself",
    ),
    # --- checkpoints ---
    Mutant(
        name="a head of another width is taken",
        file=CONFIG,
        old="            head.target_hidden_size != target.hidden_size\n",
        new="            False\n",
        test=OF_CONFIG + "test_a_head_that_does_not_fit_is_refused",
    ),
    Mutant(
        name="a head of another vocabulary is taken",
        file=CONFIG,
        old="            model.vocab_size != target.vocab_size\n",
        new="            False\n",
        test=OF_CONFIG + "test_a_head_that_does_not_fit_is_refused",
    ),
    Mutant(
        name="a head of a deeper model is taken",
        file=CONFIG,
        old="any(not 0 <= layer < target.num_layers for layer in draft.taps)",
        new="False",
        test=OF_CONFIG + "test_a_head_that_does_not_fit_is_refused",
    ),
    Mutant(
        name="an MTP head of another depth is taken",
        file=CONFIG,
        old="            head.target_layers != target.num_layers\n",
        new="            False\n",
        test=OF_CONFIG + "test_a_head_that_does_not_fit_is_refused",
    ),
    Mutant(
        name="a head may see a layer twice",
        file=CONFIG,
        old="len(set(draft.taps)) < len(draft.taps)",
        new="False",
        test=OF_CONFIG + "test_default_layers_of_a_shallow_model_are_refused",
    ),
    Mutant(
        name="norm_before_residual is guessed",
        file=CONFIG,
        old="form.nested is not None and fields.norm_before_residual is None",
        new="False",
        test=OF_CONFIG + "test_speculators_must_say_what_engines_assume_differently",
    ),
    Mutant(
        name="norm_output means what it may not",
        file=CONFIG,
        old='        "norm_output": fields.norm_output,\n',
        new="",
        test=OF_CONFIG + "test_what_no_head_is_read_from_is_refused",
    ),
    Mutant(
        name="a small model of another vocabulary drafts",
        file=CONFIG,
        old="    if model.vocab_size != target.vocab_size:",
        new="    if False:",
        test=OF_CONFIG + "test_a_small_model_of_another_vocabulary_is_refused",
    ),
    Mutant(
        name="a small model with another tokenizer drafts",
        file=CONFIG,
        old="ours is not None and theirs is not None and ours != theirs",
        new="False",
        test=OF_CONFIG + "test_a_small_model_with_other_numbers_of_tokens_is_refused",
    ),
    Mutant(
        name="added tokens of another tokenizer are not compared",
        file=CONFIG,
        old="for each in added or [] if isinstance(each, dict)}",
        new="for each in []}",
        test=OF_CONFIG + "test_a_small_model_with_other_numbers_of_tokens_is_refused",
    ),
    Mutant(
        name="tensors of a head are not compared with what it needs",
        file=WEIGHTS,
        old="    compare(draft.folder,",
        new="    0 and compare(draft.folder,",
        test=OF_CONFIG + "test_missing_and_unexpected_tensors_are_named",
    ),
    Mutant(
        name="a head among the model's tensors finds those in its way",
        file=WEIGHTS,
        old="    if head.is_in_model:",
        new="    if False:",
        test=OF_CONFIG + "test_a_head_among_the_models_tensors_needs_no_folder",
    ),
    Mutant(
        name="the model has no place for a head's tensors",
        file="hiserve/models/weights.py",
        old="return is_copy or source.startswith(bundled_prefixes(config))",
        new="return is_copy",
        test=PARITY,
    ),
    Mutant(
        name="a map may name one token twice",
        file=WEIGHTS,
        old=" or len(set(tokens.tolist())) < num_drafted",
        new="",
        test=OF_CONFIG + "test_a_map_to_no_tokens_is_refused",
    ),
    Mutant(
        name="a map may name tokens that there are not",
        file=WEIGHTS,
        old="tokens.min() < 0 or tokens.max() >= num_tokens or ",
        new="",
        test=OF_CONFIG + "test_a_map_to_no_tokens_is_refused",
    ),
    Mutant(
        name="a smaller vocabulary needs no map",
        file=WEIGHTS,
        old="(is_reduced or maps in sources)",
        new="maps in sources",
        test=OF_CONFIG + "test_a_smaller_vocabulary_needs_a_map",
    ),
]
