"""Guards of the processes: the scheduler's, its client, its supervisor, and the worker's side of the conversation."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SUPERVISOR = "hiserve/scheduler/supervisor.py"
PROCESS = "hiserve/scheduler/process.py"
CLIENT = "hiserve/scheduler/client.py"
STREAM = "hiserve/scheduler/stream.py"
OUTBOX = "hiserve/worker/outbox.py"
SERVICE = "hiserve/worker/service.py"
OF_SUPERVISOR = "tests/unit/scheduler/test_supervisor.py::"
OF_OUTBOX = "tests/unit/worker/test_outbox.py::"
OF_SERVICE = "tests/unit/worker/test_service.py::"
OF_PROCESSES = "tests/e2e/test_processes.py::"
OF_LIVES = "tests/e2e/test_process_lives.py::"
OF_STREAM = "tests/unit/scheduler/test_stream.py::"
OF_SCORES = "tests/e2e/test_process_scores.py::"

MUTANTS = [
    Mutant(
        name="messages of another incarnation are believed",
        file=SUPERVISOR,
        old="if message.incarnation != worker.number:",
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
        old="num_failed = 0 if life.was_ready else num_failed + 1",
        new="num_failed = num_useless = 0",
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
        old="if self._late or not self._client.try_send(encode(news, tokens, scores)):",
        new="if not self._client.try_send(encode(news, tokens, scores)):",
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
        old="            if uid in self._streams and self._closed is None:\n",
        new="            if False:\n",
        test=OF_PROCESSES + "test_requests_cancelled_while_queued_running_or_unread_leave_nothing",
    ),
    Mutant(
        name="cached tokens are told in every delta",
        file=STREAM,
        old="cached = None if self._is_cache_told else self._cached",
        new="cached = self._cached",
        test="tests/unit/scheduler/test_stream.py::test_what_came_from_the_cache_is_told_once_even_if_it_comes_late",
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
    # --- scores, secrets ---
    Mutant(
        name="an error overtakes scores",
        file=STREAM,
        old="if not self._tokens and not self._scores:",
        new="if not self._tokens:",
        test=OF_STREAM + "test_an_error_comes_after_what_was_told_before_it",
    ),
    Mutant(
        name="the time in the queue is forgotten with the next news",
        file=STREAM,
        old="max(self._queue_s, queue_s)",
        new="queue_s",
        test=OF_STREAM + "test_news_that_waits_is_one_delta",
    ),
    Mutant(
        name="keys travel to the engine",
        file=CLIENT,
        old="encode(without_secrets(config))",
        new="encode(config)",
        test=OF_SCORES + "test_keys_stay_in_the_process_that_checks_them",
    ),
    Mutant(
        name="all requests get the first one's scores",
        file=CLIENT,
        old="            at, score_at = end, score_end\n",
        new="            at = end\n",
        test=OF_SCORES + "test_every_request_gets_its_own_scores_in_order",
    ),
    Mutant(
        name="scores that waited are lost",
        file=OUTBOX,
        old="self._send(news, tokens, scores,",
        new='self._send(news, tokens, b"",',
        test=OF_OUTBOX + "test_reports_for_a_slow_scheduler_become_one",
    ),
]
