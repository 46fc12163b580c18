"""Orders to the other ranks of a group, and what they say."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.core.plan import BatchPlan, RowAdmit, StepFault, StepResult, TableWrites
from hiserve.core.startup_measurements import StartupMeasurements
from hiserve.core.step_faults import OUT_OF_MEMORY
from hiserve.core.transfers import CopyKind, PageCopy, PageRun, StoreLookup
from hiserve.engine import build, executor, group_facts, rank, ranks
from hiserve.engine.executor import Executor
from hiserve.engine.kv_event_sender import KvEventSender
from hiserve.engine.rank_messages import DrawOrder, Order, Ran, decode_from_rank, decode_to_rank, encode
from hiserve.engine.step_group import checksum_of
from hiserve.errors import ConfigError, EngineError, ModelError
from hiserve.ipc.frames import FrameSocket
from hiserve.ipc.kv_events import Change, Stored
from hiserve.runners.gate import Action, Decision, Reason
from tests.helpers.cache_paths import SMALL_MODEL, pool
from tests.helpers.rank_threads import rank_threads

GROUP: dict[str, Any] = SMALL_MODEL | pool(16) | {"tp": 2, "host_cache_gib": 0, "spec": "off"}
PROMPT = [*range(50, 65), *range(3000, 3015)]  # tokens of both ranks
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def in_threads() -> Iterator[None]:
    with rank_threads():
        yield


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def same(one: Any, other: Any) -> bool:
    """Whether two values of plans are equal, arrays with their types and shapes."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        fields = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in fields)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_plan_arrives_as_it_was_made() -> None:
    sampling = SamplingParams(seed=3, top_p=0.5, logit_bias={5: -1.0}, stop_token_ids=(4,))
    run = PageRun(ints(3), bytes(16), bytes(range(16)), [b"digest"], b"key", 7, 8)
    plan = BatchPlan(
        step_id=4,
        rows=ints(2, 1),
        num_new=ints(1, 3),
        num_draft=ints(0, 2),
        samples=np.array([True, False]),
        num_scored=ints(0, 0),
        max_len=ints(9, 7),
        num_propose=2,
        continuations=ints(1, 2, 3, 4, 5, 6).reshape(2, 3),
        release=ints(5),
        admit=(RowAdmit(1, ints(7, 8, 9), 2, 1, sampling, choice=1, restore_slot=2),),
        table=TableWrites(ints(1), ints(0), ints(4), ints(6), np.array([True])),
        host_retained=ints(3),
        host_retained_until_s=np.array([2**40]),
        copies=(
            PageCopy(9, CopyKind.OFFLOAD, ints(4), ints(3), 2, run),
            PageCopy(10, CopyKind.LOAD, ints(4), ints(3), 0),
        ),
        waits=(10,),
        lookups=(StoreLookup(11, [b"a", b"b"], 1, needs_tail=True),),
        relocation_version=12,
        may_replay=False,
        awaits_masks=True,
    )
    decision = Decision(Action.REPLAY, Reason.MIXED, (10,), 16, "greedy")
    ended = [(2, 2**32 - 1), (3, 0)]
    received = decode_to_rank(encode(Order(5, plan, decision, ended)))
    assert isinstance(received, Order)
    assert (received.number, received.decision, received.ended) == (5, decision, ended)
    assert same(received.plan, plan)
    draw = decode_to_rank(encode(DrawOrder(4, ints(0, -1), ints(1, 2, 3, 4).reshape(2, 2))))
    assert isinstance(draw, DrawOrder) and draw.masks is not None and draw.masks.tolist() == [[1, 2], [3, 4]]
    fault = StepFault(OUT_OF_MEMORY, "none left")
    assert decode_from_rank(encode(Ran(4, fault))) == Ran(4, fault)


def test_a_verdict_is_made_once_and_every_order_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gate has an opinion for each step; the other rank's would differ."""
    numbers, admitted = [], []
    monkeypatch.setattr(
        "hiserve.engine.executor.admit", lambda plan, *_, **__: admitted.append(plan.step_id) or _eager()
    )
    execute = rank.Follower.execute

    def noted(self: rank.Follower, order: Order, executor: Executor) -> None:
        numbers.append(order.number)
        execute(self, order, executor)

    monkeypatch.setattr(rank.Follower, "execute", noted)
    with LLM(**GROUP) as llm:
        llm.generate([PROMPT], [GREEDY])
    assert len(admitted) == len(set(admitted)) >= GREEDY.max_tokens  # type: ignore[operator]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= len(admitted)


@pytest.mark.parametrize(("action", "waits"), [(Action.REPLAY, (3, 5)), (Action.EAGER, (3, 5)), (Action.DEFER, ())])
def test_a_rank_waits_for_each_load_of_a_step_though_the_first_rank_has_seen_it_end(
    action: Action, waits: tuple[int, ...]
) -> None:
    one = ints(1)
    plan = BatchPlan(1, one, one, ints(0), np.array([True]), ints(0), max_len=one, waits=(3, 5))
    socket, other_end = FrameSocket.pair()
    follower = rank.Follower(socket)
    follower._order = Order(1, plan, Decision(action, Reason.DECODE, (5,)))
    decision = follower.settle(plan, _eager)
    assert decision is not None and (decision.action, decision.loads) == (action, waits)
    socket.close()
    other_end.close()


def result(step_id: int) -> StepResult:
    return StepResult(step_id, counts=ints(), tokens=ints()[:, None])


@pytest.fixture
def first() -> Iterator[tuple[ranks.Ranks, list[Any]]]:
    """A first rank without others, and its orders."""
    settings: Any = SimpleNamespace(parallel=SimpleNamespace(tp=1))
    made, orders = ranks.Ranks(settings, StartupMeasurements(), lambda: None), list[Any]()
    made._send = orders.append  # type: ignore[method-assign]
    yield made, orders
    made.close()


def test_the_first_rank_alone_looks_into_the_store(first: tuple[ranks.Ranks, list[Any]]) -> None:
    """No other one takes answers."""
    made, orders = first
    one, lookup = ints(1), StoreLookup(11, [b"a"], 1)
    plan = BatchPlan(1, one, one, ints(0), np.array([True]), ints(0), max_len=one, lookups=(lookup,))
    made.settle(plan, _eager)
    assert orders[0].plan.lookups == () and orders[0].plan.step_id == 1


def test_steps_in_flight_behind_one_that_failed_are_not_compared(first: tuple[ranks.Ranks, list[Any]]) -> None:
    made, orders = first
    made.take_result(result(2))
    made.void(3)
    last = 3 + executor.MAX_IN_FLIGHT
    for step_id in range(4, last + 2):
        made.take_result(result(step_id))
    one = ints(1)
    made.settle(BatchPlan(last + 2, one, one, ints(0), np.array([True]), ints(0), max_len=one), _eager)
    assert [step_id for step_id, _ in orders[0].ended] == [2, last + 1]


def _eager() -> Decision:
    return Decision(Action.EAGER, Reason.GRAPHS_OFF, sampling="greedy")


def test_an_order_that_is_missing_ends_the_rank_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "Order", lambda number, *others: Order(number + (number > 2), *others))
    with LLM(**GROUP) as llm, pytest.raises(EngineError, match=r"rank 1: AssertionError: order 4 after 2"):
        llm.generate([PROMPT], [GREEDY])


@pytest.mark.parametrize("where", ["tokens", "counts"])
def test_a_rank_whose_rows_got_other_tokens_ends_the_group(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """One token is another on the second rank, in the fourth step."""
    read_output, num_read = executor.read_output, 0

    def read(*arguments: Any) -> StepResult:
        nonlocal num_read
        result = read_output(*arguments)
        if threading.current_thread().name != "rank-1":
            return result
        num_read += 1
        return dataclasses.replace(result, **{where: getattr(result, where) + (num_read == 4)})

    monkeypatch.setattr(executor, "read_output", read)
    with LLM(**GROUP) as llm, pytest.raises(EngineError, match=r"rank 1: the tokens of step \d+ are not those of the"):
        llm.generate([PROMPT], [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)])


def test_a_step_may_end_while_earlier_ones_are_compared() -> None:
    """On CUDA another thread reads results."""

    class Step(int):
        """At its comparison with the step that is told, the next one ends."""

        def __gt__(self, other: int) -> bool:
            follower.take_result(result(2))
            return int(self) > int(other)

        def __le__(self, other: int) -> bool:
            follower.take_result(result(2))
            return int(self) <= int(other)

    socket, other_end = FrameSocket.pair()
    follower = rank.Follower(socket)
    follower.take_result(result(Step(1)))
    checksum = checksum_of(result(1))
    follower._compare([(1, checksum)])
    with pytest.raises(EngineError, match="the tokens of step 2 are not those"):
        follower._compare([(2, checksum + 1)])
    socket.close()
    other_end.close()


def test_events_do_not_depend_on_the_size_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """S12: the same changes with the same digests, each once."""
    told: dict[int, list[list[Change]]] = {1: [], 2: []}
    for size, batches in told.items():
        publisher = SimpleNamespace(put=batches.append, close=lambda: None, num_dropped=0)
        monkeypatch.setattr(build, "open_kv_events", lambda *_, publisher=publisher: KvEventSender(publisher))
        with LLM(**GROUP | {"tp": size}) as llm:
            for prompt in (PROMPT * 2, PROMPT, [*PROMPT, *range(100, 140)]):
                llm.generate([prompt], [GREEDY])
            llm.flush()
    stored = [change.digests for batch in told[1] for change in batch if isinstance(change, Stored)]
    assert len(stored) == len(set(stored)) >= 3
    assert told[2] == told[1]


def test_a_rank_that_cannot_start_gives_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ModelError("the weights are gone.")

    monkeypatch.setattr(rank, "load_half", refuse)
    with pytest.raises(ModelError, match=r"rank 1: the weights are gone"):
        LLM(**GROUP)
    assert "rank 1: the weights are gone" in caplog.text  # a worker may end before it can report


def test_ranks_that_differ_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rank, "facts_of", lambda *arguments: group_facts.facts_of(*arguments) | {"device": "another one"}
    )
    with pytest.raises(ConfigError, match=r"rank 1 of --tp 2 has device another one, and rank 0 has cpu"):
        LLM(**GROUP)
