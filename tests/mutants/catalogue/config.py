"""Guards of settings, their resolution, the model's description, the command line and the offline API."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONFIG = "hiserve/config/settings.py"
RESOLVE = "hiserve/core/resolve.py"
MACHINE = "hiserve/core/machine.py"
MODEL = "hiserve/models/config.py"
CLI = "hiserve/cli.py"
LLM = "hiserve/llm.py"
OF_CONFIG = "tests/unit/test_config.py::"
OF_RESOLVE = "tests/unit/core/test_resolve.py::"
OF_MACHINE = "tests/unit/core/test_machine.py::"
OF_MODEL = "tests/unit/models/test_config.py::"
OF_CLI = "tests/unit/test_cli.py::"
OF_LLM = "tests/e2e/test_llm.py::"
FITS = OF_RESOLVE + "test_whatever_the_machine_all_of_it_fits_or_a_typed_error_names_a_setting"
REFUSED = OF_RESOLVE + "test_what_does_not_fit_names_what_to_change"

MUTANTS = [
    Mutant(
        name="True is the number 1",
        file=CONFIG,
        old="if number is None or isinstance(value, bool):",
        new="if number is None:",
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
        test=OF_CONFIG + "test_only_the_served_name_may_be_none",
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
        old="machine.cuda_memory_bytes) // replicas",
        new="machine.cuda_memory_bytes)",
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
        name="heads need not be a multiple of key-value heads",
        file=MODEL,
        old='key-value heads": heads % kv_heads,',
        new='key-value heads": False,',
        test=OF_MODEL + "test_values_that_contradict_each_other_or_have_the_wrong_type",
    ),
    Mutant(
        name="RoPE scaling is ignored",
        file=MODEL,
        old='scaling != "default",',
        new="False,",
        test=OF_MODEL + "test_a_setting_we_would_compute_wrongly_is_refused",
    ),
    Mutant(
        name="the generation config's end tokens are not read",
        file=MODEL,
        old="ends = fields.eos_token_id if given is None else given",
        new="ends = fields.eos_token_id",
        test=OF_MODEL + "test_end_tokens_of_the_generation_config_go_first",
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
        name="an interrupted call runs to its end",
        file=LLM,
        old="        finally:\n            stop.set()\n",
        new="        finally:\n            pass\n",
        test=OF_LLM + "test_ctrl_c_ends_the_call_and_its_requests_and_nothing_else",
    ),
]
