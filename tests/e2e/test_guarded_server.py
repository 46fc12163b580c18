"""A live server with API keys: tenants, the admin, the native endpoint, limits, and what the process weighs."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live import Live, serve
from tests.helpers.small_model import small_model
from tests.helpers.waiting import PATIENCE_S, until

SMALL = (small_model(), "--cpu-threads", "1")
SECRET = "sesame-9f3c41d2"
KEYS = ("--api-key", "alpha", "--api-key", "beta", "--api-key", SECRET, "--admin-api-key", "root")
SMALL_REGION_BYTES = 16 * 2**20
TEXT = "I would like to book a table for two people at seven tonight, near the river, with a view, please. "
MEMORY_LIMIT = 250 * 2**20


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(
        tmp_path_factory.mktemp("guarded"),
        "--max-running-requests",
        "4",
        "--max-request-bytes",
        "100000",
        *SMALL,
        *KEYS,
        is_fork=False,
    ) as made:
        yield made


def client(live: Live, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=live.url, headers=headers, timeout=PATIENCE_S)


def cached(live: Live, key: str, text: str, **fields: Any) -> int:
    """Sends a prompt and returns how much of it was cached."""
    with client(live, key) as sender:
        body = {"prompt": text, "max_tokens": 1, "temperature": 0, **fields}
        reply = sender.post("/v1/completions", json=body).raise_for_status().json()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_key_finds_its_own_prefixes_and_no_others(live: Live) -> None:
    text = "Mine. " + TEXT * 4
    assert cached(live, "alpha", text) == 0
    assert (own := cached(live, "alpha", text)) > 32
    assert cached(live, "beta", text) == 0
    assert cached(live, "beta", text) == own
    assert cached(live, "root", text) == 0
    assert cached(live, "alpha", text, cache_salt="s") == 0
    assert cached(live, "alpha", text, cache_salt="s") == own
    assert cached(live, "beta", text, cache_salt="s") == 0


def test_callers_who_share_find_each_others_prefixes(tmp_path: Path) -> None:
    with serve(tmp_path, *SMALL, "--share-prefixes", *KEYS) as shared:
        text = "Ours. " + TEXT * 4
        assert cached(shared, "alpha", text) == 0
        assert cached(shared, "beta", text) > 32
        assert cached(shared, "beta", text, cache_salt="s") == 0


async def test_a_flood_with_one_key_does_not_hold_another_key_up(live: Live) -> None:
    ended: list[str] = []

    async def ask(http: httpx.AsyncClient, key: str, number: int) -> None:
        body = {"prompt": [number + 10, 11, 12], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        response = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200
        ended.append(key)

    limits, root = httpx.Limits(max_connections=None), client(live, "root")
    (worker,) = (each["pid"] for each in root.get("/server_info").json()["processes"]["workers"])
    async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S, limits=limits, trust_env=False) as http:
        flood = [asyncio.create_task(ask(http, "alpha", number)) for number in range(80)]
        while not ended:
            await asyncio.sleep(0.005)
        with live.stopped(worker):  # until the others have arrived: this process may be slower than the worker
            begun = len(ended)
            late = [asyncio.create_task(ask(http, "beta", number)) for number in range(4)]
            await until(lambda: root.get("/server_info").json()["num_inflight"] == len(flood) + len(late) - len(ended))
        await asyncio.gather(*late)
        meanwhile = ended.count("alpha") - begun
        await asyncio.gather(*flood)
    root.close()
    print(f"{meanwhile} of 80 ended meanwhile")
    assert meanwhile < 30


def test_nothing_but_health_and_metrics_is_open(live: Live) -> None:
    with client(live, None) as nobody, client(live, "alpha") as alpha, client(live, "root") as root:
        assert [nobody.get(path).status_code for path in ("/health", "/ready", "/metrics", "/ping")] == [200] * 4
        assert [nobody.get(path).status_code for path in ("/v1/models", "/server_info", "/openapi.json")] == [401] * 3
        assert (alpha.get("/server_info").status_code, root.get("/server_info").status_code) == (403, 200)
        assert "alpha" not in root.get("/server_info").text
        for path in ("/cache/stats", "/cache/tree"):
            assert [caller.get(path).status_code for caller in (nobody, alpha, root)] == [401, 403, 200]
        assert (alpha.post("/flush_cache").status_code, root.post("/flush_cache").status_code) == (403, 200)
        assert alpha.get("/health_generate").json() == {"status": "ok"}


def test_no_key_leaves_the_process_that_checks_it(live: Live) -> None:
    """Not in what it shows or logs, and nowhere in the memory of the others."""
    shown = []
    with client(live, "root") as root, client(live, SECRET) as known, client(live, SECRET[:-1]) as unknown:
        for path in ("/server_info", "/cache/stats", "/metrics", "/openapi.json", "/v1/models", "/model_info"):
            shown.append(root.get(path).raise_for_status().text)
        assert known.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
        shown += [known.get("/nowhere").text, known.post("/v1/completions", json={"n": SECRET}).text]
        shown.append(unknown.get("/v1/models").text)
        processes = root.get("/server_info").json()["processes"]
    shown.append(live.log.read_text())
    assert not [text for text in shown if SECRET[:-1] in text]
    for pid in (processes["scheduler"], *(worker["pid"] for worker in processes["workers"])):
        folder = Path(f"/proc/{pid}")
        assert SECRET.encode() not in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        assert not holds(pid, SECRET.encode())
    assert holds(processes["api"], SECRET.encode()), "the search finds nothing at all"


def holds(pid: int, word: bytes) -> bool:
    """Says whether the bytes are in the heap of a process, or in what it mapped for small things."""
    regions = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0\s*(\[heap\])?$", maps := maps_of(pid), re.MULTILINE
    )
    assert regions, maps
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for first, last, name in regions:
            size = int(last, 16) - int(first, 16)
            if name or size <= SMALL_REGION_BYTES:
                memory.seek(int(first, 16))
                if word in (memory.read(size) or b""):
                    return True
    return False


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_a_running_request_is_ended_by_its_caller_alone(live: Live) -> None:
    body = {"text": "Once", "rid": "long", "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}
    replies: list[dict[str, Any]] = []

    def ask() -> None:
        with client(live, "alpha") as alpha:
            replies.append(alpha.post("/generate", json=body).raise_for_status().json())

    thread = threading.Thread(target=ask)
    thread.start()
    with client(live, "alpha") as alpha, client(live, "beta") as beta:
        while alpha.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0:
            time.sleep(0.02)
        time.sleep(0.1)
        assert beta.post("/abort_request", json={"rid": "long"}).json() == {"aborted": 0}
        assert alpha.post("/abort_request", json={"rid": "long"}).json() == {"aborted": 1}
    thread.join(PATIENCE_S)
    (reply,) = replies
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < reply["meta_info"]["completion_tokens"] == len(reply["output_ids"]) < 5000
    assert reply["text"]


def test_the_native_endpoint_says_what_completions_say(live: Live) -> None:
    with client(live, "alpha") as alpha:
        params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
        native = alpha.post("/generate", json={"text": TEXT, "sampling_params": params}).json()
        fields = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
        plain = alpha.post("/v1/completions", json={"prompt": TEXT, "return_token_ids": True, **fields}).json()
        assert native["text"] == plain["choices"][0]["text"]
        assert native["output_ids"] == plain["choices"][0]["token_ids"]
        ids = alpha.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
        assert ids == plain["choices"][0]["prompt_token_ids"]
        assert alpha.post("/detokenize", json={"tokens": ids}).json()["prompt"].endswith(TEXT)
        scored = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}}
        scores = alpha.post("/generate", json={**scored, "return_logprob": True, "logprob_start_len": 0}).json()
        entries = scores["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in entries] == ids
        assert entries[0][0] is None
        assert all(logprob <= 0 for logprob, _, _ in entries[1:])


def test_large_and_broken_requests_have_clear_answers(live: Live) -> None:
    with client(live, "alpha") as alpha:
        assert alpha.post("/v1/completions", content=b"x" * 5_000_000).json()["error"]["code"] == "request_too_large"
        assert alpha.get("/health", headers={"x": "a" * 70_000}).status_code == 431
        assert alpha.get("/health").status_code == 200
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        answer = b""
        while part := raw.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


async def test_sockets_that_were_left_do_not_stay(live: Live) -> None:
    with client(live, "root") as root:
        pid = root.get("/server_info").json()["processes"]["api"]
    descriptors = Path(f"/proc/{pid}/fd")
    before = len(list(descriptors.iterdir()))
    host, port = live.url.removeprefix("http://").split(":")
    writers = []
    for i in range(50):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n"[: 5 * i])
        writers.append(writer)
    await until(lambda: len(list(descriptors.iterdir())) >= before + 45)  # one of another test may have gone meanwhile
    for i, writer in enumerate(writers):
        if i % 2:
            writer.write_eof()
        else:
            writer.transport.abort()
    await until(lambda: len(list(descriptors.iterdir())) <= before)
    for writer in writers:
        writer.close()


def test_the_api_process_is_small(live: Live) -> None:
    with client(live, "root") as root:
        pid = root.get("/server_info").json()["processes"]["api"]
    status = Path(f"/proc/{pid}/status").read_text()
    peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak_kib * 1024 < MEMORY_LIMIT
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
