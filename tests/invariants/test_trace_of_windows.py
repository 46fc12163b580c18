"""What a host computes again of chats and agents that come back, where each resume point takes a tail of window pages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hiserve.core.window_pool import EVERY, LEAST_SHARE, WindowLimits
from tests.helpers.copying import FILLER, add, copying_engine, run
from tests.helpers.widening import some

PAGE = 4  # everything is a fourth as long: the window of gpt-oss has 128 tokens, its pages 16
WINDOW, NUM_NEW, BUDGET = 32, 20, 512
NUM_TURNS, NUM_STEPS = 10, 24


class Trace:
    """Chats over shared instructions, and agents over shared repositories, in a random order.

    Of chats 12 % of the messages are edited and 10 % of the replies made again; agents go back in 15 % of their steps.
    """

    def __init__(self, seed: int, num_chats: int, num_agents: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.reply = np.full(NUM_NEW, FILLER, dtype=np.int32)
        instructions = [self.words(500, 501) for _ in range(4)]
        repositories = [self.words(3000, 3001) for _ in range(2)]
        live = [self.chat(instructions[int(self.rng.integers(4))]) for _ in range(num_chats)]
        live += [self.agent(repositories[int(self.rng.integers(2))]) for _ in range(num_agents)]
        self.prompts = list(self.mixed(live))

    def words(self, least: int, end: int) -> np.ndarray:
        return self.rng.integers(2, 1 << 30, int(self.rng.integers(least, end))).astype(np.int32)

    def chat(self, history: np.ndarray) -> Iterator[np.ndarray]:
        for _ in range(NUM_TURNS):
            prompt = np.concatenate((history, self.words(25, 200)))
            yield prompt
            if self.rng.random() < 0.1:
                yield prompt
            if self.rng.random() < 0.12:
                prompt = np.concatenate((history, self.words(25, 200)))
                yield prompt
            history = np.concatenate((prompt, self.reply))

    def agent(self, repository: np.ndarray) -> Iterator[np.ndarray]:
        history, ends = repository, list[np.ndarray]()
        for _ in range(NUM_STEPS):
            prompt = np.concatenate((history, self.words(75, 300)))
            yield prompt
            history = np.concatenate((prompt, self.reply))
            ends.append(history)
            if self.rng.random() < 0.15:
                before = ends[int(self.rng.integers(len(ends)))]
                history = before[: int(self.rng.integers(repository.size, before.size + 1))]

    def mixed(self, live: list[Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
        while live:
            one = live[int(self.rng.integers(len(live)))]
            prompt = next(one, None)
            if prompt is None:
                live.remove(one)
            else:
                yield prompt


def unlimited(trace: Trace) -> tuple[int, int]:
    """Returns the tokens that a cache computes which forgets nothing and resumes at every page, and its pages."""
    numbers: dict[tuple[int, bytes], int] = {}  # of each page, by the one before it and its tokens
    needed = 0
    for prompt in trace.prompts:
        said, parent = np.concatenate((prompt, trace.reply[:-1])), -1
        num_cached, is_known = 0, True
        for start in range(0, said.size // PAGE * PAGE, PAGE):
            place = (parent, said[start : start + PAGE].tobytes())
            is_known = is_known and place in numbers and start + PAGE < prompt.size
            num_cached += PAGE * is_known
            parent = numbers.setdefault(place, len(numbers))
        needed += prompt.size - num_cached
    return needed, len(numbers)


@pytest.mark.parametrize(
    ("seed", "num_chats", "num_agents", "most"),
    some([(0, 16, 3, 1.08), *((seed, 48, 8, 1.1) for seed in range(3))], (0, 16, 3, 1.08)),
)
def test_a_host_as_large_as_all_history_computes_little_again(
    seed: int, num_chats: int, num_agents: int, most: float
) -> None:
    """Tails compete with history for its frames: ``most`` times the tokens of a cache without limits.

    Few conversations tell more: 1.05, without tails where prompts leave each other 1.11, without those at ends of requests 1.28.

    The device holds a request and a quarter: while one runs, hardly a page may be evicted.
    """
    trace = Trace(seed, num_chats, num_agents)
    needed, num_pages = unlimited(trace)
    num_tokens = sum(prompt.size for prompt in trace.prompts)
    assert 0.04 < needed / num_tokens < 0.1, "the conversations hardly come back, or say nothing new"
    longest = max(prompt.size for prompt in trace.prompts) + NUM_NEW
    num_device = 5 * longest // (4 * PAGE)
    limits = WindowLimits(
        window=WINDOW, page_size=PAGE, num_draft=0, depth=0, max_batched_tokens=BUDGET, tail_every=EVERY * WINDOW
    )
    engine, executor, _ = copying_engine(
        num_pages=num_device + 1,
        num_host_pages=num_pages + 1,
        page_size=PAGE,
        max_rows=1,
        max_len=longest,
        budget=BUDGET,
        windows=limits,
        num_window_pages=int(num_device * LEAST_SHARE / (1 - LEAST_SHARE)),
    )
    computed = 0
    for uid, prompt in enumerate(trace.prompts):
        add(engine, uid, prompt, NUM_NEW)
        computed += prompt.size - run(engine)[uid].num_tokens
        executor.plans.clear()
        executor.copies.clear()
    print(f"{len(trace.prompts)} prompts, {computed / needed:.3f} of the {needed} tokens computed that had to be")
    assert needed <= computed <= most * needed
