"""Runs the scripted session against ``hiserve serve``, and records its answers without the parts that differ from run to run."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.e2e.live import serve
from tools.freeze.session import ENGINE, FLAGS, SESSION, Ask

ANSWER_S = 60.0
# ``hiserve``, whose answers tell the engine's state however long it takes to say it.
PATIENT = (
    sys.executable,
    "-c",
    f"""
import sys
from hiserve.cli import main
from hiserve.server.management import admin
from hiserve.server.management import cache as cache_routes
from hiserve.server.management import health
health.METRICS_TIMEOUT_S = health.PROBE_TIMEOUT_S = admin.INFO_TIMEOUT_S = admin.STATUS_TIMEOUT_S = {ANSWER_S}
cache_routes.ANSWER_TIMEOUT_S = {ANSWER_S}
sys.exit(main())
""",
)
# Headers and fields of times, speeds and random ids.
PASSING_HEADERS = {"date", "content-length"}
PASSING = {
    "created",
    "timestamp",
    "e2e_latency",
    "system_fingerprint",
    "weight_version",
    "version",
    "root",
    "model_path",
}
PASSING |= {"tokenizer_path", "queue_time", "prefill_s", "ttft"}
RANDOM_ID = re.compile(r"\b((?:chatcmpl|cmpl|call)-)?[0-9a-f]{24,32}\b")
DIGITS = 4


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[tuple[str, int]]:
    """Starts a server and ends it; yields its address."""
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder), *flags, command=PATIENT) as live:
        host, port = live.url.removeprefix("http://").split(":")
        yield host, int(port)


def session() -> list[str]:
    """Returns the answers of the scripted session, each a line and its indented content."""
    with serving(*ENGINE, *FLAGS) as address:
        return [line for number, ask in enumerate(SESSION) for line in told(ask, exchange(address, ask.bytes(number)))]


def refusals() -> list[str]:
    """Returns the answer to each request of the tests' corpus of malformed ones."""
    # Only here: the corpus is large, and only its own server fits it.
    from tests.helpers.bad_requests import MAX_MODEL_LEN, MAX_REQUEST_BYTES, corpus  # noqa: PLC0415

    flags = ("--max-model-len", str(MAX_MODEL_LEN), "--max-request-bytes", str(MAX_REQUEST_BYTES))
    lines = []
    with serving(*ENGINE, *flags) as address:
        for bad in corpus():
            status, _, body = parse(exchange(address, bad.raw()))
            lines += [bad.name, f"  {status} {json.dumps(_steady(json.loads(body)), sort_keys=True)}"]
    return lines


def exchange(address: tuple[str, int], sent: bytes) -> bytes:
    """Sends a request and returns all that comes back before the server closes."""
    with socket.create_connection(address, ANSWER_S) as connection, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_read, connection)
        with contextlib.suppress(ConnectionError):  # it has read enough to refuse it
            connection.sendall(sent)
        return reading.result()


def _read(connection: socket.socket) -> bytes:
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Returns status, headers and body of the first answer that is final."""
    while answer.startswith(b"HTTP/1.1 1"):
        answer = answer.partition(b"\r\n\r\n")[2]
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1)[:1] + line.split(": ", 1)[1:] for line in lines)
    if headers.pop("transfer-encoding", "") == "chunked":
        body = b"".join(_chunks(body))
    return int(first.split(" ")[1]), headers, body


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


def told(ask: Ask, answer: bytes) -> Iterator[str]:
    """Yields the lines of an answer."""
    yield ask.name
    if not answer:
        yield "  closed without an answer"
        return
    status, headers, body = parse(answer)
    yield f"  {status}"
    for name in sorted(headers.keys() - PASSING_HEADERS):
        yield f"  {name}: {RANDOM_ID.sub('ID', headers[name])}"
    kind, shows = headers.get("content-type", ""), ask.shows if status == 200 else "all"
    if shows == "kind" or not body:
        yield f"  {'a body' if body else 'no body'}"
    elif shows == "names":
        yield from _metric_names(body.decode())
    elif kind.startswith("text/event-stream"):
        yield from _events(body.decode())
    elif shows == "routes":
        yield from _routes(json.loads(body))
    else:
        yield from _pretty(_shape(json.loads(body)) if shows == "shape" else _steady(json.loads(body)))


def _events(body: str) -> Iterator[str]:
    """Yields the joined content of a stream: how tokens are spread over events depends on time."""
    events = body.split("\n\n")
    assert events.pop() == "", "the stream ends in the middle of an event"
    datas = [event.removeprefix("data: ") for event in events]
    yield f"  a stream that ends with {datas[-1]}"
    parsed = [_steady(json.loads(data)) for data in datas if data.startswith("{")]
    shape: Any = None
    heads: list[Any] = []
    whole: dict[int, Any] = {}
    for event in parsed:
        head = {key: value for key, value in event.items() if "choices" in event and key not in ("choices", "usage")}
        heads += [head] * (head not in heads)
        shape = _joined_shapes(shape, _shape(event))
        for part in event.get("choices") or [event]:
            index = part.get("index", -1 if "choices" in event else 0)
            whole[index] = _appended(whole.get(index), part)
    if parsed and parsed[-1].get("usage"):
        whole[-1] = parsed[-1]["usage"]
    yield from _pretty(
        {"heads": heads, "events": shape, "in all": {str(index): whole[index] for index in sorted(whole)}}
    )


def _appended(before: Any, new: Any) -> Any:
    """Joins two parts of a stream: texts and lists of OpenAI's deltas go on; all else is as it was said last."""
    if isinstance(before, dict) and isinstance(new, dict):
        if "meta_info" in new:  # the native stream says everything again
            return new
        return {key: _appended(before.get(key), new.get(key)) for key in dict.fromkeys((*before, *new))}
    if isinstance(before, list) and isinstance(new, list):
        return before + new
    if isinstance(before, str) and isinstance(new, str) and new not in ("assistant", before):
        return before + new
    return before if new is None else new


def _steady(what: Any, key: str = "") -> Any:
    """Returns JSON without the parts that differ from run to run, and rounded."""
    if key in PASSING:
        return f"<{type(what).__name__}>"
    if isinstance(what, dict):
        return {name: _steady(value, name) for name, value in what.items()}
    if isinstance(what, list):
        return [_steady(value) for value in what]
    if isinstance(what, str):
        return RANDOM_ID.sub("ID", what)
    return round(what, DIGITS) if isinstance(what, float) else what


def _shape(what: Any) -> Any:
    """Returns names and types; of a list the types of its elements, joined."""
    if isinstance(what, dict):
        return {key: _shape(value) for key, value in what.items()}
    if isinstance(what, list):
        joined: Any = None
        for value in what:
            joined = _joined_shapes(joined, _shape(value))
        return [] if joined is None else [joined]
    return "null" if what is None else "number" if isinstance(what, int | float) else type(what).__name__


def _joined_shapes(one: Any, other: Any) -> Any:
    """Joins the shapes of two values; null is dropped beside any other."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _joined_shapes(one.get(key), other.get(key)) for key in sorted({*one, *other})}
    if isinstance(one, list) and isinstance(other, list):
        return [_joined_shapes(one[0], other[0])] if one and other else one or other
    return other if one in (None, "null") else one


def _metric_names(body: str) -> Iterable[str]:
    """Returns the kinds of metrics, and the labels of their series; which series there are is a matter of time."""
    series = {
        re.sub(r'="(?:[^"\\]|\\.)*"', "", line.rpartition(" ")[0]) for line in body.splitlines() if line[:1] not in "#"
    }
    return [f"  {line}" for line in sorted({line for line in body.splitlines() if line.startswith("# ")} | series)]


def _routes(schema: dict[str, Any]) -> Iterable[str]:
    return sorted(
        f"  {method.upper()} {path}: {', '.join(sorted(one.get('responses', ())))}"
        for path, methods in schema["paths"].items()
        for method, one in methods.items()
    )


def _pretty(what: Any) -> list[str]:
    return [f"  {line}" for line in json.dumps(what, indent=1, ensure_ascii=True).splitlines()]
