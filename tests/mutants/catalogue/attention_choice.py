"""Guards of which attention computes which rows: in graphs, in pairs, within windows."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BACKENDS = "hiserve/attention/backends.py"
PAIRED = "hiserve/attention/paired.py"
CONTRACT = "tests/contract/test_attention.py::"
OF_BACKENDS = "tests/unit/attention/test_backends.py::"
OF_DRAFTS = OF_BACKENDS + "test_drafts_attend_with_the_named_backend_or_with_the_best_that_reads_lengths_on_the_device"
OF_PAIRS = "tests/unit/attention/test_paired.py::"
OF_COVERAGE = "tests/unit/runners/test_graph_coverage.py::"

MUTANTS = [
    Mutant(
        name="FlashInfer's tile in a graph is that of its rows, not of the longest there could be",
        file="hiserve/attention/flashinfer_tiles.py",
        old="longest = (num_rows * (width - 1) + 1) * group",
        new="longest = width * group",
        test="tests/unit/attention/test_flashinfer_tiles.py",
    ),
    Mutant(
        name="steps are planned ahead although attention needs lengths that drafts make uncertain",
        file="hiserve/worker/build.py",
        old="if depth and config.spec.tiers[-1] and runners.needs_host_lengths:",
        new="if False:",
        test="tests/contract/test_host_lengths.py::test_lengths_that_a_backend_plans_with_are_exact",
    ),
    Mutant(
        name="the reference is captured though its plans make tensors",
        file="hiserve/attention/reference.py",
        old='        """Returns none."""\n',
        new="        return self\n",
        test=OF_COVERAGE + "test_steps_of_a_backend_that_cannot_be_captured_run_without_full_graphs",
    ),
    Mutant(
        name="sizes without attention are covered",
        file="hiserve/runners/graph.py",
        old="buckets=tuple(sorted(self._captured.keys() | self.failed)),",
        new="buckets=self._buckets,",
        test=OF_COVERAGE + "test_sizes_that_attention_has_nothing_for_are_left_out",
    ),
    Mutant(
        name="a width without any graph counts as covered",
        file="hiserve/runners/dispatch.py",
        old=" if (covered := runner.coverage).buckets},",
        new=" if (covered := runner.coverage)},",
        test=OF_COVERAGE + "test_steps_of_a_backend_that_cannot_be_captured_run_without_full_graphs",
    ),
    # --- drafts ---
    Mutant(
        name="a backend that cannot do what drafts need is opened for them",
        file=BACKENDS,
        old="if named is not None and refusal is None and named.has_device_lengths:",
        new="if named is not None:",
        test=OF_DRAFTS,
    ),
    Mutant(
        name="drafts may attend with lengths of the host",
        file=BACKENDS,
        old="if named is not None and refusal is None and named.has_device_lengths:",
        new="if named is not None and refusal is None:",
        test=OF_DRAFTS,
    ),
    # --- pairs ---
    Mutant(
        name="a row that decodes behind prompts is planned by its bound",
        file="hiserve/runners/inputs.py",
        old="int(decoding[-1]) + 1 if decoding.size else 0",
        new="decoding.size",
        test="tests/unit/runners/test_inputs.py::"
        "test_rows_whose_length_drafts_may_change_are_told_from_those_behind_them",
    ),
    Mutant(
        name="rows with drafts are planned by their bounds",
        file="hiserve/runners/inputs.py",
        old="np.flatnonzero(num_new - num_draft == 1)",
        new="np.flatnonzero(num_new == 1)",
        test="tests/unit/runners/test_inputs.py::"
        "test_rows_whose_length_drafts_may_change_are_told_from_those_behind_them",
    ),
    Mutant(
        name="tokens of prompts count from the step's first",
        file=PAIRED,
        old="inputs.qo_indptr[first : end + 1] - start",
        new="inputs.qo_indptr[first : end + 1]",
        test=OF_PAIRS + "test_each_part_is_a_batch_of_its_own",
    ),
    Mutant(
        name="a part has the whole step's mask",
        file=PAIRED,
        old="inputs.tree_mask[start:stop]",
        new="inputs.tree_mask",
        test=OF_PAIRS + "test_each_part_is_a_batch_of_its_own",
    ),
    Mutant(
        name="a pair's graphs are those of prompts",
        file=PAIRED,
        old="return self._decoding.captured(",
        new="return self._prompts.captured(",
        test=OF_PAIRS + "test_graphs_have_what_rows_that_decode_have",
    ),
    Mutant(
        name="a server without a compiler does not start",
        file=BACKENDS,
        old="    except (ConfigError, ImportError) as error:",
        new="    except ImportError as error:",
        test=OF_BACKENDS + "test_auto_goes_on_with_triton_where_flashinfer_cannot_be_compiled",
    ),
    Mutant(
        name="flashinfer computes prompts where its kernels are slower",
        file=BACKENDS,
        old='"flashinfer" not in fits[1:] or not is_hopper(device)',
        new='"flashinfer" not in fits[1:]',
        test=OF_BACKENDS + "test_auto_is_triton_alone_on_other_devices",
    ),
    Mutant(
        name="auto asks flashinfer for what it lacks",
        file=BACKENDS,
        old='"flashinfer" not in fits[1:] or not is_hopper(device)',
        new="not is_hopper(device)",
        test=OF_BACKENDS + "test_auto_is_triton_alone_where_flashinfer_does_not_fit",
    ),
    # --- windows ---
    Mutant(
        name="a window on the CPU is a token too long",
        file="hiserve/attention/cpu.py",
        old="hidden.tril(before - reach)",
        new="hidden.tril(before - reach - 1)",
        test=CONTRACT + "test_a_window_hides_what_is_behind_it_in_its_layers_only",
    ),
    Mutant(
        name="a row that decodes sees a token too many",
        file="hiserve/attention/cpu.py",
        old="max(0, kv_len - num_new - reach + 1)",
        new="max(0, kv_len - num_new - reach)",
        test=CONTRACT + "test_a_window_hides_what_is_behind_it_in_its_layers_only",
    ),
    Mutant(
        name="a prompt longer than its window sees all of itself",
        file="hiserve/attention/cpu.py",
        old="if num_new == 1 or num_new == reach == kv_len:",
        new="if num_new == 1 or num_new == kv_len:",
        test=CONTRACT + "test_a_window_hides_what_is_behind_it_in_its_layers_only",
    ),
    Mutant(
        name="a row in scattered pages starts at a page's first token",
        file="hiserve/attention/cpu.py",
        old="found.narrow(0, offset, num_keys)",
        new="found.narrow(0, 0, num_keys)",
        test="tests/unit/attention/test_cpu.py::test_a_row_in_scattered_pages_gathers_those_that_its_window_reaches",
    ),
]
