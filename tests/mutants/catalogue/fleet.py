"""Fleets: where requests go."""

from hiserve.fleet import affinity, dynamo, resuming, simulation, stream_events
from tests.unit.fleet import test_affinity, test_dynamo, test_resuming, test_simulation

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
with resuming.Resumption._event, test_resuming.test_the_events_are_those_of_one_engine_wherever_it_dies["/v1/chat/completions-plain"]:
    "INV 96: the opening of a stream that broke before its first token comes twice"
    self._shown(choice if tokens else None)
    self._shown(choice)
with resuming.Resumption._shown, test_resuming.test_the_events_are_those_of_one_engine_wherever_it_dies["/v1/chat/completions-choices"]:
    "INV 96: a choice that broke between its finish and its end cannot go on"
    {choice} - self._ended - {None}
    {choice} - {None}
with stream_events.NativeEvents.mend, test_resuming.test_the_events_are_those_of_one_engine_wherever_it_dies["/generate-scores"]:
    "INV 96: the scores of an engine that died are lost, or come twice"
    facts["finish_reason"] is None
    True
with stream_events.ItemEvents.mend, test_resuming.test_the_events_are_those_of_one_engine_wherever_it_dies["/v1/responses-plain"]:
    "INV 96: an item of a response has another name after a break"
    names.setdefault("id", chunk["item_id"])
    chunk["item_id"]
with resuming.Resumption.broke, test_resuming.test_the_events_are_those_of_one_engine_wherever_it_dies["/v1/completions-plain"]:
    "INV 96: half an event of a dead engine stays before the next one's first"
    self._rest, self._held, self._ended = b"", [], set()
    self._held, self._ended = [], set()
with resuming.resumed[2], test_resuming.test_the_events_are_those_of_one_engine_wherever_it_dies["/generate-plain"]:
    "INV 96: a stream whose engine dies after its last event begins again"
    resumption.is_over
    False
with resuming.resumed, test_resuming.test_a_reply_that_cannot_be_resumed_is_not_begun_again:
    "INV 96: a client gets another engine's reply behind a part of the first one's"
    has_begun and resumption.is_plain
    False
with resuming.Resumption._event, test_resuming.test_a_text_like_an_event_is_a_text:
    "INV 96: a text with the characters that begin the data of an event is taken for one"
    event.partition(b"data: ")
    event.rpartition(b"data: ")
with resuming._num_choices, test_resuming.test_other_replies_are_not_resumed:
    "a number of choices takes all memory of a gateway"
    number <= MAX_CHOICES
    True
with dynamo.sampling_of, test_dynamo.test_tokens_that_the_model_lacks_are_refused:
    "biases and stop tokens behind Dynamo are not compared with the vocabulary"
    sampling.check_vocabulary(vocab_size)
    pass
with affinity.conversation_key, test_affinity.test_a_body_of_any_form_has_a_key:
    "a gateway fails over a request without items"
    isinstance(given, list) and given and isinstance(given[0], dict)
    isinstance(given, list) and isinstance(given[0], dict)
