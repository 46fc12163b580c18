"""Benchmarks of a GPU in one go: none stops another, what each had written is kept, and their commands are ones that exist."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import gpu_bench
from tools.gpu_bench import COMMIT, JOBS, OUT, Job, run_all, table, unpack

ROOT = Path(__file__).parents[3]
WRITES = "import sys; open(sys.argv[1], 'w').write('{\"at\": \"' + sys.argv[2] + '\"}'); print('wrote it')"
LIMIT_S = 123.0
HANGS = """
import json, os, subprocess, sys, time
os.chdir(os.path.dirname(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)"])
with open("written", "w") as file:
    json.dump([child.pid], file)
os.rename("written", sys.argv[1])
time.sleep(999)
"""


def job(name: str, program: str, expected_s: float = 1.0) -> Job:
    return Job(name, ("-c", program, OUT, COMMIT), expected_s, tiny=())


def test_a_benchmark_that_fails_stops_no_other_and_all_that_was_found_is_kept(tmp_path: Path) -> None:
    jobs = [job("fails", "raise SystemExit('no luck')"), job("writes", WRITES), job("bar", WRITES + "; sys.exit(1)")]
    ran = run_all(jobs, tmp_path / "out", "abc1234", within_s=600.0, tiny=False)
    assert [each.ended for each in ran.values()] == ["ended 1", "ended 0", "ended 1"]
    assert [each.result for each in ran.values()] == [None, {"at": "abc1234"}, {"at": "abc1234"}]
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["bar"]["result"] == {"at": "abc1234"} and written["fails"]["result"] is None
    told = table(ran, tmp_path / "out")
    assert "no luck" in told and "--- writes" not in told, "of those that failed what they printed"
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["log.txt", "results.json"]
    assert unpack(tmp_path / "out", tmp_path) == ["writes", "bar"]
    assert json.loads((tmp_path / "writes.json").read_text()) == {"at": "abc1234"}


def test_one_that_hangs_is_ended_with_what_it_started_and_what_it_wrote_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(subprocess.Popen[bytes]):
        """Its time is over as soon as it has written its result, however long that took."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout != LIMIT_S or HANGS not in self.args:  # type: ignore[operator]
                return super().wait(timeout)
            while not Path(self.args[-2]).exists():  # type: ignore[index, arg-type]
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(Job, "limit_s", LIMIT_S)
    monkeypatch.setattr(subprocess, "Popen", Impatient)
    ran = run_all([job("hangs", HANGS), job("writes", WRITES)], tmp_path, "abc", within_s=600.0, tiny=False)
    assert [each.ended for each in ran.values()] == [f"stopped after {LIMIT_S:.0f} s", "ended 0"]
    (started,) = ran["hangs"].result
    stat = Path(f"/proc/{started}/stat")
    assert not stat.exists() or stat.read_text().rpartition(") ")[2][0] == "Z", "what it started runs on"


def test_what_would_not_end_in_time_is_left_out_and_told(tmp_path: Path) -> None:
    ran = run_all([job("long", WRITES, 900.0), job("short", WRITES)], tmp_path, "abc", within_s=300.0, tiny=False)
    assert ran["long"].ended.startswith("left out") and ran["long"].result is None
    assert ran["short"].ended == "ended 0"


@pytest.mark.parametrize("each", JOBS, ids=lambda each: each.name)
def test_every_command_is_one_that_its_program_takes(
    each: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of pytest select files that exist; the others are parsed up to a flag that nobody has, which ends them."""
    if each.command[1] == "tools.gpu_suite":
        selected = each.command[each.command.index("--") + 1 :]
        files = [word.removeprefix("--ignore=") for word in selected if "tests/" in word]
        assert files and all((ROOT / file).exists() for file in files), files
        return
    module, *arguments = each.command[1:]
    places = {OUT: "/nonexistent/out.json", COMMIT: "abc1234"}
    words = [module, *(places.get(word, word) for word in arguments), *(each.tiny or ()), "--no-such-flag"]
    monkeypatch.setattr(sys, "argv", words)
    found = importlib.import_module(module)
    program = importlib.import_module(f"{module}.__main__") if hasattr(found, "__path__") else found
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err.splitlines()[-1], shlex.join(words)


def test_each_file_of_the_suite_is_in_one_of_its_parts() -> None:
    parts = {each.name: each.command for each in JOBS if each.command[1] == "tools.gpu_suite"}
    named = [word for command in parts.values() for word in command if word.startswith("tests/gpu/test_")]
    left_out = [word.removeprefix("--ignore=") for word in parts["suite_gpu_rest"] if word.startswith("--ignore=")]
    assert sorted(named) == sorted(set(left_out)), "the rest is what no other part has"
    assert {"tests/gpu", "tests/contract"} < set(parts["suite_gpu_rest"])


def test_names_are_told_apart_and_each_fits_into_one_command_of_ten_minutes() -> None:
    assert len({each.name for each in JOBS}) == len(JOBS)
    assert all(each.expected_s <= 540 for each in JOBS)
    assert gpu_bench.END_S < 60
