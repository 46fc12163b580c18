"""The workloads of ``docs/figures.md`` on any server with OpenAI's API: output tokens per second, and times to the first token.

Usage: ``python -m benchmarks.peer OUT.json COMMIT (--url URL | --start NAME) [--runs 3] [--only NAME ...] [--tiny] [-- FLAGS]``.
``--url`` is the address of a server that runs. ``--start`` starts ``hiserve``, ``vllm`` or ``sglang`` with its defaults and FLAGS,
where it is installed: Llama-8B's shape with random weights and a tokenizer of its vocabulary. Prompts are token ids, and replies
have their whole length. Each run has prompts of its own, and the first one of a workload is not counted. To compare servers, run
it for each on one machine. ``--tiny`` takes hiserve-nano on the CPU, or small workloads for the server at ``--url``.
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
def server(given: argparse.Namespace) -> Iterator[str]:
    """Yields the address of the server that is measured."""
    if given.url:
        yield given.url.rstrip("/")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), SHAPES[LARGE]["vocab_size"])
        shape = {"model_type": "llama", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
        (Path(folder) / "config.json").write_text(json.dumps(shape | SHAPES[LARGE]))
        command = NANO_COMMAND if given.tiny else COMMANDS[given.start]
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


def main() -> int:
    given = arguments()
    sizes = TINY if given.tiny else FULL
    name = given.name or given.start or given.url
    result = Record.of(given, "python -m benchmarks.peer OUT.json COMMIT ...", "benchmarks/peer.py")
    result |= {"server": name, "flags": given.flags, "workloads": {}}
    print(f"{name:<28} {'output/s':>10} {'input/s':>10} {'ttft ms':>10} {'tpot ms':>10}", flush=True)
    with server(given) as url:
        for title, workload in workloads(sizes).items():
            if given.only and title not in given.only:
                continue
            found = result["workloads"][title] = measure(url, workload, given.runs, given.vocab_size)
            result.save()
            median = found["median"]
            rates = f"{median['output_tokens_per_s']:>10.0f} {median['input_tokens_per_s']:>10.0f}"
            print(f"{title:<28} {rates} {median['ttft_ms']:>10.1f} {median['tpot_ms']:>10.2f}", flush=True)
    return 0


def arguments() -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url")
    where.add_argument("--start", choices=COMMANDS)
    parser.add_argument("--name", help="of the server, with its version; default: as --start or --url")
    parser.add_argument("--runs", type=int, default=3, help="that count, of each workload (3)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="workloads, by their names in the table")
    parser.add_argument(
        "--vocab-size", type=int, help="of the model at --url (default: as of the model that is started)"
    )
    parser.add_argument("flags", nargs="*", help="of the server that is started, after --")
    given = parser.parse_args()
    if given.vocab_size is None:
        given.vocab_size = 2048 if given.tiny else SHAPES[LARGE]["vocab_size"]
    return given


if __name__ == "__main__":
    raise SystemExit(main())
