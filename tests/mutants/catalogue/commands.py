"""Commands."""

from hiserve.cache.storage import inventory
from tests.unit import test_graph_planted
from tests.unit.commands import test_cache_command
from tools.graph_lint import values as graph_values

with graph_values.collect, test_graph_planted.test_what_is_planted_is_found:
    "INV 39: tensors in fields of dataclasses are not found"
    facts.classes[each.name].update(_fields(each, facts))
    pass
with inventory.delete_store, test_cache_command.test_what_a_server_uses_is_left_alone:
    "`cache delete` deletes a store in use"
    _lock(fd, f"the store file:{directory}")
    pass
