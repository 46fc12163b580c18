"""Large bodies are read by a process of their own: the event loop's CPU time is what is measured, not the clock."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from hiserve.errors import RequestError
from hiserve.server.reply.seals import Seals
from hiserve.text.body.chat import MAX_PARTS
from hiserve.text.body.parser import MAX_BODY_VALUES, QUICK_STRINGS, QUICK_VALUES, Sizes, is_quick, parse_body
from hiserve.text.helpers import pool as helper_pool
from hiserve.text.helpers import process as helper_process
from hiserve.text.helpers.pool import HelperPool
from hiserve.text.template.chat_template import TOO_SLOW, ChatTemplate
from tests.helpers.chats import chat_of
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.processes import children
from tests.helpers.slowness import MAX_TRIES, comparable_s, least_cpu_s
from tests.helpers.waiting import PATIENCE_S, until
from tests.helpers.widening import some
from tests.unit.server.conftest import Server, make_server, reply_script

CHAT, TEXT, NATIVE, RESPONSES = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses"
HI = {"role": "user", "content": "Hi"}
PART = {"type": "text", "text": "x"}


def calling(arguments: str) -> dict[str, Any]:
    """A message of the assistant that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


LONG = {"role": "user", "content": "x " * 5000}
CODE = json.dumps({"a": "f(a, [b])\n" * 170})
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": CODE}
CUSTOM = {**ITEM, "type": "custom_tool_call", "input": CODE * 2}
SEALED = {"type": "reasoning", "encrypted_content": "A" * 1900}
MESSAGES, TOO_LONG = "/v1/messages", "prompt is too long: "
BLOCK = {"type": "text", "text": "words of a text " * 40}
SIGNED = {"type": "thinking", "signature": Seals("k").seal("a thought " * 140)}
USED = {"type": "tool_use", "id": "c", "name": "f", "input": json.loads(CODE)}
RETURNED = {"type": "tool_result", "tool_use_id": "c", "content": CODE}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


SIMILAR = (
    *("ids to truncate", "many prompts", "parts that fit", "many arguments", "arguments of code", "items that fit"),
    *("items of calls", "messages of a block", "blocks to count", "one signed thought", "strings", "long text"),
    *("documents", "results of tools", "custom calls", "sealed thoughts"),
)  # to another attack
# Of the thread of the event loop, for one body of up to 8 MB: copies of its bytes, and no work in Python on its values.
LOOP_S = 0.08
ATTACKS: dict[str, Callable[[], tuple[str, Any, str | None]]] = {  # made when they are sent: 200 MB
    "biases": lambda: (TEXT, {"prompt": "Hi", "logit_bias": {str(token): 1.5 for token in range(400_000)}}, "logit_bias"),
    "ids": lambda: (TEXT, {"prompt": [5] * 2_000_000}, "prompt"),
    "ids to truncate": lambda: (TEXT, {"prompt": [5] * 2_000_000, "truncate_prompt_tokens": 20}, None),
    "many prompts": lambda: (NATIVE, {"input_ids": [[5] * 2000] * 1000}, "input_ids"),
    "nested lists": lambda: (TEXT, {"prompt": [[]] * 2_000_000}, "prompt"),
    "deep lists": lambda: (TEXT, b'{"prompt": ' + 4_000_000 * b"[", None),
    "parts": lambda: (CHAT, {"messages": [{"role": "user", "content": [PART] * 240_000}]}, "messages[0].content"),
    "parts that fit": lambda: (CHAT, {"messages": [{"role": "user", "content": [PART] * 200}] * 40, "truncate_prompt_tokens": 9}, None),
    "messages": lambda: (CHAT, {"messages": [HI] * 180_000}, "messages"),
    "documents": lambda: (CHAT, {"messages": [HI], "documents": [{"a": [1] * 10}] * 100_000}, "documents"),
    "arguments": lambda: (CHAT, {"messages": [calling('{"a": [' + "{}," * 2_000_000 + "1]}")]}, "messages[0].tool_calls"),
    "many arguments": lambda: (CHAT, {"messages": [calling(json.dumps({"a": [0] * 30_000}))] * 40}, "messages[1].tool_calls"),
    "arguments of code": lambda: (CHAT, {"messages": [calling(json.dumps({"a": "f(a, [b])\n" * 50_000}))] * 5, "truncate_prompt_tokens": 9}, None),
    "large numbers": lambda: (CHAT, {"messages": [calling('{"a": ' + "9" * 4000 + "}")] * 1500}, "messages[0].tool_calls[0]"),
    "unknown": lambda: (TEXT, {"prompt": "Hi", "metadata": {str(i): [i] for i in range(300_000)}}, "metadata"),
    "strings": lambda: (TEXT, {"prompt": "Hi", "stop": ["ab"] * 1_000_000}, "stop"),
    "cut text": lambda: (TEXT, {"prompt": "many words of a text\n" * 350_000, "truncate_prompt_tokens": 7}, None),
    "items": lambda: (RESPONSES, {"input": [HI] * 180_000}, "input"),
    "items that fit": lambda: (RESPONSES, {"input": [HI] * 4096}, "input"),
    "items of calls": lambda: (RESPONSES, {"input": [*[ITEM] * 4000, LONG]}, "input"),
    "custom calls": lambda: (RESPONSES, {"input": [*[CUSTOM] * 2000, LONG]}, "input"),
    "calls and thoughts": lambda: (RESPONSES, {"input": [*[ITEM, CUSTOM, SEALED] * 500, LONG]}, "input"),
    "sealed thoughts": lambda: (RESPONSES, {"input": [SEALED] * 4096}, "input"),
    "exchanges to leave out": lambda: (RESPONSES, {"input": [{"role": "user", "content": "words of a text " * 100}] * 4000, "truncation": "auto"}, "input"),
    "messages of a block": lambda: (MESSAGES, {"messages": [HI] * 180_000, "max_tokens": 5}, "the body has more"),
    "blocks that fit": lambda: (MESSAGES, {"messages": [said(*[BLOCK] * 4000), *[HI] * 4000], "max_tokens": 5}, TOO_LONG),
    "blocks to count": lambda: (f"{MESSAGES}/count_tokens", {"messages": [said(*[BLOCK] * 10_000), HI]}, "messages must be"),
    "signed thoughts": lambda: (MESSAGES, {"messages": [said(*[SIGNED] * 4000), LONG], "max_tokens": 5}, TOO_LONG),
    "one signed thought": lambda: (
        MESSAGES,
        {"messages": [said({"type": "thinking", "signature": Seals("k").seal("a thought " * 580_000)}), LONG], "max_tokens": 5},
        TOO_LONG,
    ),
    "uses and results of tools": lambda: (
        MESSAGES,
        {"messages": [said(*[USED] * 2000), {"role": "user", "content": [RETURNED] * 2000}, LONG], "max_tokens": 5},
        TOO_LONG,
    ),
    "results of tools": lambda: (
        MESSAGES,
        {"messages": [{"role": "user", "content": [RETURNED] * 4000}, LONG], "max_tokens": 5},
        TOO_LONG,
    ),
    "long text": lambda: (TEXT, {"prompt": "many words of a text\n" * 350_000}, "prompt"),
}  # fmt: skip


@pytest_asyncio.fixture
async def big() -> AsyncIterator[Server]:
    made = make_server(FakeEngineClient(script=lambda _: reply_script()), max_request_bytes=2**25, seal_key="k")
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        yield made


@pytest.mark.parametrize("name", some(ATTACKS, *(name for name in ATTACKS if name not in SIMILAR)))
async def test_no_large_body_takes_the_event_loop(big: Server, name: str) -> None:
    path, body, param = ATTACKS[name]()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    await big.post(TEXT, {"prompt": "warm " * 20_000, "truncate_prompt_tokens": 3})
    spent_s = []
    while not spent_s or (len(spent_s) < MAX_TRIES and min(spent_s) >= LOOP_S):
        begin = time.thread_time()
        call = big.call("POST", path, raw)
        await asyncio.wait_for(call._task, 200)
        spent_s.append(comparable_s(time.thread_time() - begin, LOOP_S))
    print(f"{len(raw) / 1e6:.1f} MB: {spent_s} s of the loop, {call.status} {call.text[:150]}")
    assert min(spent_s) < LOOP_S
    if name in ("ids to truncate", "parts that fit", "arguments of code", "cut text"):
        assert call.status == 200, call.text
        (*_, seen) = big.engine.seen
        assert len(seen.prompt) == body["truncate_prompt_tokens"]
        return
    assert call.status == 400
    if path.startswith(MESSAGES):
        assert call.json["error"]["message"].startswith(param)
    else:
        assert call.json["error"]["param"] == param
    assert len(call.text) < 1000


GOOD: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": [5, 6, 7], "echo": True}),
    (TEXT, {"prompt": [[5, 6], [7]], "n": 2, "seed": 3}),
    (TEXT, {"prompt": "the token 🙂", "logit_bias": {"5": 1.5, "6": -2}, "stop": ["x"]}),
    (NATIVE, {"input_ids": [[5, 6], [7]]}),
    (CHAT, {"messages": [{"role": "user", "content": [PART, {"type": "text", "text": "ÿ"}]}, HI]}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/tokenize", {"messages": [HI]}),
    (RESPONSES, {"input": [HI, {"role": "user", "content": [{"type": "input_text", "text": "ÿ"}]}]}),
    (
        MESSAGES,
        {
            "messages": [
                HI,
                said(PART, {**USED, "input": {}}),
                {"role": "user", "content": [RETURNED | {"content": "ÿ"}]},
            ],
            "max_tokens": 5,
        },
    ),
]
BAD: list[tuple[str, Any, str | None]] = [
    (TEXT, {"prompt": [5, 500]}, "prompt"),
    (TEXT, {"prompt": [5, -1]}, "prompt"),
    (TEXT, {"prompt": [5, True]}, "prompt"),
    (TEXT, {"prompt": [5, 10**30]}, "prompt"),
    (TEXT, {"prompt": [[5], []]}, "prompt"),
    (TEXT, {"prompt": [5] * 257}, "prompt"),
    (NATIVE, {"input_ids": [[5], [1.5]]}, "input_ids"),
    (CHAT, {"messages": [{"role": "user", "content": [PART] * (MAX_PARTS + 1)}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    (TEXT, {"prompt": "Hi", "seed": 2**70}, None),
    (TEXT, b'{"prompt": "\\ud800"}', None),
    (TEXT, b'{"prompt": "Hi"', None),
    (TEXT, b"[1, 2]", None),
]


@pytest.fixture
def always_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiserve.server.request.body.is_quick", lambda raw: False)


@pytest.mark.usefixtures("always_aside")
async def test_a_body_that_a_process_reads_is_answered_as_any(big: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, body in GOOD:
        call = await big.post(path, body)
        assert call.status == 200, call.text
    aside_prompts = [seen.prompt.tolist() for seen in big.engine.seen]
    assert all(seen.prompt.dtype == np.int32 for seen in big.engine.seen)
    for path, raw, param in BAD:
        call = await big.post(path, raw)
        assert (call.status, call.json["error"]["param"]) == (400, param), (raw, call.text)
    monkeypatch.undo()
    big.engine.seen.clear()
    for path, body in GOOD:
        await big.post(path, body)
    assert [seen.prompt.tolist() for seen in big.engine.seen] == aside_prompts


def test_what_is_quick_is_told_by_counts() -> None:
    code = json.dumps({"prompt": 'f(a, b, [c], {"d": 1})\n' * 8000}).encode()
    assert code.count(b",") > 2 * QUICK_STRINGS
    assert is_quick(code), "commas and brackets of a text are no values"
    assert is_quick(json.dumps({"prompt": [100_000] * QUICK_VALUES}).encode())
    assert not is_quick(json.dumps({"prompt": [1] * (QUICK_VALUES + 10)}).encode())
    assert not is_quick(json.dumps({"prompt": [[]] * (QUICK_STRINGS + 10)}).encode())
    assert not is_quick(json.dumps({"logit_bias": {str(i): 1 for i in range(2 * QUICK_STRINGS + 10)}}).encode())
    assert not is_quick(b" " * (2**20 + 1))


@pytest.mark.parametrize("raw", [
    json.dumps({"prompt": list(range(QUICK_VALUES))}), json.dumps({"prompt": [[]] * QUICK_STRINGS}),
    json.dumps({"logit_bias": {str(i): 1.5 for i in range(QUICK_STRINGS)}}), json.dumps({"prompt": '","' * 60_000}),
    json.dumps({"prompt": "\x01" * 170_000}), "[" * 2**20, "1," * 2**16, '{"prompt": "' + '\\",' * 20_000,
], ids=["ids", "lists", "biases", "quotes", "escapes", "deep", "broken", "string without an end"])  # fmt: skip
def test_the_worst_of_what_is_quick_takes_little(raw: str) -> None:
    body = raw.encode()

    def parse() -> None:
        if is_quick(body):
            with contextlib.suppress(RequestError):
                parse_body(body)

    assert least_cpu_s(parse, 0.06) < 0.06


# --- the processes --------------------------------------------------------------------------

SIZES = Sizes(vocab_size=100, max_model_len=1000)


@pytest_asyncio.fixture
async def helpers() -> AsyncIterator[HelperPool]:
    made = HelperPool(None)
    yield made
    await made.close()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def test_a_process_that_has_grown_ends_and_the_next_body_has_another(
    helpers: HelperPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_pool, "IDLE_S", 1e6)
    before = set(children(os.getpid()))
    await helpers.slim(b'{"prompt": "Hi"}', SIZES, 0)
    (first,) = set(children(os.getpid())) - before
    with pytest.raises(RequestError, match=f"more than {MAX_BODY_VALUES} values, most of them in x"):
        await helpers.slim(b'{"x": [' + b"[]," * 5_000_000 + b"1]}", SIZES, 0)
    await until(lambda: first not in children(os.getpid()))  # though nobody sends anything
    assert await helpers.slim(b'{"prompt": "Hi"}', SIZES, 0) == {"prompt": "Hi"}
    (second,) = set(children(os.getpid())) - before
    assert second != first
    assert resident_bytes(second) < helper_process.KEPT_MEMORY_BYTES


async def test_a_process_gives_way_to_the_event_loop_and_may_not_take_all_memory(helpers: HelperPool) -> None:
    before = set(children(os.getpid()))
    await helpers.slim(b"{}", SIZES, 0)
    (pid,) = set(children(os.getpid())) - before
    least = 19  # no process is nicer
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(least, os.nice(0) + helper_process.NICENESS)
    limit, hard_limit = resource.prlimit(pid, resource.RLIMIT_DATA)
    had = limit - helper_process.MAX_MEMORY_BYTES  # by its threads, one a core and more
    assert limit == hard_limit and had > 0


ENDLESS = """
import sys, time
from hiserve.text.helpers import process
process.JOB_CPU_S = 0.05
def answer(helper, job):
    while time.process_time() < 5:
        pass
    return [b"", b""]
process.Helper.answer = answer
sys.exit(process.serve(sys.argv[1]))
"""


async def test_a_process_that_takes_too_much_time_of_a_core_ends_with_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own time counts, and no clock: on a busy machine a body has as much of it."""
    monkeypatch.setattr(helper_pool, "COMMAND", (sys.executable, "-c", ENDLESS))
    pool = HelperPool(None)
    try:
        with pytest.raises(RequestError, match="more time or memory to read than any may") as refused:
            await pool.slim(b"{}", SIZES, 0)
        assert refused.value.code == TOO_SLOW
    finally:
        await pool.close()


async def test_a_process_that_dies_refuses_its_body_alone(helpers: HelperPool) -> None:
    before = set(children(os.getpid()))
    await helpers.slim(b"{}", SIZES, 0)
    (pid,) = set(children(os.getpid())) - before
    os.kill(pid, signal.SIGSTOP)
    reading = asyncio.create_task(helpers.slim(b"{}", SIZES, 0))
    await until(lambda: any(each._child.is_busy for each in helpers._all))
    os.kill(pid, signal.SIGPROF)  # as the kernel does when the CPU time is over
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(RequestError, match="more time or memory"):
        await reading
    assert await helpers.slim(b'{"a": 1}', SIZES, 0) == {"a": 1}


async def test_work_that_cannot_be_sent_takes_no_place() -> None:
    made = HelperPool(ChatTemplate("{{ messages[0].content }}"))
    for _ in range(2 * helper_pool.NUM_PROCESSES):
        with pytest.raises(OverflowError):
            await made.render(chat_of([HI], template_kwargs={"number": 2**70}), None, 0)
    async with asyncio.timeout(PATIENCE_S):
        assert await made.render(chat_of([HI]), None, 0) == "Hi"
    await made.close()


async def test_an_idle_process_ends(helpers: HelperPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_pool, "IDLE_S", 0.0)
    before = set(children(os.getpid()))
    await helpers.slim(b"{}", SIZES, 0)
    await until(lambda: set(children(os.getpid())) <= before)
    assert await helpers.slim(b"{}", SIZES, 0) == {}


async def test_a_caller_that_goes_keeps_its_place_until_the_work_is_over() -> None:
    made = HelperPool(ChatTemplate("{{ messages[0].content }}"))
    readings = [asyncio.create_task(made.slim(b'{"a": [1]}', SIZES, 0)) for _ in range(6)]
    await asyncio.sleep(0)
    for reading in readings[:4]:
        reading.cancel()
    done = await asyncio.gather(*readings, return_exceptions=True)
    assert [isinstance(each, asyncio.CancelledError) for each in done] == [True] * 4 + [False] * 2
    assert done[4:] == 2 * [{"a": [1]}]
    await made.close()
