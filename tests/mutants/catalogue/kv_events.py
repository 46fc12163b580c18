"""Guards of KV events: what is told, how it travels, and whom nobody waits for."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CHANNELS = "hiserve/messages/channels.py"
WIRE = "hiserve/messages/kv_events.py"
PUBLISHER = "hiserve/messages/publisher.py"
ENDPOINTS = "hiserve/core/endpoints.py"
EVENTS = "hiserve/worker/kv_events.py"
LOOP = "hiserve/worker/loop.py"
BUILD = "hiserve/worker/build.py"
TIERS = "hiserve/cache/index/tiers.py"
MANAGER = "hiserve/cache/index/manager.py"
OF_WIRE = "tests/unit/messages/test_kv_events.py::"
OF_PUBLISHER = "tests/unit/messages/test_publisher.py::"
OF_ENDPOINTS = "tests/unit/core/test_endpoints.py::"
OF_EVENTS = "tests/unit/worker/test_kv_events.py::"
OF_ENGINES = "tests/e2e/test_kv_events.py::"
FORMAT = OF_WIRE + "test_a_batch_is_a_list_of_time_events_and_rank_and_its_events_are_maps_with_a_type"
MACHINE = "tests/invariants/test_index_machine.py::test_index_agrees_with_the_model[4]"

MUTANTS = [
    Mutant(
        name="a run that follows pages of its own node is told below the node before",
        file="hiserve/cache/index/tier.py",
        old="            if start:\n                parent = node.digests[start - 1]\n",
        new="",
        test=MACHINE,
    ),
    Mutant(
        name="the start of a prompt has a parent",
        file="hiserve/cache/index/tier.py",
        old="None if node.parent.is_root else node.parent.digests[-1]",
        new="node.parent.digests[-1]",
        test=OF_EVENTS + "test_a_split_changes_nothing_for_a_router",
    ),
    Mutant(
        name="a run is told with the tokens of its whole node",
        file="hiserve/cache/index/tier.py",
        old="key = node.key[start * len(node.key) // node.num_pages :]",
        new="key = node.key",
        test=MACHINE,
    ),
    Mutant(
        name="routers do not hear of removals",
        file="hiserve/cache/index/tier.py",
        old="            self._listener.removed(self._tier, digests)",
        new="            pass",
        test=MACHINE,
    ),
    Mutant(
        name="pages on their way are told again after a flush",
        file=TIERS,
        old="if node.pages.size and not node.device_ready_op:\n                self.device.tell(node)",
        new="if node.pages.size:\n                self.device.tell(node)",
        test="tests/invariants/test_tier_machine.py::test_two_tiers_agree_with_the_model_and_order_every_access",
    ),
    Mutant(
        name="what requests hold is not told again after a flush",
        file=MANAGER,
        old="            self.tiers.tell_all()\n",
        new="",
        test=OF_EVENTS + "test_what_requests_hold_is_told_again_after_a_flush",
    ),
    Mutant(
        name="a flush of one tier clears both for routers",
        file=MANAGER,
        old="if tier is None and self._listener is not None:",
        new="if self._listener is not None:",
        test=OF_EVENTS + "test_a_flush_of_one_tier_tells_what_it_removed",
    ),
    Mutant(
        name="a flush is not told as one",
        file=MANAGER,
        old="            self._listener.cleared()\n            self.tiers.tell_all()\n",
        new="            pass\n",
        test=OF_EVENTS + "test_a_flush_is_told_at_once_and_clears_all",
    ),
    Mutant(
        name="a removal is told with a list of the index",
        file=EVENTS,
        old='self._changes.append(Removed(MEDIA[tier], b"".join(digests)))',
        new="self._changes.append(Removed(MEDIA[tier], digests))",
        test=OF_EVENTS + "test_a_removal_keeps_its_digests_whatever_the_index_does_with_its_list",
    ),
    Mutant(
        name="a worker does not say that it has nothing when it starts",
        file=EVENTS,
        old="self._changes: list[Change] = [Cleared()]",
        new="self._changes: list[Change] = []",
        test=OF_EVENTS + "test_the_first_batch_says_that_nothing_is_cached",
    ),
    Mutant(
        name="a step without changes publishes a batch",
        file=EVENTS,
        old="        if self._changes:\n            self._publisher",
        new="        if True:\n            self._publisher",
        test=OF_EVENTS + "test_a_step_that_changes_nothing_publishes_nothing",
    ),
    Mutant(
        name="a flush is told with the next step",
        file=LOOP,
        old="        self._publish()\n        return num_pages\n",
        new="        return num_pages\n",
        test=OF_EVENTS + "test_a_flush_is_told_at_once_and_clears_all",
    ),
    Mutant(
        name="what a former process left is told with the first step",
        file=LOOP,
        old="        self._publish()  # what a former process left\n",
        new="",
        test=OF_EVENTS + "test_what_a_former_process_left_is_told_before_the_first_step",
    ),
    Mutant(
        name="closing the engine leaves the sockets of KV events",
        file=LOOP,
        old="            self._kv_events.close()",
        new="            pass",
        test=OF_EVENTS + "test_closing_the_engine_closes_the_sockets",
    ),
    Mutant(
        name="a start that fails leaves the sockets of KV events",
        file=BUILD,
        old="            undo.callback(kv_events.close)\n",
        new="            pass\n",
        test=OF_ENGINES + "test_a_model_that_does_not_load_gives_the_address_back",
    ),
    Mutant(
        name="hashes are not signed",
        file=WIRE,
        old='dtype=">i8"',
        new='dtype=">u8"',
        test=OF_WIRE + "test_hashes_are_signed_and_have_the_first_byte_in_front",
    ),
    Mutant(
        name="hashes begin with the last byte",
        file=WIRE,
        old='dtype=">i8"',
        new='dtype="<i8"',
        test=FORMAT,
    ),
    Mutant(
        name="a replay begins with all that is kept",
        file=WIRE,
        old="                if sequence >= start:",
        new="                if True:",
        test=OF_WIRE + "test_a_replay_has_what_was_kept_from_a_number_on_and_an_end",
    ),
    Mutant(
        name="a replay of nonsense is one of all",
        file=WIRE,
        old="        if len(request) == SEQUENCE_BYTES:",
        new="        if True:",
        test=OF_WIRE + "test_nonsense_is_answered_by_the_end_alone",
    ),
    Mutant(
        name="batches are kept without end",
        file=WIRE,
        old="deque(maxlen=max_batches)",
        new="deque()",
        test=OF_WIRE + "test_a_replay_has_what_was_kept_from_a_number_on_and_an_end",
    ),
    Mutant(
        name="heartbeats push out what was said",
        file=PUBLISHER,
        old="keep=bool(changes)",
        new="keep=True",
        test=OF_PUBLISHER + "test_silence_is_broken_by_heartbeats_with_numbers_that_no_replay_has",
    ),
    Mutant(
        name="heartbeats come in the middle of a talk",
        file=PUBLISHER,
        old="                due_s = self._clock() + self._heartbeat_s\n                num_lost",
        new="                num_lost",
        test=OF_PUBLISHER + "test_who_talks_has_no_heartbeat",
    ),
    Mutant(
        name="dropped batches leave no gap",
        file=PUBLISHER,
        old="                self._history.skip(num_lost)\n",
        new="",
        test=OF_PUBLISHER + "test_what_finds_the_queue_full_is_dropped_with_its_number_and_counted",
    ),
    Mutant(
        name="batches queue without end",
        file=PUBLISHER,
        old="if len(self._queue) >= self._max_queued:",
        new="if False:",
        test=OF_PUBLISHER + "test_what_finds_the_queue_full_is_dropped_with_its_number_and_counted",
    ),
    Mutant(
        name="a publisher that failed says nothing",
        file=PUBLISHER,
        old="        if self._failure is not None:",
        new="        if False:",
        test=OF_PUBLISHER + "test_a_thread_that_failed_is_heard_of",
    ),
    Mutant(
        name="what is queued at the end is lost",
        file=PUBLISHER,
        old="            is_closing = self._is_closing  # asked first: what was put before is queued by now\n",
        new="            if self._is_closing:\n                return\n",
        test=OF_PUBLISHER + "test_what_was_put_is_published_before_the_sockets_close",
    ),
    Mutant(
        name="a replay is answered without the frames before its number",
        file=PUBLISHER,
        old="[*envelope, sequence, payload]",
        new="[envelope[0], sequence, payload]",
        test=OF_PUBLISHER + "test_who_comes_late_gets_all_by_replay",
    ),
    Mutant(
        name="a long replay loses what its reader does not take at once",
        file=CHANNELS,
        old="        self._questions.set_hwm(MAX_UNREAD_ANSWERS)\n",
        new="",
        test=OF_PUBLISHER + "test_a_whole_replay_reaches_a_reader_that_takes_its_time",
    ),
    Mutant(
        name="a slow subscriber is kept everything for",
        file=CHANNELS,
        old="self._news.set_hwm(MAX_UNREAD_NEWS)",
        new="self._news.set_hwm(0)",
        test=OF_PUBLISHER + "test_what_a_slow_subscriber_loses_its_numbers_tell_and_nobody_waits",
    ),
    Mutant(
        name="a path is taken from who uses it",
        file=CHANNELS,
        old="                require_free(path)\n",
        new="                pass\n",
        test=OF_PUBLISHER + "test_a_path_in_use_is_not_taken_from_who_uses_it",
    ),
    Mutant(
        name="a file that is no socket is taken for one",
        file="hiserve/messages/endpoints.py",
        old="    if not path.is_socket():",
        new="    if False:",
        test=OF_PUBLISHER + "test_a_file_that_is_no_socket_stays",
    ),
    Mutant(
        name="a path stays after the end",
        file=CHANNELS,
        old="            path.unlink(missing_ok=True)",
        new="            pass",
        test=OF_PUBLISHER + "test_a_refused_replay_gives_the_events_address_back",
    ),
    Mutant(
        name="addresses of the sixth version are not understood",
        file=CHANNELS,
        old='sock.setsockopt(zmq.IPV6, "[" in endpoint)',
        new="sock.setsockopt(zmq.IPV6, False)",
        test=OF_PUBLISHER + "test_the_loopback_of_the_sixth_version_can_be_used",
    ),
    Mutant(
        name="replicas share a port",
        file=ENDPOINTS,
        old="{int(tcp['port']) + replica}",
        new="{int(tcp['port'])}",
        test=OF_ENDPOINTS + "test_each_replica_has_the_next_port_or_a_path_with_its_number",
    ),
    Mutant(
        name="ports beyond the last are promised to replicas",
        file=ENDPOINTS,
        old="<= MAX_PORT - num_replicas + 1:",
        new="<= MAX_PORT:",
        test=OF_ENDPOINTS + "test_the_ports_of_all_replicas_must_exist",
    ),
    Mutant(
        name="events and replays may overlap among replicas",
        file=ENDPOINTS,
        old="    if not taken.isdisjoint(both):",
        new="    if events == replay:",
        test=OF_ENDPOINTS + "test_events_and_replays_share_no_address_in_any_replica",
    ),
    Mutant(
        name="events of a cache that shares nothing are published",
        file=ENDPOINTS,
        old="    if config.cache.disable_prefix_cache:",
        new="    if False:",
        test=OF_ENDPOINTS + "test_without_a_prefix_cache_there_is_nothing_to_tell",
    ),
]
