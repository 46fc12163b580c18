"""Guards of tokens to text, stop texts, templates, prompts and remembered replies."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OUTPUT = "hiserve/text/output.py"
DETOKENIZER = "hiserve/text/detokenizer.py"
REPLIES = "hiserve/text/replies.py"
TEMPLATE = "hiserve/text/template.py"
SANDBOX = "hiserve/text/sandbox.py"
BUDGET = "hiserve/text/budget.py"
PROMPTS = "hiserve/text/prompts.py"
CONVERT = "hiserve/text/convert.py"
CHAT = "hiserve/text/chat.py"
OF_OUTPUT = "tests/unit/text/test_output.py::"
OF_DETOKENIZER = "tests/unit/text/test_detokenizer.py::"
OF_REPLIES = "tests/unit/text/test_replies.py::"
OF_TEMPLATE = "tests/unit/text/test_template.py::"
OF_SANDBOX = "tests/unit/text/test_sandbox.py::"
OF_PROMPTS = "tests/unit/text/test_prompts.py::"
OF_CHAT = "tests/unit/text/test_chat.py::"
OF_TOKENIZER = "tests/unit/text/test_tokenizer.py::"

MUTANTS = [
    # --- tokens to text ---
    Mutant(
        name="half a character is shown",
        file=DETOKENIZER,
        old='self._decoder.decode(b"".join([pieces[i] for i in ids if i < len(pieces)]))',
        new='b"".join([pieces[i] for i in ids if i < len(pieces)]).decode(errors="replace")',
        test=OF_DETOKENIZER + "test_a_split_character_is_held_back_until_it_is_complete",
    ),
    Mutant(
        name="an unfinished character is lost at the end",
        file=DETOKENIZER,
        old='self._decoder.decode(b"", final=True)',
        new='""',
        test=OF_DETOKENIZER + "test_an_unfinished_character_appears_at_the_end_only",
    ),
    Mutant(
        name="a run of bytes is shown before it ends",
        file=DETOKENIZER,
        old="is_open = not self._ids or self._ids[-1] in self._byte_ids or text.endswith(REPLACEMENT)",
        new="is_open = not self._ids or text.endswith(REPLACEMENT)",
        test=OF_DETOKENIZER + "test_any_other_decoder_is_streamed_too",
    ),
    Mutant(
        name="a finished reply is not flushed",
        file=OUTPUT,
        old="self._detokenizer.push(self._visible(tokens, finish)) + self._detokenizer.flush()",
        new="self._detokenizer.push(self._visible(tokens, finish))",
        test="tests/unit/server/test_replies_over_http.py::test_a_reply_cut_inside_a_character_ends_with_a_replacement",
    ),
    Mutant(
        name="the token that ends a choice is shown",
        file=OUTPUT,
        old="return tokens[:-1] if is_cut else tokens",
        new="return tokens",
        test=OF_OUTPUT + "test_the_token_that_ends_a_choice_counts_but_is_not_shown",
    ),
    # --- stop texts ---
    Mutant(
        name="stop texts stop nothing",
        file=OUTPUT,
        old="        if matches:\n",
        new="        if False:\n",
        test=OF_OUTPUT + "test_the_text_is_the_whole_decoding_up_to_the_first_stop",
    ),
    Mutant(
        name="the start of a stop text leaks",
        file=OUTPUT,
        old="max(stop.num_matched for stop in self._stops)",
        new="0",
        test=OF_OUTPUT + "test_no_part_of_a_stop_leaks_and_nothing_is_held_needlessly",
    ),
    Mutant(
        name="a stop text is forgotten where another start of it fails",
        file=OUTPUT,
        old="length = self._border(length)\n        return length + 1",
        new="length = 0\n        return length + 1",
        test=OF_OUTPUT + "test_no_part_of_a_stop_leaks_and_nothing_is_held_needlessly",
    ),
    Mutant(
        name="what was held is lost at the end",
        file=OUTPUT,
        old='Shown("".join(texts) + self._held, ',
        new='Shown("".join(texts), ',
        test=OF_OUTPUT + "test_what_was_held_is_shown_at_the_end",
    ),
    Mutant(
        name="tokens behind a stop text count",
        file=OUTPUT,
        old='Shown("".join(texts), i + 1, FinishReason.STOP',
        new='Shown("".join(texts), len(tokens), FinishReason.STOP',
        test=OF_OUTPUT + "test_a_stop_that_spans_tokens_cuts_what_follows_from_text_and_count",
    ),
    Mutant(
        name="a choice goes on after its stop text",
        file=OUTPUT,
        old="if self._ended is not None:",
        new="if False:",
        test=OF_OUTPUT + "test_a_stop_that_spans_tokens_cuts_what_follows_from_text_and_count",
    ),
    Mutant(
        name="of two stop texts the shorter counts",
        file=OUTPUT,
        old="matches = [(end, -len(stop.text),",
        new="matches = [(end, len(stop.text),",
        test=OF_OUTPUT + "test_the_stop_that_is_complete_first_counts_and_of_several_the_longest",
    ),
    Mutant(
        name="a stop text counts before min_tokens",
        file=OUTPUT,
        old="is_early = self._num_tokens < self._sampling.min_tokens",
        new="is_early = False",
        test=OF_OUTPUT + "test_a_stop_does_not_count_before_the_least_number_of_tokens",
    ),
    # --- replies keep their tokens ---
    Mutant(
        name="ids are spliced whatever they decode to",
        file=REPLIES,
        old="tokenizer.decode(ids, skip_hidden=False) == content",
        new="True",
        test=OF_REPLIES + "test_ids_that_decode_to_another_text_are_not_used",
    ),
    Mutant(
        name="a reply is known by its words alone",
        file=REPLIES,
        old="before = key = namespace_digest(before, ",
        new="before = key = namespace_digest(namespace, ",
        test=OF_REPLIES + "test_another_conversation_does_not_see_the_reply",
    ),
    Mutant(
        name="a reply is known in every namespace",
        file=REPLIES,
        old="if any(setting) else namespace",
        new='if any(setting) else b""',
        test=OF_REPLIES + "test_namespaces_do_not_see_each_other",
    ),
    Mutant(
        name="a reply is known whatever calls came before",
        file=REPLIES,
        old="before = namespace_digest(key, json.dumps(more))",
        new="pass",
        test=OF_REPLIES + "test_every_field_of_an_earlier_message_belongs_to_the_conversation",
    ),
    Mutant(
        name="a reply is known whatever the tools",
        file=REPLIES,
        old="namespace_digest(namespace, json.dumps(setting)) if any(setting) else namespace",
        new="namespace",
        test=OF_REPLIES + "test_what_a_template_may_show_belongs_to_the_conversation",
    ),
    Mutant(
        name="replies are kept without end",
        file=REPLIES,
        old="len(self._ids) > self._max_entries or ",
        new="",
        test=OF_REPLIES + "test_the_memory_is_bounded_by_entries_and_drops_the_least_recently_used",
    ),
    # --- templates ---
    Mutant(
        name="a loop that writes nothing is free",
        file=SANDBOX,
        old='self.writeline(f"context.parent[{BUDGET!r}].pay({BLOCK_CHARS + _num_chars(block)})")',
        new="pass",
        test=OF_SANDBOX + "test_a_template_that_would_not_end_is_stopped",
        timeout_s=30.0,
    ),
    Mutant(
        name="a product is free before it is made",
        file=SANDBOX,
        old="budget_of(context).pay(each * len(sequence) * max(times, 0))",
        new="pass",
        test=OF_SANDBOX + "test_a_template_that_would_not_end_is_stopped",
    ),
    Mutant(
        name="a rendering may take any time",
        file=BUDGET,
        old="if time.monotonic() > self._deadline:",
        new="if False:",
        test=OF_SANDBOX + "test_time_that_is_over_has_a_code_of_its_own",
        timeout_s=30.0,
    ),
    Mutant(
        name="a variable of the request takes the place of the messages",
        file=TEMPLATE,
        old="        self._check_names(chat.template_kwargs)\n",
        new="",
        test=OF_TEMPLATE + "test_a_variable_may_not_take_the_place_of_what_is_given",
    ),
    Mutant(
        name="a prompt grows beyond the context",
        file=TEMPLATE,
        old="if max_chars is not None and num_chars > max_chars:",
        new="if False:",
        test=OF_TEMPLATE + "test_a_prompt_that_cannot_fit_the_context_is_refused_while_it_grows",
    ),
    Mutant(
        name="a template may make lone surrogates",
        file=TEMPLATE,
        old='        check_text(text, "messages")\n',
        new="",
        test=OF_TEMPLATE + "test_a_lone_surrogate_that_comes_by_a_template_is_refused",
    ),
    # --- prompts ---
    Mutant(
        name="a slow template is refused at once",
        file=PROMPTS,
        old="if error.code != TOO_SLOW:",
        new="if True:",
        test=OF_PROMPTS + "test_a_slow_template_does_not_hold_up_the_loop",
    ),
    Mutant(
        name="a long conversation is encoded in the loop",
        file=PROMPTS,
        old="if len(step.text) > INLINE_CHARS:",
        new="if False:",
        test=OF_PROMPTS + "test_long_prompts_are_encoded_in_a_thread_and_short_ones_inline",
    ),
    Mutant(
        name="comparing lists costs nothing",
        file="hiserve/text/comparisons.py",
        old="    pay_visits(budget, left)\n    pay_visits(budget, right)\n",
        new="    budget.pay(1)\n",
        test=OF_SANDBOX + "test_a_template_that_would_not_end_is_stopped",
        timeout_s=30,  # it compares for ever
    ),
    Mutant(
        name="conversations of any size are rendered in the loop",
        file=PROMPTS,
        old="if len(step.chat.messages) <= INLINE_MESSAGES and",
        new="if",
        test=OF_PROMPTS + "test_a_large_conversation_is_not_begun_in_the_loop",
    ),
    Mutant(
        name="a text is cut anywhere",
        file="hiserve/text/cuts.py",
        old="        if not has_words and any(map(across.search, self.tokenizer.vocab.values())):\n            return False\n"
        "        return all(self._are_tokens_cut(left, right) for left, right in texts)",
        new="        return True",
        test="tests/unit/text/test_cuts.py::test_a_part_of_a_prompt_has_the_tokens_of_the_whole",
    ),
    Mutant(
        name="the whole of a text is encoded, however little counts",
        file="hiserve/text/steps.py",
        old="if wanted.from_end and num_found >= wanted.most:",
        new="if False:",
        test="tests/unit/text/test_cuts.py::test_of_a_long_text_the_end_that_counts_is_encoded",
    ),
    Mutant(
        name="every body is read in the loop",
        file="hiserve/server/bodies.py",
        old="if is_quick(raw):",
        new="if True:",
        test="tests/unit/server/test_big_bodies.py::test_no_large_body_takes_the_event_loop",
    ),
    Mutant(
        name="the arguments of tool calls have values without end",
        file="hiserve/text/chat.py",
        old='if num_values > MAX_VALUES:\n            raise RequestError(\n                f"the arguments',
        new='if False:\n            raise RequestError(\n                f"the arguments',
        test="tests/unit/text/test_chat.py::test_arguments_of_all_calls_together_have_a_bounded_number_of_values",
    ),
    Mutant(
        name="the next caller is whoever asked first",
        file="hiserve/text/turns.py",
        old="self._lines.setdefault(caller, deque())",
        new="self._lines.setdefault(0, deque())",
        test="tests/unit/text/test_turns.py::test_who_asks_for_much_waits_behind_each_other_caller_once",
    ),
    Mutant(
        name="code that comes with a tokenizer is run",
        file=CONVERT,
        old="trust_remote_code=False",
        new="trust_remote_code=True",
        test=OF_TOKENIZER + "test_code_that_comes_with_a_tokenizer_is_never_run",
    ),
    Mutant(
        name="JSON is walked to any depth",
        file=CHAT,
        old="for _ in range(MAX_DEPTH):",
        new="while True:",
        test=OF_CHAT + "test_malformed_fields_are_refused_with_their_place",
    ),
    Mutant(
        name="tools are shown that must not be called",
        file=CHAT,
        old='None if body.get("tool_choice") == "none" else tools',
        new="tools",
        test=OF_CHAT + "test_tools_that_must_not_be_called_are_left_out",
    ),
    Mutant(
        name="a lone surrogate is taken for text",
        file=CHAT,
        old="        text.encode()\n",
        new='        text.encode("utf-8", "replace")\n',
        test=OF_CHAT + "test_only_lone_surrogates_are_invalid_text",
    ),
    Mutant(
        name="a place is lost with a caller who goes as it becomes his",
        file="hiserve/text/turns.py",
        old="            if place.done() and not place.cancelled():\n                self.leave()\n",
        new="",
        test="tests/unit/text/test_turns.py::test_who_goes_as_soon_as_it_is_his_turn_passes_it_on",
        timeout_s=60.0,
    ),
    Mutant(
        name="a text is cut behind a word that takes the spaces that follow",
        file="hiserve/text/cuts.py",
        old="if any(token.rstrip and token.content[-1:].isalpha() for token in added):",
        new="if not self.tokenizer.vocab:",
        test="tests/unit/text/test_cuts.py::test_a_part_of_a_prompt_has_the_tokens_of_the_whole",
    ),
]
