"""Guards of widened models: that they say what the narrow one says, and cost what their shape costs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLACES = "benchmarks/widen/places.py"
TENSORS = "benchmarks/widen/tensors.py"
TARGET = "benchmarks/widen/target.py"
HEADS = "benchmarks/widen/heads.py"
PLAN = "benchmarks/widen/plan.py"
TESTS = "tests/unit/benchmarks/test_widen.py::"
LOGITS = TESTS + "test_logits_are_those_of_the_narrow_model_and_padded_tokens_are_out_of_reach"
DRAFTS = TESTS + "test_a_head_drafts_what_the_narrow_one_drafts_and_no_padded_token"

MUTANTS = [
    Mutant(
        name="a pair of a wide head has the frequency of another",
        file=PLACES,
        old="torch.arange(dim // 2) * (wide_dim // dim)",
        new="torch.arange(dim // 2)",
        test=LOGITS,
    ),
    Mutant(
        name="a query head reads keys of another group",
        file=PLACES,
        old="head // group * wide_group + head % group for",
        new="head for",
        test=LOGITS,
    ),
    Mutant(
        name="layers of a widened model stand side by side",
        file=PLACES,
        old="layer * wide.num_layers // narrow.num_layers for",
        new="layer for",
        test=TESTS + "test_extra_layers_compute_and_add_nothing",
    ),
    Mutant(
        name="frequencies may differ",
        file=PLACES,
        old=" or narrow.rope != wide.rope",
        new="",
        test=TESTS + "test_a_model_that_does_not_fit_is_refused",
    ),
    Mutant(
        name="no element is left for the mark",
        file=PLACES,
        old="narrow.hidden_size + 1, wide",
        new="narrow.hidden_size, wide",
        test=TESTS + "test_a_model_that_does_not_fit_is_refused",
    ),
    Mutant(
        name="norms of a widened model are those of the narrow one",
        file=TENSORS,
        old="math.sqrt(narrow.hidden_size / wide.hidden_size)",
        new="1.0",
        test=LOGITS,
    ),
    Mutant(
        name="attention divides by the root of wider heads",
        file=TENSORS,
        old="math.sqrt(wide.head_dim / narrow.head_dim)",
        new="1.0",
        test=LOGITS,
    ),
    Mutant(
        name="the rest of a head is noise",
        file=TENSORS,
        old="out.index_fill_(0, rows.taken",
        new="out.index_fill_(0, rows.places",
        test=LOGITS,
    ),
    Mutant(
        name="extra layers write the stream",
        file=TENSORS,
        old="            out.zero_()\n",
        new="            out.normal_(0.0, STD)\n",
        test=TESTS + "test_extra_layers_compute_and_add_nothing",
    ),
    Mutant(
        name="extra layers are empty",
        file=TENSORS,
        old="            if source is not None:\n                out.index_fill_",
        new="            if source is None:\n                out.zero_()\n            else:\n                out.index_fill_",
        test=TESTS + "test_extra_layers_compute_and_add_nothing",
    ),
    Mutant(
        name="what nobody reads is zero",
        file=TENSORS,
        old="            if source is not None:\n                out.index_fill_(0, rows.taken.to(out.device), 0.0)",
        new="            if source is not None:\n                out.zero_()",
        test=TESTS + "test_heads_and_neurons_that_nobody_reads_cost_as_much_as_others",
    ),
    Mutant(
        name="the seed of a widened model changes nothing",
        file=TENSORS,
        old="zlib.crc32(name.encode(), self._seed)",
        new="zlib.crc32(name.encode())",
        test=TESTS + "test_another_seed_draws_other_weights",
    ),
    Mutant(
        name="padded tokens are as quiet as others",
        file=TENSORS,
        old='if kind == "lm_head" or (kind == "embed_tokens" and self._is_tied):',
        new='if kind == "embed_tokens" and self._is_tied:',
        test=LOGITS,
    ),
    Mutant(
        name="a tied head hears no mark",
        file=TENSORS,
        old='kind == "lm_head" or (kind == "embed_tokens" and self._is_tied)',
        new='kind == "lm_head"',
        test=TESTS + "test_a_tied_head_cannot_reach_padded_tokens_either",
    ),
    Mutant(
        name="the mark is felt by norms",
        file=TENSORS,
        old="MARK = 2.0**-30",
        new="MARK = 2.0**-8",
        test=LOGITS,
    ),
    Mutant(
        name="the EAGLE-3 head loses the mark",
        file=TENSORS,
        old='if kind in ("fc", "eh_proj"):',
        new='if kind == "eh_proj":',
        test=DRAFTS,
    ),
    Mutant(
        name="the MTP head loses the mark",
        file=TENSORS,
        old='if kind in ("fc", "eh_proj"):',
        new='if kind == "fc":',
        test=DRAFTS,
    ),
    Mutant(
        name="any dtype will do for the mark",
        file=TENSORS,
        old="if out.dtype not in _DTYPES:",
        new="if False:",
        test=TESTS + "test_a_dtype_without_room_for_what_hides_padded_tokens_is_refused",
    ),
    Mutant(
        name="norms of a widened model have the eps of the narrow one",
        file=TARGET,
        old='narrow["rms_norm_eps"] * narrow["hidden_size"] / shape["hidden_size"]',
        new='narrow["rms_norm_eps"]',
        test=LOGITS,
    ),
    Mutant(
        name="all tensors of a widened model are one file",
        file=TARGET,
        old="if shard and num_bytes + tensor.nbytes > shard_bytes:",
        new="if False:",
        test=TESTS + "test_files_are_as_large_as_they_may_be",
    ),
    Mutant(
        name="a widened head sees the layers of the narrow numbers",
        file=HEADS,
        old="widened.places.layers[layer] for layer in",
        new="layer for layer in",
        test=DRAFTS,
    ),
    Mutant(
        name="a widened MTP layer has the number of the narrow one",
        file=HEADS,
        old="name.replace(prefix, wide_prefix): tensor",
        new="name: tensor",
        test=DRAFTS,
    ),
    Mutant(
        name="a draft vocabulary may be smaller than its head's",
        file=HEADS,
        old="if not vocab_size <= size <= wide_size:",
        new="if False:",
        test=TESTS + "test_an_eagle3_head_has_a_vocabulary_of_its_own_size_with_the_ids_of_its_target",
    ),
    Mutant(
        name="heads that come with the narrow model are forgotten",
        file=HEADS,
        old='if (folder / kind / "config.json").is_file()',
        new="if not kind",
        test=TESTS + "test_the_command_writes_heads_where_the_engine_finds_those_of_a_model",
    ),
    Mutant(
        name="all tokens of the model are in a smaller draft vocabulary",
        file=HEADS,
        old="torch.arange(widened.config.vocab_size, device=device) < ",
        new="torch.arange(widened.config.vocab_size, device=device) <= ",
        test=TESTS + "test_an_eagle3_head_has_a_vocabulary_of_its_own_size_with_the_ids_of_its_target",
    ),
    Mutant(
        name="the plan forgets extra layers",
        file=PLAN,
        old="(num_layers - num_nano) * layer",
        new="0 * layer",
        test=TESTS + "test_the_plan_of_a_shape_counts_its_parameters_once",
    ),
]
