"""Commands."""

from hiserve import __main__ as entry
from hiserve.cache.storage import inventory
from hiserve.commands import batch, batch_files, top
from tests.unit import test_graph_planted, test_main
from tests.unit.commands import test_batch, test_cache_command, test_top
from tests.unit.tools import test_pytest_forks
from tools import pytest_forks
from tools.graph_lint import values as graph_values

with graph_values.collect, test_graph_planted.test_what_is_planted_is_found:
    "INV 39: tensors in fields of dataclasses are not found"
    facts.classes[each.name].update(_fields(each, facts))
    pass
with inventory.delete_store, test_cache_command.test_what_a_server_uses_is_left_alone:
    "`cache delete` deletes a store in use"
    _lock(fd, f"the store file:{directory}")
    pass
with batch_files.Results.is_new, test_batch.test_a_custom_id_names_one_line:
    "two lines of a batch have one custom_id"
    len(self._known) > before
    True
with batch.answer_all, test_batch.test_a_second_run_answers_the_lines_without_a_reply:
    "a batch that is continued answers all lines again"
    results.has(custom_id)
    False
with batch_files._read_done, test_batch.test_a_reply_that_was_cut_by_a_kill_is_made_again:
    "a line that was cut stays in the output of a batch"
    os.truncate(output, end)
    pass
with batch_files._read_done, test_batch.test_a_reply_that_was_cut_by_a_kill_is_made_again:
    "a batch that is continued loses replies before a line that was cut"
    end += len(line)
    pass
with batch._Window.leave, test_batch.test_room_of_bodies_that_are_answered_is_given_back:
    "the room of bodies that were answered is lost"
    self._num_bytes -= num_bytes
    pass
with batch._serve, test_batch.test_a_batch_gives_the_copies_of_the_cache_the_time_of_a_server_that_ends:
    "a batch ends without the copies of its cache"
    handle.close(settings.server.drain_timeout_s)
    handle.close()
with batch._serve, test_batch.test_a_body_may_be_as_large_as_for_the_server_in_a_line_that_is_longer:
    "a line of a batch is refused for the length of its custom_id"
    settings.server.max_request_bytes + ENVELOPE_BYTES
    settings.server.max_request_bytes
with batch_files.Results.__init__, test_batch.test_a_file_of_something_else_is_left_as_it_is:
    "a batch writes its replies after notes"
    self._done = _read_done(output)
    self._done = set()
with entry.main, test_main.test_ctrl_c_in_an_import_ends_the_command_without_a_word:
    "Ctrl-C during the imports shows a traceback"
    return INTERRUPTED
    raise
with top._Reader.__enter__, test_top.test_ctrl_c_ends_the_board_within_a_finalizer_too:
    "Ctrl-C is not seen while a frame is read, where a finalizer may lose it"
    self.start()
    self.run()
with pytest_forks.start_forks, test_pytest_forks.test_a_fork_that_dies_fails_the_test_that_it_ran_and_no_other_is_left_out:
    "a fork whose last test is expected to fail seems to have died"
    vars(sys).pop("last_value", None)
    pass
with pytest_forks.messages_of, test_pytest_forks.test_ctrl_c_while_a_fork_is_read_costs_no_message_but_that:
    "Ctrl-C while a fork is read ends without the results of others"
    json.JSONDecodeError
    KeyError
with pytest_forks.start_forks, test_pytest_forks.test_a_fork_that_dies_fails_the_test_that_it_ran_and_no_other_is_left_out:
    "the first process waits for what a killed fork has not said, whose pipe a child keeps"
    os.set_blocking(received, False)
    pass
