"""When requests are sent: arrivals by rate and seed, limits, sessions, think times."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from hiserve.bench import load
from hiserve.bench.load import SoFar, arrivals, drive, drive_in_groups
from hiserve.bench.workload import Prompt, Run, Sample, Turn, Workload
from tests.helpers.virtual_time import CPU_SHARE, clocks, in_virtual_time


@pytest.fixture(autouse=True)
def virtual_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "time", CLOCKS)


CLOCKS = clocks()


def workload(*sessions: list[Turn]) -> Workload:
    return Workload(name="test", sessions=list(sessions))


def single(count: int) -> Workload:
    return workload(*([Turn(prompt=str(index), max_tokens=1)] for index in range(count)))


class Server:
    """Answers each prompt after a time; remembers who was there when."""

    def __init__(self, reply_s: float = 0.0, ids: list[int] | None = None) -> None:
        self.reply_s = reply_s
        self.ids = ids or []
        self.prompts: list[Prompt] = []
        self.num_open = self.most_open = 0

    async def send(self, prompt: Prompt, max_tokens: int, sample: Sample) -> None:
        self.prompts.append(prompt)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        sample.begin_s = CLOCKS.perf_counter()
        await asyncio.sleep(self.reply_s)
        sample.end_s = CLOCKS.perf_counter()
        sample.output_ids = list(self.ids)
        self.num_open -= 1


def offsets(run: Run) -> list[float]:
    return [sample.begin_s - run.begin_s for sample in run.samples]


def test_arrivals_have_the_rate_and_follow_the_seed() -> None:
    many = single(4000)
    times = arrivals(many, rate=50.0, burstiness=1.0, seed=42)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as Poisson's are
    assert times == arrivals(many, rate=50.0, burstiness=1.0, seed=42)
    assert times != arrivals(many, rate=50.0, burstiness=1.0, seed=43)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_changes_the_variation_and_not_the_rate(burstiness: float, variation: float) -> None:
    gaps = np.diff(arrivals(single(8000), rate=50.0, burstiness=burstiness, seed=42))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1)


def test_the_rate_is_of_requests_whatever_the_sessions() -> None:
    sessions = workload(*([Turn(prompt="x", max_tokens=1)] * 4 for _ in range(2000)))
    assert np.diff(arrivals(sessions, rate=50.0, burstiness=1.0, seed=42)).mean() == pytest.approx(4 / 50, rel=0.1)


def test_an_infinite_rate_begins_everything_at_once() -> None:
    assert arrivals(single(3), rate=math.inf, burstiness=1.0, seed=42) == [0.0] * 3


@in_virtual_time
async def test_requests_are_sent_at_their_times() -> None:
    server = Server()
    run = await drive(single(3), server.send, starts=[0.0, 0.05, 0.1])
    assert offsets(run) == pytest.approx([0.0, 0.05, 0.1], abs=1e-6)
    assert [sample.due_s - run.begin_s for sample in run.samples] == pytest.approx([0.0, 0.05, 0.1], abs=1e-6)
    assert run.end_s - run.begin_s == pytest.approx(0.1)
    assert run.client_cpu_s == pytest.approx(CPU_SHARE * (run.end_s - run.begin_s))


@in_virtual_time
async def test_a_limit_holds_requests_back_and_their_own_time_starts_then() -> None:
    server, done = Server(0.03), []
    run = await drive(single(6), server.send, starts=[0.0] * 6, max_concurrency=2, on_done=done.append)
    assert server.most_open == 2
    assert sorted(sample.session for sample in done) == list(range(6))
    waits = [sample.begin_s - sample.due_s for sample in run.samples]
    assert waits == pytest.approx([0, 0, 0.03, 0.03, 0.06, 0.06], abs=1e-6)
    assert all(sample.end_s - sample.begin_s < 0.06 for sample in run.samples)


@in_virtual_time
async def test_without_a_limit_all_are_in_flight() -> None:
    server = Server(0.03)
    await drive(single(20), server.send, starts=[0.0] * 20)
    assert server.most_open == 20


@in_virtual_time
async def test_a_session_waits_for_its_reply_and_thinks() -> None:
    turns = [Turn(prompt="a", max_tokens=1), Turn(prompt="b", max_tokens=1, think_s=0.05)]
    run = await drive(workload(turns), Server(0.04).send, starts=[0.0])
    assert offsets(run) == pytest.approx([0.0, 0.09], abs=1e-6)
    assert [(sample.session, sample.turn) for sample in run.samples] == [(0, 0), (0, 1)]


@in_virtual_time
async def test_recorded_times_are_kept_unless_the_session_is_late() -> None:
    quick = [Turn(prompt="a", max_tokens=1, at_s=0.02), Turn(prompt="b", max_tokens=1, at_s=0.12)]
    slow = [Turn(prompt="c", max_tokens=1, at_s=0.0), Turn(prompt="d", max_tokens=1, at_s=0.01)]
    run = await drive(workload(quick, slow), Server(0.06).send, starts=[0.0, 0.0])
    assert offsets(run) == pytest.approx([0.02, 0.12, 0.0, 0.06], abs=1e-6)
    assert all(sample.begin_s - sample.due_s < 0.03 for sample in run.samples)  # waiting for a reply is not late


@in_virtual_time
async def test_a_chat_grows_by_its_replies() -> None:
    def new(*ids: int) -> Turn:
        return Turn(prompt=np.array(ids, dtype=np.int32), max_tokens=1, extends=True)

    server = Server(ids=[9])
    await drive(workload([new(1, 2), new(3), new(4)]), server.send, starts=[0.0])
    assert [np.asarray(prompt).tolist() for prompt in server.prompts] == [[1, 2], [1, 2, 9, 3], [1, 2, 9, 3, 9, 4]]


@in_virtual_time
async def test_samples_stand_in_the_order_of_the_workload() -> None:
    server = Server()
    run = await drive(single(5), server.send, starts=[0.04, 0.03, 0.02, 0.01, 0.0])
    assert server.prompts == ["4", "3", "2", "1", "0"]
    assert [sample.session for sample in run.samples] == [0, 1, 2, 3, 4]


@in_virtual_time
async def test_groups_are_visited_in_turn_and_grow_by_their_replies() -> None:
    def new(*ids: int) -> Turn:
        return Turn(prompt=np.array(ids, dtype=np.int32), max_tokens=1, extends=True)

    server, done = Server(0.01, ids=[9]), []
    sessions = [[new(1), new(11)], [new(2), new(12)], [new(3)]]
    run = await drive_in_groups(workload(*sessions), server.send, group_size=2, on_done=done.append)
    sent = [np.asarray(prompt).tolist() for prompt in server.prompts]
    assert sent == [[1], [2], [3], [1, 9, 11], [2, 9, 12]]
    assert server.most_open == 2
    assert len(done) == 5
    assert [(sample.session, sample.turn) for sample in run.samples] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    first, again, _, _, alone = run.samples
    assert first.end_s <= alone.begin_s and alone.end_s <= again.begin_s
    assert all(sample.begin_s - sample.due_s < 0.01 for sample in run.samples)


@pytest.mark.parametrize("in_groups", [False, True])
@in_virtual_time
async def test_a_run_that_is_stopped_early_keeps_what_was_sent(in_groups: bool) -> None:
    class Stuck(Server):
        """Answers one request, and then nobody."""

        async def send(self, prompt: Prompt, max_tokens: int, sample: Sample) -> None:
            self.reply_s = 0 if not self.prompts else 3600
            if len(self.prompts) == 2:
                asyncio.get_running_loop().call_soon(running.cancel)
            await super().send(prompt, max_tokens, sample)

    server = Stuck()
    drive_it = (
        drive_in_groups(single(5), server.send, group_size=3)
        if in_groups
        else drive(single(5), server.send, starts=[0.0, 0.0, 0.0, 3600.0, 3600.0])
    )
    running = asyncio.create_task(drive_it)
    run = await running
    assert [sample.error for sample in run.samples] == ["", "interrupted", "interrupted"]
    assert run.num_unsent == 2 and run.is_partial
    assert not (await drive(single(2), Server().send, starts=[0.0, 0.0])).is_partial


def test_what_was_measured_so_far_is_told_after_each_request() -> None:
    words: list[str] = []
    so_far = SoFar(words.append)
    fine = {"begin_s": 10.0, "chunk_s": [10.25], "end_s": 12.0, "num_output": 20, "num_prompt": 100, "num_cached": 50}
    so_far.add(Sample(**fine))
    so_far.add(Sample(begin_s=10.0, end_s=12.0, error="http 500"))
    assert words == ["10 tokens/s, TTFT 250 ms, 50% cached", "10 tokens/s, TTFT 250 ms, 50% cached, 1 failed"]
