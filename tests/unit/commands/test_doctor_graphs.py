"""``hiserve doctor --graphs``: what it prints, and when it says that something is wrong."""

from __future__ import annotations

import json
import sys

import msgspec
import pytest
from rich.text import Text

from hiserve import cli
from hiserve.commands import doctor
from hiserve.commands.doctor import Answer, judge, run_on_device, show_graphs
from hiserve.ipc.messages import GraphReport, StepCheck
from tests.helpers.settings import settings_of
from tests.helpers.waiting import PATIENCE_S

ON_CPU = settings_of(device="cpu")
ON_CUDA = msgspec.structs.replace(ON_CPU, model=msgspec.structs.replace(ON_CPU.model, device="cuda"))
READY = StepCheck(kind="decode", ran="replay/decode", allocations=0.0, difference=0.001, problems=[])
LATE = msgspec.structs.replace(READY, kind="mixed", ran="eager/width", problems=["ran as eager/width"])


def report(*checks: StepCheck) -> GraphReport:
    return GraphReport(device="a GPU", num_nodes=7, checks=list(checks))


def test_a_machine_without_a_gpu_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--graphs"]) == 0
    (steps,) = capsys.readouterr().out.splitlines()
    assert steps.startswith("note steps") and "CPU" in steps


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--graphs", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["is_ready"] and answer["report"] is None and "CPU" in answer["not_run"]


def test_the_settings_graphs_is_read_too_and_json_is_of_graphs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--graphs", "some"]) == 1
    assert cli.main(["doctor", "--graphs", "decode", "--device", "cpu"]) == 1
    assert cli.main(["doctor", "--json"]) == 1
    some, cpu, alone = capsys.readouterr().err.splitlines()
    assert "give one of auto, off, decode, all" in some
    assert "--graphs is decode" in cpu
    assert "hiserve doctor --graphs --json" in alone


@pytest.mark.parametrize(
    ("told", "is_ready"), [(report(READY), True), (report(READY, LATE), False), ("no kernel image", False)]
)
def test_it_is_ready_when_no_step_is_wrong(
    told: GraphReport | str, is_ready: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = judge(ON_CUDA, lambda config: told)
    assert answer.is_ready == is_ready
    show_graphs(answer)
    out = Text.from_ansi(capsys.readouterr().out).plain
    assert ("fail" in out) == (not is_ready)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Answer) == answer


def test_a_problem_is_shown_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    late = msgspec.structs.replace(LATE, problems=["graph.py:3, x[rows].item() waits"])
    show_graphs(judge(ON_CUDA, lambda config: report(late)))
    assert "x[rows].item()" in capsys.readouterr().out


def test_on_the_cpu_nothing_is_run() -> None:
    def run_steps(config: object) -> GraphReport:
        raise AssertionError("there is no GPU")

    answer = judge(ON_CPU, run_steps)
    assert answer.is_ready and answer.not_run


def test_steps_run_in_another_process_and_what_it_dies_of_is_told() -> None:
    told = run_on_device(ON_CPU)
    assert isinstance(told, GraphReport)
    assert [(check.kind, check.problems) for check in told.checks] == [
        (kind, []) for kind in ("prefill", "decode", "verify", "mixed")
    ]
    broken = msgspec.structs.replace(ON_CPU, model=msgspec.structs.replace(ON_CPU.model, model="/no/such/folder"))
    assert "/no/such/folder" in str(run_on_device(broken))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("say('compiling'); say(''); sys.exit(3)", "compiling"),
        ("say('compiling'); time.sleep(3600)", "the steps did not end within"),
        ("sys.exit(3)", "it said nothing"),
        (
            "sys.stdin.read(); say('compiling'); print('ninja: no work to do'); print(report)",
            report(READY),
        ),
    ],
)
def test_what_the_other_process_says_is_passed_on_at_once(
    code: str, told: GraphReport | str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    intro = "import sys, time; say = lambda text: print(text, file=sys.stderr, flush=True); "
    given = f"report = {msgspec.json.encode(report(READY)).decode()!r}; "
    monkeypatch.setattr(doctor, "_GRAPHS_COMMAND", (sys.executable, "-I", "-S", "-c", intro + given + code))
    for limit_s in (1.0, 10.0, 100.0):  # in which a busy machine may not even start a process
        monkeypatch.setattr(doctor, "GRAPHS_TIMEOUT_S", limit_s if "3600" in code else PATIENCE_S)
        got, said = run_on_device(ON_CPU), capsys.readouterr()
        if "compiling" in said.err or "compiling" not in code:
            break
    assert got == (f"{told} {limit_s:g} s" if "3600" in code else told)
    assert ("compiling\n" in said.err) == ("compiling" in code) and not said.out
