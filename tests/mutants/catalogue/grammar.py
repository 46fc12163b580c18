"""Grammars: masks, matchers, vetting."""

from hiserve.engine import executor, grammars, loop, planner, rows
from hiserve.grammar import bounds, compiler, matcher, regular, tagged, thoughts, tools, vet, vet_process
from hiserve.kernels import draw, sampling
from hiserve.runners import device_rows, graph
from hiserve.sampling import params
from hiserve.server.openai import routes
from hiserve.server.request import grammar_fields
from hiserve.text.reader import output
from tests.e2e import test_grammar_halves as halves
from tests.e2e import test_grammars as replies
from tests.unit.engine import test_grammars
from tests.unit.grammar import test_bounds, test_matcher, test_regular, test_thoughts, test_tools, test_vet
from tests.unit.kernels import test_draw
from tests.unit.runners import test_mask_buffers
from tests.unit.sampling import test_changes
from tests.unit.server import test_custom_tools, test_grammar_fields, test_responses
from tests.unit.text import test_output

with grammars.GrammarRows.advance, test_grammars.test_matchers_see_accepted_tokens_alone_and_tell_the_token_that_ends_the_grammar:
    "INV 72: a step has the mask of the step before"
    emitted[:count]
    emitted[: count - 1]
with grammars.GrammarRows.advance, test_grammars.test_matchers_see_accepted_tokens_alone_and_tell_the_token_that_ends_the_grammar:
    "INV 72: a matcher sees rejected drafts"
    emitted[:count]
    emitted
with grammars.GrammarRows.masks, test_grammars.test_each_place_of_a_row_has_the_mask_after_the_drafts_before_it_and_other_rows_are_free:
    "INV 72: the token after the last draft has no mask"
    range(index * width, index * width + 1 + len(ahead))
    range(index * width, index * width + len(ahead))
with grammars.GrammarRows.admit, replies.test_replies_do_not_depend_on_drafts_overlap_or_other_requests["few pages"]:
    "INV 72: a preempted row starts its grammar anew"
    end = matcher.advance(request.tokens[request.num_prompt :].tolist())
    end = None
with rows.RowState.reply, test_grammars.test_rows_that_move_between_steps_give_the_same_replies:
    "INV 72: a row that moves to another compiled grammar has seen tokens that nothing drew"
    self.tokens[row, self.request(row).num_prompt : self.known[row]]
    self.tokens[row, self.request(row).num_prompt :]
with loop.Engine._start_masks, halves.test_a_forward_is_launched_before_the_step_before_it_is_known_and_its_draw_after_that["ahead"]:
    "INV 75: masks are computed before the step before is known"
    len(self._in_flight) > 1
    len(self._in_flight) > 2
with grammars.GrammarRows.masks, test_grammars.test_a_matcher_that_fails_after_its_request_left_the_row_fails_no_other_request["False"]:
    "INV 75: a matcher that failed is looked for in a row that its request has left"
    self._matchers.get(row) is matcher
    True
with loop.Engine.step, halves.test_a_forward_is_launched_before_the_step_before_it_is_known_and_its_draw_after_that["ahead"]:
    "INV 75: the next step is planned after the draw, while nothing computes"
    plan = self._planner.plan()
    self._draw()
    plan = self._planner.plan()
with planner.Planner.plan, halves.test_draws_under_grammars_are_replayed["ahead"]:
    "INV 75: the draw does not wait for masks"
    self.grammars.is_used and self.grammars.constrain_any(rows[allocation.samples])
    False
with executor.Executor.submit, halves.test_nothing_is_submitted_between_the_halves:
    "INV 75: a step is submitted between the halves of another"
    assert self._undrawn is None, f"step {plan.step_id} was submitted before the draw of the step before it"
    pass
with executor.Executor._propose, halves.test_a_preemption_between_the_halves_changes_no_reply["before-drafts"]:
    "INV 75: masks follow the drafts of an earlier step"
    self._rows.copy_drafts(self._drafts)
    pass
with graph.GraphRunner._capture_bucket, halves.test_draws_under_grammars_are_replayed["ahead"]:
    "captured draws read no masks"
    draw(inputs, made["logits"], rows, drawing, rows.draw_ops, masks)
    draw(inputs, made["logits"], rows, drawing, rows.draw_ops)
with device_rows.MaskBuffers.free, test_mask_buffers.test_draws_read_what_was_lent_and_all_rows_are_free_before_and_afterwards:
    "a step without grammars draws under the masks of the step before"
    self._entries.fill_(NO_MASK)
    pass
with draw.allowed, test_draw.test_triton_chooses_the_tokens_that_the_twins_choose:
    "the draw kernel reads the bit of another token"
    entry % 32
    (entry + 1) % 32
with sampling.masked, test_changes.test_a_token_that_a_mask_forbids_is_never_drawn_and_the_others_keep_their_scores:
    "a free row takes the first mask of its step"
    (bits == 0) & (entries >= 0)[:, None]
    bits == 0
with params.SamplingRows._early_ends, test_changes.test_a_grammar_yields_neither_to_min_tokens_nor_holds_back_an_end:
    "min_tokens forbids the only token that a grammar allows"
    params.min_tokens == 0 or params.grammar is not None
    params.min_tokens == 0
with output.TextOutput.push, test_output.test_a_choice_that_its_grammar_ends_shows_its_last_token_and_has_stopped:
    "the last token of a complete grammar is taken for an end token"
    self.push(tokens, FinishReason.LENGTH)
    self.push(tokens, FinishReason.STOP)
with grammar_fields.constrain, test_grammar_fields.test_a_refused_grammar_never_reaches_the_engine:
    "INV 73: a grammar reaches the engine that nothing has tried"
    grammar, warnings = await cancel_on_disconnect(request.receive, checking)
    grammar, warnings = constraint.grammar, []
with vet.Vetting._check_caller, test_vet.test_a_caller_who_ended_two_processes_waits_before_a_new_grammar:
    "INV 73: a caller may end any number of processes"
    wait_s > 0
    False
with grammars.GrammarRows.spread, test_grammars.test_not_all_rows_of_a_large_burst_move_after_one_step:
    "all rows of a burst move after one step, each 10 us, while the device waits"
    num_shown += 1 + tokens.size
    num_shown += tokens.size
with compiler.Compiler.compile_again, test_grammars.test_a_grammar_is_compiled_again_once_no_other_is_being_compiled:
    "a request waits while a grammar is compiled that has a matcher"
    all(each.done() for each in self._compiled.values())
    True
with matcher.MatcherThreads.advance, test_matcher.test_matchers_that_advance_side_by_side_are_where_each_alone_is["136"]:
    "INV 72: a matcher that advances beside others sees tokens after the end of its grammar"
    has_taken and matcher._goes_on(token)
    has_taken
with matcher.MatcherThreads.fill, test_thoughts.test_masks_after_drafts_are_those_after_the_same_tokens:
    "INV 72: a budget of thoughts fails with drafts"
    matcher.force(drafts, masks[first:])
    matcher.force([], masks[first:])
with matcher.Matcher.allowed, test_thoughts.test_masks_after_drafts_are_those_after_the_same_tokens:
    "INV 72: a draft may stand where a budget forces another token"
    tokens[: next(wrong, len(tokens))]
    tokens
with thoughts.ThoughtBudget.forced, test_thoughts.test_a_thought_does_not_end_within_a_character:
    "a thought is ended within a character"
    _is_cut(place.tail)
    False
with thoughts.ThoughtBudget.__init__, test_thoughts.test_an_opening_longer_than_the_mark_is_found_behind_other_text:
    "a long opening of several tokens begins no thought"
    max(len(opening), len(mark), _MAX_CHAR_BYTES)
    max(len(mark), _MAX_CHAR_BYTES)
with matcher._bodies, test_thoughts.test_a_format_is_the_text_of_the_final_message:
    "the text of a format is in a message without a header"
    "" if kind == "lark" else header
    ""
with vet_process.try_out, test_vet.test_a_grammar_after_a_thought_is_tried_with_it["text"]:
    "INV 73: a grammar after a thought is walked in the thought alone"
    ["", *marks]
    [""]
with vet_process.try_out, test_vet.test_texts_that_nothing_satisfies_are_refused_also_beside_calls:
    "INV 73: texts that nothing satisfies pass beside calls"
    first is not grammar
    False
with vet.Vetting._check_room, test_vet.test_requests_that_wait_for_verdicts_are_bounded_and_one_caller_has_half:
    "one caller may have all places of those who wait for verdicts"
    own >= -(-self._max_waiting // 2)
    False
with tagged.TaggedArguments._closed, test_tools.test_a_text_without_quotes_has_no_mark_that_would_end_it:
    "INV 76: a tagged text has the mark after it"
    rules.terminal(f"{whole} & ~/{_ANY}{spelled}(?s:.+)/")
    whole
with tools._Calls.among_text, test_tools.test_an_object_that_would_be_a_call_without_a_mark_is_no_text:
    "INV 76: free text begins like a call without a mark"
    [r"\{"] * self._row.is_bare
    []
with matcher._with_marks, test_matcher.test_a_mark_that_is_a_token_is_no_text_whether_the_tokenizer_hides_it_or_not:
    "text has marks that are tokens"
    token["special"] or token["content"] in _MARKS
    token["special"]
with tagged.TaggedArguments.expression, test_tools.test_required_arguments_are_looked_up_not_searched:
    "required arguments are searched in a list"
    dict.fromkeys(schema.get("required") or ())
    list(schema.get("required") or ())
with tagged.TaggedArguments._alternatives, test_tools.test_a_keyword_of_another_type_is_the_callers_fault:
    "keywords of a value have any type"
    _check_shapes(found)
    None
with tagged.TaggedArguments._parts, test_tools.test_a_value_whose_mark_tells_its_type_is_of_it:
    "INV 76: a text stands where its mark says that it is none"
    self._reader.types(part) - {"string"}
    self._reader.types(part)
with tools.ToolGrammars.of, test_tools.test_a_grammar_is_written_once_for_the_same_tools_and_anew_for_others:
    "a grammar of tools is that of others with the same names"
    msgspec.msgpack.encode((chat.choice, chat.is_single, is_free, parts, fields))
    msgspec.msgpack.encode((chat.choice, chat.is_single, is_free, [name for _, name, _ in parts], fields))
with tools.ToolGrammars.of, test_tools.test_a_reply_beside_a_format_is_a_text_of_it_or_calls["hermes-True"]:
    "INV 76: a format beside tools lets no call be"
    found if texts is None else found._replace(grammar=texts.either(found.grammar))
    found if texts is None else found._replace(grammar=texts)
with tools.ToolGrammars.of, test_grammar_fields.test_a_regex_is_of_the_whole_reply_beside_tools_too["auto"]:
    "a regex that spells calls is not held where the model calls by itself"
    texts.kind not in LENIENT
    False
with grammar_fields.of_chat, test_grammar_fields.test_a_format_is_of_the_content_which_a_call_that_must_be_made_does_not_have["required"]:
    "a format beside a call that must be made is refused as a second grammar"
    constraint.is_format
    False
with tools._written, test_responses.test_a_tool_that_cannot_be_called_is_named_as_the_client_has_it:
    "an error of a tool names the field of another protocol"
    fields[index] if fields else ToolField(f"tools[{index}].function")
    ToolField(f"tools[{index}].function")
with grammar_fields.constrain, test_grammar_fields.test_a_tool_whose_schema_is_broken_is_named_whichever_field_forces_it:
    "a broken schema of a tool is refused with a place in rules that the client never sees"
    await _check_schemas(vetting, request, constraint, refusal)
    pass
with bounds.with_whitespace, test_matcher.test_the_white_space_of_json_is_that_of_the_pattern:
    "the white space of JSON that a request asks for is any"
    spaced | {_OPTIONS: {"whitespace_pattern": pattern}}
    spaced
with bounds.json_schema, test_bounds.test_options_of_the_library_are_none_of_a_schema:
    "a schema may change separators, so that replies are no JSON"
    isinstance(schema, dict) and _OPTIONS in schema
    False
with grammar_fields.OpenAIGrammarFields.constraints, test_grammar_fields.test_each_spelling_is_the_same_grammar:
    "disable_any_whitespace is ignored"
    found if whitespace is None else _spaced(found, *whitespace)
    found
with grammar_fields._check_schemas, test_grammar_fields.test_the_broken_one_of_many_tools_is_found_by_halves:
    "each of 128 tools is tried to name the broken one, which takes 15 s"
    half = len(schemas) // 2
    half = 1
with tools.CustomTools._regular, test_responses.test_the_rules_of_a_custom_tool_are_held_where_they_are_regular_and_counted_where_not:
    "INV 76: the rules of a custom tool are shown alone"
    regular(rules)
    None
with tools.CustomTools._regular, test_responses.test_the_rules_that_are_read_have_one_limit_for_all_tools_of_a_request:
    "the event loop waits while the rules of 128 tools are read"
    self._num_chars + len(rules)
    len(rules)
with tools.CustomTools.pattern, test_custom_tools.test_an_expression_that_closes_groups_of_others_is_tried_by_itself:
    "the regular expression a)(b of a custom tool is held as ab"
    is_whole(tool.definition)
    True
with routes.OpenAIRoutes.completions, test_custom_tools.test_no_grammar_of_a_request_that_does_not_fit_is_tried["/v1/completions"]:
    "the grammar of a request that does not fit is tried"
    fit_context(sampling, fields.limits, max(map(len, prompts)), engine.max_model_len)
    None
with regular._Rules.expression, test_regular.test_a_rule_that_leads_back_to_itself_is_read_once["two"]:
    "the event loop waits 0.9 s while 1,024 rules are followed back to themselves, 64 times each"
    self._bodies.pop(name)
    self._bodies[name]
with regular._Body.alternatives, test_regular.test_rules_that_lead_forward_alone_are_a_regular_expression:
    "groups that stand one after another count as groups in one another"
    self._rules.depth -= 1
    pass
with regular._Body._sequence, test_regular.test_rules_of_many_long_parts_are_none_before_the_parts_fill_memory["sequence"]:
    "the parts of a rule are joined before their length is checked"
    _bounded(found + self._repeated(self._atom()))
    found + self._repeated(self._atom())
with vet_process.Credit.run, test_vet.test_a_trial_yields_to_other_processes_beyond_its_credit_alone:
    "a grammar that takes long has the priority of the engine"
    os.setpriority(os.PRIO_PROCESS, thread.native_id, niceness)
    pass
with grammar_fields.check_shown, test_responses.test_rules_that_are_only_shown_are_refused_where_they_are_no_grammar:
    "rules of a custom tool that are no grammar are shown to the model"
    refusal.code == INVALID
    False
with grammars.GrammarCopies._compile_again, test_grammars.test_rows_that_came_in_one_burst_spread_over_several_compiled_ones:
    "the masks of rows with one grammar are computed one after another"
    sources.add(another)
    pass
with grammars.GrammarRows.spread, test_grammars.test_rows_that_came_in_one_burst_spread_over_several_compiled_ones:
    "INV 72: a row that moves to another matcher starts its grammar anew"
    matcher.advance(tokens.tolist())
    pass
with compiler.Compiler.compile_again, test_grammars.test_a_grammar_that_takes_long_is_compiled_once:
    "a grammar that takes seconds is compiled once a thread, and holds up those of other requests"
    matcher.source.compile_s <= MAX_AGAIN_S
    True
