"""Guards of checkpoints, of the decoder and its layers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONFIG = "hiserve/models/config.py"
NAMES = "hiserve/models/names.py"
WEIGHTS = "hiserve/models/weights.py"
HUB = "hiserve/models/hub.py"
DECODER = "hiserve/models/decoder.py"
ROPE = "hiserve/models/rope.py"
FREQUENCIES = "hiserve/models/frequencies.py"
FIELDS = "hiserve/models/fields.py"
GENERATION = "hiserve/models/generation.py"
FAMILY = "hiserve/models/family.py"
BUILD = "hiserve/worker/build.py"
MOE = "hiserve/layers/moe.py"
KERNELS = "hiserve/kernels/reference.py"
OF_CONFIG = "tests/unit/models/test_config.py::"
OF_WEIGHTS = "tests/unit/models/test_weights.py::"
OF_HUB = "tests/unit/models/test_hub.py::"
OF_ROPE = "tests/unit/models/test_rope.py::"
OF_GENERATION = "tests/unit/models/test_generation.py::"
OF_MOE = "tests/unit/layers/test_moe.py::"
OF_LAYERS = "tests/unit/layers/test_layers.py::"
OF_FAMILIES = "tests/e2e/test_families_oracle.py::"
OF_LOGITS = "tests/e2e/test_transformers_oracle.py::"

MUTANTS = [
    # --- what config.json says ---
    Mutant(
        name="every layer has experts",
        file=CONFIG,
        old="(layer + 1) % self.step == 0 and layer not in self.dense_layers",
        new="layer not in self.dense_layers",
        test=OF_FAMILIES + "test_experts_stand_in_the_layers_that_the_configuration_names",
    ),
    Mutant(
        name="a window that nobody outgrows is one",
        file="hiserve/models/windows.py",
        old="window is None or window >= context_length or",
        new="window is None or",
        test=OF_CONFIG + "test_windows_are_those_that_a_request_could_outgrow",
    ),
    Mutant(
        name="all layers slide where some are full",
        file="hiserve/models/windows.py",
        old="return tuple(window if each else None for each in slides)",
        new="return (window,) * len(slides)",
        test=OF_CONFIG + "test_windows_are_those_that_a_request_could_outgrow",
    ),
    Mutant(
        name="a window that is switched off slides",
        file="hiserve/models/windows.py",
        old="None if fields.use_sliding_window is False else fields.sliding_window",
        new="fields.sliding_window",
        test=OF_CONFIG + "test_windows_are_those_that_a_request_could_outgrow",
    ),
    Mutant(
        name="layers of an unknown type are full",
        file="hiserve/models/windows.py",
        old="sorted(set(types) - _LAYER_TYPES)",
        new="[]",
        test=OF_CONFIG + "test_types_of_layers_that_make_no_sense_are_refused",
    ),
    Mutant(
        name="attention is not told of windows",
        file="hiserve/models/attention.py",
        old="        windows=config.windows,\n",
        new="",
        test=OF_FAMILIES + "test_a_sliding_window_moves_as_in_transformers",
    ),
    Mutant(
        name="do_sample false is greedy whatever else is named",
        file=GENERATION,
        old="is_greedy = fields.do_sample is False and",
        new="is_greedy = fields.do_sample is False or",
        test=OF_GENERATION + "test_do_sample_false_is_greedy_only_where_nothing_else_is_named",
    ),
    Mutant(
        name="two spellings may differ",
        file=FIELDS,
        old="elif spelled.get(old) and spelled[old] != spelled[new]:",
        new="elif False:",
        test=OF_ROPE + "test_two_spellings_that_differ_are_refused",
    ),
    Mutant(
        name="one expert counts for all",
        file=CONFIG,
        old="num_sparse * self.experts.num_experts * expert",
        new="num_sparse * expert",
        test=OF_CONFIG + "test_parameters_are_counted_as_transformers_counts_them",
    ),
    Mutant(
        name="the generation config's end tokens are not read",
        file=CONFIG,
        old="ends = as_ids(fields.eos_token_id) if generation.eos_token_ids is None else generation.eos_token_ids",
        new="ends = as_ids(fields.eos_token_id)",
        test=OF_CONFIG + "test_end_tokens_of_the_generation_config_go_first",
    ),
    Mutant(
        name="heads need not be a multiple of key-value heads",
        file=CONFIG,
        old='key-value heads": heads % kv_heads,',
        new='key-value heads": False,',
        test=OF_CONFIG + "test_values_that_contradict_each_other_or_have_the_wrong_type",
    ),
    Mutant(
        name="Qwen2 has no biases",
        file=FAMILY,
        old="    has_qkv_bias=True,\n",
        new="",
        test=OF_CONFIG + "test_biases_of_each_family",
    ),
    # --- positions ---
    Mutant(
        name="any RoPE scaling is taken for a known one",
        file=ROPE,
        old="    if kind not in _NEEDS:\n",
        new="    if False:\n",
        test=OF_ROPE + "test_numbers_that_make_no_sense_are_named",
    ),
    Mutant(
        name="longrope always takes its long list",
        file=ROPE,
        old="and max_len > self.original_context",
        new="",
        test=OF_ROPE + "test_longrope_chooses_its_list_by_the_longest_request",
    ),
    Mutant(
        name="linear scaling is ignored",
        file=FREQUENCIES,
        old="1.0 / wavelengths / rope.factor",
        new="1.0 / wavelengths",
        test=OF_ROPE + "test_frequencies_and_attention_factor_are_bitwise_those_of_transformers",
    ),
    Mutant(
        name="yarn is not ramped",
        file=FREQUENCIES,
        old="ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)",
        new="ramp = torch.ones(head_dim // 2)",
        test=OF_ROPE + "test_frequencies_and_attention_factor_are_bitwise_those_of_transformers",
    ),
    Mutant(
        name="yarn stretches no context",
        file=ROPE,
        old='if rope.kind == "yarn" else 0',
        new="if False else 0",
        test=OF_ROPE + "test_yarn_stretches_the_context_of_files_that_name_the_original_one",
    ),
    # --- weights ---
    Mutant(
        name="Mixtral's gate and up are swapped",
        file=NAMES,
        old='("w1", "w3", "w2")',
        new='("w3", "w1", "w2")',
        test=OF_WEIGHTS + "test_rows_of_experts_are_gate_then_up_expert_after_expert",
    ),
    Mutant(
        name="an incomplete copy in the cache is taken",
        file=HUB,
        old="        if _is_whole(folder):\n            return folder\n",
        new="        return folder\n",
        test=OF_HUB + "test_a_copy_that_lacks_something_is_completed",
    ),
    Mutant(
        name="a cached model asks the network",
        file=HUB,
        old=", allow_patterns=list(PATTERNS), local_files_only=True",
        new=", allow_patterns=list(PATTERNS)",
        test=OF_HUB + "test_a_model_in_the_cache_needs_no_network",
    ),
    Mutant(
        name="tensors are not compared before they are read",
        file=WEIGHTS,
        old="    compare(\n        folder,",
        new="    0 and compare(\n        folder,",
        test=OF_WEIGHTS + "test_what_is_missing_is_named_before_anything_is_read",
    ),
    Mutant(
        name="fused experts are not found",
        file=NAMES,
        old="return cls.FUSED if any(",
        new="return cls.EACH if any(",
        test=OF_FAMILIES + "test_experts_are_read_in_every_spelling",
    ),
    Mutant(
        name="a checkpoint may lack a tensor",
        file=WEIGHTS,
        old="    if missing:\n",
        new="    if False:\n",
        test=OF_WEIGHTS + "test_a_missing_tensor_is_named",
    ),
    Mutant(
        name="a tensor may have any shape",
        file=WEIGHTS,
        old="if tensor.shape != piece.shape:",
        new="if False:",
        test=OF_WEIGHTS + "test_a_wrong_shape_is_named_with_both_shapes",
    ),
    Mutant(
        name="only the first shard is read",
        file="hiserve/models/checkpoint.py",
        old="return [folder / name for name in sorted(names)]",
        new="return [folder / name for name in sorted(names)][:1]",
        test=OF_WEIGHTS + "test_shards_load_as_one_file_does",
    ),
    Mutant(
        name="a config.json may ask for any size",
        file=CONFIG,
        old="    refuse_oversize(fields, path)\n",
        new="",
        test="tests/unit/models/test_config.py::"
        "test_a_size_that_no_model_has_is_refused_before_anything_is_built_of_it",
    ),
    Mutant(
        name="prompts change their backend while graphs are captured",
        file="hiserve/attention/backends.py",
        old="lambda: is_serving() and prompts.is_ready()",
        new="lambda: prompts.is_ready()",
        test="tests/unit/attention/test_backends.py::test_auto_waits_for_no_compiler_when_requests_are_to_be_served",
    ),
    Mutant(
        name="prompts change their backend back",
        file="hiserve/attention/paired.py",
        old="self._is_split = self._is_split or self._may_split()",
        new="self._is_split = self._may_split()",
        test="tests/unit/attention/test_paired.py::"
        "test_until_prompts_have_a_backend_the_other_computes_them_and_the_change_is_between_two_steps",
    ),
    Mutant(
        name="weights are not read in the order of the files",
        file="hiserve/models/reading.py",
        old="sorted(wanted, key=lambda each: (each[0].path, each[0].begin))",
        new="wanted",
        test="tests/unit/models/test_reading.py::test_pieces_are_in_the_order_of_the_files_and_no_byte_is_read_twice",
    ),
    Mutant(
        name="weights are read one piece after the other",
        file="hiserve/models/reading.py",
        old="ThreadPoolExecutor(NUM_THREADS,",
        new="ThreadPoolExecutor(1,",
        test="tests/unit/models/test_reading.py::test_several_pieces_are_read_at_once_and_ahead_of_their_copies",
    ),
    Mutant(
        name="tensors without a place are dropped",
        file=WEIGHTS,
        old="    if unexpected:\n",
        new="    if False:\n",
        test=OF_WEIGHTS + "test_an_unexpected_tensor_is_named",
    ),
    Mutant(
        name="integers are taken for weights",
        file=WEIGHTS,
        old="if tensor.dtype not in TORCH_DTYPES:",
        new="if False:",
        test=OF_WEIGHTS + "test_integers_are_refused_as_quantized",
    ),
    # --- decoder and layers ---
    Mutant(
        name="an expert's output is not weighed",
        file=MOE,
        old="mine * weights[expert]",
        new="mine",
        test=OF_MOE + "test_a_token_is_what_its_experts_make_of_it",
    ),
    Mutant(
        name="experts without tokens run",
        file=MOE,
        old="            if count:\n",
        new="            if True:\n",
        test=OF_MOE + "test_on_the_cpu_an_expert_without_tokens_is_not_run",
    ),
    Mutant(
        name="what an expert makes of others' tokens reaches them",
        file=KERNELS,
        old="torch.where(is_chosen[:, expert, None], made, 0.0)",
        new="made",
        test=OF_MOE + "test_what_an_expert_makes_of_a_token_that_is_not_its_own_never_reaches_it",
    ),
    Mutant(
        name="the router's softmax is narrow",
        file=KERNELS,
        old="logits.softmax(-1, torch.promote_types(logits.dtype, torch.float32))",
        new="logits.softmax(-1)",
        test=OF_MOE + "test_shares_are_at_least_float32_and_sum_to_one_if_normalized",
    ),
    Mutant(
        name="attention_factor is ignored",
        file=DECODER,
        old="Rotary(frequencies, embedding.dtype, ops, config.rope.attention_factor)",
        new="Rotary(frequencies, embedding.dtype, ops)",
        test=OF_FAMILIES + "test_a_model_gives_the_logits_and_tokens_of_transformers",
    ),
    Mutant(
        name="biases are dropped",
        file=DECODER,
        old='parameters.pop(name + "_bias", None)',
        new='None if parameters.pop(name + "_bias", None) is None else None',
        test=OF_FAMILIES + "test_a_model_gives_the_logits_and_tokens_of_transformers",
    ),
    Mutant(
        name="longrope knows nothing of the longest request",
        file=BUILD,
        old="load_decoder(folder, model_config, max_len=max_len, taps=taps",
        new="load_decoder(folder, model_config, taps=taps",
        test=OF_FAMILIES + "test_a_model_gives_the_logits_and_tokens_of_transformers",
    ),
    Mutant(
        name="queries and keys are not normed",
        file=DECODER,
        old="            qk_weight=qk_weight,\n",
        new="            qk_weight=None,\n",
        test=OF_LOGITS + "test_float32_logits_of_every_position_agree",
    ),
    Mutant(
        name="every head is tied",
        file=DECODER,
        old='Linear(parameters.pop("head", embedding))',
        new='Linear((parameters.pop("head", None), embedding)[1])',
        test=OF_LOGITS + "test_float32_logits_of_every_position_agree",
    ),
    Mutant(
        name="shares of experts are not scaled to 1",
        file=KERNELS,
        old="(shares / shares.sum(-1, keepdim=True) if is_normalized else shares)",
        new="shares",
        test=OF_MOE + "test_shares_are_at_least_float32_and_sum_to_one_if_normalized",
    ),
    Mutant(
        name="shares belong to other experts",
        file=MOE,
        old="weights = torch.split_with_sizes(shares.flatten()[order, None], counts)",
        new="weights = torch.split_with_sizes(shares.flatten()[:, None], counts)",
        test=OF_MOE + "test_both_forms_agree",
    ),
    Mutant(
        name="sixteen bits are rotated as they are",
        file="hiserve/layers/rotary.py",
        old="torch.promote_types(dtype, torch.float32)",
        new="dtype",
        test=OF_LAYERS + "test_rotation_of_a_sixteen_bit_model_happens_in_float32",
    ),
    Mutant(
        name="the kind of a draft is no part of a cache's identity",
        file="hiserve/models/identity.py",
        old="(draft.kind, _shape(draft.model, max_len), draft.taps, draft.head)",
        new="(_shape(draft.model, max_len), draft.taps, draft.head)",
        test="tests/unit/models/test_identity.py::test_an_edited_draft_is_another_cache",
    ),
]
