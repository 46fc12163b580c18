"""The replica of a conversation: the same on every router, few moves when replicas come or go, no crowds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from hiserve.fleet.affinity import BUSY_MORE, NUM_HOMES, Affinity, conversation_key

NAMES = [f"http://replica-{index}:8000" for index in range(20)]
KEYS = [b"conversation %d" % index for index in range(2000)]
NO_LOADS = np.zeros(20, dtype=np.int64)
RECORDED = [3, 19, 17, 14, 19, 18, 18, 13, 7, 8, 17, 4]
HI: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_routers_choose_alike_whatever_the_order_of_their_names() -> None:
    one, other = Affinity(NAMES), Affinity(NAMES[::-1])
    for key in KEYS[:50]:
        homes = [NAMES[index] for index in one.homes(key)]
        assert homes == [NAMES[::-1][index] for index in other.homes(key)]
        assert len(set(homes)) == NUM_HOMES
    assert Affinity(NAMES[:1]).homes(KEYS[0]) == [0]


def test_the_choice_does_not_change_between_versions() -> None:
    """A fleet may run several versions of a router at once."""
    assert [Affinity(NAMES).homes(key)[0] for key in KEYS[:12]] == RECORDED


def test_one_replica_more_or_less_moves_few_conversations() -> None:
    """S21: at most 2/n."""
    homes = [NAMES[Affinity(NAMES).choose(key, NO_LOADS)] for key in KEYS]
    fewer = [NAMES[Affinity(NAMES[:-1]).choose(key, NO_LOADS[1:])] for key in KEYS]
    moved = sum(one != other for one, other in zip(homes, fewer, strict=True))
    assert moved == homes.count(NAMES[-1]) <= 2 / 20 * len(KEYS)
    counts = Counter(homes)
    assert len(counts) == 20
    assert max(counts.values()) < 1.5 * len(KEYS) / 20


def test_a_busy_home_is_passed_by_in_order_and_then_the_idlest_takes_over() -> None:
    affinity, loads = Affinity(NAMES), NO_LOADS.copy()
    homes = affinity.homes(KEYS[0])
    idlest = next(index for index in range(20) if index not in homes)
    loads[homes[0]] = BUSY_MORE
    assert affinity.choose(KEYS[0], loads) == homes[0], "it has as many as any may have"
    loads[:] = 50
    loads[idlest] = 1
    chosen = []
    for home in homes:
        chosen.append(affinity.choose(KEYS[0], loads))
        loads[home] = 1000
        loads[loads > 50] = int(loads.sum())  # busier than twice the mean
    assert chosen == homes
    assert affinity.choose(KEYS[0], loads) == idlest


def test_the_turns_of_a_conversation_have_one_key_and_others_have_others() -> None:
    first = conversation_key("a", {"messages": HI})
    later = [*HI, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "How are you?"}]
    assert conversation_key("a", {"messages": later, "temperature": 0}) == first
    items = conversation_key("a", {"input": HI, "instructions": "x"})
    assert conversation_key("a", {"input": later, "instructions": "x"}) == items != first
    others: list[tuple[str, dict[str, Any]]] = [
        ("b", {"messages": HI}),
        ("a", {"messages": [HI[0], {"role": "user", "content": "Hi!"}]}),
        ("a", {"messages": HI, "tools": [{"name": "f"}]}),
        ("a", {"messages": HI, "system": "x"}),
        ("a", {"prompt": "Hi"}),
    ]
    keys = {conversation_key(*each) for each in others}
    assert len(keys) == len(others)
    assert first not in keys


@pytest.mark.parametrize(
    "body",
    [{}, {"messages": []}, {"messages": 5}, {"messages": [5]}, {"prompt": 5}, {"input": [{"a": 1}]}, {"input": []}],
)
def test_a_body_of_any_form_has_a_key(body: dict[str, Any]) -> None:
    assert len(conversation_key("", body)) == 32


def test_long_prompts_that_begin_alike_go_to_one_replica() -> None:
    one, other = ({"prompt": "x" * 5000 + end} for end in "ab")
    assert conversation_key("", one) == conversation_key("", other)
    assert conversation_key("", {"prompt": "a"}) != conversation_key("", {"prompt": "b"})
