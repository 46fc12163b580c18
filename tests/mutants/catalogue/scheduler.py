"""Guards of the scheduler: ledger, queue, policies, admission, prefix index."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LEDGER = "hiserve/scheduler/ledger.py"
DISPATCHER = "hiserve/scheduler/dispatcher.py"
ADMISSION = "hiserve/scheduler/admission.py"
POLICY = "hiserve/scheduler/policy.py"
INDEX = "hiserve/scheduler/prefix_index.py"
OF_DISPATCHER = "tests/unit/scheduler/test_dispatcher.py::"
OF_ADMISSION = "tests/unit/scheduler/test_admission.py::"
OF_INDEX = "tests/unit/scheduler/test_prefix_index.py::"
OF_PROCESSES = "tests/e2e/test_processes.py::"
CONSERVATION = "tests/unit/scheduler/test_conservation.py"
QUEUE = "hiserve/scheduler/queue.py"
OF_REPORTS = "tests/unit/scheduler/test_reports.py::"

MUTANTS = [
    Mutant(
        name="a request may end twice",
        file=LEDGER,
        old="if self._entries.pop(entry.uid, None) is not entry:",
        new="if self._entries.pop(entry.uid, None) is None and False:",
        test=OF_DISPATCHER + "test_ending_a_request_twice_is_an_invariant_error",
    ),
    Mutant(
        name="a live uid is accepted again",
        file=LEDGER,
        old="if message.uid in self._entries:",
        new="if False:",
        test=OF_DISPATCHER + "test_a_uid_in_use_is_malformed",
    ),
    Mutant(
        name="a worker may report on another's request",
        file=LEDGER,
        old="if entry is None or entry.replica != replica:",
        new="if entry is None:",
        test=OF_DISPATCHER + "test_a_report_on_what_the_worker_does_not_hold_changes_nothing",
    ),
    Mutant(
        name="a seed the caller gave is replaced",
        file="hiserve/core/request.py",
        old="if self.seed is not None:",
        new="if False:",
        test=OF_DISPATCHER + "test_the_seed_is_drawn_once_and_a_given_one_is_kept",
    ),
    Mutant(
        name="an admission forgets what was generated",
        file=LEDGER,
        old="        return message, self.tokens",
        new="        return message, self.prompt",
        test=OF_DISPATCHER + "test_an_admit_carries_prompt_then_generated",
    ),
    Mutant(
        name="an abort is sent to the worker twice",
        file=DISPATCHER,
        old="if entry is None or entry.state is State.ABORTING:",
        new="if entry is None:",
        test=OF_DISPATCHER + "test_an_abort_while_running_ends_when_the_worker_answers",
    ),
    Mutant(
        name="an aborted request stays in the queue",
        file=DISPATCHER,
        old="                self._take_out(entry)\n                self._end(entry)\n                dropped",
        new="                self._end(entry)\n                dropped",
        test=CONSERVATION,
    ),
    Mutant(
        name="a credit is not given back",
        file=DISPATCHER,
        old="            self.admission.give_back(entry.replica)",
        new="            pass",
        test=OF_DISPATCHER + "test_fcfs_admits_in_order_of_arrival_as_credits_come_back",
    ),
    Mutant(
        name="the requests of a dead worker are forgotten",
        file=DISPATCHER,
        old="        held = self.ledger.running_on(replica)",
        new="        held = self.ledger.running_on(replica)[1:]",
        test=CONSERVATION,
    ),
    Mutant(
        name="failures are dropped",
        file=DISPATCHER,
        old="            self._end(entry)\n            self._outlet.failed(entry.uid, to_error(code, message))",
        new="            self._end(entry)",
        test=CONSERVATION,
    ),
    Mutant(
        name="the ledger misses tokens",
        file=DISPATCHER,
        old="entry.extend(ids[start : start + count], num_words)",
        new="entry.extend(ids[start : start + 1], num_words)",
        test=CONSERVATION,
    ),
    Mutant(
        name="queued requests wait for workers that never come",
        file=DISPATCHER,
        old="for entry in [entry for entry in self.ledger if entry.state is State.QUEUED]:",
        new="for entry in ():",
        test=OF_DISPATCHER + "test_without_any_worker_left_everything_is_refused",
    ),
    Mutant(
        name="a prompt that fills the context is accepted",
        file=DISPATCHER,
        old="if len(prompt) >= self._max_len:",
        new="if len(prompt) > self._max_len:",
        test=OF_DISPATCHER + "test_a_request_that_cannot_run_is_refused_and_not_accepted",
    ),
    Mutant(
        name="negative token ids reach the worker",
        file=DISPATCHER,
        old="if not len(prompt) or prompt.min() < 0:",
        new="if not len(prompt):",
        test=OF_DISPATCHER + "test_a_negative_token_id_never_reaches_a_worker",
    ),
    Mutant(
        name="published pages are not remembered",
        file=DISPATCHER,
        old="        self.index.update(replica, published, removed)\n",
        new="",
        test=OF_PROCESSES + "test_a_conversation_returns_to_the_worker_that_holds_its_prefix",
    ),
    Mutant(
        name="workers have endless credit",
        file=ADMISSION,
        old="max(1, self.max_running // LOOKAHEAD_SHARE) - self.num_held",
        new="1000",
        test=CONSERVATION,
    ),
    Mutant(
        name="the prefix wins whatever the load",
        file=ADMISSION,
        old="if load.num_held - idlest <= slack:",
        new="if True:",
        test=OF_ADMISSION + "test_the_prefix_loses_when_its_worker_is_far_busier",
    ),
    Mutant(
        name="a small prefix counts like a large one",
        file=ADMISSION,
        old="slack = load.max_running * cached / (2 * num_tokens)",
        new="slack = load.max_running * bool(cached) / 2",
        test=OF_ADMISSION + "test_a_small_shared_prefix_does_not_draw_all_traffic_to_one_worker",
    ),
    Mutant(
        name="placement looks at load alone",
        file=ADMISSION,
        old="ranked.append((-cached, load.num_held,",
        new="ranked.append((0, load.num_held,",
        test=OF_ADMISSION + "test_the_longest_prefix_wins_against_load",
    ),
    Mutant(
        name="longest-prefix lets a cold request starve",
        file=QUEUE,
        old="if self._num_gone - oldest.number >= MAX_OVERTAKEN:",
        new="if False:",
        test=OF_DISPATCHER + "test_longest_prefix_starves_nobody",
    ),
    Mutant(
        name="longest-prefix takes the shortest",
        file=POLICY,
        old="lengths.index(max(lengths))",
        new="lengths.index(min(lengths))",
        test=OF_DISPATCHER + "test_longest_prefix_admits_the_best_match_first_and_the_oldest_among_equals",
    ),
    Mutant(
        name="the index counts the last token of a prompt as cached",
        file=INDEX,
        old="max_pages=(len(prompt) - 1) // self._page_size,",
        new="max_pages=len(prompt) // self._page_size,",
        test=OF_INDEX + "test_whole_pages_match_and_the_last_token_is_always_computed",
    ),
    Mutant(
        name="the index mixes tenants",
        file=INDEX,
        old="root=namespace_digest(self._namespace, namespace),",
        new="root=namespace_digest(self._namespace, b''),",
        test=OF_INDEX + "test_tenants_do_not_see_each_others_pages",
    ),
    Mutant(
        name="the index forgets that pages were removed",
        file=INDEX,
        old="num_tiers = pages.pop(digest, 0) - 1",
        new="num_tiers = pages.get(digest, 0)",
        test=OF_INDEX + "test_removed_pages_end_the_match",
    ),
    Mutant(
        name="a match asked again ignores evictions",
        file=INDEX,
        old="while depth and prefix.digests[depth - 1] not in pages:",
        new="while False:",
        test=OF_INDEX + "test_a_prefix_asked_again_follows_growth_eviction_and_a_new_worker",
    ),
    # --- bounds, deadlines, priorities ---
    Mutant(
        name="a queue has room without end",
        file=QUEUE,
        old="        return not self._waiting or (\n",
        new="        return True or (\n",
        test=OF_DISPATCHER + "test_a_full_queue_refuses_and_loses_nothing_it_accepted",
    ),
    Mutant(
        name="a queue counts requests alone",
        file=QUEUE,
        old=" and self.num_tokens + num_tokens <= self._max_tokens",
        new="",
        test=OF_DISPATCHER + "test_the_queue_is_bounded_by_tokens_too_but_takes_any_single_request",
    ),
    Mutant(
        name="an empty queue refuses a long prompt",
        file=QUEUE,
        old="return not self._waiting or (",
        new="return (",
        test=OF_DISPATCHER + "test_the_queue_is_bounded_by_tokens_too_but_takes_any_single_request",
    ),
    Mutant(
        name="a burst is refused though rows are free",
        file=DISPATCHER,
        old="            self.dispatch()  # of",
        new="            pass  # of",
        test=OF_DISPATCHER + "test_a_burst_fills_free_rows_before_it_is_refused",
    ),
    Mutant(
        name="a queued request waits for ever",
        file=DISPATCHER,
        old="for entry in self._late(timeout_s, _is_new):",
        new="for entry in ():",
        test=OF_DISPATCHER + "test_a_request_that_waited_too_long_ends_with_an_error_and_a_running_one_goes_on",
    ),
    Mutant(
        name="a request takes any time",
        file=DISPATCHER,
        old="        self.abort([entry.uid for entry in self._late(self._limits.request_timeout_s, _is_open)])\n",
        new="",
        test=OF_DISPATCHER + "test_a_request_that_takes_too_long_in_all_is_aborted_wherever_it_is",
    ),
    Mutant(
        name="all priorities are equal",
        file=POLICY,
        old="        return priority\n",
        new="        return 0\n",
        test=OF_DISPATCHER + "test_the_largest_priority_goes_first_and_the_oldest_among_equals",
    ),
    Mutant(
        name="the smallest priority goes first",
        file=QUEUE,
        old="self._by_rank[max(self._by_rank)]",
        new="self._by_rank[min(self._by_rank)]",
        test=OF_DISPATCHER + "test_the_largest_priority_goes_first_and_the_oldest_among_equals",
    ),
    Mutant(
        name="of equal workers the first gets everything",
        file=ADMISSION,
        old="        load.last_taken = self._num_taken\n",
        new="",
        test=OF_ADMISSION + "test_equals_take_turns",
    ),
    Mutant(
        name="the time in the queue is told again and again",
        file=LEDGER,
        old="        queue_s, self.queue_s = self.queue_s, UNREPORTED\n        return queue_s\n",
        new="        return self.queue_s\n",
        test=OF_REPORTS + "test_the_time_in_the_queue_is_told_with_the_first_news_and_only_then",
    ),
    Mutant(
        name="nobody measures the time in the queue",
        file=LEDGER,
        old="self.queue_s = now_s - self.accepted_at_s",
        new="self.queue_s = 0.0",
        test=OF_REPORTS + "test_the_time_in_the_queue_is_told_with_the_first_news_and_only_then",
    ),
]
