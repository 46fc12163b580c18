"""What the load generator itself costs: ``hiserve bench serve`` against a server that does nothing but send.

Usage: ``python benchmarks/bench_tool.py``. 32 streams, 1,000 chunks a second in all, for 5 seconds.
Bar: the client's processor time during the run <= 10 % of the run.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import RESULTS, ROOT, Record

STREAMS = 32
CHUNKS_PER_S = 1000
RUN_S = 5
CHUNKS = CHUNKS_PER_S * RUN_S // STREAMS
ROUNDS = 5
BAR = 0.1
MODELS = {"object": "list", "data": [{"id": "fake", "object": "model", "max_model_len": 100_000}]}
CHUNK = {
    "id": "cmpl-3f60b7cbe86f4d6bbcb2f4a1",
    "created": 1_700_000_000,
    "model": "fake",
    "system_fingerprint": "0123456789abcdef",
    "object": "text_completion",
}


def event(number: int) -> bytes:
    """Returns one chunk as hiserve words it, running usage included."""
    usage = {"prompt_tokens": 8, "completion_tokens": number, "total_tokens": 8 + number}
    usage["prompt_tokens_details"] = {"cached_tokens": 0}
    finish = "length" if number == CHUNKS else None
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish}
    data = b"data: " + json.dumps({**CHUNK, "choices": [choice], "usage": usage}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENTS = [event(number) for number in range(1, CHUNKS + 1)]


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves one connection: the list of models, or a stream of chunks at even times."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            body = json.loads(await reader.readexactly(length) or "{}")
            if body.get("stream"):
                await stream(writer, body["max_tokens"])
                continue
            found = json.dumps(MODELS).encode() if head.startswith("get /v1/models") else b"{}"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(found), found))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        writer.close()


async def stream(writer: asyncio.StreamWriter, max_tokens: int) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    begin = time.perf_counter()
    for number, chunk in enumerate(EVENTS[:max_tokens]):
        await asyncio.sleep(begin + number * STREAMS / CHUNKS_PER_S - time.perf_counter())
        writer.write(chunk)
    done = b"data: [DONE]\n\n"
    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done))


async def serve() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def run_once(port: int, output: Path) -> dict[str, Any]:
    """Runs the command once; arrivals are spread over one gap, so that chunks come one by one."""
    command = [sys.executable, "-m", "hiserve.cli", "bench", "serve", "--url", f"http://127.0.0.1:{port}"]
    command += ["--num-prompts", str(STREAMS), "--input-length", "8", "--output-length", str(CHUNKS)]
    command += ["--request-rate", str(CHUNKS_PER_S), "--vocab-size", "100", "--output", str(output)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    result = json.loads(output.read_bytes())
    summary = result["summary"]
    assert summary["num_ok"] == STREAMS and summary["num_output"] == STREAMS * CHUNKS, summary
    return {
        "cpu_share": round(summary["client_cpu_share"], 4),
        "chunks_per_s": round(summary["output_tokens_per_s"], 1),
        "duration_s": round(summary["duration_s"], 3),
        "itl_median_ms": round(summary["itl_chunk_ms"]["median"], 3),
        "itl_p99_ms": round(summary["itl_chunk_ms"]["p99"], 3),
    }


def main() -> int:
    if "--serve" in sys.argv:
        asyncio.run(serve())
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            rounds = [run_once(port, Path(folder) / "run.json") for _ in range(ROUNDS)]
        finally:
            server.terminate()
    share = statistics.median(each["cpu_share"] for each in rounds)
    chunks_per_s = statistics.median(each["chunks_per_s"] for each in rounds)
    command = "python benchmarks/bench_tool.py"
    record = Record(RESULTS / "bench_tool.json", command, "hiserve/bench", "benchmarks/bench_tool.py")
    record |= {
        "streams": STREAMS,
        "sent_itl_ms": STREAMS * 1000 / CHUNKS_PER_S,
        "chunks_per_s": chunks_per_s,
        "cpu_share": share,
        "cpu_us_per_chunk": round(share / chunks_per_s * 1e6, 1),
        "bar": BAR,
        "rounds": rounds,
    }
    record.save()
    print(f"{chunks_per_s:.0f} chunks/s take {share:.1%} of a core (bar {BAR:.0%})")
    return int(share > BAR)


if __name__ == "__main__":
    sys.exit(main())
