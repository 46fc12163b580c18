"""Guards of the load generator: what it sends, when, and what it makes of the answers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HTTP = "hiserve/bench/http.py"
CLIENT = "hiserve/bench/client.py"
BACKENDS = "hiserve/bench/backends.py"
METRICS = "hiserve/bench/metrics.py"
SERIES = "hiserve/bench/series.py"
GOODPUT = "hiserve/bench/goodput.py"
LOAD = "hiserve/bench/load.py"
REQUEST = "hiserve/bench/request.py"
SYNTHETIC = "hiserve/bench/datasets/synthetic.py"
TRACE = "hiserve/bench/datasets/trace.py"
AGENTS = "hiserve/bench/datasets/agents.py"
OF_HTTP = "tests/unit/bench/test_http.py::"
OF_CLIENT = "tests/unit/bench/test_client.py::"
OF_METRICS = "tests/unit/bench/test_metrics.py::"
OF_GOODPUT = "tests/unit/bench/test_goodput.py::"
OF_LOAD = "tests/unit/bench/test_load.py::"
OF_SYNTHETIC = "tests/unit/bench/datasets/test_synthetic.py::"
OF_RECORDED = "tests/unit/bench/datasets/test_recorded.py::"

MUTANTS = [
    # --- figures ---
    Mutant(
        name="TPOT counts the first token",
        file=METRICS,
        old="/ (sample.num_output - 1)",
        new="/ sample.num_output",
        test=OF_METRICS + "test_latencies_of_one_request",
    ),
    Mutant(
        name="waiting for a place counts as latency",
        file=METRICS,
        old="sample.chunk_s[0] - sample.begin_s if",
        new="sample.chunk_s[0] - sample.due_s if",
        test=OF_METRICS + "test_waiting_for_a_place_is_not_latency_but_is_told",
    ),
    Mutant(
        name="failed requests count",
        file=METRICS,
        old="fine = [sample for sample in run.samples if not sample.error]",
        new="fine = list(run.samples)",
        test=OF_METRICS + "test_failures_are_counted_by_kind_and_left_out_of_everything_else",
    ),
    Mutant(
        name="a cached share is made up",
        file=METRICS,
        old="bool(fine) and all(sample.num_cached >= 0",
        new="any(sample.num_cached >= 0",
        test=OF_METRICS + "test_cached_share_is_of_prompt_tokens_and_only_when_every_reply_tells",
    ),
    Mutant(
        name="gaps per token are made up",
        file=METRICS,
        old="if len(counts) != sample.num_output:",
        new="if False:",
        test=OF_METRICS + "test_gaps_per_token_need_a_running_count_or_one_chunk_a_token",
    ),
    Mutant(
        name="tokens at the end without text have no gap",
        file=METRICS,
        old="if counts and sample.num_output > counts[-1]:",
        new="if False:",
        test=OF_METRICS + "test_tokens_at_the_end_without_text_count_in_the_gaps_per_token",
    ),
    Mutant(
        name="a successor is in flight with its predecessor",
        file=SERIES,
        old="np.array([*(sample.end_s for sample in samples), *(sample.begin_s for sample in samples)])\n    changes = np.repeat([-1.0, 1.0]",
        new="np.array([*(sample.begin_s for sample in samples), *(sample.end_s for sample in samples)])\n    changes = np.repeat([1.0, -1.0]",
        test=OF_METRICS + "test_in_flight_counts_and_a_successor_is_not_together_with_its_predecessor",
    ),
    Mutant(
        name="ramp and tail are steady",
        file=SERIES,
        old="(numbers >= median) & (spans > 0)",
        new="spans > 0",
        test=OF_METRICS + "test_the_steady_state_leaves_out_ramp_and_tail",
    ),
    Mutant(
        name="a reply without text is good",
        file=GOODPUT,
        old="if sample.error or not sample.chunk_s:",
        new="if sample.error:",
        test=OF_GOODPUT + "test_failures_and_replies_without_text_count_as_misses",
    ),
    Mutant(
        name="the limit itself is a miss",
        file=GOODPUT,
        old="seconds * 1e3 <= limit_ms",
        new="seconds * 1e3 < limit_ms",
        test=OF_GOODPUT + "test_the_limit_itself_is_good",
    ),
    Mutant(
        name="a single token misses its TPOT",
        file=GOODPUT,
        old="seconds is None or",
        new="seconds is not None and",
        test=OF_GOODPUT + "test_one_token_cannot_miss_the_time_between_tokens",
    ),
    # --- load ---
    Mutant(
        name="the rate is of sessions",
        file=LOAD,
        old="workload.num_turns / count / rate",
        new="1 / rate",
        test=OF_LOAD + "test_the_rate_is_of_requests_whatever_the_sessions",
    ),
    Mutant(
        name="burstiness changes the rate",
        file=LOAD,
        old="mean_gap / burstiness",
        new="mean_gap",
        test=OF_LOAD + "test_burstiness_changes_the_variation_and_not_the_rate",
    ),
    Mutant(
        name="any number of requests is in flight",
        file=LOAD,
        old="            async with places:\n",
        new="            if places:\n",
        test=OF_LOAD + "test_a_limit_holds_requests_back_and_their_own_time_starts_then",
    ),
    Mutant(
        name="a chat forgets its replies",
        file=LOAD,
        old="known = _extended(prompt, np.array(sample.output_ids, dtype=np.int32))",
        new="known = prompt",
        test=OF_LOAD + "test_a_chat_grows_by_its_replies",
    ),
    Mutant(
        name="a session does not think",
        file=LOAD,
        old="ready_s + turn.think_s if",
        new="ready_s if",
        test=OF_LOAD + "test_a_session_waits_for_its_reply_and_thinks",
    ),
    Mutant(
        name="the warm-up fills the cache",
        file=REQUEST,
        old="    return prompt[::-1]\n",
        new="    return prompt\n",
        test=OF_SYNTHETIC + "test_a_mirrored_prompt_has_the_size_and_not_the_beginning",
    ),
    # --- connections and events ---
    Mutant(
        name="an old connection is used again",
        file=HTTP,
        old="connection.is_open and connection.used_s >= oldest",
        new="connection.is_open",
        test=OF_HTTP + "test_a_connection_that_ends_or_was_idle_for_long_is_not_used_again",
    ),
    Mutant(
        name="a cancelled request leaves its rest to the next",
        file=HTTP,
        old="undo.callback(connection.close)",
        new="undo.callback(self._idle.append, connection)",
        test=OF_HTTP + "test_a_cancelled_request_does_not_leave_its_rest_to_the_next_one",
    ),
    Mutant(
        name="a cut response is whole",
        file=HTTP,
        old="if self._status and not self._is_framed and error is None:",
        new="if self._status and error is None:",
        test=OF_HTTP + "test_a_broken_response_is_an_error_and_the_next_request_goes_on",
    ),
    Mutant(
        name="an interim response is the answer",
        file=HTTP,
        old="if self._status >= 200:",
        new="if True:",
        test=OF_HTTP + "test_each_framing_is_read_to_its_end",
    ),
    Mutant(
        name="a stream without an end is whole",
        file=CLIENT,
        old="if not sample.finish and not self._is_done:",
        new="if False:",
        test=OF_CLIENT + "test_a_stream_without_an_end_is_incomplete",
    ),
    Mutant(
        name="an error inside a stream is no failure",
        file=BACKENDS,
        old="        event = self._decoder.decode(data)\n        if event.error is not None:",
        new="        event = self._decoder.decode(data)\n        if False:",
        test=OF_CLIENT + "test_an_error_in_the_stream_is_a_failure_though_the_status_was_200",
    ),
    Mutant(
        name="events without text are chunks",
        file=BACKENDS,
        old="            if has_text:\n",
        new="            if True:\n",
        test=OF_CLIENT + "test_neither_the_opening_nor_the_usage_nor_done_is_a_chunk",
    ),
    Mutant(
        name="chunks of a growing text are counted whatever they bring",
        file=BACKENDS,
        old="        if len(event.text) > self._num_chars:\n",
        new="        if True:\n",
        test=OF_CLIENT + "test_a_cumulative_reply_is_read_by_its_growth",
    ),
    # --- data sets ---
    Mutant(
        name="the longest of a range is never drawn",
        file=SYNTHETIC,
        old="size=count, endpoint=True",
        new="size=count, endpoint=False",
        test=OF_SYNTHETIC + "test_a_ratio_spans_both_sides_of_the_length_ends_included",
    ),
    Mutant(
        name="a chat may outgrow the context",
        file=SYNTHETIC,
        old="(length if turn.extends else 0) + len",
        new="len",
        test=OF_SYNTHETIC + "test_what_a_chat_will_grow_to_must_fit",
    ),
    Mutant(
        name="each row has blocks of its own",
        file=TRACE,
        old="            if hash_id not in blocks:\n                blocks[hash_id] = draw_tokens(np.random.default_rng((seed, hash_id)),",
        new="            if True:\n                blocks[hash_id] = draw_tokens(np.random.default_rng((seed, hash_id, len(sessions))),",
        test=OF_RECORDED + "test_the_same_hash_is_the_same_block",
    ),
    Mutant(
        name="recorded times ignore the speed",
        file=TRACE,
        old="row.timestamp / 1000 / speed",
        new="row.timestamp / 1000",
        test=OF_RECORDED + "test_recorded_times_are_divided_by_the_speed",
    ),
    Mutant(
        name="long prompts are not cut",
        file=TRACE,
        old="prompt, max_tokens = prompt[:room], fitting",
        new="max_tokens = fitting",
        test=OF_RECORDED + "test_prompts_are_cut_at_the_end_and_counted",
    ),
    Mutant(
        name="a cut prompt loses its end",
        file=AGENTS,
        old="text[starts[middle] :]",
        new="text[: starts[middle]]",
        test=OF_RECORDED + "test_long_prompts_lose_messages_from_the_front_and_are_counted",
    ),
]
