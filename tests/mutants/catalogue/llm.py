"""Guards of the offline API and of the commands around it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

API = "hiserve/llm/api.py"
BACKENDS = "hiserve/llm/backends.py"
OUTPUTS = "hiserve/llm/outputs.py"
GENERATE = "hiserve/commands/generate.py"
DOCTOR = "hiserve/commands/doctor.py"
OF_LLM = "tests/e2e/test_llm.py::"
OF_GENERATE = "tests/unit/commands/test_generate.py::"
OF_DOCTOR = "tests/unit/commands/test_doctor.py::"

MUTANTS = [
    # --- the offline API ---
    Mutant(
        name="an interrupted call runs to its end",
        file=BACKENDS,
        old="    finally:\n        stop()\n",
        new="    finally:\n        pass\n",
        test=OF_LLM + "test_ctrl_c_ends_the_call_and_its_requests_and_nothing_else",
    ),
    Mutant(
        name="every choice scores the prompt",
        file=API,
        old="own = sampling if choice == 0 else msgspec.structs.replace(sampling, prompt_logprobs=None)",
        new="own = sampling",
        test=OF_LLM + "test_choices_but_the_first_take_the_prompt_from_the_cache",
    ),
    Mutant(
        name="a stop text leaves the row running",
        file=BACKENDS,
        old="self.engine.abort([uid])",
        new="pass",
        test=OF_LLM + "test_a_stop_text_ends_the_work_too",
    ),
    Mutant(
        name="all prompts are read at once",
        file=BACKENDS,
        old="while len(live) < self._room and (job",
        new="while (job",
        test=OF_LLM + "test_any_number_of_prompts_is_read_as_there_is_room",
    ),
    Mutant(
        name="a failed request ends its batch in process",
        file=BACKENDS,
        old='job.fail(EngineError(f"the request failed: {message}"))',
        new='raise EngineError(f"the request failed: {message}")',
        test=OF_LLM + "test_a_request_that_fails_ends_alone",
    ),
    Mutant(
        name="replies of an offline chat are forgotten",
        file=API,
        old='self._chats.remember(b"", request.chat, choice.text, choice.token_ids)',
        new="pass",
        test=OF_LLM + "test_the_second_turn_of_a_chat_finds_the_whole_first",
    ),
    Mutant(
        name="results come as they end",
        file=API,
        old="                while waiting and not waiting[0].num_open:\n                    yield self._finished(waiting.popleft())\n",
        new="                if not job.request.num_open:\n                    yield job.request.output\n",
        test=OF_LLM + "test_a_result_holds_prompt_tokens_text_and_reason_in_the_order_of_the_prompts",
    ),
    Mutant(
        name="every choice tells what was cached",
        file=OUTPUTS,
        old="if cached is not None and choice.index == 0:",
        new="if cached is not None:",
        test=OF_LLM + "test_choices_but_the_first_take_the_prompt_from_the_cache",
    ),
    Mutant(
        name="the model's own sampling is ignored",
        file=API,
        old='return SamplingParams() if config.model.sampling_defaults == "openai" else model',
        new="return SamplingParams() if True else model",
        test=OF_LLM + "test_the_model_says_how_to_sample_where_nobody_does",
    ),
    # --- commands ---
    Mutant(
        name="a wrong line stops the batch",
        file=GENERATE,
        old="                    heads.append(head)\n                else:",
        new="                    heads.append(head)\n                    return\n                else:",
        test=OF_GENERATE + "test_a_wrong_line_is_answered_in_its_place",
    ),
    Mutant(
        name="a refused line takes the result of the next",
        file=GENERATE,
        old='while "error" in heads[0]:',
        new="while False:",
        test=OF_GENERATE + "test_a_wrong_line_is_answered_in_its_place",
    ),
    Mutant(
        name="flags win over what a line says",
        file=GENERATE,
        old="_sampling(self._defaults | fields)",
        new="_sampling(fields | self._defaults)",
        test=OF_GENERATE + "test_what_a_line_says_goes_before_flags_and_those_before_the_model",
    ),
    Mutant(
        name="the doctor's exit status is always 0",
        file=DOCTOR,
        old='return int(any(finding.level == "fail" for finding in findings))',
        new="return 0",
        test=OF_DOCTOR + "test_a_port_in_use_and_an_unknown_model_are_failures",
    ),
    Mutant(
        name="a broken package is called missing",
        file=DOCTOR,
        old="elif not package.is_missing:",
        new="elif False:",
        test=OF_DOCTOR + "test_a_package_that_is_there_but_broken_is_not_called_missing",
    ),
]
