"""The real OpenAI client against a live server on the embedded model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import openai.lib._pydantic
import pydantic
import pytest
import pytest_asyncio

from hiserve.models.model_config import NANO, find_model
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.e2e.live import COMMAND, Live, serve
from tests.helpers.processes import wait_dead
from tests.helpers.waiting import PATIENCE_S, wait_until
from tests.helpers.widening import some

MODEL = NANO
QUESTIONS = [
    "I would like a small latte with oat milk, please.",
    "Can you book a table for two tonight?",
    "Hi, I need a ride to the airport tomorrow morning.",
    "Two cappuccinos and a muffin, please.",
    "Find me a cheap hotel in Boston.",
    "What movies are playing this weekend?",
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(tmp_path_factory.mktemp("live"), "--cpu-threads", "1") as running:
        yield running


@pytest_asyncio.fixture
async def client(live: Live) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_chat_reply_with_usage(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model=MODEL, messages=[user(QUESTIONS[0])], max_completion_tokens=24, temperature=0
    )
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert 0 < reply.usage.completion_tokens <= 24
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens is not None
    assert reply.system_fingerprint
    assert reply.id.startswith("chatcmpl-")


async def test_a_streamed_reply_equals_the_whole_one(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": [user(QUESTIONS[1])], "max_tokens": 32, "seed": 5}
    whole = await client.chat.completions.create(**fields, temperature=0)
    stream = await client.chat.completions.create(
        **fields, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_text_completions_of_text_and_of_token_ids_agree(client: openai.AsyncOpenAI) -> None:
    text = "Would you like"
    ids = Tokenizer.load(find_model(MODEL)).encode(text, add_special_tokens=True).tolist()
    replies = [
        await client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
        for prompt in (text, ids)
    ]
    assert replies[0].choices[0].text == replies[1].choices[0].text


async def test_a_seed_repeats_a_sampled_reply_and_another_seed_changes_it(client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> str:
        reply = await client.chat.completions.create(
            model=MODEL, messages=[user(QUESTIONS[2])], max_tokens=32, temperature=1.0, seed=seed
        )
        return reply.choices[0].message.content or ""

    first = await ask(1)
    assert await ask(1) == first
    assert len({first, await ask(2), await ask(3)}) > 1


async def test_chat_choices_and_scores_parse_into_the_clients_types(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model=MODEL, messages=[user(QUESTIONS[3])], n=3, max_tokens=12, seed=7, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) > 1
    assert reply.usage is not None
    num_entries = 0
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0
            assert entry.bytes is not None
            assert bytes(entry.bytes).decode(errors="replace") == entry.token or entry.token.startswith("bytes:")
            assert len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        num_entries += len(choice.logprobs.content)
        shown = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content if entry.token[:2] != "<|")
        assert shown.decode(errors="replace") == choice.message.content
    assert num_entries == reply.usage.completion_tokens


async def test_streamed_choices_parse_into_the_clients_types(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[user(QUESTIONS[4])],
        n=2,
        max_tokens=12,
        stop=["?"],
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    roles, finishes, num_entries, usage = [], [], 0, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            finishes += [choice.index] if choice.finish_reason else []
            num_entries += len((choice.logprobs and choice.logprobs.content) or ())
    assert roles == ["assistant"] * 2
    assert sorted(finishes) == [0, 1]
    assert usage is not None
    assert usage.completion_tokens == num_entries


async def test_completion_scores_and_echoes_parse_into_the_clients_types(client: openai.AsyncOpenAI) -> None:
    reply = await client.completions.create(
        model=MODEL, prompt=["Would you like", "I need"], echo=True, logprobs=3, max_tokens=4, temperature=0
    )
    assert len(reply.choices) == 2
    for choice, prompt in zip(reply.choices, ("Would you like", "I need"), strict=True):
        assert choice.text.startswith(prompt)
        scores = choice.logprobs
        assert scores is not None
        assert scores.tokens and scores.token_logprobs and scores.top_logprobs and scores.text_offset
        assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(scores.text_offset)
        assert scores.token_logprobs[0] is None
        assert all(score <= 0 for score in scores.token_logprobs[1:])
        assert all(len(top) >= 3 for top in scores.top_logprobs[1:])


async def test_extensions_go_in_the_extra_body(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model=MODEL,
        messages=[user(QUESTIONS[5])],
        max_tokens=8,
        logit_bias={"5": -100},
        presence_penalty=0.5,
        user="ann",
        metadata={"a": "b"},
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [7], "cache_salt": "x"},
    )
    assert reply.choices[0].model_extra is not None
    assert "stop_reason" in reply.choices[0].model_extra


async def test_errors_are_the_clients_own_exceptions(client: openai.AsyncOpenAI, live: Live) -> None:
    pids = live.pids()
    messages: Any = [user("Hi")]
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=messages)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        await client.chat.completions.create(model=MODEL, messages=messages, temperature=-1)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as many:
        await client.chat.completions.create(model=MODEL, messages=messages, n=65)
    assert many.value.param == "n"
    with pytest.raises(openai.BadRequestError) as shaped:
        await client.chat.completions.create(model=MODEL, messages=messages, response_format={"type": "shape"})
    assert shaped.value.param == "response_format.type"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=MODEL, prompt=[10] * 100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as negative:
        await client.completions.create(model=MODEL, prompt=[-1])
    assert negative.value.param == "prompt"
    bad = httpx.post(f"{live.url}/v1/completions", content=rb'{"prompt": "\ud800"}')
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "prompt")
    assert (await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)).choices
    assert live.pids() == pids, "a malformed request must not cost a process"


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == [MODEL]


@pytest.mark.parametrize("repeats", some([1, 2], 1))
async def test_the_next_turn_hits_the_whole_history_of_a_sampled_reply(
    client: openai.AsyncOpenAI, live: Live, repeats: int
) -> None:
    """Conversations at temperature 0.7, and hotter ones whose sampled ids are not the tokenizer's own choice."""
    page_size = live.info()["config"]["cache"]["page_size"]
    tokenizer = Tokenizer.load(find_model(MODEL))
    num_unusual = 0
    for seed, question in enumerate(QUESTIONS * repeats):
        messages: list[Any] = [user(f"{question} ({seed})")]
        history = 0
        for turn in range(3):
            reply = await client.chat.completions.create(
                model=MODEL,
                messages=messages,
                temperature=0.7 if seed % 2 else 1.5,
                seed=100 + seed,
                max_tokens=40,
                extra_body={"return_token_ids": True},
            )
            assert reply.usage is not None
            assert reply.usage.prompt_tokens_details is not None
            cached = reply.usage.prompt_tokens_details.cached_tokens or 0
            assert cached >= history - page_size, f"seed {seed}, turn {turn}: {cached} of {history}"
            history = reply.usage.total_tokens
            text = reply.choices[0].message.content or ""
            ids = [i for i in reply.choices[0].model_extra["token_ids"] if i not in tokenizer.hidden_ids]
            num_unusual += ids != tokenizer.encode(text, add_special_tokens=False).tolist()
            messages += [{"role": "assistant", "content": text}, user("Thank you. And then?")]
    assert num_unusual >= 1, "no sampled reply differed from its tokenization: the test shows nothing"


async def test_disconnects_leak_no_pages_and_every_stream_ends_once(live: Live) -> None:
    seed = 20_260_214
    print(f"seed {seed}")
    rng = random.Random(seed)
    before = live.counter("hiserve:request_success_total")
    limits = httpx.Limits(max_connections=100)
    ends: list[str] = []

    async def one(http: httpx.AsyncClient, leave_after: int | None, max_tokens: int, question: str) -> None:
        body = {"messages": [user(question)], "stream": True, "max_tokens": max_tokens, "temperature": 0.7}
        num_events, finishes, num_done = 0, [], 0
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line:
                    continue
                num_events += 1
                if leave_after is not None and num_events >= leave_after:
                    ends.append("left")
                    return
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    num_done += 1
                    continue
                event = json.loads(data)
                assert "error" not in event, event
                finishes += [choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]]
        assert (len(finishes), num_done) == (1, 1)
        ends.append(finishes[0])

    async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S, limits=limits) as http:
        calls = []
        for i in range(100):
            leave_after = rng.randint(1, 12) if rng.random() < 0.3 else None
            question = f"{rng.choice(QUESTIONS)} {rng.randint(0, 30)} {'please ' * rng.randint(0, 60)}{i % 7}"
            calls.append(one(http, leave_after, rng.randint(4, 40), question))
        await asyncio.gather(*calls)
    assert len(ends) == 100
    assert 15 <= ends.count("left") <= 45
    info = live.wait_idle()
    for worker in info["workers"]:
        stats = worker["stats"]
        assert stats["free_pages"] + stats["evictable_pages"] == worker["num_pages"], stats
    assert live.counter("hiserve:request_success_total") - before == 100
    assert live.counter("hiserve:request_success_total", finished_reason="error") == 0
    assert live.counter("hiserve:kv_cache_usage_perc") == 0


async def test_a_closed_socket_frees_its_request_while_others_run(live: Live) -> None:
    """A request without an end in sight leaves the batch when its client does."""
    live.wait_idle()
    num_whole = live.counter("hiserve:request_success_total", finished_reason="length")
    host, port = live.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": [50], "max_tokens": 4000, "ignore_eos": True}).encode()
    for _ in range(3):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        while not (await asyncio.to_thread(live.info))["num_inflight"]:
            await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()
        await asyncio.to_thread(live.wait_idle)
    assert live.counter("hiserve:request_success_total", finished_reason="length") == num_whole


def test_a_port_in_use_is_one_line_and_exit_status_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [*COMMAND, "serve", "--port", str(port)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    assert ended.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in ended.stderr
    assert "Traceback" not in ended.stderr


def wait_for_log(running: Live, text: str) -> None:
    wait_until(lambda: text in running.log.read_text(), lambda: f"{text!r} is not in the log")


def test_a_second_signal_stops_at_once_and_kill_leaves_no_orphans(tmp_path: Path) -> None:
    body = {"prompt": [50], "max_tokens": 8000, "ignore_eos": True, "stream": True}
    for signals, status in (([signal.SIGTERM, signal.SIGTERM], 0), ([signal.SIGKILL], -signal.SIGKILL)):
        with serve(tmp_path, "--cpu-threads", "1", "--drain-timeout-s", "3600") as running:
            pids = running.pids()
            with (
                pytest.raises(httpx.RemoteProtocolError) if status else contextlib.nullcontext(),
                httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=PATIENCE_S) as response,
            ):
                lines = response.iter_lines()
                next(lines)
                running.process.send_signal(signals[0])
                for number in signals[1:]:  # two signals at once may arrive as one
                    wait_for_log(running, "draining")
                    running.process.send_signal(number)
                list(lines)
            assert running.process.wait(PATIENCE_S) == status
            wait_dead(pids)


def test_the_terminal_chat_talks_through_a_pipe(live: Live) -> None:
    script = f"{QUESTIONS[0]}\nThank you.\n/stats\n/reset\n/nonsense\n{QUESTIONS[1]}\n/exit\nnever said\n"
    ended = subprocess.run(
        [*COMMAND, "chat", "--url", live.url],
        input=script,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("first token") == 3
    assert "2 turns" in ended.stdout
    assert "forgotten" in ended.stdout


def test_the_terminal_chat_brings_its_own_server() -> None:
    ended = subprocess.run(
        [*COMMAND, "chat"], input=f"{QUESTIONS[0]}\n", capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("first token") == 1


async def test_structured_output_parses_into_the_clients_types(client: openai.AsyncOpenAI) -> None:
    """The client writes the schema itself, strict, and reads the reply; streamed deltas are the same text."""

    class Order(pydantic.BaseModel):
        drink: Literal["latte", "mocha", "tea"]
        sizes: list[Literal["small", "large"]] = pydantic.Field(max_length=3)  # a small model goes on without a limit
        count: int = pydantic.Field(ge=1, le=99)

    asked: Any = {"model": MODEL, "messages": [user(QUESTIONS[0])], "seed": 3, "temperature": 0.7, "max_tokens": 200}
    parsed = await client.chat.completions.parse(**asked, response_format=Order)
    (choice,) = parsed.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Order)
    assert Order.model_validate_json(choice.message.content or "") == choice.message.parsed
    wire = {"type": "json_schema", "json_schema": {"name": "order", "strict": True, "schema": strict_schema(Order)}}
    stream = await client.chat.completions.create(**asked, response_format=wire, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == choice.message.content
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**asked, extra_body={"guided_regex": "("})
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "guided_regex")


def strict_schema(kind: type[pydantic.BaseModel]) -> dict[str, Any]:
    """The schema that the client's ``parse`` sends."""
    return openai.lib._pydantic.to_strict_json_schema(kind)


async def test_the_next_step_of_an_agent_hits_the_whole_history(client: openai.AsyncOpenAI, live: Live) -> None:
    """Calls are sampled under a regex, with odd white space that the client does not return."""
    page_size = live.info()["config"]["cache"]["page_size"]
    look: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    call = r'<tool_call>\n\{"name": "look", "arguments": \{"where":  {1,3}"[a-z]{3,12}"\}\}\n</tool_call>'
    messages: list[Any] = [user(QUESTIONS[4])]
    history = 0
    for seed in range(4):
        reply = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=[look], temperature=1.2, seed=seed, extra_body={"guided_regex": call}
        )
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        (made,) = choice.message.tool_calls
        assert made.type == "function"
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        assert (reply.usage.prompt_tokens_details.cached_tokens or 0) >= history - page_size
        history = reply.usage.total_tokens
        arguments = json.dumps(json.loads(made.function.arguments), separators=(",", ":"))
        assert arguments != made.function.arguments
        function = {"name": made.function.name, "arguments": arguments}
        calls = [{"id": made.id, "type": "function", "function": function}]
        messages += [
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": made.id, "content": "yes"},
        ]


@pytest.mark.parametrize("grammar", [
    {"syntax": "regex", "definition": r"(up|down) [1-9]( \"\w{2}\")?"},
    {"syntax": "lark", "definition": 'start: ("up" | "down") " " /[1-9]/ [more]\nmore: " \\"" LETTER ~ 2 "\\""\nLETTER: /\\w/'},
])  # fmt: skip
async def test_the_input_of_a_custom_tool_is_held_to_its_grammar(client: openai.AsyncOpenAI, grammar: Any) -> None:
    tool = {"type": "custom", "custom": {"name": "move", "format": {"type": "grammar", "grammar": grammar}}}
    messages = [user(QUESTIONS[0])]
    for choice in ({"type": "custom", "custom": {"name": "move"}}, "required"):
        fields: Any = {
            "model": MODEL,
            "tools": [tool],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "max_tokens": 256,
            "seed": 3,
        }
        reply = await client.chat.completions.create(messages=messages, **fields)
        (call,) = reply.choices[0].message.tool_calls or ()
        assert call.type == "custom"
        assert re.fullmatch(r"(up|down) [1-9]( \"\w{2}\")?", call.custom.input), call.custom.input
        stream = await client.chat.completions.create(messages=messages, stream=True, **fields)
        deltas = [delta.to_dict() async for chunk in stream for delta in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(delta["custom"]["input"] for delta in deltas) == call.custom.input
        messages += [reply.choices[0].message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
