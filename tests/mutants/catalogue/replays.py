"""Guards of replays: what a request takes along when its worker dies, and who is suspected of the death."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LEDGER = "hiserve/scheduler/ledger.py"
DISPATCHER = "hiserve/scheduler/dispatcher.py"
QUARANTINE = "hiserve/scheduler/quarantine.py"
QUEUE = "hiserve/scheduler/queue.py"
SUPERVISOR = "hiserve/scheduler/supervisor.py"
INCARNATION = "hiserve/scheduler/incarnation.py"
RECOVERY = "hiserve/scheduler/recovery.py"
PROCESS = "hiserve/scheduler/process.py"
FAREWELL = "hiserve/worker/farewell.py"
SCENE = "hiserve/worker/scene.py"
MEMORY = "hiserve/worker/device_memory.py"
SERVICE = "hiserve/worker/service.py"
WAITING = "hiserve/worker/waiting.py"
GATE = "hiserve/server/gate.py"
METRICS = "hiserve/server/metrics.py"
OF_REPLAYS = "tests/unit/scheduler/test_replays.py::"
OF_SUPERVISOR = "tests/unit/scheduler/test_supervisor.py::"
OF_FAREWELL = "tests/unit/worker/test_farewell.py::"
OF_MEMORY = "tests/unit/worker/test_device_memory.py::"
OF_GATE = "tests/unit/server/test_gate.py::"

MUTANTS = [
    Mutant(
        name="what lost its worker goes to the end of the queue",
        file=QUEUE,
        old="for each in reversed(waiting):",
        new="for each in waiting:",
        test=OF_REPLAYS + "test_those_that_lost_their_worker_come_first_and_in_their_order",
    ),
    Mutant(
        name="a replay is placed by its prompt alone",
        file=DISPATCHER,
        old="self.index.prefix(entry.tokens, entry.namespace)",
        new="self.index.prefix(entry.prompt, entry.namespace)",
        test=OF_REPLAYS + "test_they_may_go_to_another_worker_at_once_and_take_what_it_has_cached_into_account",
    ),
    Mutant(
        name="cached tokens are told by every worker",
        file=LEDGER,
        old="if cached is None or self.is_cache_told:",
        new="if cached is None:",
        test=OF_REPLAYS + "test_what_of_the_prompt_was_cached_and_the_time_in_the_queue_are_told_once",
    ),
    Mutant(
        name="the time in the queue is counted for every worker",
        file=LEDGER,
        old="        if not self.num_admissions:\n",
        new="        if True:\n",
        test=OF_REPLAYS + "test_the_time_in_the_queue_is_until_the_first_worker_even_if_it_never_spoke",
    ),
    Mutant(
        name="drafts of dead workers are forgotten",
        file=LEDGER,
        old="return self.former_drafts + drafts",
        new="return drafts",
        test=OF_REPLAYS + "test_drafts_of_all_workers_are_counted_together",
    ),
    Mutant(
        name="scores of a prompt are told again",
        file=LEDGER,
        old="            num_scored=self.num_scored,\n",
        new="",
        test=OF_REPLAYS + "test_scores_of_the_prompt_are_asked_for_from_where_they_ended",
    ),
    Mutant(
        name="scores of tokens are taken for those of the prompt",
        file=LEDGER,
        old="min(len(self.prompt) - 1, self.num_scored + num_words // (1 + 2 * num_top))",
        new="self.num_scored + num_words // (1 + 2 * num_top)",
        test=OF_REPLAYS + "test_scores_of_the_prompt_are_asked_for_from_where_they_ended",
    ),
    Mutant(
        name="what is being aborted runs again",
        file=DISPATCHER,
        old="aborted = [entry for entry in held if entry.state is State.ABORTING]",
        new="aborted: list[Entry] = []",
        test=OF_REPLAYS + "test_what_was_being_aborted_ends_with_its_worker",
    ),
    Mutant(
        name="a replay dies of the time it once waited",
        file=DISPATCHER,
        old="return entry.state is State.QUEUED and not entry.num_admissions",
        new="return entry.state is State.QUEUED",
        test=OF_REPLAYS + "test_the_deadline_of_the_queue_is_for_those_that_no_worker_ever_had",
    ),
    Mutant(
        name="progress clears nobody",
        file=LEDGER,
        old="self.num_crashes = 1 if self.has_moved else self.num_crashes + 1",
        new="self.num_crashes += 1",
        test=OF_REPLAYS + "test_one_crash_and_crashes_between_which_a_request_moved_make_no_suspect",
    ),
    Mutant(
        name="suspects are not halved",
        file=QUARANTINE,
        old="half = (len(suspects) + 1) // 2",
        new="half = len(suspects)",
        test=OF_REPLAYS + "test_the_one_request_that_kills_its_workers_fails_and_no_other",
    ),
    Mutant(
        name="the last suspect is guilty though others were there",
        file=QUARANTINE,
        old="if suspects == on_trial == held and len(held) == 1:",
        new="if suspects == on_trial and len(suspects) == 1:",
        test=OF_REPLAYS + "test_a_request_is_given_up_when_it_had_its_worker_for_itself_and_not_before",
    ),
    Mutant(
        name="others run beside suspects",
        file=DISPATCHER,
        old="        if replica in self.quarantine:\n            self.admission.reserve(replica)\n",
        new="",
        test=OF_REPLAYS + "test_a_request_is_given_up_when_it_had_its_worker_for_itself_and_not_before",
    ),
    Mutant(
        name="the next suspects do not wait for the first",
        file=QUARANTINE,
        old="if not all(entry.has_moved or entry.state is State.ENDED for entry in ward.on_trial):",
        new="if False:",
        test=OF_REPLAYS + "test_a_request_is_given_up_when_it_had_its_worker_for_itself_and_not_before",
    ),
    Mutant(
        name="a worker that did nothing counts as useful",
        file=DISPATCHER,
        old="was_of_use = not held or any(",
        new="was_of_use = True or any(",
        test=OF_REPLAYS + "test_a_worker_was_of_use_if_it_told_news_or_had_no_request",
    ),
    Mutant(
        name="suspects of a worker that never comes again wait for it",
        file=DISPATCHER,
        old="        self.queue.put_back([self._waiting(entry) for entry in self.quarantine.dissolve(replica)])\n",
        new="",
        test=OF_REPLAYS + "test_suspects_of_a_worker_that_never_comes_again_run_elsewhere_or_are_refused",
    ),
    # --- the life and death of workers ---
    Mutant(
        name="a worker that hangs is waited for",
        file=SUPERVISOR,
        old="if how := worker.stuck(now_s, limit_s):",
        new="if how := worker.stuck(now_s, 0):",
        test=OF_SUPERVISOR + "test_a_worker_whose_work_does_not_get_on_is_replaced_after_its_time",
    ),
    Mutant(
        name="a worker that hangs is not asked where",
        file=SUPERVISOR,
        old="                worker.process.send_signal(signal.SIGUSR1)\n",
        new="",
        test=OF_SUPERVISOR + "test_a_worker_whose_work_does_not_get_on_is_replaced_after_its_time",
    ),
    Mutant(
        name="a supervisor that stood still blames its workers",
        file=SUPERVISOR,
        old="            worker.still.forgive(max(0.0, now_s - before_s - 2 * PATROL_S))\n",
        new="",
        test=OF_SUPERVISOR + "test_time_in_which_the_supervisor_stood_still_is_not_the_workers",
    ),
    Mutant(
        name="no limit is the shortest limit",
        file=INCARNATION,
        old="if not max_still_s or own_s <=",
        new="if own_s <=",
        test=OF_SUPERVISOR + "test_without_a_limit_no_worker_hangs",
    ),
    Mutant(
        name="a worker that rests hangs",
        file=INCARNATION,
        old="(max_still_s if num_requests else max(max_still_s, RECENT_S))",
        new="max_still_s",
        test=OF_SUPERVISOR + "test_a_worker_whose_work_does_not_get_on_is_replaced_after_its_time",
    ),
    Mutant(
        name="a worker is killed over its last words",
        file=SUPERVISOR,
        old="asyncio.get_running_loop().call_later(EXIT_GRACE_S, worker.process.kill)",
        new="worker.process.kill()",
        test=OF_SUPERVISOR + "test_the_last_words_of_a_worker_are_kept_with_how_its_process_ended",
    ),
    Mutant(
        name="the last findings stand instead of the first",
        file=SUPERVISOR,
        old="self._findings.setdefault(worker.replica, ready.findings)",
        new="self._findings[worker.replica] = ready.findings",
        test=OF_SUPERVISOR + "test_what_the_first_worker_chose_is_handed_to_each_successor",
    ),
    Mutant(
        name="a recovery ends when the worker is ready",
        file=RECOVERY,
        old='            "first token": now_s - worker.ready_s,\n',
        new="",
        test=OF_SUPERVISOR + "test_the_way_back_is_measured_by_phase",
    ),
    Mutant(
        name="nobody learns that no worker is left",
        file=PROCESS,
        old="            self._client.send(encode(Halted(refusal.message)))\n",
        new="",
        test="tests/unit/scheduler/test_process.py::test_a_client_is_told_when_no_worker_is_left",
        timeout_s=30,
    ),
    Mutant(
        name="memory that ran out costs the device",
        file=FAREWELL,
        old="    if isinstance(error, Exception) and fault_of(error):\n        return False\n",
        new="",
        test=OF_FAREWELL + "test_an_exit_code_tells_whether_the_device_is_lost",
    ),
    Mutant(
        name="where an error came from is not looked at",
        file=FAREWELL,
        old="error = error.__cause__ or error.__context__",
        new="error = None",
        test=OF_FAREWELL + "test_the_error_that_another_came_from_counts_too",
    ),
    Mutant(
        name="a scene names who has the row now",
        file=SCENE,
        old="held = rows[columns.admission[rows] == admissions]",
        new="held = rows[:1]",
        test=OF_FAREWELL + "test_the_scene_names_the_steps_in_flight_and_their_requests",
    ),
    Mutant(
        name="memory of the dead is not waited for",
        file=MEMORY,
        old="        sleep(PERIOD_S)\n",
        new="        break\n",
        test=OF_MEMORY + "test_a_worker_waits_until_memory_has_come_back",
    ),
    Mutant(
        name="memory that others have is waited for as long as may be",
        file=MEMORY,
        old=" and settled_s < SETTLED_S:",
        new=":",
        test=OF_MEMORY + "test_what_others_have_taken_is_not_waited_for_long",
    ),
    Mutant(
        name="scores of a prompt that were told are told again",
        file=WAITING,
        old="self.num_scored = self.num_told if wants_scores",
        new="self.num_scored = 0 if wants_scores",
        test="tests/e2e/test_replays.py",
        timeout_s=120,
    ),
    Mutant(
        name="an engine that died stays dead",
        file=GATE,
        old="        self._keeping = asyncio.create_task(self._keep(self._engine))\n",
        new="",
        test=OF_GATE + "test_an_engine_that_dies_is_replaced_and_meanwhile_the_gate_says_why",
    ),
    Mutant(
        name="an engine that cannot start is started for ever",
        file=GATE,
        old="if num_failures == MAX_FAILURES:",
        new="if False:",
        test=OF_GATE + "test_an_engine_that_cannot_be_started_is_given_up_and_the_gate_says_so",
    ),
    Mutant(
        name="no engine is ever forgiven",
        file=GATE,
        old="if time.monotonic() - begin > SETTLED_S:",
        new="if False:",
        test=OF_GATE + "test_an_engine_that_lived_for_long_is_forgiven",
    ),
    Mutant(
        name="a server that ends starts its engine again",
        file=GATE,
        old="                if self._is_draining:\n                    return\n",
        new="",
        test=OF_GATE + "test_an_engine_that_is_stopped_is_not_started_again",
    ),
    Mutant(
        name="counters stand still after a new scheduler",
        file=METRICS,
        old="is_new = (worker.pid, worker.incarnation) != last[:2]",
        new="is_new = worker.incarnation > last.incarnation",
        test="tests/unit/server/test_metrics.py::test_counters_go_on_when_a_new_scheduler_counts_from_the_beginning",
    ),
    Mutant(
        name="a worker in a long line of quiet steps says nothing",
        file=SERVICE,
        old="is_due = time.monotonic() - self._told_s >= HEARTBEAT_S",
        new="is_due = False",
        test="tests/unit/worker/test_service.py::test_a_worker_says_every_second_that_it_lives",
    ),
    Mutant(
        name="an engine without workers is ready",
        file="hiserve/scheduler/client.py",
        old="return self._closed is None and not self._halted",
        new="return self._closed is None",
        test="tests/e2e/test_process_lives.py::test_a_client_that_was_told_that_no_worker_is_left_says_so",
    ),
    Mutant(
        name="a process that cannot be started is never tried again",
        file="hiserve/server/gate.py",
        old="except (HiserveError, OSError) as error:",
        new="except HiserveError as error:",
        test="tests/unit/server/test_gate.py::test_a_start_that_fails_is_tried_again",
        timeout_s=60,
    ),
]
