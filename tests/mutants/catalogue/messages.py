"""Guards of the codec, of the channels and of merging."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CODEC = "hiserve/messages/codec.py"
COALESCE = "hiserve/messages/coalesce.py"
CHANNELS = "hiserve/messages/channels.py"
CHILD = "hiserve/messages/child.py"
PARENT = "hiserve/messages/parent.py"
FAILURES = "hiserve/messages/failures.py"
OF_CODEC = "tests/unit/messages/test_codec.py::"
OF_COALESCE = "tests/unit/messages/test_coalesce.py::"
OF_CHANNELS = "tests/unit/messages/test_channels.py::"
OF_LIVES = "tests/e2e/test_process_lives.py::"
COLUMNS = OF_CODEC + "test_columns_that_contradict_each_other_are_malformed"
FRAMES = OF_CODEC + "test_malformed_frames_raise_one_typed_error"

MUTANTS = [
    Mutant(
        name="a bad value inside a message escapes the decoder",
        file=CODEC,
        old="(msgspec.DecodeError, HiserveError, UnicodeDecodeError, IndexError, RecursionError)",
        new="(msgspec.DecodeError, UnicodeDecodeError, IndexError, RecursionError)",
        test=FRAMES,
    ),
    Mutant(
        name="no frames at all escape the decoder",
        file=CODEC,
        old="HiserveError, UnicodeDecodeError, IndexError, RecursionError)",
        new="HiserveError, UnicodeDecodeError, RecursionError)",
        test=FRAMES,
    ),
    Mutant(
        name="surplus frames are accepted",
        file=CODEC,
        old="if len(frames) - 1 != expected:",
        new="if len(frames) - 1 < expected:",
        test=FRAMES,
    ),
    Mutant(
        name="a cut token escapes the decoder",
        file=CODEC,
        old="if len(frames[1]) % WORD_BYTES:",
        new="if False:",
        test=FRAMES,
    ),
    Mutant(
        name="an error forgets the message it is about",
        file=CODEC,
        old='raise MalformedError(f"{len(frames[1])} bytes are no whole number of int32 tokens", message)',
        new='raise MalformedError(f"{len(frames[1])} bytes are no whole number of int32 tokens")',
        test=OF_CODEC + "test_an_error_keeps_the_struct_that_could_be_read",
    ),
    Mutant(
        name="columns of different lengths are accepted",
        file=CODEC,
        old="(counts, finishes, message.cached, message.drafts, words)",
        new="(counts, finishes, words)",
        test=COLUMNS,
    ),
    Mutant(
        name="negative counts are accepted",
        file=CODEC,
        old="min(counts) < 0 or ",
        new="",
        test=COLUMNS,
    ),
    Mutant(
        name="unknown finish reasons are accepted",
        file=CODEC,
        old=" or max(finishes) > max(FinishReason)",
        new="",
        test=COLUMNS,
    ),
    Mutant(
        name="a request may be named twice in a report",
        file=CODEC,
        old="if len(set(message.uids)) < rows or len(set(ended)) < len(ended):",
        new="if len(set(ended)) < len(ended):",
        test=COLUMNS,
    ),
    Mutant(
        name="a request may end twice in a report",
        file=CODEC,
        old="ended += [uid for uid, _, _ in message.failed]",
        new="pass",
        test=COLUMNS,
    ),
    Mutant(
        name="tokens may be missing",
        file=CODEC,
        old="if sum(counts) != num_tokens:",
        new="if sum(counts) < num_tokens:",
        test=COLUMNS,
    ),
    Mutant(
        name="digests may be cut",
        file=CODEC,
        old="if len(digests) % DIGEST_BYTES:",
        new="if False:",
        test=OF_CODEC + "test_digests_cut_short_are_malformed",
    ),
    Mutant(
        name="merging forgets how much was cached",
        file=COALESCE,
        old="if row.cached is None:",
        new="if True:",
        test=OF_COALESCE + "test_tokens_are_appended_per_request_in_order_of_first_arrival",
    ),
    Mutant(
        name="merging keeps the first finish",
        file=COALESCE,
        old="row.finish = finish",
        new="row.finish = row.finish",
        test=OF_COALESCE + "test_tokens_are_appended_per_request_in_order_of_first_arrival",
    ),
    Mutant(
        name="what was taken is taken again",
        file=COALESCE,
        old="rows, self._rows = self._rows, {}",
        new="rows = self._rows",
        test=OF_COALESCE + "test_any_history_merges_to_what_its_reader_would_have_seen",
    ),
    Mutant(
        name="a link without a bound",
        file=CHANNELS,
        old="self._socket.set_hwm(HIGH_WATER_MARK)",
        new="self._socket.set_hwm(0)",
        test=OF_CHANNELS + "test_a_peer_that_does_not_read_is_refused_after_a_bounded_number_of_messages",
    ),
    Mutant(
        name="an endpoint outlives its connection",
        file=CHANNELS,
        old="        remove(self.endpoint)\n",
        new="        pass\n",
        test=OF_CHANNELS + "test_a_connection_survives_the_removal_of_its_endpoint",
    ),
    Mutant(
        name="the last words of the dead are lost",
        file=CHANNELS,
        old="if is_gone and not batch:",
        new="if is_gone:",
        test=OF_CHANNELS + "test_what_the_dead_said_is_delivered_before_they_are_reported_gone",
    ),
    Mutant(
        name="a death is reported before the last words",
        file=CHANNELS,
        old="        elif was_gone and not self._is_gone:",
        new="        if was_gone and not self._is_gone:",
        test=OF_CHANNELS + "test_an_async_channel_reports_its_peer_gone_once_and_last",
    ),
    Mutant(
        name="a message overtakes those that wait",
        file=CHANNELS,
        old="if self._backlog or not self._link.try_send(frames):",
        new="if not self._link.try_send(frames):",
        test=OF_CHANNELS + "test_what_waits_is_not_overtaken",
    ),
    Mutant(
        name="nobody looks again after a send",
        file=CHANNELS,
        old="        self._wake()\n        if self._backlog",
        new="        if self._backlog",
        test=OF_CHANNELS + "test_a_message_that_came_during_a_send_is_not_forgotten",
    ),
    Mutant(
        name="nobody looks again after a full batch",
        file=CHANNELS,
        old="return is_newly_gone or self._link.is_readable or (self._is_full and self._link.is_writable)",
        new="return is_newly_gone",
        test=OF_CHANNELS + "test_no_message_and_no_wake_up_is_lost_under_traffic_both_ways",
    ),
    Mutant(
        name="a refused sender is never told",
        file=CHANNELS,
        old="if not self._is_closed and self._is_full and self._link.is_writable:",
        new="if False:",
        test=OF_CHANNELS + "test_a_refused_sender_is_told_when_it_may_go_on",
    ),
    Mutant(
        name="what waits for a dead peer is kept for ever",
        file=CHANNELS,
        old="self._socket.setsockopt(zmq.LINGER, 0)",
        new="self._socket.setsockopt(zmq.LINGER, -1)",
        test=OF_CHANNELS + "test_what_waits_for_the_dead_holds_nobody_up",
    ),
    Mutant(
        name="an interrupt ends the children",
        file=CHILD,
        old="for signum in (signal.SIGINT, signal.SIGTERM):",
        new="for signum in (signal.SIGINT,):",
        test=OF_LIVES + "test_interrupts_and_terminations_are_left_to_the_parent",
    ),
    Mutant(
        name="a parent closes its ears when the child is dead",
        file=PARENT,
        old="        await wait_for_event(self._gone, LAST_WORDS_S)\n",
        new="",
        test="tests/unit/messages/test_parent.py::test_the_last_words_of_a_child_are_heard",
    ),
    Mutant(
        name="an error loses its type on the way",
        file=FAILURES,
        old="_BY_CODE.get(code, EngineError)",
        new="EngineError",
        test=OF_LIVES + "test_a_failed_start_is_one_clear_error",
    ),
    # --- scores ---
    Mutant(
        name="scores may be missing",
        file=CODEC,
        old="if WORD_BYTES * sum(words) != num_score_bytes:",
        new="if False:",
        test=COLUMNS,
    ),
    Mutant(
        name="negative numbers of scores are accepted",
        file=CODEC,
        old=" or min(words) < 0",
        new="",
        test=COLUMNS,
    ),
    Mutant(
        name="the time in the queue may be missing",
        file=CODEC,
        old="        lengths.append(len(message.queue_s))\n",
        new="        pass\n",
        test=OF_CODEC + "test_news_whose_columns_contradict_each_other_is_malformed",
    ),
    Mutant(
        name="merging gives all requests the first one's scores",
        file=COALESCE,
        old="            score_at += WORD_BYTES * words\n",
        new="",
        test=OF_COALESCE + "test_scores_are_appended_per_request_in_order",
    ),
]
