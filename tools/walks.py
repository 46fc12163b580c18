"""Counts the files of hiserve that run during one act: how much a reader opens to follow it.

    python -m tools.walks [--device cuda] [TREE ...]

Each tree is a checkout whose server this interpreter can run. Every process of the server records the files whose functions it calls, between
two marks. An act beyond a chat counts the files that run in addition to those of the chat. On a GPU the acts are a chat without
graphs, and one whose steps are replayed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tools.import_path import import_path

RECORDER = """
import pathlib, sys, threading, time
HOME, TREE = pathlib.Path({home!r}), {tree!r}
seen = set()
def record(frame, event, arg):
    if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(TREE):
        seen.add(frame.f_code.co_filename)
def answer():
    import os
    done = 0
    while True:
        time.sleep(0.02)
        if (HOME / f"mark-{{done + 1}}").exists():
            done += 1
            (HOME / f"{{done}}-{{os.getpid()}}").write_text("\\n".join(list(seen)))
            seen.clear()
threading.Thread(target=answer, daemon=True).start()
threading.setprofile(record)
sys.setprofile(record)
"""
SETTLE_S = 1.5  # every process answers a mark within this time, also while the recorder slows it down
PORT = 8731
SYSTEM = "You help customers of a small coffee shop. Be short, polite and precise. "


@dataclass
class Server:
    """A running server whose processes answer marks."""

    process: subprocess.Popen[bytes]  # of ``hiserve serve``
    home: Path  # where marks and answers lie
    tree: Path  # its checkout
    num_marks: int = 0  # set so far

    def mark(self) -> set[str]:
        """Returns the files that ran since the last mark, relative to the package."""
        self.num_marks += 1
        (self.home / f"mark-{self.num_marks}").touch()
        time.sleep(SETTLE_S)
        texts = [path.read_text() for path in self.home.glob(f"{self.num_marks}-*")]
        return {
            str(Path(line).relative_to(self.tree / "hiserve")) for text in texts for line in text.split("\n") if line
        }

    def chat(self, text: str, max_tokens: int = 12) -> None:
        """Streams one reply to its end."""
        body = {
            "model": "hiserve-nano",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            assert "[DONE]" in "".join(response.iter_text())


@contextlib.contextmanager
def serve(tree: Path, device: str, *flags: str) -> Iterator[Server]:
    """Starts a server of a tree on a device with the recorder in each of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "sitecustomize.py").write_text(RECORDER.format(home=str(home), tree=str(tree / "hiserve")))
        environment = os.environ | {"PYTHONPATH": import_path(home, tree)}
        flags = ("--port", str(PORT), "--device", device, "--cpu-threads", "1", "--log-level", "error", *flags)
        command = [sys.executable, "-c", "import sys; from hiserve.cli import main; sys.exit(main())", "serve", *flags]
        process = subprocess.Popen(command, env=environment, cwd=home)
        try:
            for _ in range(1200):
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{PORT}/ready", timeout=5).status_code == 200:
                        break
                assert process.poll() is None, f"the server of {tree} ended with {process.returncode}"
                time.sleep(0.1)
            server = Server(process, home, tree)
            server.chat("A first request pays for what is imported late.")
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def chat(server: Server) -> None:
    server.chat("Hello, I would like to order two coffees, please.")


def host_load(server: Server) -> None:
    """The device has room for one prompt; the first one comes back from the host."""
    for number in (1, 2, 3, 1):
        server.chat(f"{number} " + SYSTEM * 20)


def death(server: Server) -> None:
    """The worker is killed during a reply."""
    url = f"http://127.0.0.1:{PORT}/server_info"
    (worker,) = httpx.get(url, timeout=30).json()["workers"]
    killer = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.5; kill -9 {worker['pid']}"])
    server.chat("Tell me about tea.", max_tokens=400)
    killer.wait()


PLAIN = ("--spec", "off", "--host-cache-gib", "0")
Acts = dict[str, tuple[tuple[str, ...], Callable[[Server], None]]]  # by name: flags of the server, and the act
ON_CPU: Acts = {
    "chat": (PLAIN, chat),
    "host load": (
        ("--spec", "off", "--host-cache-gib", "0.05", "--kv-pages", "48", "--max-model-len", "700"),
        host_load,
    ),
    "draft and verify": (("--spec", "eagle3", "--spec-steps", "3", "--host-cache-gib", "0"), chat),
    "death of a worker": (PLAIN, death),
}
FEW_ROWS = (*PLAIN, "--max-running-requests", "4")
ON_CUDA: Acts = {
    "chat": ((*FEW_ROWS, "--graphs", "off"), chat),
    "replay": ((*FEW_ROWS, "--graphs", "decode"), chat),
}


def files_of(tree: Path, device: str) -> dict[str, set[str]]:
    """Returns the files of each act; beyond a chat, those that it has in addition."""
    found: dict[str, set[str]] = {}
    for name, (flags, act) in (ON_CPU if device == "cpu" else ON_CUDA).items():
        with serve(tree, device, *flags) as server:
            server.mark()
            act(server)
            files = server.mark()
            found[name] = files - found.get("chat", set())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path()])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--names", action="store_true", help="print the files")
    arguments = parser.parse_args()
    for tree in arguments.trees:
        for name, files in files_of(tree.resolve(), arguments.device).items():
            rooms = Counter(file.split("/")[0] for file in files)
            print(f"{tree}: {name}: {len(files)} files", dict(rooms.most_common()))
            if arguments.names:
                print("\n".join(f"  {file}" for file in sorted(files)))


if __name__ == "__main__":
    main()
