"""No byte that a server reads is ever unpickled: in its source, and in its processes at work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import hiserve
from tests.e2e.live import COMMAND, Live, serve
from tests.helpers.waiting import PATIENCE_S
from tools.import_path import import_path

PACKAGE = Path(hiserve.__file__).parent
FORBIDDEN = re.compile(
    r"\b(?:import|from)\s+(?:_?pickle|dill|cloudpickle|joblib|shelve|marshal)\b|\btorch\.load\b|allow_pickle\s*=\s*True"
    r"|send_pyobj|recv_pyobj|multiprocessing"
)
# Runs first in every process of the server: whoever unpickles something is written down, with the way he came.
WATCH = """
import builtins, os, pickle, sys, traceback, _pickle

def note(line):
    with open({log!r}, "a") as log:
        log.write(f"{{os.getpid()}} {{line}}\\n")

def watched(name, made):
    if isinstance(made, type):
        def __init__(self, *args, **kwargs):
            note(f"REACHED {{name}} " + " < ".join(f"{{f.filename}}:{{f.lineno}}" for f in traceback.extract_stack()[-2:-9:-1]))
            made.__init__(self, *args, **kwargs)
        return type(made.__name__, (made,), {{"__init__": __init__}})
    def call(*args, **kwargs):
        note(f"REACHED {{name}} " + " < ".join(f"{{f.filename}}:{{f.lineno}}" for f in traceback.extract_stack()[-2:-9:-1]))
        return made(*args, **kwargs)
    return call

for module in (pickle, _pickle):
    for name in ("load", "loads", "Unpickler", "_Unpickler", "_load", "_loads"):
        if hasattr(module, name):
            setattr(module, name, watched(f"{{module.__name__}}.{{name}}", getattr(module, name)))

true_import = builtins.__import__

def watch_torch(*args, **kwargs):
    module = true_import(*args, **kwargs)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "load") and not hasattr(torch.load, "is_watched"):
        torch.load = torch.serialization.load = watched("torch.load", torch.load)
        torch.load.is_watched = True
        note("watches torch.load")
    return module

builtins.__import__ = watch_torch
note("watches pickle")
"""


def watching(folder: Path, *command: str) -> tuple[tuple[str, ...], Path]:
    """Returns the command with its processes watched, and the file where they are written down."""
    log = folder / "pickle.log"
    (folder / "sitecustomize.py").write_text(WATCH.format(log=str(log)))
    return ("env", f"PYTHONPATH={import_path(folder, PACKAGE.parent)}", *command), log


def test_no_source_of_the_package_names_what_unpickles() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import pickle; pickle.loads(pickle.dumps(1))", "pickle.loads"),
        ("import io, pickle; pickle.Unpickler(io.BytesIO(pickle.dumps(1))).load()", "pickle.Unpickler"),
        ("import io, torch; f = io.BytesIO(); torch.save(1, f); f.seek(0); torch.load(f)", "torch.load"),
    ],
)
def test_the_watch_sees_who_unpickles(code: str, name: str, tmp_path: Path) -> None:
    command, log = watching(tmp_path, sys.executable, "-c", code)
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    assert f"REACHED {name} " in log.read_text()


def use(live: Live) -> None:
    """Serves chats and completions, cached on every tier, with drafts and scores, and errors."""
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http:
        text = "I would like to book a table for two people at seven tonight, near the river. " * 4
        for _ in range(2):
            for number in range(8):
                body = {"prompt": f"{number} {text}", "max_tokens": 8, "logprobs": 2, "n": 2, "seed": 1}
                http.post("/v1/completions", json=body).raise_for_status()
        chat = {"messages": [{"role": "user", "content": text}], "stream": True}
        assert http.post("/v1/chat/completions", json=chat).text.endswith("data: [DONE]\n\n")
        assert http.post("/v1/completions", content=b"\x80\x04K\x01.").status_code == 400  # a pickle
        assert http.post("/tokenize", json={"prompt": text}).status_code == 200


def test_a_server_at_work_unpickles_nothing(tmp_path: Path) -> None:
    command, log = watching(tmp_path, *COMMAND)
    flags = (
        "--kv-pages",
        "60",
        "--max-model-len",
        "512",
        "--host-cache-gib",
        "0.02",
        "--store",
        f"file:{tmp_path}/store",
    )
    with serve(tmp_path, "--cpu-threads", "1", *flags, "--spec", "ngram", command=command, is_fork=False) as live:
        use(live)
        live.wait_idle()
        pids = live.pids()
    written = log.read_text().splitlines()
    assert {int(line.split()[0]) for line in written if line.endswith("watches pickle")} >= set(pids)
    assert {int(line.split()[0]) for line in written if line.endswith("watches torch.load")} == {pids[-1]}
    assert [line for line in written if "REACHED" in line] == []
