"""HTTP: bad requests, keys, limits, streams."""

from hiserve.commands import serve
from hiserve.core import request
from hiserve.server import conversations, engine_handle, routes
from hiserve.server.http import auth, connection, streaming, tracing
from hiserve.server.management import admin, debug
from hiserve.server.messages import format as messages_format
from hiserve.server.messages import request as messages_request
from hiserve.server.metrics import registry as metrics
from hiserve.server.openai import format as openai_format
from hiserve.server.openai import types as openai_types
from hiserve.server.reply import blocks, choices, generation, seals
from hiserve.server.request import body as request_body
from hiserve.server.request import known_fields, resumption, sampling_fields
from hiserve.server.responses import format as responses_format
from hiserve.server.responses import request as responses_request
from hiserve.server.responses import store as response_store
from hiserve.text.body import chat as chat_request
from hiserve.text.body import json as request_json
from hiserve.text.body import parser as text_bodies
from hiserve.text.body import retention, tools
from hiserve.text.helpers import process as helper_process
from tests.unit.commands import test_serve
from tests.unit.core import test_request
from tests.unit.server import (
    test_auth,
    test_big_bodies,
    test_body_limit,
    test_cache_usage,
    test_choices,
    test_connection,
    test_custom_tools,
    test_debug,
    test_disconnects,
    test_engine_handle,
    test_errors,
    test_item_references,
    test_large_replies,
    test_logprobs,
    test_messages,
    test_messages_request,
    test_metrics,
    test_response_store,
    test_responses,
    test_resumed_events,
    test_resumption,
    test_retention,
    test_schema,
    test_seals,
    test_tracing,
)
from tests.unit.text import test_chat_request, test_request_json

with known_fields.check_fields, test_errors.test_what_is_not_built_is_never_silently_ignored:
    "INV 16: an unsupported field is ignored"
    not any(_is_same(value, neutral) for neutral in (None, *REFUSED[name]))
    False
with text_bodies.parse_prompt, test_errors.test_a_bad_prompt_is_a_400:
    "INV 16: a token id outside the vocabulary is accepted"
    low < 0 or high >= vocab_size
    False
with openai_types.CompletionRequest.prompts, test_choices.test_the_most_choices_are_served:
    "INV 63: n has no limit"
    len(prompts) * self.num_choices > MAX_CHOICES
    False
with request.SamplingParams.__post_init__, test_request.test_lists_and_pairs_of_fields_are_bounded:
    "INV 63: a stop text has no limit"
    (number := max(map(len, self.stop), default=0)) > MAX_STOP_CHARS
    False
with chat_request._turns, test_chat_request.test_arguments_of_all_calls_together_have_a_bounded_number_of_values:
    "INV 63: arguments of tool calls have no limit"
    num_values > MAX_VALUES
    False
with tools.Tool, test_chat_request.test_a_null_is_no_object_of_another_type:
    "a client that writes null for fields it does not use is refused"
    Custom | None
    Custom
with request_json.check_json, test_chat_request.test_malformed_fields_are_refused_with_their_place:
    "INV 23: nested JSON has no limit"
    range(MAX_DEPTH)
    iter(int, 1)
with request_json._invalid_text, test_request_json.test_a_fault_is_named_by_its_field_and_its_limit:
    "INV 63: a text that is no Unicode is sought in values that no type reads"
    name in fields and (path := _invalid_text(entry, fields[name], schemas, f"{where}.{name}")) is not None
    (path := _invalid_text(entry, fields.get(name, {}), schemas, f"{where}.{name}")) is not None
with request_body.BodyReader.read, test_big_bodies.test_no_large_body_takes_the_event_loop:
    "INV 63: every body is parsed in the event loop"
    is_quick(raw)
    True
with streaming.answer, test_large_replies.test_the_scores_of_a_long_prompt_are_worded_in_a_thread:
    "INV 63: large replies are worded in the event loop"
    choices.is_large
    False
with request_body.BodyLimit.__call__.receive_counted, test_body_limit.test_a_longer_body_is_refused_where_it_exceeds_the_limit:
    "INV 63: only an announced body length is limited"
    self._check(num_bytes)
    pass
with connection.HttpConnection.data_received, test_connection.test_a_head_without_end_is_a_431:
    "INV 63: the head of a request has no limit"
    self._num_idle_bytes += len(data)
    pass
with sampling_fields.range_of, test_schema.test_the_described_limits_are_those_that_are_checked:
    "INV 25: the schema promises values that are refused"
    Meta(ge=least, le=most)
    Meta(ge=least)
with auth.AuthMiddleware.__call__, test_auth.test_without_a_known_key_nothing_is_served:
    "a path without a route needs no key"
    scope["path"] in self._public
    not scope["path"].startswith("/v1")
with auth.Auth.caller, test_auth.test_the_keys_are_compared_in_constant_time_and_always_all:
    "keys are compared byte by byte"
    hmac.compare_digest(digest, key)
    digest == key
with auth.namespace_of, test_auth.test_each_key_has_a_namespace_and_a_salt_only_narrows_it:
    "INV 7: two keys with one cache salt share a namespace"
    namespace_digest("tenant", tenant, cache_salt or "")
    namespace_digest("tenant", cache_salt or tenant)
with admin.AdminRoutes.abort_request, test_auth.test_a_caller_ends_his_own_requests_and_the_admin_anyones:
    "a caller aborts requests of another"
    self._auth.tags(rid) if self._auth.is_admin(request) else [tag_of(request, rid)]
    self._auth.tags(rid)
with admin.AdminRoutes.server_info, test_auth.test_server_info_shows_no_secret:
    "INV 64: /server_info shows the keys"
    without_secrets(self._resolved.settings)
    self._resolved.settings
with auth.Auth.sees_metrics, test_auth.test_metrics_tell_a_tenant_nothing_of_what_others_ask_and_find_cached:
    "a tenant's metrics show the hits of others"
    self.caller(authorization)
    return bool(self.caller(authorization))
with engine_handle.EngineHandle._open, test_engine_handle.test_an_engine_that_dies_is_replaced_and_meanwhile_the_gate_says_why:
    "INV 51: a dead engine is not restarted"
    self._keeping = asyncio.create_task(self._keep(self._engine))
    pass
with engine_handle.EngineHandle._take_over, test_metrics.test_restarts_are_counted_whoever_died_and_whether_or_not_anybody_looked:
    "restarts of workers are not counted when the scheduler died too"
    self._engine.num_restarts + len(engine.started.workers)
    self._engine.num_restarts
with metrics.RestartTotals.observe, test_metrics.test_replays_are_counted_and_the_latest_recovery_is_shown:
    "counters of a process that was restarted are lost"
    last != life
    False
with streaming.cancel_on_disconnect, test_disconnects.test_a_closed_socket_aborts_the_request:
    "a request runs on after its client has gone"
    raise ClientDisconnect
    await asyncio.wait(tasks[:1])
with choices.each_choice, test_logprobs.test_one_choice_of_a_prompt_scores_it_for_all:
    "n > 1 with prompt_logprobs scores the prompt n times"
    msgspec.structs.replace(first, prompt_logprobs=None)
    first
with choices.Choices.cached, test_cache_usage.test_several_prompts_are_summed_and_the_miss_is_the_first_ones:
    "INV 12: usage of several prompts counts the first alone"
    sum((other.cached for other in others), first.cached)
    first.cached
with serve.serve, test_serve.test_sigterm_lets_open_streams_finish_and_refuses_new_ones:
    "INV 65: a draining server accepts new requests"
    handle.drain()
    pass
with seals.Seals.open, test_seals.test_another_secret_opens_nothing:
    "a thought is taken for the model's own whoever sealed it"
    hmac.compare_digest(code, self._code(raw))
    True
with (
    response_store.ResponseStore._make_room,
    test_response_store.test_a_flood_stays_within_the_bytes_and_takes_nothing_from_another_s_share,
):
    "INV 74: a caller's flood takes the share of others"
    max(sizes, key=lambda each: sizes[each])
    min(sizes, key=lambda each: sizes[each])
with response_store.ResponseStore.get, test_responses.test_no_caller_reads_another_s_and_nothing_is_kept_where_the_store_is_off:
    "INV 74: a caller reads another's response"
    "SELECT id, previous, items, reply, num_items FROM responses WHERE id = ? AND caller = ?"
    "SELECT id, previous, items, reply, num_items FROM responses WHERE id = ? OR caller = ?"
with tools.check_alike, test_custom_tools.test_a_custom_tool_with_the_name_of_a_function_is_refused:
    "calls of a function are shown as those of a custom tool of the same name"
    tool != other
    False
with responses_request._add_tool, test_responses.test_two_tools_whose_calls_could_be_of_either_are_refused:
    "calls of a function are shown as those of a namespace's tool"
    ClientTool(tool.name, namespace, kind, is_strict)
    ClientTool(name, None, kind, is_strict)
with responses_request.read_choice, test_responses.test_the_allowed_tool_at_fault_is_named_by_its_place:
    "an error of an allowed tool does not say which one"
    tuple(allowed)
    ()
with responses_request._turns, test_responses.test_the_next_step_of_an_agent_begins_with_the_tokens_of_this_one:
    "the words and calls of one reply are turns of their own"
    not _is_of_reply(item)
    True
with (
    responses_format.ResponseWriter._item_of,
    test_responses.test_calls_of_namespaces_and_custom_tools_come_as_the_client_knows_them_and_go_back,
):
    "a call of a namespace keeps the model's name"
    self._names.get(name)
    None
with response_store.ResponseStore.holding, test_item_references.test_a_reference_to_an_item_that_is_not_stored_is_refused_by_its_id:
    "INV 74: a caller refers to another's item"
    _HOLDING
    _HOLDING.replace("AND caller = :caller", "")
with response_store.ResponseStore._expire, test_response_store.test_what_is_not_used_for_an_hour_is_forgotten:
    "INV 74: stored responses never expire"
    self._now() - KEPT_S
    0.0
with sampling_fields.fit_context, test_responses.test_a_limit_beyond_the_room_is_cut_and_the_reply_incomplete:
    "an output limit beyond the room is refused where it should be cut"
    limits.is_cut and limits.max_tokens is not None
    False
with messages_request._assistant_parts, test_messages_request.test_only_what_is_sealed_here_is_a_thought:
    "a thought that a client made up reaches the prompt"
    unseal(block.signature if isinstance(block, ThinkingBlock) else block.data)
    "so"
with messages_request.read_messages, test_messages_request.test_a_fault_names_its_place:
    "a message that continues a conversation of the server is answered without it"
    fields.thread is not None
    False
with messages_request._system, test_messages.test_the_billing_header_of_a_session_is_left_out_unless_it_is_kept:
    "the billing header of each session ends the sharing of prefixes"
    blocks[0].text.startswith(BILLING_HEADER)
    False
with messages_format.MessageWriter.end, test_messages.test_any_partition_gives_the_same_blocks:
    "a thought that is not shown cannot come back"
    self._seal(text)
    self._seal(block.thinking)
with debug.DebugRoutes.steps, test_debug.test_steps_that_the_next_question_would_show_again_wait_for_it:
    "a step is shown twice to somebody who watches several workers"
    step.end_s <= until_s
    True
with tracing.Traces.end, test_tracing.test_a_process_that_never_answers_holds_a_bounded_number_of_requests:
    "INV 80: requests wait for a collector without a limit"
    len(self._waiting) >= MAX_WAITING
    False
with tracing.Traces._send, test_tracing.test_requests_that_wait_at_the_end_are_sent_in_batches:
    "traces that wait at the end are lost"
    not self._waiting
    not self._waiting or self._closing.is_set()
with tracing._error, test_tracing.test_a_client_that_goes_away_is_named:
    "a request whose client went away looks like one that ended"
    status in (0, CLIENT_CLOSED_REQUEST) or any(not each.finish for each in generations)
    status == CLIENT_CLOSED_REQUEST
with helper_process.serve, test_big_bodies.test_a_process_that_takes_too_much_time_of_a_core_ends_with_its_body:
    "a body takes a core for as long as it likes"
    signal.setitimer(signal.ITIMER_PROF, JOB_CPU_S)
    pass
with retention.check_breakpoints, test_retention.test_more_than_four_breakpoints_are_refused_in_anthropics_words:
    "INV 77: a request has any number of marks"
    number > MAX_BREAKPOINTS
    False
with openai_format.CustomEvents.read, test_custom_tools.test_the_input_of_a_custom_tool_is_streamed_for_each_choice["3"]:
    "a chat completion streams the arguments that the model writes for the input of a custom tool"
    event._replace(text=self._reader.push(event.text))
    event
with openai_format.CustomEvents.read, test_custom_tools.test_the_rest_of_an_input_comes_with_the_last_delta_where_its_call_does_not_end:
    "the end of an input that was cut is lost"
    is_last
    False
with generation.Generation.run, test_resumption.test_both_parts_of_a_stream_are_the_whole:
    "INV 90: the engine takes resumed tokens for a part of the prompt"
    self.num_resumed
    0
with resumption.resume, test_resumed_events.test_each_choice_goes_on_behind_its_own_tokens["/v1/completions"]:
    "INV 90: a choice that has ended is generated again"
    tokens is None
    False
with blocks.BlockWriter.events, test_resumed_events.test_a_stream_of_blocks_goes_on_after_its_last_event_with_tokens["/v1/messages"]:
    "INV 90: an event has the tokens of texts that come behind it"
    events[-1].token_ids, tokens = tokens, []
    events[0].token_ids, tokens = tokens, []
with blocks.BlockWriter.resume, test_resumed_events.test_a_stream_of_blocks_goes_on_after_its_last_event_with_tokens["/v1/responses"]:
    "INV 90: a resumed stream opens a second time"
    self._is_resumed = True
    pass
with openai_format.CompletionFormatter.resume, test_resumption.test_both_parts_of_a_stream_are_the_whole:
    "INV 90: the places of scores begin anew after a break"
    self._logprobs[generation.choice].skip(shown.tokens)
    pass
with seals.Seeds.draw, test_resumption.test_requests_of_one_id_draw_one_seed_on_servers_with_one_secret:
    "INV 91: whoever knows an id knows the seed"
    self._key
    bytes(32)
with routes.FrontEnd.draw_seed, test_resumption.test_requests_of_two_callers_with_one_id_have_seeds_of_their_own:
    "INV 91: a caller who knows another's request id draws its seed"
    tag_of(request)
    request.state.request_id
with conversations.begin_reply, test_messages.test_no_tokens_fill_the_cache_and_are_an_empty_message:
    "a message of no tokens shows the one that was generated"
    chat_request.limits.max_tokens != 0
    True
