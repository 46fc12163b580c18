"""Guards of the benchmark of the GPU: what its figures are compared with."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LIMITS = "benchmarks/gpu/limits.py"
FIGURES = "benchmarks/gpu/figures.py"
PEERS = "benchmarks/gpu/peers.py"
PROFILING = "benchmarks/gpu/profiling.py"
ELIGIBLE = "benchmarks/gpu/eligible.py"
SERVED = "benchmarks/gpu/served.py"
README = "benchmarks/readme.py"
SPEC = "benchmarks/gpu/spec.py"
SPEC_LIMITS = "benchmarks/gpu/spec_limits.py"
TESTS = "tests/unit/benchmarks/test_gpu.py::"
OF_SPEC = "tests/unit/benchmarks/test_gpu_spec.py::"

MUTANTS = [
    Mutant(
        name="a decode step does not read the output head",
        file=LIMITS,
        old="weight_bytes=(layers + table) * element",
        new="weight_bytes=layers * element",
        test=TESTS + "test_a_decode_step_reads_all_weights_but_the_embedding_and_the_keys_and_values_of_its_rows",
    ),
    Mutant(
        name="a tied head is counted twice",
        file=LIMITS,
        old="table * (1 if model.tie_embeddings else 2)",
        new="table * 2",
        test=TESTS + "test_an_embedding_that_is_the_output_head_too_is_read_by_every_step",
    ),
    Mutant(
        name="attention of a prompt costs nothing",
        file=LIMITS,
        old=" + 2 * self.attention_width * num_tokens**2",
        new="",
        test=TESTS + "test_operations_of_a_prompt_are_its_products_and_half_a_square_of_attention",
    ),
    Mutant(
        name="a figure without a ratio meets its bar",
        file=FIGURES,
        old="(self.ratio is not None and self.ratio >= self.bar)",
        new="(self.ratio is None or self.ratio >= self.bar)",
        test=TESTS + "test_a_bar_is_met_by_a_ratio_that_reaches_it",
    ),
    Mutant(
        name="a peer on a slower machine is not scaled",
        file=PEERS,
        old="ours / (theirs * scale)",
        new="ours / theirs",
        test=TESTS + "test_a_peer_is_scaled_by_what_both_machines_could_do",
    ),
    Mutant(
        name="what runs at once on the device is busy twice",
        file=PROFILING,
        old="max(0.0, stop - max(begin, end))",
        new="stop - begin",
        test=TESTS + "test_time_that_two_activities_of_the_device_share_is_busy_once",
    ),
    Mutant(
        name="the device is idle behind what ended while something else ran",
        file=PROFILING,
        old="        end = max(end, stop)",
        new="        end = stop",
        test=TESTS + "test_time_that_two_activities_of_the_device_share_is_busy_once",
    ),
    Mutant(
        name="steps that a strict gate refused are not eligible",
        file=ELIGIBLE,
        old="if reason not in NOT_ELIGIBLE",
        new='if reason not in NOT_ELIGIBLE | {"strict_load"}',
        test=TESTS + "test_only_what_a_graph_was_made_for_counts_against_the_gate",
    ),
    Mutant(
        name="tokens of a shape have no text",
        file=SERVED,
        old="range(len(vocab), vocab_size)",
        new="range(len(vocab), len(vocab))",
        test=TESTS + "test_every_token_of_a_shape_is_a_piece_of_text",
    ),
    Mutant(
        name="the README hides a bar that a GPU missed",
        file=README,
        old="{missed(figure.is_met)}",
        new="",
        test=TESTS + "test_the_readme_tells_the_later_run_of_a_part_and_flags_what_missed_its_bar",
    ),
    # --- speculation ---
    Mutant(
        name="a cycle costs one draft forward",
        file=SPEC_LIMITS,
        old="        layers_s += (num_draft - 1) * product_s(self.layer_params, rows)\n",
        new="",
        test=OF_SPEC + "test_the_least_cost_of_a_cycle_is_bytes_where_rows_are_few_and_products_where_they_are_many",
    ),
    Mutant(
        name="verifying costs what a plain step does",
        file=SPEC_LIMITS,
        old="self._step_s(rows, 1 + num_draft, context, ceilings)",
        new="self._step_s(rows, 1, context, ceilings)",
        test=OF_SPEC + "test_the_least_cost_of_a_cycle_is_bytes_where_rows_are_few_and_products_where_they_are_many",
    ),
    Mutant(
        name="an MTP head speaks for nothing",
        file=SPEC_LIMITS,
        old="draft_head_params=own_table,",
        new="draft_head_params=own_table if is_eagle else 0,",
        test=OF_SPEC + "test_a_head_is_counted_tensor_by_tensor",
    ),
    Mutant(
        name="no head is nothing to compare with",
        file=SPEC,
        old='for mode in ("off", *map(str, sizes.steps))}\n    best',
        new="for mode in map(str, sizes.steps)}\n    best",
        test=OF_SPEC + "test_what_chooses_its_drafts_is_compared_with_the_best_that_does_not_and_none_is_one_of_them",
    ),
    Mutant(
        name="replies of the GPU may differ",
        file=SPEC,
        old="float(are_kept(judged))",
        new="1.0",
        test=OF_SPEC + "test_replies_are_the_same_when_every_case_keeps_the_margin",
    ),
    Mutant(
        name="an engine that chooses its drafts is not held",
        file=SPEC,
        old="        choice._controller = Held(num_draft)\n",
        new="        pass\n",
        test="tests/e2e/test_gpu_benchmark.py::test_speculation_is_measured_on_a_widened_model_with_real_heads",
    ),
]
