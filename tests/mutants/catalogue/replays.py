"""Guards of replays: what a request takes along when its worker dies, and who is suspected of the death."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LEDGER = "hiserve/scheduler/ledger.py"
DISPATCHER = "hiserve/scheduler/dispatcher.py"
QUARANTINE = "hiserve/scheduler/quarantine.py"
QUEUE = "hiserve/scheduler/queue.py"
OF_REPLAYS = "tests/unit/scheduler/test_replays.py::"

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
]
