"""Fleets: where requests go."""

from hiserve.fleet import affinity, resuming, simulation
from tests.unit.fleet import test_affinity, test_resuming, test_simulation

with affinity.Affinity.homes, test_affinity.test_routers_choose_alike_whatever_the_order_of_their_names:
    "INV 95: a replica's place in the list decides"
    self._hashes ^ np.uint64(_hash(key))
    np.arange(self._hashes.size, dtype=np.uint64) ^ np.uint64(_hash(key))
with affinity.Affinity.choose, test_affinity.test_a_busy_home_is_passed_by_in_order_and_then_the_idlest_takes_over:
    "INV 95: a crowd follows its conversation's first home"
    loads[home] <= limit
    True
with affinity.conversation_key, test_affinity.test_the_turns_of_a_conversation_have_one_key_and_others_have_others:
    "INV 95: each turn of a conversation has a key of its own"
    next(ends, len(messages))
    len(messages)
with simulation._Fleet.use, test_simulation.test_a_cache_gives_up_the_ends_of_prompts_first:
    "the simulation evicts the starts of prompts first"
    reversed(blocks)
    blocks
with resuming.Resumption.push, test_resuming.test_the_events_are_those_of_one_engine_wherever_it_dies["/v1/chat/completions-plain"]:
    "INV 96: the opening of a stream that broke before its first token comes twice"
    self._tokens and not self._is_ending
    not self._is_ending
with resuming.Resumption.push, test_resuming.test_the_events_are_those_of_one_engine_wherever_it_dies["/v1/chat/completions-plain"]:
    "INV 96: a stream that broke between its finish and its end cannot go on"
    self._tokens and not self._is_ending
    self._tokens
with resuming.Resumption.broke, test_resuming.test_the_events_are_those_of_one_engine_wherever_it_dies["/v1/completions-plain"]:
    "INV 96: half an event of a dead engine stays before the next one's first"
    self._rest = self._held = b""
    self._held = b""
with resuming.resumed, test_resuming.test_a_reply_that_cannot_be_resumed_is_not_begun_again:
    "INV 96: a client gets another engine's reply behind a part of the first one's"
    has_begun and resumption.is_plain
    False
