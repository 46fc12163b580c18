"""Commands."""

from hiserve import __main__ as entry
from hiserve.cache.storage import inventory
from hiserve.commands import batch, batch_files
from tests.unit import test_graph_planted, test_main
from tests.unit.commands import test_batch, test_cache_command
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
with batch_files.Results.__init__, test_batch.test_a_file_of_something_else_is_left_as_it_is:
    "a batch writes its replies after notes"
    self._done = _read_done(output)
    self._done = set()
with entry.main, test_main.test_ctrl_c_in_an_import_ends_the_command_without_a_word:
    "Ctrl-C during the imports shows a traceback"
    return INTERRUPTED
    raise
