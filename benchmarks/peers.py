"""Workloads on servers with OpenAI's API, one after the other on one machine: batches, prompts, chats, agents, arrivals, conversations.

Usage: ``python -m benchmarks.peers OUT.json COMMIT (--start NAME ... | --url URL ...) [--runs 3] [--only WORKLOAD ...]
[--sessions FILE] [--tiny] [-- FLAGS]``. ``--start hiserve vllm sglang`` starts each that is named, where it is installed, with its
defaults: Llama-8B's shape with random weights and a tokenizer of its vocabulary; then with weights in FP8, with few pages on the device
and a tier on the host, and with the shape of a small model. ``--url`` names servers that run, for the first of these. FLAGS are of
the server that is started, if it is one. FILE has recorded sessions of agents (``hiserve bench serve --dataset agent-sessions``).
Prompts are token ids otherwise, and replies have their whole length. Each run has prompts of its own, the same for all servers; the
first run of a workload is not counted, but FILE is sent once. Ratios are of the first server to the others, beside their bars.
``--tiny`` takes hiserve-nano on the CPU, or small workloads for ``--url``.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.gpu.sizes import FULL, LARGE, SMALL, TINY, Sizes
from benchmarks.record import Record, gpu_parser, judge, medians
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
LATENCIES = ("ttft_ms", "tpot_ms", "e2el_ms")
SEED = 7000
DEVICE_PAGE = 16  # tokens
FP8 = {
    "hiserve": ("--quantize", "fp8"),
    "vllm": ("--quantization", "fp8"),
    "sglang": ("--quantization", "fp8"),
}


class Workload(NamedTuple):
    """A kind of ``hiserve bench`` with its options.

    Attributes:
        figure: By which servers are compared: a rate, or a time.
        bar: How many times better the first server is to be.
        is_recorded: Each run would send the same prompts, which the first leaves in the cache: that one is all, and counts.
    """

    kind: str
    options: dict[str, Any]
    figure: str = FIGURES[0]
    bar: float = 1.05
    is_recorded: bool = False


class Setup(NamedTuple):
    """A model, the flags with which each server is started, beside those of all, and what is measured then."""

    shape: str
    flags: dict[str, tuple[str, ...]]
    workloads: dict[str, Workload]


def setups(sizes: Sizes, sessions: Path | None = None) -> list[Setup]:
    """Returns them in order, the defaults first; ``sessions`` are recorded ones of agents."""
    at_once = batches([(case.rows, case.prompt, case.output) for case in sizes.peers])
    at_once |= batches([(*sizes.prefill, 1)])
    small = batches([(case.rows, case.prompt, case.output) for case in (sizes.peers[0], sizes.peers[-1])])
    return [
        Setup(LARGE, {}, at_once | others(sizes, sessions)),
        Setup(LARGE, FP8, {f"FP8, {title}": each for title, each in at_once.items()}),
        few_pages(sizes),
        Setup(SMALL, {}, {f"{SMALL}, {title}": each for title, each in small.items()}),
    ]


def batches(cases: Iterable[tuple[int, int, int]]) -> dict[str, Workload]:
    """Returns requests that come at once; a case is their number, and the lengths of prompt and reply."""
    found = {}
    for rows, prompt, output in cases:
        sent = {"num_prompts": rows, "max_concurrency": rows, "input_length": prompt, "output_length": output}
        found[f"{rows} x {prompt} -> {output}"] = Workload("serve", sent)
    return found


def others(sizes: Sizes, sessions: Path | None) -> dict[str, Workload]:
    """Returns short and long requests, streams that come and go, mixed lengths, arrivals, chats and agents."""
    is_full = sizes is FULL
    found = batches([(256, 128, 128), (1, 32_000, 256)] if is_full else [(8, 16, 16), (1, 400, 8)])
    for case in (sizes.http, sizes.crowd):
        sent = {"num_prompts": case.requests, "max_concurrency": case.streams}
        sent |= {"input_length": case.prompt, "output_length": case.output}
        found[f"{case.streams} of {case.requests} x {case.prompt} -> {case.output}"] = Workload("serve", sent)
    lengths = {"input_length": sizes.http.prompt, "output_length": sizes.http.output}
    count, arriving, rate = (256, 200, 10) if is_full else (8, 8, 4)
    mixed = lengths | {"random_range_ratio": 0.9}
    found[f"{count} of mixed lengths"] = Workload("serve", {"num_prompts": count} | mixed)
    arrivals = {"num_prompts": arriving, "request_rate": rate} | mixed
    found[f"{rate} arrivals a second"] = Workload("serve", arrivals, "e2el_ms")
    chats = sizes.chats
    said = {"num_clients": chats.chats, "num_rounds": chats.turns, "shared_length": chats.shared}
    said |= {"request_length": chats.turn_input, "output_length": chats.turn_output}
    found[f"{chats.chats} chats x {chats.turns} turns"] = Workload("multiturn", said, bar=1.15)
    if sessions is not None:
        asked = {"dataset": "agent-sessions", "path": sessions, "num_prompts": 758, "max_concurrency": 16}
        # With the recorded times days would pass; random weights know no end of a reply.
        asked |= {"speed": math.inf, "ignore_eos": True}
        found["agents, 16 at once"] = Workload("serve", asked, "requests_per_s", 1.2, is_recorded=True)
    return found


def few_pages(sizes: Sizes) -> Setup:
    """Returns conversations in groups, of which the device holds a part and the host all."""
    case, tiers = sizes.conversations, sizes.tiers
    pages, length, gib = tiers["kv_pages"], str(tiers["max_model_len"]), f"{sizes.host_gib:g}"
    flags = {
        "hiserve": ("--kv-pages", str(pages), "--max-model-len", length, "--host-cache-gib", gib),
        "vllm": (
            *("--num-gpu-blocks-override", str(pages), "--max-model-len", length),
            *("--kv-offloading-backend", "native", "--kv-offloading-size", gib),
        ),
        "sglang": (
            *("--max-total-tokens", str(pages * DEVICE_PAGE), "--context-length", length),
            *("--enable-hierarchical-cache", "--hicache-size", str(math.ceil(sizes.host_gib))),
        ),
    }
    said = {"num_conversations": case.conversations, "group_size": case.group, "num_rounds": case.turns}
    said |= {"conversation_length": case.history, "request_length": case.turn_input, "output_length": case.turn_output}
    title = f"{case.conversations} conversations of {case.history} over {pages} pages"
    return Setup(LARGE, flags, {title: Workload("cache", said | {"tokens_per_page": DEVICE_PAGE}, bar=1.15)})


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
def server(name: str, setup: Setup, given: argparse.Namespace) -> Iterator[str]:
    """Yields the address of a server that is measured: one that runs, or one that is started."""
    if given.url:
        yield name.rstrip("/")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), SHAPES[setup.shape]["vocab_size"])
        model_type = "llama" if setup.shape == LARGE else "qwen3"
        known = {"model_type": model_type, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
        (Path(folder) / "config.json").write_text(json.dumps(known | SHAPES[setup.shape]))
        command = NANO_COMMAND if given.tiny else COMMANDS[name]
        with started(
            [word.replace("{folder}", folder) for word in (*command, *setup.flags.get(name, ()), *given.flags)]
        ) as url:
            yield url


def measure(url: str, workload: Workload, num_runs: int, vocab_size: int) -> dict[str, Any]:
    """Returns the medians of some runs, and all of their summaries; one more run comes first, unless they are recorded."""
    options = workload.options | {"vocab_size": vocab_size}
    seeds = range(SEED, SEED + (1 if workload.is_recorded else 1 + num_runs))
    runs = [bench(workload.kind, url, **options, seed=seed) for seed in seeds]
    summaries = [run["summary"] for run in runs[-num_runs:]]
    samples = {name: [summary[name] for summary in summaries] for name in FIGURES}
    samples |= {name: [summary[name]["median"] for summary in summaries] for name in LATENCIES}
    return {"median": medians(samples), "compared": workload.figure, "runs": summaries}


def ratios(servers: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns, by workload and other server, how many times better the first server is."""
    first, *rest = servers
    found: dict[str, dict[str, float]] = {}
    for title, ours in servers[first].items():
        for other in rest:
            if title in servers[other]:
                mine, its = (each["median"][ours["compared"]] for each in (ours, servers[other][title]))
                found.setdefault(title, {})[other] = its / mine if ours["compared"] in LATENCIES else mine / its
    return found


def main() -> int:
    given = arguments()
    result = Record.of(given, "python -m benchmarks.peers OUT.json COMMIT ...", "benchmarks/peers.py")
    result |= {"flags": given.flags, "servers": {}, "ratios": {}}
    planned = planned_of(given)
    for name in given.start or given.url:
        print(f"{name:<48} {'output/s':>10} {'input/s':>10} {'ttft ms':>10} {'tpot ms':>10}", flush=True)
        found = result["servers"][name] = {}
        for setup in planned:
            wanted = {title: each for title, each in setup.workloads.items() if not given.only or title in given.only}
            if not wanted:
                continue
            with server(name, setup, given) as url:
                for title, workload in wanted.items():
                    vocab_size = given.vocab_size or SHAPES[setup.shape]["vocab_size"]
                    found[title] = measure(url, workload, given.runs, vocab_size)
                    result["ratios"] = ratios(result["servers"])
                    result.save()
                    show(title, found[title]["median"])
    bars = {title: each.bar for setup in planned for title, each in setup.workloads.items()}
    result["bars"] = {title: bars[title] for title in result["ratios"]}
    result.save()
    pairs = [(title, other) for title, others in result["ratios"].items() for other in others]
    judge(
        {f"{title}, of {other}": result["ratios"][title][other] for title, other in pairs},
        least={f"{title}, of {other}": bars[title] for title, other in pairs},
    )
    return 0


def planned_of(given: argparse.Namespace) -> list[Setup]:
    """Returns what is measured where servers are started, or the first of it where they run."""
    planned = setups(TINY if given.tiny else FULL, given.sessions)
    return planned[:1] if given.url else planned


def show(title: str, median: dict[str, float]) -> None:
    rates = f"{median['output_tokens_per_s']:>10.0f} {median['input_tokens_per_s']:>10.0f}"
    print(f"{title:<48} {rates} {median['ttft_ms']:>10.1f} {median['tpot_ms']:>10.2f}", flush=True)


def arguments() -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", nargs="+")
    where.add_argument("--start", nargs="+", choices=COMMANDS)
    parser.add_argument("--runs", type=int, default=3, help="that count, of each workload (3)")
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="by their names in the table")
    parser.add_argument("--sessions", type=Path, metavar="FILE", help="recorded sessions of agents, JSON lines")
    parser.add_argument(
        "--vocab-size", type=int, help="of the models at --url (default: as of the model that is started)"
    )
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:end])
    given.flags = words[end + 1 :]
    if given.flags and len(given.start or ()) != 1:
        parser.error(f"flags {' '.join(given.flags)} are for one server that is started: --start NAME")
    titles = [title for setup in planned_of(given) for title in setup.workloads]
    if unknown := [title for title in given.only or () if title not in titles]:
        parser.error(
            "\n  ".join([f"no workload is named {unknown[0]!r} (agents want --sessions FILE); here are:", *titles])
        )
    if given.vocab_size is None and given.tiny:
        given.vocab_size = 2048
    return given


if __name__ == "__main__":
    raise SystemExit(main())
