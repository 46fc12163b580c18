"""Requests, queues, callers, workers that die."""

from hiserve.scheduler import crash_isolation, dispatcher, ledger, placement, queue, request_stream, supervisor, worker_process
from tests.unit.scheduler import (
    test_conservation,
    test_dispatcher,
    test_fairness,
    test_placement,
    test_prefix_index,
    test_progress_watch,
    test_replays,
    test_request_stream,
    test_supervisor,
)

with ledger.Ledger.end, test_dispatcher.test_ending_a_request_twice_is_an_invariant_error:
    "INV 10: a request ends twice"
    self._entries.pop(entry.uid, None) is not entry
    self._entries.pop(entry.uid, None) is None and False
with dispatcher.Dispatcher.worker_lost, test_conservation:
    "INV 10: the requests of a dead worker are dropped"
    self.ledger.running_on(replica)
    self.ledger.running_on(replica)[1:]
with placement.Placement.place, test_placement.test_a_session_has_no_home_where_another_worker_has_more_of_the_prompt:
    "a session draws its request to a busy worker that has less of the prompt than another"
    replica == home and cached[replica] == max(cached.values())
    replica == home
with dispatcher.Dispatcher.dispatch, test_dispatcher.test_cold_requests_of_a_session_stay_together_until_their_worker_dies:
    "the session of a request chooses no worker"
    entry.session
    b""
with ledger.Ledger.rows, test_dispatcher.test_a_report_on_what_the_worker_does_not_hold_changes_nothing:
    "a worker reports on the request of another"
    entry is None or entry.replica != replica
    entry is None
with dispatcher.Dispatcher._refusal, test_dispatcher.test_a_negative_token_id_never_reaches_a_worker:
    "INV 16: a negative token id reaches a worker"
    not len(prompt) or prompt.min() < 0
    not len(prompt)
with ledger.Entry.to_admit, test_replays.test_scores_of_the_prompt_are_asked_for_from_where_they_ended:
    "INV 48: scores of a prompt are reported again after a replay"
    self.num_scored
    0
with dispatcher.Dispatcher.worker_lost, test_replays.test_what_was_being_aborted_ends_with_its_worker:
    "INV 48: a request being aborted is replayed"
    aborted = [entry for entry in held if entry.state is RequestState.ABORTING]
    aborted: list[Entry] = []
with crash_isolation.CrashIsolation.isolate, test_replays.test_a_request_is_given_up_when_it_had_its_worker_for_itself_and_not_before:
    "INV 49: the last suspect is convicted although others ran beside it"
    suspects == running == held and len(held) == 1
    suspects == running and len(suspects) == 1
with supervisor.Supervisor._watch, test_supervisor.test_a_worker_whose_work_does_not_get_on_is_replaced_after_its_time:
    "INV 50: a worker that hangs is not ended"
    limit_s
    0
with supervisor.Supervisor._watch, test_supervisor.test_time_in_which_the_supervisor_stood_still_is_not_the_workers:
    "INV 50: time in which the supervisor stood still counts for its workers"
    worker.progress.extend_deadline(max(0.0, now_s - before_s - 2 * WATCH_INTERVAL_S))
    pass
with (
    worker_process.ProgressWatch.sample,
    test_progress_watch,
    test_supervisor.test_a_worker_that_gets_no_cpu_is_not_taken_for_one_that_hangs,
):
    "INV 50: time without a CPU counts for a worker"
    computed_s if is_runnable else passed_s
    passed_s
with supervisor.Supervisor._supervise, test_supervisor.test_a_successor_that_cannot_be_started_is_a_failed_start_and_is_tried_again:
    "INV 50: a worker that cannot be spawned is tried again without a pause"
    num_useless + 1
    0
with supervisor._WorkerRun.was_useful, test_supervisor.test_a_worker_without_output_of_the_requests_it_held_delays_its_successor:
    "INV 50: a worker that dies without output is replaced without a pause"
    self.worker.has_output or not uids
    True
with supervisor.Supervisor._on_message, test_supervisor.test_messages_of_another_incarnation_are_counted_and_ignored:
    "messages of an earlier incarnation are accepted"
    message.incarnation != worker.number
    False
with queue.Queue.window, test_fairness.test_a_flood_of_one_caller_does_not_hold_another_up:
    "INV 61: the first caller has every turn"
    min(self._queues, key=self._served.__getitem__)
    next(iter(self._queues))
with queue.Queue.shed_candidate, test_fairness.test_a_full_queue_makes_room_for_who_has_less_than_a_share:
    "INV 61: a full queue makes no room for a caller below its share"
    not others or not is_fair
    True
with queue._CallerQueue.window, test_fairness.test_no_policy_lets_a_request_starve:
    "INV 61: a policy lets a request starve"
    MAX_OVERTAKEN
    10 * MAX_OVERTAKEN
with queue.Queue.has_room, test_dispatcher.test_a_full_queue_refuses_and_loses_nothing_it_accepted:
    "INV 24: the queue has no limit"
    not self._waiting
    True
with request_stream.RequestStream.is_too_long, test_request_stream.test_more_than_a_reader_may_leave_unread_is_too_long:
    "INV 24: a reader may leave everything unread"
    self._num_unread_bytes > self._max_unread_bytes
    False
with placement.PrefixIndex.prefix, test_prefix_index.test_tenants_do_not_see_each_others_pages:
    "INV 7: the placement index mixes tenants"
    namespace
    b""
with placement.Placement.place, test_placement.test_cold_sessions_spread_and_stick:
    "INV 78: a session has no home"
    not is_home
    True
with placement._weight, test_placement.test_a_session_leaves_a_worker_that_is_dead_full_or_far_busier_and_comes_back:
    "INV 78: sessions move when another worker dies"
    xxhash.xxh3_64_intdigest(b"%d:" % replica + session)
    replica
