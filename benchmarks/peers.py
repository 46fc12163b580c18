"""The workloads of ``docs/figures.md`` on servers with OpenAI's API, one after the other on one machine.

Usage: ``python -m benchmarks.peers OUT.json COMMIT (--start NAME ... | --url URL ...) [--runs 3] [--only WORKLOAD ...] [--tiny] [-- FLAGS]``.
``--start hiserve vllm sglang`` starts each that is named, where it is installed, with its defaults: Llama-8B's shape with random weights
and a tokenizer of its vocabulary. ``--url`` names servers that run. FLAGS are of the server that is started, if it is one. Prompts are
token ids, and replies have their whole length. Each run has prompts of its own, the same for all servers; the first run of a workload
is not counted. Ratios are of the first server to the others. ``--tiny`` takes hiserve-nano on the CPU, or small workloads for ``--url``.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.gpu.sizes import FULL, LARGE, TINY, Sizes
from benchmarks.record import Record, gpu_parser, medians
from benchmarks.served import HISERVE, bench, write_tokenizer
from hiserve.models.builtin_shapes import SHAPES
from hiserve.models.model_config import NANO

COMMANDS = {
    "hiserve": (*HISERVE, "serve", "{folder}", "--load-format", "dummy", "--port", "{port}"),
    "vllm": (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "{folder}", "--load-format", "dummy", "--port", "{port}"),
    "sglang": (sys.executable, "-m", "sglang.launch_server", "--model-path", "{folder}", "--load-format", "dummy", "--port", "{port}"),
}  # fmt: skip
NANO_COMMAND = (
    *HISERVE,
    "serve",
    NANO,
    "--device",
    "cpu",
    "--cpu-threads",
    "1",
    "--kv-pages",
    "400",
    "--port",
    "{port}",
)
MAX_START_S = 900.0
PERIOD_S = 0.5
FIGURES = ("output_tokens_per_s", "input_tokens_per_s", "requests_per_s")
SEED = 7000


class Workload(NamedTuple):
    """A kind of ``hiserve bench`` with its options."""

    kind: str
    options: dict[str, int]


def workloads(sizes: Sizes) -> dict[str, Workload]:
    """Returns those that the engine is measured with: batches at once, prompts alone, chats, and streams that come and go."""
    cases = [(case.rows, case.rows, case.prompt, case.output) for case in sizes.peers]
    cases += [(sizes.prefill[0], sizes.prefill[0], sizes.prefill[1], 1)]
    cases += [(sizes.http.streams, sizes.http.requests, sizes.http.prompt, sizes.http.output)]
    found = {}
    for streams, requests, prompt, output in cases:
        sent = {"num_prompts": requests, "max_concurrency": streams, "input_length": prompt, "output_length": output}
        of = "" if requests == streams else f" of {requests}"
        found[f"{streams}{of} x {prompt} -> {output}"] = Workload("serve", sent)
    chats = sizes.chats
    said = {"num_clients": chats.chats, "num_rounds": chats.turns}
    said |= {"request_length": chats.turn_input, "output_length": chats.turn_output}
    return found | {f"{chats.chats} chats x {chats.turns} turns": Workload("multiturn", said)}


@contextmanager
def started(command: Sequence[str]) -> Iterator[str]:
    """Starts a server on a free port; yields its address when it answers.

    Raises:
        SystemExit: It ended, or did not answer in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, begin = f"http://127.0.0.1:{port}", time.monotonic()
    process = subprocess.Popen([word.replace("{port}", str(port)) for word in command], stdout=sys.stderr)
    try:
        while not is_ready(url):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            if time.monotonic() > begin + MAX_START_S:
                raise SystemExit(f"{' '.join(command)} does not answer after {MAX_START_S:g} s")
            time.sleep(PERIOD_S)
        yield url
    finally:
        process.terminate()
        process.wait(120)


def is_ready(url: str) -> bool:
    """Asks for a token; a server may list its models before they are loaded."""
    with httpx.Client(base_url=url, timeout=MAX_START_S, trust_env=False) as http:
        try:
            models = http.get("/v1/models")
            if not models.is_success:
                return False
            body = {"model": models.json()["data"][0]["id"], "prompt": "Hello", "max_tokens": 1}
            return http.post("/v1/completions", json=body).is_success
        except httpx.TransportError:
            return False


@contextmanager
def server(name: str, given: argparse.Namespace) -> Iterator[str]:
    """Yields the address of a server that is measured: one that runs, or one that is started."""
    if given.url:
        yield name.rstrip("/")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), SHAPES[LARGE]["vocab_size"])
        shape = {"model_type": "llama", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
        (Path(folder) / "config.json").write_text(json.dumps(shape | SHAPES[LARGE]))
        command = NANO_COMMAND if given.tiny else COMMANDS[name]
        with started([word.replace("{folder}", folder) for word in (*command, *given.flags)]) as url:
            yield url


def measure(url: str, workload: Workload, num_runs: int, vocab_size: int) -> dict[str, Any]:
    """Returns the medians of some runs, and all of their summaries; one more run comes first."""
    options = workload.options | {"vocab_size": vocab_size}
    runs = [bench(workload.kind, url, **options, seed=SEED + number) for number in range(1 + num_runs)]
    summaries = [run["summary"] for run in runs[1:]]
    samples = {name: [summary[name] for summary in summaries] for name in FIGURES}
    samples["ttft_ms"] = [summary["ttft_ms"]["median"] for summary in summaries]
    samples["tpot_ms"] = [summary["tpot_ms"]["median"] for summary in summaries]
    return {"median": medians(samples), "runs": summaries}


def ratios(servers: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns, by workload and server, the output tokens of the first server over those of each other."""
    first, *others = servers
    found: dict[str, dict[str, float]] = {}
    for title, ours in servers[first].items():
        for other in others:
            if title in servers[other]:
                theirs = servers[other][title]["median"]["output_tokens_per_s"]
                found.setdefault(title, {})[other] = ours["median"]["output_tokens_per_s"] / theirs
    return found


def main() -> int:
    given = arguments()
    sizes = TINY if given.tiny else FULL
    result = Record.of(given, "python -m benchmarks.peers OUT.json COMMIT ...", "benchmarks/peers.py")
    result |= {"flags": given.flags, "servers": {}, "ratios": {}}
    for name in given.start or given.url:
        print(f"{name:<28} {'output/s':>10} {'input/s':>10} {'ttft ms':>10} {'tpot ms':>10}", flush=True)
        found = result["servers"][name] = {}
        with server(name, given) as url:
            for title, workload in workloads(sizes).items():
                if given.only and title not in given.only:
                    continue
                found[title] = measure(url, workload, given.runs, given.vocab_size)
                result["ratios"] = ratios(result["servers"])
                result.save()
                median = found[title]["median"]
                rates = f"{median['output_tokens_per_s']:>10.0f} {median['input_tokens_per_s']:>10.0f}"
                print(f"{title:<28} {rates} {median['ttft_ms']:>10.1f} {median['tpot_ms']:>10.2f}", flush=True)
    for title, others in result["ratios"].items():
        print(title, *(f"{ratio:.3f} of {other}" for other, ratio in others.items()), sep=", ", flush=True)
    return 0


def arguments() -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", nargs="+")
    where.add_argument("--start", nargs="+", choices=COMMANDS)
    parser.add_argument("--runs", type=int, default=3, help="that count, of each workload (3)")
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="by their names in the table")
    parser.add_argument(
        "--vocab-size", type=int, help="of the models at --url (default: as of the model that is started)"
    )
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:end])
    given.flags = words[end + 1 :]
    if given.flags and len(given.start or ()) != 1:
        parser.error(f"flags {' '.join(given.flags)} are for one server that is started: --start NAME")
    if given.vocab_size is None:
        given.vocab_size = 2048 if given.tiny else SHAPES[LARGE]["vocab_size"]
    return given


if __name__ == "__main__":
    raise SystemExit(main())
