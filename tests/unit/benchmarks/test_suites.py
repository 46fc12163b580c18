"""What the recorded suites share: their result file, their conversations, and the differences of an engine's counters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.drive import Conversations, gate_between, visit
from benchmarks.kernels import copy
from benchmarks.record import Record, gpu_parser
from hiserve.bench.http import Pool
from hiserve.bench.load_client import BACKENDS, Client, RequestDefaults
from hiserve.core.transfers import CopyKind


def test_a_record_holds_what_is_said_of_the_run_and_every_figure_that_was_there_when_it_was_saved(
    tmp_path: Path,
) -> None:
    given = gpu_parser(None).parse_args([str(tmp_path / "out.json"), "abc1234", "--tiny"])
    record = Record.of(given, "python -m benchmarks.x OUT.json COMMIT", "benchmarks/record.py")
    record |= {"parts": {}}
    record["parts"]["first"] = 1
    record.save()
    found = json.loads(given.out.read_text())
    assert found == dict(record)
    assert (found["commit"], found["parts"]) == ("abc1234", {"first": 1})
    assert found["measured"]["paths"] == ["benchmarks/record.py"]


def test_copies_are_measured_against_the_ceiling_of_their_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA alone; the names of copies are those of its ceilings, of its bars and of the page of figures."""

    class Subject:
        page_bytes, start_s = 1 << 16, (1e-6,)

        def orders(self, kind: CopyKind, order_bytes: int, *, adjacent: bool = False) -> list[CopyKind]:
            return [kind]

        def rate(self, make: Callable[[], list[CopyKind]]) -> float:
            return 45.0 * len(make())

    rates = {"pinned_to_device_bytes_per_s": 50.0, "device_to_pinned_bytes_per_s": 90.0}
    monkeypatch.setattr(copy, "link_rates", lambda num_bytes: rates)
    monkeypatch.setattr(copy, "slowdown", lambda subject: {})
    found = copy.measure_shape(Subject(), copy.ceiling())  # type: ignore[arg-type]
    assert (found["load_anywhere"]["of_ceiling"], found["offload_anywhere"]["of_ceiling"]) == (0.9, 0.5)
    assert found["both_at_once"]["of_ceiling"] == 90 / 140


def test_a_counter_of_the_gate_that_was_not_there_before_counts_whole() -> None:
    before = {"replay": {"decode": 5}}
    after = {"replay": {"decode": 7, "mixed": 2}, "eager": {"tokens": 1}}
    assert gate_between(before, after) == {"replay": {"decode": 2, "mixed": 2}, "eager": {"tokens": 1}}


def test_every_conversation_has_a_history_and_something_new_for_each_later_turn() -> None:
    case = Conversations(conversations=3, group=2, history=10, turn_input=4, turn_output=2, turns=3)
    first, later = case.texts(lambda length: np.zeros(length, dtype=np.int32))
    assert [len(each) for each in first] == [10] * 3
    assert [[len(each) for each in turn] for turn in later] == [[4] * 3] * 2
    assert len(case.texts(np.zeros, count=5)[0]) == 5  # type: ignore[arg-type]


def test_a_later_turn_sends_what_was_said_and_what_is_new() -> None:
    class Seen:
        def __init__(self, prompt: np.ndarray, num_new: int) -> None:
            self.prompt, self.tokens, self.cached = prompt, [9] * num_new, None

    class Fake:
        def __init__(self) -> None:
            self.sent: list[list[int]] = []

        def add(self, prompt: np.ndarray, num_new: int) -> Seen:
            self.sent.append(prompt.tolist())
            return Seen(prompt, num_new)

        def finish(self, *requests: Seen) -> None:
            pass

    case = Conversations(conversations=2, group=1, history=2, turn_input=1, turn_output=1, turns=2)
    drive, numbers = Fake(), iter(range(1, 100))
    groups = visit(drive, case, case.texts(lambda n: np.array([next(numbers) for _ in range(n)], dtype=np.int32)))  # type: ignore[arg-type]
    assert drive.sent == [[1, 2], [3, 4], [1, 2, 9, 5], [3, 4, 9, 6]]
    assert [(group["turn"], group["input_tokens"]) for group in groups] == [(0, 2), (0, 2), (1, 4), (1, 4)]


@pytest.mark.parametrize("fields", [{"cache_salt": "a"}, {"seed": 3, "temperature": 0.8}])
def test_a_client_may_ask_for_something_else_than_the_one_it_came_from(fields: dict[str, object]) -> None:
    client = Client(Pool("http://127.0.0.1:1"), BACKENDS["openai"](), RequestDefaults(model="m"), 1.0)
    other = client.asking_for(**fields)
    assert {name: getattr(other.asking, name) for name in fields} == fields
    assert client.asking == RequestDefaults(model="m")
