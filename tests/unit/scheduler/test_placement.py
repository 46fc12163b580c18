"""Credits bound what a worker holds; placement weighs cached prefix against load."""

from __future__ import annotations

import pytest

from hiserve.scheduler.placement import Placement


def admission(*held: int, rows: int = 8) -> Placement:
    built = Placement()
    for replica, count in enumerate(held):
        built.join(replica, rows)
        for _ in range(count):
            built.take_credit(replica)
    return built


def no_match(_replica: int) -> int:
    return 0


def test_a_worker_holds_its_rows_and_a_small_lookahead() -> None:
    built = admission(0, rows=16)
    while built.with_credit():
        built.take_credit(0)
    assert built.num_held(0) == 18
    assert built.place(100, no_match) is None
    built.return_credit(0)
    assert built.place(100, no_match) == 0


def test_even_one_row_has_a_lookahead() -> None:
    assert admission(1, rows=1).with_credit() == [0]
    assert admission(2, rows=1).with_credit() == []


def test_load_decides_without_a_prefix() -> None:
    assert admission(3, 1, 2).place(100, no_match) == 1


def test_the_longest_prefix_wins_against_load() -> None:
    assert admission(3, 0).place(100, lambda replica: 96 if replica == 0 else 0) == 0
    assert admission(3, 3).place(100, lambda replica: [32, 96][replica]) == 1


def test_the_prefix_loses_when_its_worker_is_far_busier() -> None:
    assert admission(5, 0).place(100, lambda replica: 96 if replica == 0 else 0) == 1


def test_a_small_shared_prefix_does_not_draw_all_traffic_to_one_worker() -> None:
    assert admission(2, 0).place(1000, lambda replica: 32 if replica == 0 else 0) == 1


def test_the_prefix_loses_when_its_worker_has_no_credit() -> None:
    assert admission(9, 8).place(100, lambda replica: 96 if replica == 0 else 0) == 1


def test_a_worker_that_left_is_not_chosen_and_comes_back_empty() -> None:
    built = admission(2, 5)
    built.leave(0)
    assert built.with_credit() == [1]
    built.join(0, 8)
    assert built.num_held(0) == 0


def test_credits_cannot_go_below_nothing() -> None:
    with pytest.raises(AssertionError, match="holds none"):
        admission(0).return_credit(0)
    with pytest.raises(AssertionError, match="was sent another"):
        admission(9).take_credit(0)


def test_equals_take_turns() -> None:
    placement = Placement()
    for replica in range(3):
        placement.join(replica, 4)
    chosen = []
    for _ in range(6):  # one after the other: each has ended when the next one comes
        replica = placement.place(100, lambda _: 0)
        assert replica is not None
        placement.take_credit(replica)
        placement.return_credit(replica)
        chosen.append(replica)
    assert chosen == [0, 1, 2, 0, 1, 2]


def alike(_replica: int) -> int:
    return 16


SESSIONS = [b"session %d" % number for number in range(200)]


def homes(built: Placement) -> dict[bytes, int | None]:
    return {session: built.place(100, no_match, session) for session in SESSIONS}


def test_cold_sessions_spread_and_stick() -> None:
    built = admission(0, 0)
    first = homes(built)
    assert 60 < sum(replica == 0 for replica in first.values()) < 140
    built.take_credit(0)
    built.take_credit(0)
    assert homes(built) == first, "a session left its worker though that is little busier"
    assert {session: built.place(100, alike, session) for session in SESSIONS} == first


def test_a_known_prefix_wins_over_the_session() -> None:
    built = admission(0, 0)
    for replica in (0, 1):
        assert {
            built.place(100, lambda asked, replica=replica: 16 * (asked == replica), name) for name in SESSIONS
        } == {replica}


def test_a_session_leaves_a_worker_that_is_dead_full_or_far_busier_and_comes_back() -> None:
    built = admission(0, 0, 0)
    first = homes(built)
    built.leave(1)
    then = homes(built)
    assert set(then.values()) == {0, 2}
    assert all(then[session] == replica for session, replica in first.items() if replica != 1), "others moved too"
    built.join(1, 8)
    assert homes(built) == first
    busy = admission(5, 0, rows=8)
    assert set(homes(busy).values()) == {1}
    full = admission(9, 4, 3, rows=8)  # and the next choice of its sessions is no second home
    assert {homes(full)[session] for session, replica in first.items() if replica == 0} == {2}


def test_without_a_session_load_decides() -> None:
    assert admission(1, 0).place(100, no_match, b"") == 1


def test_a_session_has_no_home_where_another_worker_has_more_of_the_prompt() -> None:
    first = homes(admission(0, 0, 0))
    built = admission(2, 5, 0)  # the known prefix is where it is too busy, and the home is busier than the third
    for session, home in first.items():
        if home == 0:
            assert built.place(100, no_match, session) == 0
            assert built.place(100, lambda replica: 16 if replica == 1 else 0, session) == 2
