"""Callers take turns; no place is lost and none is given twice."""

from __future__ import annotations

import asyncio
import random

from hiserve.text.helpers.fair_threads import FairSemaphore
from tests.helpers.waiting import PATIENCE_S


async def test_who_asks_for_much_waits_behind_each_other_caller_once() -> None:
    turns, order = FairSemaphore(1), list[int]()

    async def work(caller: int) -> None:
        await turns.enter(caller)
        order.append(caller)
        await asyncio.sleep(0)
        turns.leave()

    await asyncio.gather(*[work(1) for _ in range(20)], *[work(2) for _ in range(3)], work(3))
    assert order == [1, 1, 2, 3, 1, 2, 1, 2] + [1] * 16


async def test_places_are_kept_whoever_leaves() -> None:
    print("seed 5")
    dice = random.Random(5)
    turns, num_inside, most_inside = FairSemaphore(3), 0, 0

    async def work(caller: int) -> None:
        nonlocal num_inside, most_inside
        await turns.enter(caller)
        num_inside += 1
        most_inside = max(most_inside, num_inside)
        try:
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
        finally:
            num_inside -= 1
            turns.leave()

    tasks = [asyncio.create_task(work(dice.randrange(4))) for _ in range(300)]
    for _ in range(100):
        await asyncio.sleep(0)
        tasks[dice.randrange(300)].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (num_inside, most_inside) == (0, 3)
    assert sum(not task.cancelled() for task in tasks) > 150
    for _ in range(3):  # all places are free
        await asyncio.wait_for(turns.enter(0), PATIENCE_S)


async def test_who_goes_as_soon_as_it_is_his_turn_passes_it_on() -> None:
    turns = FairSemaphore(1)
    await turns.enter(1)
    goes, stays = (asyncio.create_task(turns.enter(caller)) for caller in (2, 3))
    await asyncio.sleep(0)
    turns.leave()
    goes.cancel()  # the place is his, and he does not know it yet
    await asyncio.wait_for(stays, PATIENCE_S)
    assert goes.cancelled()
