"""The ladder of step sizes: down at once, up in its own time."""

from __future__ import annotations

from hiserve.engine.step_backoff import GROW_AFTER, MAX_GROW_AFTER, StepBackoff

MOST = 4096


def pass_steps(backoff: StepBackoff, count: int) -> None:
    for _ in range(count):
        backoff.passed()


def fall(backoff: StepBackoff, num_tokens: int) -> list[int]:
    """Fails until nothing is smaller; returns the sizes of the steps that failed."""
    sizes = [num_tokens]
    while backoff.shrink(sizes[-1], was_replay=False):
        sizes.append(min(sizes[-1], backoff.num_tokens))
    return sizes


def test_steps_shrink_to_a_quarter_of_the_one_that_failed_down_to_one_token() -> None:
    backoff = StepBackoff(MOST)
    assert not backoff.is_reduced
    assert fall(backoff, 600) == [600, 150, 37, 9, 2, 1]
    assert backoff.is_reduced


def test_a_step_planned_before_the_fault_was_known_shrinks_nothing_further_than_its_own_quarter() -> None:
    backoff = StepBackoff(MOST)
    assert backoff.shrink(400, was_replay=False)
    assert backoff.shrink(800, was_replay=False)
    assert backoff.num_tokens == 100


def test_one_token_is_tried_again_without_a_graph() -> None:
    backoff = StepBackoff(MOST)
    backoff.shrink(2, was_replay=True)
    assert backoff.may_replay and backoff.num_tokens == 1
    assert backoff.shrink(1, was_replay=True)
    assert not backoff.may_replay
    assert not backoff.shrink(1, was_replay=False)


def test_steps_grow_back_after_so_many_that_passed() -> None:
    backoff = StepBackoff(MOST)
    fall(backoff, MOST)
    backoff.shrink(1, was_replay=True)
    sizes = []
    while backoff.is_reduced:
        sizes.append(backoff.num_tokens)
        pass_steps(backoff, GROW_AFTER - 1)
        assert backoff.num_tokens == sizes[-1]
        backoff.passed()
        assert backoff.may_replay
    assert sizes == [1, 4, 16, 64, 256, 1024]
    assert backoff.num_tokens == MOST


def test_a_fault_between_starts_the_count_anew() -> None:
    backoff = StepBackoff(MOST)
    backoff.shrink(400, was_replay=False)
    pass_steps(backoff, GROW_AFTER - 1)
    backoff.shrink(100, was_replay=False)
    pass_steps(backoff, GROW_AFTER - 1)
    assert backoff.num_tokens == 25


def test_where_growing_fails_again_and_again_it_is_tried_ever_more_rarely_and_forgotten_at_last() -> None:
    backoff = StepBackoff(1000)
    backoff.shrink(1000, was_replay=False)
    waits = []
    for _ in range(8):
        count = 0
        while backoff.is_reduced:
            backoff.passed()
            count += 1
        waits.append(count)
        backoff.shrink(1000, was_replay=False)
    assert waits == [min(GROW_AFTER * 2**i, MAX_GROW_AFTER) for i in range(8)]
    pass_steps(backoff, MAX_GROW_AFTER)  # grown
    pass_steps(backoff, MAX_GROW_AFTER)  # and sound for as long
    backoff.shrink(1000, was_replay=False)
    pass_steps(backoff, GROW_AFTER)
    assert not backoff.is_reduced
