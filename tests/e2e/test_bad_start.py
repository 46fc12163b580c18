"""``hiserve serve`` on something that cannot be served: one clear line, exit code 1, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.live import COMMAND
from tests.helpers import forks
from tests.helpers.models import save_llama
from tests.helpers.processes import wait_dead
from tests.helpers.tiny_text import TEMPLATE, byte_level_backend
from tests.helpers.waiting import PATIENCE_S

WEIGHTS = "model.safetensors"
MISSING = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that could be served."""
    folder = save_llama(tmp_path_factory.mktemp("healthy"), vocab_size=401, eos_token_id=1)
    byte_level_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "<|bos|>"}))
    return folder


@pytest.fixture
def model(healthy: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(healthy, tmp_path / "model"))


class Attempt:
    """One start of the server, over.

    Args:
        scratch: For everything temporary of all its processes.
        argv: After ``hiserve``.
        is_fork: As for ``live.serve``.
    """

    def __init__(self, scratch: Path, *argv: str, is_fork: bool = True) -> None:
        scratch.mkdir()
        environment = os.environ | {"TMPDIR": str(scratch)}
        if is_fork:
            done = forks.run([*COMMAND, *argv], environment)
        else:
            done = subprocess.run(
                [*COMMAND, *argv], capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False
            )
            wait_dead(pids_with(f"TMPDIR={scratch}"))
        self.returncode, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr
        assert list(scratch.iterdir()) == [], "something temporary was left behind"

    def refusal(self) -> str:
        """Returns the one line it must have said."""
        assert self.returncode == 1, self.stderr
        assert self.stdout == ""
        assert self.stderr.startswith("hiserve: "), self.stderr
        assert self.stderr.count("\n") == 1, self.stderr
        return self.stderr


def pids_with(variable: str) -> list[int]:
    """Returns the processes that have this in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
        except OSError:  # it ended, or is not ours
            continue
    return found


def serve(tmp_path: Path, *argv: str) -> Attempt:
    return Attempt(tmp_path / "scratch", "serve", *argv, "--port", "0", "--log-level", "warning")


# --- known before any other process starts ------------------------------------------------------


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    place = str(tmp_path / "nowhere")
    line = serve(tmp_path, place).refusal()
    assert place in line
    assert "config.json" in line


def test_an_architecture_nobody_serves(tmp_path: Path, model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"architectures": ["BertModel"]}))
    line = serve(tmp_path, str(model)).refusal()
    for name in ("BertModel", "LlamaForCausalLM", "Qwen3ForCausalLM"):
        assert name in line


def test_a_tokenizer_that_is_missing(tmp_path: Path, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    line = serve(tmp_path, str(model)).refusal()
    assert str(model) in line
    assert "tokenizer.json" in line


def test_a_port_in_use(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        line = Attempt(tmp_path / "scratch", "serve", str(model), "--port", port).refusal()
    assert port in line
    assert "--port" in line


def test_more_pages_than_memory(tmp_path: Path, model: Path) -> None:
    line = serve(tmp_path, str(model), "--kv-pages", "2000000000").refusal()
    assert "2000000000" in line
    assert "Lower --kv-pages" in line


def test_a_host_cache_larger_than_memory(tmp_path: Path, model: Path) -> None:
    line = serve(tmp_path, str(model), "--device", "cpu", "--host-cache-gib", "60000").refusal()
    assert "needs 60000.00 GiB but" in line
    assert "Lower --host-cache-gib" in line


def test_a_name_of_a_host_cache_that_is_a_path(tmp_path: Path, model: Path) -> None:
    line = serve(tmp_path, str(model), "--host-cache-name", "../x").refusal()
    assert "--host-cache-name is '../x'" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there(tmp_path: Path, model: Path) -> None:
    line = serve(tmp_path, str(model), "--device", "cuda").refusal()
    assert "no CUDA device" in line
    assert "--device cpu" in line


def test_a_flag_nobody_knows(tmp_path: Path, model: Path) -> None:
    line = serve(tmp_path, str(model), "--kv-page", "7").refusal()
    assert "'--kv-page'" in line
    assert "--kv-pages?" in line


# --- known to the worker -------------------------------------------------------------------------


@pytest.mark.wide  # the test of the usual log level has the same line
def test_a_tensor_that_is_missing(tmp_path: Path, model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    del tensors[MISSING]
    save_file(tensors, model / WEIGHTS)
    line = serve(tmp_path, str(model)).refusal()
    assert MISSING in line
    assert str(model) in line


def test_a_tensor_nobody_asked_for(tmp_path: Path, model: Path) -> None:
    save_file(load_file(model / WEIGHTS) | {"model.surprise.weight": torch.zeros(3)}, model / WEIGHTS)
    assert "model.surprise.weight" in serve(tmp_path, str(model)).refusal()


@pytest.mark.parametrize(
    "flags", [pytest.param([], id="plain", marks=pytest.mark.wide), pytest.param(["--debug"], id="debug")]
)
def test_a_file_that_was_cut_short(tmp_path: Path, model: Path, flags: list[str]) -> None:
    whole = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    attempt = serve(tmp_path, str(model), *flags)
    if not flags:
        line = attempt.refusal()
    else:  # where it happened, in this process and in the worker
        assert attempt.returncode == 1
        assert attempt.stderr.count("Traceback") >= 2
        assert "weights.py" in attempt.stderr
        line = attempt.stderr.splitlines()[-1]
    assert line.startswith("hiserve: ")
    assert WEIGHTS in line
    assert "damaged" in line


def test_at_the_usual_log_level_the_line_is_the_last_and_there_is_no_traceback(tmp_path: Path, model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    del tensors[MISSING]
    save_file(tensors, model / WEIGHTS)
    attempt = Attempt(tmp_path / "scratch", "serve", str(model), "--port", "0", is_fork=False)
    assert attempt.returncode == 1
    assert "Traceback" not in attempt.stderr
    assert MISSING in attempt.stderr.splitlines()[-1]


# --- the same for the other commands --------------------------------------------------------------


def test_the_plan_of_a_folder_that_is_missing(tmp_path: Path) -> None:
    place = str(tmp_path / "nowhere")
    assert place in Attempt(tmp_path / "scratch", "config", place).refusal()


def test_a_chat_with_a_folder_that_is_missing(tmp_path: Path) -> None:
    place = str(tmp_path / "nowhere")
    attempt = Attempt(tmp_path / "scratch", "chat", place)
    assert attempt.returncode == 1
    first, last = attempt.stderr.splitlines()  # what its server said, and that there is none
    assert place in first
    assert last == "hiserve: the server did not start."


def test_the_offline_api_raises_what_the_worker_found(tmp_path: Path, model: Path) -> None:
    (model / WEIGHTS).write_bytes(b"short")
    program = (
        "import sys, warnings\nfrom hiserve import LLM\nfrom hiserve.errors import ModelError\n"
        "warnings.simplefilter('error')\n"
        "for in_process in (True, False):\n"
        "    try:\n        LLM(sys.argv[1], in_process=in_process)\n"
        "    except ModelError as error:\n        print(error.message)\n"
    )
    done = forks.run([sys.executable, "-c", program, str(model)], os.environ)
    assert done.stderr == ""
    assert [WEIGHTS in line for line in done.stdout.splitlines()] == [True, True]
