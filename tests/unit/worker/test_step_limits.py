"""The ladder of step sizes: down at once, up in its own time."""

from __future__ import annotations

from hiserve.worker.step_limits import GROW_AFTER, MAX_GROW_AFTER, StepLimits

MOST = 4096


def pass_steps(limits: StepLimits, count: int) -> None:
    for _ in range(count):
        limits.passed()


def fall(limits: StepLimits, num_tokens: int) -> list[int]:
    """Fails until nothing is smaller; returns the sizes of the steps that failed."""
    sizes = [num_tokens]
    while limits.shrink(sizes[-1], was_replay=False):
        sizes.append(min(sizes[-1], limits.num_tokens))
    return sizes


def test_steps_shrink_to_a_quarter_of_the_one_that_failed_down_to_one_token() -> None:
    limits = StepLimits(MOST)
    assert not limits.is_reduced
    assert fall(limits, 600) == [600, 150, 37, 9, 2, 1]
    assert limits.is_reduced


def test_a_step_planned_before_the_fault_was_known_shrinks_nothing_further_than_its_own_quarter() -> None:
    limits = StepLimits(MOST)
    assert limits.shrink(400, was_replay=False)
    assert limits.shrink(800, was_replay=False)
    assert limits.num_tokens == 100


def test_one_token_is_tried_again_without_a_graph() -> None:
    limits = StepLimits(MOST)
    limits.shrink(2, was_replay=True)
    assert limits.may_replay and limits.num_tokens == 1
    assert limits.shrink(1, was_replay=True)
    assert not limits.may_replay
    assert not limits.shrink(1, was_replay=False)


def test_steps_grow_back_after_so_many_that_passed() -> None:
    limits = StepLimits(MOST)
    fall(limits, MOST)
    limits.shrink(1, was_replay=True)
    sizes = []
    while limits.is_reduced:
        sizes.append(limits.num_tokens)
        pass_steps(limits, GROW_AFTER - 1)
        assert limits.num_tokens == sizes[-1]
        limits.passed()
        assert limits.may_replay
    assert sizes == [1, 4, 16, 64, 256, 1024]
    assert limits.num_tokens == MOST


def test_a_fault_between_starts_the_count_anew() -> None:
    limits = StepLimits(MOST)
    limits.shrink(400, was_replay=False)
    pass_steps(limits, GROW_AFTER - 1)
    limits.shrink(100, was_replay=False)
    pass_steps(limits, GROW_AFTER - 1)
    assert limits.num_tokens == 25


def test_where_growing_fails_again_and_again_it_is_tried_ever_more_rarely_and_forgotten_at_last() -> None:
    limits = StepLimits(1000)
    limits.shrink(1000, was_replay=False)
    waits = []
    for _ in range(8):
        count = 0
        while limits.is_reduced:
            limits.passed()
            count += 1
        waits.append(count)
        limits.shrink(1000, was_replay=False)
    assert waits == [min(GROW_AFTER * 2**i, MAX_GROW_AFTER) for i in range(8)]
    pass_steps(limits, MAX_GROW_AFTER)  # grown
    pass_steps(limits, MAX_GROW_AFTER)  # and sound for as long
    limits.shrink(1000, was_replay=False)
    pass_steps(limits, GROW_AFTER)
    assert not limits.is_reduced
