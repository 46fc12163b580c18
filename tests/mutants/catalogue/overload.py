"""Guards of overload: turns of callers, a full queue, when to come back, readers that are slow."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

QUEUE, DRAIN = "hiserve/scheduler/queue.py", "hiserve/scheduler/drain.py"
DISPATCHER, STREAM, CLIENT = (f"hiserve/scheduler/{name}.py" for name in ("dispatcher", "stream", "client"))
OF_FAIRNESS = "tests/unit/scheduler/test_fairness.py::"
OF_STREAM = "tests/unit/scheduler/test_stream.py::"

MUTANTS = [
    Mutant(
        name="whoever came first has every turn",
        file=QUEUE,
        old="min(self._lines, key=self._served.__getitem__)",
        new="next(iter(self._lines))",
        test=OF_FAIRNESS + "test_a_flood_of_one_caller_does_not_hold_another_up",
    ),
    Mutant(
        name="turns are counted, not tokens",
        file=QUEUE,
        old="self.charge(entry.caller, len(entry.prompt) - num_cached)",
        new="self.charge(entry.caller, 1)",
        test=OF_FAIRNESS + "test_callers_are_served_as_many_tokens_each_whatever_they_ask_for",
    ),
    Mutant(
        name="long replies cost nothing",
        file=DISPATCHER,
        old="self.queue.charge(entry.caller, count)",
        new="self.queue.charge(entry.caller, 0)",
        test=OF_FAIRNESS + "test_callers_are_served_as_many_tokens_each_whatever_they_ask_for",
    ),
    Mutant(
        name="turns are saved up",
        file=QUEUE,
        old="max(self._served.get(caller, 0), self._latest_turn)",
        new="self._served.get(caller, 0)",
        test=OF_FAIRNESS + "test_who_was_away_saves_up_no_turns",
    ),
    Mutant(
        name="cached prompts are charged",
        file=DISPATCHER,
        old="self.queue.admit(entry.uid, self._num_free(waiting, replica))",
        new="self.queue.admit(entry.uid, 0)",
        test=OF_FAIRNESS + "test_what_was_cached_is_not_charged",
    ),
    Mutant(
        name="a full queue belongs to who filled it",
        file=QUEUE,
        old="        if not others or not is_fair:",
        new="        if True:",
        test=OF_FAIRNESS + "test_a_full_queue_makes_room_for_who_has_less_than_a_share",
    ),
    Mutant(
        name="who comes last takes the whole queue",
        file=QUEUE,
        old="        if not others or not is_fair:",
        new="        if not others:",
        test=OF_FAIRNESS + "test_a_full_queue_makes_room_for_who_has_less_than_a_share",
    ),
    Mutant(
        name="many short ones make room for a long one",
        file=QUEUE,
        old="key=lambda line: line.num_tokens if has_places else len(line)",
        new="key=len",
        test=OF_FAIRNESS + "test_room_is_made_by_whoever_has_most_of_what_there_is_too_little_of",
    ),
    Mutant(
        name="a request is pushed out in the middle of its answer",
        file=QUEUE,
        old="return None if last.entry.num_admissions else last",
        new="return last",
        test=OF_FAIRNESS + "test_who_was_answered_in_part_is_not_pushed_out",
    ),
    Mutant(
        name="the small ones starve behind the urgent",
        file=QUEUE,
        old="if self._num_gone - oldest.number >= MAX_OVERTAKEN:",
        new="if self._num_gone - oldest.number >= 10 * MAX_OVERTAKEN:",
        test=OF_FAIRNESS + "test_no_policy_lets_a_request_starve",
    ),
    Mutant(
        name="who lost a worker stands in line again",
        file=QUEUE,
        old="waiting.number = self._num_gone - MAX_OVERTAKEN",
        new="waiting.number = self._num_gone",
        test=OF_FAIRNESS + "test_who_lost_a_worker_goes_first_of_the_caller_whatever_the_policy",
    ),
    Mutant(
        name="everybody is told to come back at once",
        file=DRAIN,
        old="return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds)))",
        new="return MIN_RETRY_S",
        test=OF_FAIRNESS + "test_the_wait_is_what_the_queue_takes_to_empty",
    ),
    Mutant(
        name="come back in no time, or never",
        file=DRAIN,
        old="min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds)))",
        new="math.ceil(seconds)",
        test=OF_FAIRNESS + "test_the_wait_is_bounded_and_never_nothing",
    ),
    Mutant(
        name="the drain is an average of all time",
        file=DRAIN,
        old="kept = math.exp(-passed_s / MEMORY_S)",
        new="kept = 1.0",
        test=OF_FAIRNESS + "test_a_slower_drain_is_a_longer_wait_soon",
    ),
    Mutant(
        name="an idle night makes a slow queue",
        file=DRAIN,
        old="self._since_s = now_s if is_busy else None",
        new="self._since_s = now_s",
        test=OF_FAIRNESS + "test_an_empty_queue_does_not_count_as_one_that_does_not_move",
    ),
    Mutant(
        name="a reader may leave everything unread",
        file=STREAM,
        old="return self._num_unread_bytes > self._max_unread_bytes",
        new="return False",
        test=OF_STREAM + "test_more_than_a_reader_may_leave_unread_is_too_long",
    ),
    Mutant(
        name="what was read counts as unread",
        file=STREAM,
        old="        self._num_unread_bytes = 0\n        self._drafts",
        new="        self._drafts",
        test=OF_STREAM + "test_what_was_read_does_not_count",
    ),
    Mutant(
        name="a stream that was cut keeps what it had",
        file=STREAM,
        old="        self._tokens, self._scores = [], bytearray()\n        self.fail(",
        new="        self.fail(",
        test=OF_STREAM + "test_a_stream_that_was_cut_keeps_nothing_and_says_why",
    ),
    Mutant(
        name="a stream that was cut keeps its row",
        file=CLIENT,
        old="                stream.cut()\n                self._process.send(encode(Abort([uid])))\n",
        new="                stream.cut()\n",
        test="tests/e2e/test_processes.py::test_a_stream_is_ended_when_too_much_of_it_is_unread_and_no_other",
    ),
    Mutant(
        name="a refusal does not say when to come back",
        file="hiserve/server/failures.py",
        old='        headers["retry-after"] = str(retry_after_s)\n',
        new="        pass\n",
        test="tests/unit/server/test_envelope.py::test_clients_are_told_whether_and_when_to_come_back",
    ),
    Mutant(
        name="all keys are one caller",
        file="hiserve/server/auth.py",
        old="return Caller(key=digest, tenant=tenant, is_admin=is_admin, number=number)",
        new="return Caller(key=digest, tenant=tenant, is_admin=is_admin)",
        test="tests/unit/server/test_auth.py::test_the_engine_is_told_whose_a_request_is_by_a_number_alone",
    ),
    # --- strangers ---
    Mutant(
        name="whoever finds the socket is the child",
        file="hiserve/messages/parent.py",
        old="link = Link.bind(endpoint, process.pid)",
        new="link = Link.bind(endpoint)",
        test="tests/unit/messages/test_strangers.py::test_strangers_at_the_socket_of_a_child_are_not_heard_and_do_not_keep_it_out",
    ),
    Mutant(
        name="a child waits for ever for a parent that died",
        file="hiserve/messages/child.py",
        old="wait_for_listener(endpoint, MEET_S, lambda: os.getppid() == parent)",
        new="wait_for_listener(endpoint, 60 * MEET_S, lambda: True)",
        test="tests/unit/messages/test_strangers.py::test_a_child_whose_parent_never_listens_ends",
    ),
    Mutant(
        name="depth escapes the decoder",
        file="hiserve/messages/codec.py",
        old="UnicodeDecodeError, IndexError, RecursionError)",
        new="UnicodeDecodeError, IndexError)",
        test="tests/unit/messages/test_codec.py::test_neither_depth_nor_announced_sizes_get_through",
    ),
    Mutant(
        name="a question of many frames is sent back with every batch",
        file="hiserve/messages/publisher.py",
        old="        if len(envelope) > MAX_ENVELOPE:  # all",
        new="        if False:  # all",
        test="tests/unit/messages/test_strangers.py::test_a_question_of_many_frames_is_not_sent_back_with_every_batch",
    ),
    # --- what a request may hold ---
    Mutant(
        name="a stop text is as long as you like",
        file="hiserve/core/request.py",
        old="if (number := max(map(len, self.stop), default=0)) > MAX_STOP_CHARS:",
        new="if False:",
        test="tests/unit/server/test_input_limits.py::test_too_much_is_refused_by_the_name_of_its_field",
    ),
    Mutant(
        name="a name is as long as you like",
        file="hiserve/server/fields.py",
        old="if most is not None and len(value) > most:",
        new="if False:",
        test="tests/unit/server/test_input_limits.py::test_too_much_is_refused_by_the_name_of_its_field",
    ),
    Mutant(
        name="a message has as many fields as you like",
        file="hiserve/text/chat.py",
        old="if len(value) > MAX_FIELDS:",
        new="if False:",
        test="tests/unit/server/test_input_limits.py::test_so_is_too_much_in_a_message",
    ),
    Mutant(
        name="a long text holds the interpreter",
        file="hiserve/text/tokenizer.py",
        old="(encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)",
        new="encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)",
        test="tests/unit/text/test_tokenizer.py::test_a_long_text_does_not_hold_other_threads_up",
    ),
    # --- drain ---
    Mutant(
        name="a server that ends takes new requests",
        file="hiserve/commands/serve.py",
        old="            gate.drain()\n            copy_until_s",
        new="            copy_until_s",
        test="tests/unit/commands/test_serve.py::test_sigterm_lets_open_streams_finish_and_refuses_new_ones",
    ),
    Mutant(
        name="a drain has no end",
        file="hiserve/commands/serve.py",
        old="await asyncio.wait_for(_unless(stop_now, _idle(gate)), drain_timeout_s)",
        new="await _unless(stop_now, _idle(gate))",
        test="tests/unit/commands/test_serve.py::test_a_drain_does_not_wait_for_ever",
    ),
    Mutant(
        name="a drain gives no time",
        file="hiserve/commands/serve.py",
        old="await asyncio.wait_for(_unless(stop_now, _idle(gate)), drain_timeout_s)",
        new="pass",
        test="tests/unit/commands/test_serve.py::test_sigterm_lets_open_streams_finish_and_refuses_new_ones",
    ),
]
