"""Text: detokenizer, stop texts, templates, remembered replies."""

from hiserve.text import conversation
from hiserve.text.prompt import known_replies, spelled_tokens
from hiserve.text.reader import buffer as reply_buffer
from hiserve.text.reader import calls as call_reader
from hiserve.text.reader import json_values, output
from hiserve.text.reader import marks as reply_marks
from hiserve.text.reader import messages as message_reader
from hiserve.text.template import budget as render_budget
from hiserve.text.template import chat_template
from hiserve.text.template import comparisons as template_comparisons
from hiserve.text.tokens import convert, detokenizer, split_points
from tests.unit.text import (
    test_detokenizer,
    test_gemma_template,
    test_known_replies,
    test_output,
    test_reader,
    test_spelled_tokens,
    test_split_points,
    test_template,
    test_template_sandbox,
    test_tokenizer,
)

with detokenizer.ByteLevelDetokenizer.push, test_detokenizer.test_a_split_character_is_held_back_until_it_is_complete:
    "INV 15: half a character is sent"
    self._decoder.decode(b"".join([pieces[i] for i in ids if i < len(pieces)]))
    b"".join([pieces[i] for i in ids if i < len(pieces)]).decode(errors="replace")
with output.StopTexts.release, test_output.test_no_part_of_a_stop_leaks_and_nothing_is_held_needlessly:
    "INV 21: the start of a stop text is sent"
    max(stop.num_matched for stop in self._stops)
    0
with output.TextOutput._scan, test_output.test_a_stop_that_spans_tokens_cuts_what_follows_from_text_and_count:
    "INV 21: tokens after a stop text are counted"
    i + 1
    len(tokens)
with known_replies.KnownReply.place, test_known_replies.test_a_reply_that_a_stop_text_cut_keeps_the_tokens_before_it:
    "INV 13: remembered ids are spliced whatever they decode to"
    _num_equal(whole, x, begin, text, y)
    begin - x
with known_replies._end_of_same, test_known_replies.test_arguments_of_another_value_are_the_clients:
    "INV 13: arguments that the client changed are replaced by the generated ones"
    canonical(text[at:end_of_value]) != canonical(written)
    False
with known_replies._end_of_same, test_known_replies.test_tagged_values_keep_their_tokens_in_another_spelling_of_the_same_value:
    "INV 13: tagged values that the client changed are replaced by the generated ones"
    canonical(other) == canonical(written)
    True
with known_replies.KnownReply.restored, test_known_replies.test_a_thought_is_put_back_only_to_its_own_reply:
    "a thought is put back to another reply"
    not self.answers(turn)
    False
with render_budget.RenderBudget.pay, test_template_sandbox.test_time_that_is_over_has_a_code_of_its_own:
    "INV 22: a template renders without a time limit"
    time.monotonic() > self._deadline and time.thread_time() > self._cpu_deadline
    False
with render_budget.RenderBudget.pay, test_template_sandbox.test_time_in_which_a_rendering_gets_no_cpu_is_not_its_own:
    "a chat is refused because the machine is busy"
    time.monotonic() > self._deadline and time.thread_time() > self._cpu_deadline
    time.monotonic() > self._deadline
with template_comparisons.pay_visits, test_template_sandbox.test_a_template_that_would_not_end_is_stopped:
    "INV 22: comparing nested lists in a template is free"
    waiting.append(iter(inner))
    pass
with split_points.SplitPoints._are_tokens_cut, test_split_points.test_a_part_of_a_prompt_has_the_tokens_of_the_whole:
    "INV 63: a text is cut anywhere"
    [*before.tolist(), *after[self.num_anchor :].tolist()] == whole.tolist()
    True
with convert.main, test_tokenizer.test_code_that_comes_with_a_tokenizer_is_never_run:
    "code that comes with a tokenizer is run"
    False
    True
with reply_buffer.ReplyBuffer.drop, test_reader.test_spans_cover_every_token_and_marks_belong_to_what_follows:
    "the tokens of a mark belong to no part of a reply"
    return stop
    return 0
with reply_marks.ReplySyntax.__init__, test_reader.test_a_mark_that_is_a_token_is_known_by_it_alone:
    "spelled-out text opens a call"
    len(part) > 1 and part in row.marks
    False
with reply_buffer.ReplyBuffer.passed_on, test_reader.test_a_call_in_the_midst_of_words_is_found_in_deltas_of_any_size:
    "a mark that comes amid plain text is text"
    begin(text) is not None
    False
with message_reader.MessageReader._header, test_reader.test_messages_are_read_by_their_headers:
    "a thought of another channel is content"
    channel is not None and channel[1] == THOUGHTS
    False
with reply_buffer.ReplyBuffer.show_until, test_reader.test_every_value_is_read_in_deltas_of_any_size["qwen3_coder-1"]:
    "a value that arrives token by token is not escaped"
    not self.text and kind is not Kind.ARGUMENTS
    not self.text
with call_reader.CallReader._object, test_reader.test_arguments_are_as_the_model_wrote_them:
    "malformed arguments are lost"
    yield from self._rest()
    pass
with (
    call_reader.CallReader._end,
    test_reader.test_a_call_that_is_cut_anywhere_after_its_name_has_what_came_of_its_arguments_and_leaves_no_content["hermes-False"],
):
    "what a cut leaves of a closing mark is content"
    found or (closing and buffer.is_cut_short)
    found
with (
    call_reader.CallReader._object,
    test_reader.test_a_call_that_is_cut_anywhere_after_its_name_has_what_came_of_its_arguments_and_leaves_no_content["hermes-False"],
):
    "the begin of the member before arguments counts as arguments"
    end < 0 and self._buffer.is_cut_short
    False
with json_values.OpenString.is_open, test_reader.test_a_closing_mark_within_a_string_of_json_is_text["minimax"]:
    "a mark within a string of JSON ends a tagged value"
    not self._is_over and self._value.is_in_string
    False
with chat_template.ChatTemplate.render, test_template.test_a_call_that_failed_is_told_to_the_model_once:
    "the model is told twice that a call failed"
    chat.has_errors and not self.shows_errors
    chat.has_errors
with reply_buffer.EventLog.add, test_reader.test_content_alone_has_no_event_and_its_place_follows_from_the_next:
    "content without an event of its own is no part of the reply that is kept"
    Event(CONTENT, plain, self._num_tokens, events[0].start), *events
    (*events,)
with spelled_tokens.pieces, test_spelled_tokens.test_special_tokens_in_words_are_text_for_any_template:
    "a user ends a turn by a token spelled out"
    start < place < end
    False
with spelled_tokens.SpelledTokens.__init__, test_spelled_tokens.test_no_word_of_a_user_or_a_tool_is_a_mark_of_deepseek:
    "tokens that the template writes and that are not special are taken from users"
    token.special or token.content in source
    token.special
with (
    reply_marks.ReplySyntax._searches,
    test_known_replies.test_an_agents_steps_with_the_template_of_qwen3_5_keep_their_tokens["False-False"],
):
    "the second line break before the calls of Qwen3.5 is content"
    MarkSearch([*calls, *thoughts], self.row.call_lines)
    MarkSearch([*calls, *thoughts], 1)
with chat_template.ChatTemplate.shows_later_system, test_gemma_template.test_instructions_are_the_users_wherever_they_stand:
    "a template that refuses system turns behind replies is taken for one that shows them everywhere"
    (("user", "system"), ("user", "assistant", "system", "user"))
    (("user", "system"),)
with conversation.Conversation.with_reminders, test_gemma_template.test_instructions_behind_a_reply_begin_the_users_next_turn:
    "a reminder behind a reply is one more turn of the user"
    is_reminder = True
    pass
