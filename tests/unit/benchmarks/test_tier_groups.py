"""Groups of the trace that engines serve: no conversation twice, and the requests of the trace in their order."""

from __future__ import annotations

import numpy as np

from benchmarks.tier_traces import Conversations
from benchmarks.tiers_engine import groups

NUM_TURNS = 500


def made() -> Conversations:
    return Conversations("zipf", 2, 4, 40)


def test_a_group_ends_before_a_conversation_that_it_holds() -> None:
    trace, turns, sizes = made(), [], []
    while len(turns) < NUM_TURNS:
        group = groups(trace, 4)
        names = [turn.conversation for turn in group]
        assert len(set(names)) == len(names) and (len(names) == 4 or trace.following in names)
        for turn in group:
            trace.replied(turn, np.arange(turn.num_new, dtype=np.int32))
        turns += group
        sizes.append(len(group))
    assert {1, 4} <= set(sizes)
    alone = made()
    for turn in turns:
        expected = alone.next()
        alone.replied(expected, np.arange(expected.num_new, dtype=np.int32))
        assert turn.conversation == expected.conversation and np.array_equal(turn.prompt, expected.prompt)
