"""Guards of settings, their resolution, the machine and the command line."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONFIG = "hiserve/config/settings.py"
RESOLVE = "hiserve/core/resolve.py"
MACHINE = "hiserve/core/machine.py"
CLI = "hiserve/cli.py"
OF_CONFIG = "tests/unit/test_config.py::"
OF_RESOLVE = "tests/unit/core/test_resolve.py::"
OF_MACHINE = "tests/unit/core/test_machine.py::"
OF_CLI = "tests/unit/test_cli.py::"
FITS = OF_RESOLVE + "test_whatever_the_machine_all_of_it_fits_or_a_typed_error_names_a_setting"
REFUSED = OF_RESOLVE + "test_what_does_not_fit_names_what_to_change"
SERVING = "hiserve/config/serving.py"

MUTANTS = [
    Mutant(
        name="graphs are captured on cpu",
        file="hiserve/core/resolve.py",
        old='if on_cpu and graphs != "off":',
        new="if False:",
        test="tests/unit/core/test_resolve.py::test_what_does_not_fit_names_what_to_change[graphs on cpu]",
    ),
    Mutant(
        name="Triton attends on cpu",
        file="hiserve/core/resolve.py",
        old='if on_cpu and backend in ("triton", "flashinfer"):',
        new='if on_cpu and backend == "flashinfer":',
        test="tests/unit/core/test_resolve.py::test_what_does_not_fit_names_what_to_change[triton on cpu]",
    ),
    Mutant(
        name="the pool takes what a step needs",
        file="hiserve/core/resolve.py",
        old="else max(0, room - needed)",
        new="else room",
        test="tests/unit/core/test_resolve.py::test_on_cuda_the_pool_takes_what_a_step_leaves",
    ),
    Mutant(
        name="larger steps need no more memory",
        file="hiserve/core/step_memory.py",
        old="activations = max_tokens *",
        new="activations = 2048 *",
        test="tests/unit/core/test_resolve.py::test_on_cuda_the_pool_takes_what_a_step_leaves",
    ),
    Mutant(
        name="page tables of graphs need no memory",
        file="hiserve/core/step_memory.py",
        old=" + len(widths) * ROW_BUCKETS * tables",
        new="",
        test="tests/unit/core/test_resolve.py::test_graphs_of_every_size_keep_their_page_tables",
    ),
    Mutant(
        name="page tables of a step need no memory",
        file="hiserve/core/step_memory.py",
        old="_token_bytes(shape, dtype_bytes) + tables\n",
        new="_token_bytes(shape, dtype_bytes)\n",
        test="tests/unit/core/test_resolve.py::test_graphs_of_every_size_keep_their_page_tables",
    ),
    Mutant(
        name="ways of drawing need no memory for their graphs",
        file="hiserve/core/step_memory.py",
        old="FURTHER_GRAPHS = 3, 2, 3",
        new="FURTHER_GRAPHS = 2, 2, 3",
        test="tests/unit/core/test_resolve.py::test_sizes_of_graphs_are_no_more_than_planned",
    ),
    Mutant(
        name="True is the number 1",
        file=CONFIG,
        old="if number is None or isinstance(value, bool) or math.isnan(number):",
        new="if number is None or math.isnan(number):",
        test=OF_CONFIG + "test_what_is_no_whole_number_is_refused",
    ),
    Mutant(
        name="numbers have no upper end",
        file=CONFIG,
        old="if setting.most is not None and number > setting.most:",
        new="if False:",
        test=OF_CONFIG + "test_a_number_is_taken_within_its_range_as_text_too",
    ),
    Mutant(
        name="any setting may be None",
        file=CONFIG,
        old="if (value is None and is_optional) or",
        new="if value is None or",
        test=OF_CONFIG + "test_only_what_is_none_by_default_may_be_none",
    ),
    Mutant(
        name="weights that fill the memory are planned beside a pool",
        file=RESOLVE,
        old="    if weights >= free:",
        new="    if False:",
        test=REFUSED,
    ),
    Mutant(
        name="the tables of rows take no memory",
        file=RESOLVE,
        old="    if sum(memory.values()) > free:",
        new="    if False:",
        test=REFUSED,
    ),
    Mutant(
        name="replicas do not share the memory",
        file=RESOLVE,
        old="free = machine.memory_bytes // replicas if on_cpu",
        new="free = machine.memory_bytes if on_cpu",
        test=OF_RESOLVE + "test_replicas_share_the_memory",
    ),
    Mutant(
        name="the longest request may be longer than the pool",
        file=RESOLVE,
        old="        return pages, longest\n",
        new="        return pages, length\n",
        test=OF_RESOLVE + "test_the_longest_request_shrinks_to_the_pool_when_nobody_chose_it",
    ),
    Mutant(
        name="the padding page counts as room",
        file=RESOLVE,
        old="longest = (pages - 1) * page_size",
        new="longest = pages * page_size",
        test=FITS,
    ),
    Mutant(
        name="cached files of the control group do not give way",
        file=MACHINE,
        old=" - _read_table(groups / stat)[reclaimable]",
        new="",
        test=OF_MACHINE + "test_cached_files_give_way",
    ),
    Mutant(
        name="the quota of the control group is no limit of cores",
        file=MACHINE,
        old='if quota != "max":',
        new="if False:",
        test=OF_MACHINE + "test_cores_are_those_of_the_process_within_the_quota",
    ),
    Mutant(
        name="flags may be abbreviated",
        file=CLI,
        old="description=summary, allow_abbrev=False)",
        new="description=summary)",
        test=OF_CLI + "test_flags_are_not_abbreviated",
    ),
    Mutant(
        name="the command line loads torch",
        file=CLI,
        old="import argparse\n",
        new="import argparse\nimport torch\n",
        test=OF_CLI + "test_help_and_refusals_take_little_time_and_no_torch",
    ),
    Mutant(
        name="NaN is a number in range",
        file=CONFIG,
        old=" or math.isnan(number):",
        new=":",
        test=OF_CONFIG + "test_what_is_no_number_is_refused",
    ),
    Mutant(
        name="secrets may be shown",
        file=CONFIG,
        old="    return msgspec.structs.replace(config, **sections)\n",
        new="    return config\n",
        test=OF_CONFIG + "test_no_secret_is_left_in_what_may_be_shown",
    ),
    Mutant(
        name="the admin's key is no secret",
        file=SERVING,
        old='server information.", is_secret=True)',
        new='server information.")',
        test=OF_CONFIG + "test_no_secret_is_left_in_what_may_be_shown",
    ),
    Mutant(
        name="an empty key is a key",
        file=CONFIG,
        old="all(isinstance(text, str) and text for",
        new="all(isinstance(text, str) for",
        test=OF_CONFIG + "test_a_list_takes_one_text_or_several_and_no_empty_one",
    ),
    Mutant(
        name="steps that verify drafts have the logits of decode steps",
        file="hiserve/core/step_memory.py",
        old="num_drawn = max(max_rows, min(max_rows * max(widths), max_tokens))",
        new="num_drawn = max_rows",
        test=OF_RESOLVE + "test_drafts_that_look_for_repetitions_take_what_verifying_them_takes",
    ),
    Mutant(
        name="graphs of all numbers of drafts share their logits",
        file="hiserve/core/step_memory.py",
        old="logits = ROW_BUCKETS * max_rows * sum(widths) *",
        new="logits = ROW_BUCKETS * max_rows * len(widths) *",
        test=OF_RESOLVE + "test_drafts_of_every_number_keep_their_logits_for_each_size_of_graph",
    ),
    Mutant(
        name="what drafts needs no room in a step",
        file="hiserve/core/step_memory.py",
        old='items["features and drafts"] = kept + max(0, drafting - activations)',
        new='items["features and drafts"] = 0',
        test=OF_RESOLVE + "test_what_drafts_take_is_shown_and_the_pool_leaves_room_for_it",
    ),
    Mutant(
        name="tokens are drawn all at once",
        file="hiserve/runners/step.py",
        old="range(0, host_rows.size, DRAWN_SLICE)",
        new="range(0, host_rows.size, host_rows.size)",
        test="tests/unit/runners/test_graph.py::test_tokens_are_drawn_so_many_at_a_time",
    ),
    Mutant(
        name="the largest step is measured without its drafts",
        file="hiserve/worker/profile.py",
        old="            runners.propose(plan, ran)\n",
        new="",
        test="tests/unit/worker/test_profile.py::test_with_drafts_the_largest_step_that_verifies_them_runs_too",
    ),
]
