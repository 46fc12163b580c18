"""``/debug/rows`` and ``/debug/steps``: what they show, in which forms, what they refuse."""

from __future__ import annotations

import msgspec
import pytest

from hiserve.ipc.watching import RowFacts, StepRecord, WorkerView
from hiserve.server.management import debug
from tests.unit.server.conftest import Server

ROW = RowFacts(1, 9, "decode", 20, 16, "host", 22, 3, 6, 2, 1, 0, True, 4, 3)


def step_of(number: int, end_s: float, decision: str = "replay") -> StepRecord:
    return StepRecord(
        number, end_s - 0.25, end_s, 2, 9, 7, 2, 1, 1, decision, "decode" if decision else "", 0.001, 1, ""
    )


async def test_rows_are_shown_by_replica(server: Server) -> None:
    server.engine.views = [WorkerView(0, 2, 5.0, [ROW]), WorkerView(1, 1, 5.0)]
    shown = msgspec.json.decode((await server.get("/debug/rows")).text, type=debug.Rows)
    assert [(each.replica, each.incarnation, each.rows) for each in shown.replicas] == [(0, 2, [ROW]), (1, 1, [])]
    assert server.engine.watched == [("rows", 0.0)]


async def test_steps_that_the_next_question_would_show_again_wait_for_it(server: Server) -> None:
    early, late = step_of(3, 4.5), step_of(4, 5.5)
    server.engine.views = [WorkerView(0, 1, 5.0, [], [early]), WorkerView(1, 1, 6.0, [], [early, late])]
    shown = msgspec.json.decode((await server.get("/debug/steps?since=4.2500000000000009")).text, type=debug.Steps)
    assert shown.until_s == 5.0
    assert [each.steps for each in shown.replicas] == [[early], [early]]
    assert server.engine.watched == [("steps", 4.2500000000000009)]


async def test_a_trace_of_chrome_has_a_slice_for_each_step_and_a_process_for_each_worker(server: Server) -> None:
    steps = [step_of(3, 4.5), step_of(4, 5.5, decision="")]
    server.engine.views = [WorkerView(0, 1, 5.0, [], steps), WorkerView(1, 1, 5.0)]
    events = (await server.get("/debug/steps?format=chrome")).json["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(each["name"], each["pid"], each["ts"], each["dur"]) for each in slices] == [
        ("replay decode", 0, 4_250_000, 250_000),
        ("copies", 0, 5_250_000, 250_000),
    ]
    assert msgspec.convert(slices[0]["args"], StepRecord) == steps[0]
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"rows": 2}] * 2
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["worker 0", "worker 1"]


async def test_without_a_worker_nothing_is_shown(server: Server) -> None:
    assert (await server.get("/debug/rows")).json == {"replicas": []}
    assert (await server.get("/debug/steps?since=3")).json == {"until_s": 0.0, "replicas": []}


@pytest.mark.parametrize("since", ["", "-1", "x", "1e5", "nan", "inf", "1.", "٣", "9" * 5000])
async def test_a_time_that_is_none_is_refused(server: Server, since: str) -> None:
    call = await server.get(f"/debug/steps?since={since}")
    assert (call.status, call.json["error"]["param"]) == (400, "since")
    assert not server.engine.watched


@pytest.mark.parametrize("form", ["", "xml", "Chrome"])
async def test_a_format_that_is_none_is_refused_with_those_that_are(server: Server, form: str) -> None:
    call = await server.get(f"/debug/steps?format={form}")
    assert (call.status, call.json["error"]["message"]) == (400, "format must be one of json, chrome.")
    assert not server.engine.watched


async def test_a_worker_that_does_not_answer_is_a_503(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiserve.server.engine_handle.ANSWER_TIMEOUT_S", 0.01)
    server.engine.hangs = True
    for path in ("/debug/rows", "/debug/steps"):
        assert (await server.get(path)).status == 503
