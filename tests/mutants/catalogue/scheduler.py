"""Guards of the scheduler process, of its client, and of the worker's side of the conversation."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LEDGER = "hiserve/scheduler/ledger.py"
DISPATCHER = "hiserve/scheduler/dispatcher.py"
ADMISSION = "hiserve/scheduler/admission.py"
POLICY = "hiserve/scheduler/policy.py"
INDEX = "hiserve/scheduler/prefix_index.py"
SUPERVISOR = "hiserve/scheduler/supervisor.py"
PROCESS = "hiserve/scheduler/process.py"
CLIENT = "hiserve/scheduler/client.py"
OUTBOX = "hiserve/worker/outbox.py"
SERVICE = "hiserve/worker/service.py"
OF_DISPATCHER = "tests/unit/scheduler/test_dispatcher.py::"
OF_ADMISSION = "tests/unit/scheduler/test_admission.py::"
OF_INDEX = "tests/unit/scheduler/test_prefix_index.py::"
OF_SUPERVISOR = "tests/unit/scheduler/test_supervisor.py::"
OF_OUTBOX = "tests/unit/worker/test_outbox.py::"
OF_SERVICE = "tests/unit/worker/test_service.py::"
OF_PROCESSES = "tests/e2e/test_processes.py::"
OF_LIVES = "tests/e2e/test_process_lives.py::"
CONSERVATION = "tests/unit/scheduler/test_conservation.py"

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
        file=LEDGER,
        old="if sampling.seed is None:",
        new="if True:",
        test=OF_DISPATCHER + "test_the_seed_is_drawn_once_and_a_given_one_is_kept",
    ),
    Mutant(
        name="an admission forgets what was generated",
        file=LEDGER,
        old="np.concatenate([self.prompt, np.frombuffer(self.generated, dtype=np.int32)])",
        new="self.prompt",
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
        old="                self.queue.remove(uid)\n                self._end(entry)",
        new="                self._end(entry)",
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
        old="        for entry in self.ledger.running_on(replica):",
        new="        for entry in self.ledger.running_on(replica)[1:]:",
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
        old="entry.generated.extend(ids[start : start + count])",
        new="entry.generated.extend(ids[start : start + 1])",
        test=CONSERVATION,
    ),
    Mutant(
        name="queued requests wait for workers that never come",
        file=DISPATCHER,
        old="        for waiting in self.queue.window(len(self.queue)):",
        new="        for waiting in self.queue.window(0):",
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
        name="nobody counts who was overtaken",
        file=DISPATCHER,
        old="overtaken.num_overtaken += 1",
        new="pass",
        test=OF_DISPATCHER + "test_longest_prefix_starves_nobody",
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
        old="ranked.append((-cached, load.num_held, replica))",
        new="ranked.append((0, load.num_held, replica))",
        test=OF_ADMISSION + "test_the_longest_prefix_wins_against_load",
    ),
    Mutant(
        name="longest-prefix lets a cold request starve",
        file=POLICY,
        old="if waiting[0].num_overtaken >= MAX_OVERTAKEN:",
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
        old="pages.difference_update(split_digests(removed))",
        new="pass",
        test=OF_INDEX + "test_removed_pages_end_the_match",
    ),
    Mutant(
        name="a match asked again ignores evictions",
        file=INDEX,
        old="while depth and prefix.digests[depth - 1] not in pages:",
        new="while False:",
        test=OF_INDEX + "test_a_prefix_asked_again_follows_growth_eviction_and_a_new_worker",
    ),
    Mutant(
        name="messages of another incarnation are believed",
        file=SUPERVISOR,
        old="if message.incarnation != worker.incarnation:",
        new="if False:",
        test=OF_SUPERVISOR + "test_messages_of_another_incarnation_are_counted_and_ignored",
    ),
    Mutant(
        name="a worker may be ready twice",
        file=SUPERVISOR,
        old="        if worker.ready is not None:\n            raise",
        new="        if False:\n            raise",
        test=OF_SUPERVISOR + "test_a_worker_that_talks_nonsense_is_replaced",
    ),
    Mutant(
        name="a worker may report before it is ready",
        file=SUPERVISOR,
        old="elif worker.ready is None:",
        new="elif False:",
        test=OF_SUPERVISOR + "test_a_report_before_ready_fails_the_start",
    ),
    Mutant(
        name="a worker is started again for ever",
        file=SUPERVISOR,
        old="num_failed = 0 if worker.ready is not None else num_failed + 1",
        new="num_failed = 0",
        test=OF_SUPERVISOR + "test_a_successor_that_never_comes_up_is_abandoned_after_a_few_tries",
    ),
    Mutant(
        name="a malformed request is never answered",
        file=PROCESS,
        old="if isinstance(error.message, Generate):",
        new="if False:",
        test=OF_PROCESSES + "test_malformed_frames_are_counted_and_the_request_answered",
    ),
    Mutant(
        name="news overtakes the news that waits",
        file=PROCESS,
        old="if self._late or not self._client.try_send(encode(news, tokens)):",
        new="if not self._client.try_send(encode(news, tokens)):",
        test="tests/unit/scheduler/test_process.py::test_news_does_not_overtake_the_news_that_waits",
    ),
    Mutant(
        name="a failure overtakes the news that waits",
        file=PROCESS,
        old="        self._send_late()\n        self._client.send(",
        new="        self._client.send(",
        test="tests/unit/scheduler/test_process.py::test_a_failure_comes_after_the_news_that_waits",
    ),
    Mutant(
        name="a closed generator keeps its request running",
        file=CLIENT,
        old="                self._process.send(encode(Abort([uid])))",
        new="                pass",
        test=OF_PROCESSES + "test_requests_cancelled_while_queued_running_or_unread_leave_nothing",
    ),
    Mutant(
        name="cached tokens are told in every delta",
        file=CLIENT,
        old="self._tokens, self._is_first = [], False",
        new="self._tokens = []",
        test=OF_PROCESSES
        + "test_closing_after_the_end_is_harmless "
        + OF_PROCESSES
        + "test_first_come_is_first_served",
    ),
    Mutant(
        name="streams outlive the scheduler",
        file=CLIENT,
        old="            stream.fail(UnavailableError(reason))",
        new="            pass",
        test=OF_LIVES + "test_a_killed_scheduler_fails_every_request_and_takes_its_workers_along",
    ),
    Mutant(
        name="a report overtakes those that wait",
        file=OUTBOX,
        old="if not self.is_pending and self._channel.is_writable:",
        new="if self._channel.is_writable:",
        test=OF_OUTBOX + "test_a_report_does_not_overtake_those_that_wait",
    ),
    Mutant(
        name="an answer nobody takes is lost",
        file=OUTBOX,
        old="while self._answers and self._channel.try_send(self._answers[0]):\n            self._answers.popleft()",
        new="while self._answers:\n            self._channel.try_send(self._answers.popleft())",
        test=OF_OUTBOX + "test_answers_wait_and_are_not_merged",
    ),
    Mutant(
        name="an idle worker spins",
        file=SERVICE,
        old="is_idle = not self._engine.has_work",
        new="is_idle = False",
        test=OF_SERVICE + "test_an_idle_worker_sleeps",
    ),
]
