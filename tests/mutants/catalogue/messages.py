"""Messages between processes and to routers."""

from hiserve.ipc import channel, child, codec, launcher, updates
from tests.unit.ipc import test_channel, test_child, test_codec, test_launcher, test_strangers, test_updates

with updates.RequestUpdates.check, test_codec.test_columns_that_contradict_each_other_are_malformed:
    "INV 62: columns of different lengths are accepted"
    (counts, finishes, words, self.cached, self.drafts, self.queue_s)
    (counts, finishes, words)
with updates.MergedUpdates._count_pages, test_updates.test_pages_that_came_and_went_leave_nothing_behind:
    "updates that are not accepted keep pages that came and went"
    del self._pages[digest]
    self._pages[digest] = 0
with codec.MessageDecoder.decode, test_codec.test_neither_depth_nor_announced_sizes_get_through:
    "INV 62: deep nesting escapes the decoder"
    RecursionError
    KeyError
with child.ChildProcess.start, test_strangers.test_strangers_at_the_socket_of_a_child_are_not_heard_and_do_not_keep_it_out:
    "INV 62: a stranger at the socket is taken for the child"
    Link.bind(endpoint, process.pid)
    Link.bind(endpoint)
with child.connect_to_parent, test_strangers.test_a_child_connects_although_strangers_fill_the_queue_of_connections:
    "strangers that fill the queue of connections keep a child from its parent"
    os.getppid() != parent or not path_of(endpoint).exists() or time.monotonic() >= late_s
    True
with child.connect_to_parent, test_strangers.test_a_child_whose_parent_never_listens_ends:
    "INV 17: a child waits without end for a dead parent"
    wait_for_listener(endpoint, CONNECT_S, lambda: os.getppid() == parent)
    wait_for_listener(endpoint, 60 * CONNECT_S, lambda: True)
with channel.PollingChannel.receive, test_channel.test_what_the_dead_said_is_delivered_before_they_are_reported_gone:
    "INV 10: the last messages of a dead process are lost"
    is_gone and (not batch)
    is_gone
with channel.AsyncChannel._has_more, test_channel.test_no_event_is_missed_between_any_two_calls:
    "a message that comes between two looks at the socket is not announced again"
    is_newly_gone or is_readable or (self._is_full and is_writable)
    is_newly_gone or is_readable or (self._is_full and self._link.is_writable)
with child.bound_memory, test_child.test_memory_is_bounded_beyond_what_a_process_has:
    "the bound of a helper's memory counts what the threads of its libraries hold"
    num_pages * resource.getpagesize() + num_bytes
    num_bytes
with launcher.main, test_launcher.test_what_is_imported_is_never_looked_through:
    "what a worker has imported is looked through in every full garbage collection"
    gc.freeze()
    gc.get_freeze_count()
