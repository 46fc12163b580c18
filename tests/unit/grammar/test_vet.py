"""Verdicts: of a process that dies of some grammars, kept by digest, and refused to callers who end too many."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from hiserve.core.request import Grammar
from hiserve.errors import OverloadedError, RequestError, UnavailableError
from hiserve.grammar import vet, vet_process
from hiserve.grammar.matcher import Matcher
from hiserve.grammar.vet import Trial, Vetting
from hiserve.grammar.vet_process import draw_allowed, try_out
from tests.helpers.clock import Clock
from tests.helpers.grammars import GRAMMARS, nano_folder, nano_vocabulary
from tests.helpers.waiting import wait_until

SLOW = Grammar.of("json", '{"type":"integer","multipleOf":1234567}')
DEEP = Grammar.of(
    "json",
    json.dumps(
        {
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20_000)} | {"d20000": {}},
            "$ref": "#/$defs/d0",
        }
    ),
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture
async def vetting(clock: Clock) -> AsyncIterator[Vetting]:
    made = Vetting(nano_folder(), 4096, (1, 9999), 64, clock)
    yield made
    await made.close()


async def refused(vetting: Vetting, grammar: Grammar, **how: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await vetting.check(grammar, "regex", **how)
    assert caught.value.param == "regex" and caught.value.message.startswith("regex cannot be used as a grammar: ")
    return caught.value


async def test_sound_grammars_pass_and_are_tried_once(vetting: Vetting) -> None:
    for _ in range(3):
        checks = [vetting.check(grammar, "regex") for grammar in GRAMMARS.values()]
        assert await asyncio.gather(*checks) == [(grammar, []) for grammar in GRAMMARS.values()]
    assert vetting.trials == {"accepted": len(GRAMMARS), "refused": 0, "killed": 0}


async def test_a_refusal_is_kept_too(vetting: Vetting) -> None:
    for _ in range(2):
        assert (await refused(vetting, Grammar.of("regex", "["))).code == "invalid_grammar"
        assert (await refused(vetting, Grammar.of("json", '{"$ref":"#"}'))).code == "invalid_grammar"
        assert (await refused(vetting, Grammar.of("regex", "(.{1,1000}){1,1000}"))).code == "grammar_too_complex"
    assert vetting.trials == {"accepted": 0, "refused": 3, "killed": 0}


async def test_a_schema_that_cannot_be_held_is_refused_or_relaxed(vetting: Vetting) -> None:
    schema = Grammar.of("json", '{"type":"string","format":"colour"}')
    assert "colour" in (await refused(vetting, schema)).message
    grammar, warnings = await vetting.check(schema, "regex", may_relax=True)
    assert grammar == Grammar.of("json_lenient", schema.text)
    assert "colour" in warnings[0]


@pytest.mark.parametrize("grammar", [SLOW, DEEP], ids=["time", "stack"])
async def test_a_grammar_that_ends_the_process_is_refused_and_the_next_one_has_another(
    vetting: Vetting, grammar: Grammar
) -> None:
    for _ in range(2):
        assert (await refused(vetting, grammar)).code == "grammar_too_complex"
    assert vetting.trials["killed"] == 1
    assert (await vetting.check(GRAMMARS["json"], "regex"))[0] == GRAMMARS["json"]


async def test_a_process_that_gets_no_cpu_for_some_seconds_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import sys, time
from hiserve.grammar import vet_process
prompt = vet_process.try_out
vet_process.try_out = lambda *trial: (time.sleep(3), prompt(*trial))[1]
sys.exit(vet_process.serve(sys.argv[1]))
"""
    monkeypatch.setattr(vet, "COMMAND", (sys.executable, "-c", program))
    made = Vetting(nano_folder(), 4096, (1, 9999))
    assert await made.check(GRAMMARS["regex"], "regex") == (GRAMMARS["regex"], [])
    assert made.trials["killed"] == 0
    await made.close()


class OwnNiceness(threading.Thread):
    """Notes its niceness at its end, which it is told or comes when its niceness changes."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.niceness = threading.Event(), -1

    def run(self) -> None:
        begin = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        wait_until(lambda: self.go_on.is_set() or os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) != begin)
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_trial_yields_to_other_processes_beyond_its_credit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cpu, own = Clock(), Clock(0.0), os.getpriority(os.PRIO_PROCESS, 0)
    least = vet_process.MAX_NICENESS  # no process is nicer
    credit, long, short, next_one = vet_process.Credit(clock, cpu), OwnNiceness(), OwnNiceness(), OwnNiceness()
    look = iter([0.0, 0.2, 0.3, 0.3])
    monkeypatch.setattr(credit, "_cpu_clock", lambda: next(look))
    if own == least:
        long.go_on.set()
    credit.run(long)
    assert long.niceness == min(least, own + vet_process.NICENESS)
    assert credit.left_s == pytest.approx(-0.05)
    clock.now_s += 2.0
    monkeypatch.setattr(credit, "_cpu_clock", lambda: (short.go_on.set(), 0.3)[1])
    credit.run(short)
    assert short.niceness == own and credit.left_s == pytest.approx(0.15)
    clock.now_s += 3600.0
    next_one.go_on.set()
    monkeypatch.setattr(credit, "_cpu_clock", lambda: 0.3)
    credit.run(next_one)
    assert credit.left_s == vet_process.MAX_CREDIT_S


async def test_a_caller_who_ended_two_processes_waits_before_a_new_grammar(
    vetting: Vetting, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await vetting.check(GRAMMARS["choice"], "regex", caller=1)
    does, deadly = vetting._process.do, b"deadly"

    async def die(frames: list[bytes]) -> list[bytes] | None:
        return None if deadly in frames[0] else await does(frames)

    monkeypatch.setattr(vetting._process, "do", die)
    hostile = [Grammar.of("regex", f"deadly{index}") for index in range(20)]
    ends = await asyncio.gather(*(vetting.check(each, "regex", caller=1) for each in hostile), return_exceptions=True)
    assert [type(each) for each in ends] == [RequestError] * 2 + [OverloadedError] * 18
    assert vetting.trials["killed"] == 2
    with pytest.raises(OverloadedError) as caught:
        await vetting.check(GRAMMARS["json"], "guided_json", caller=1)
    assert (caught.value.param, caught.value.retry_after_s) == ("guided_json", 61)
    await vetting.check(GRAMMARS["choice"], "regex", caller=1)  # known
    await vetting.check(GRAMMARS["json"], "regex", caller=2)  # of another caller
    clock.now_s += 60
    await vetting.check(GRAMMARS["regex"], "regex", caller=1)


async def test_requests_that_wait_for_verdicts_are_bounded_and_one_caller_has_half(
    vetting: Vetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()
    does = vetting._process.do

    async def wait(frames: list[bytes]) -> list[bytes] | None:
        await go_on.wait()
        return await does(frames)

    monkeypatch.setattr(vetting._process, "do", wait)
    monkeypatch.setattr(vetting, "_max_waiting", 6)

    def ask(caller: int, *names: str) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(vetting.check(GRAMMARS[name], "regex", caller=caller)) for name in names]

    first = [*ask(1, "json", "json", "regex"), *ask(2, "json", "choice")]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="3 of this caller; the limit is 6") as caught:
        await asyncio.wait_for(vetting.check(GRAMMARS["json"], "regex", caller=1), 5)
    assert caught.value.retry_after_s == 1
    first += ask(3, "json")
    await asyncio.sleep(0)
    for caller in (2, 4):
        with pytest.raises(OverloadedError, match="6 requests wait"):
            await asyncio.wait_for(vetting.check(GRAMMARS["json"], "regex", caller=caller), 5)
    for gone in first[:2]:  # clients go away: there is room, but not for new grammars of the one who has half of them
        gone.cancel()
    await asyncio.sleep(0)
    first += ask(4, "json")
    go_on.set()
    ends = await asyncio.gather(*first, return_exceptions=True)
    assert [isinstance(end, BaseException) for end in ends] == [True, True, *[False] * 5]
    assert not vetting._waiting and not vetting._trials


async def test_the_fault_of_a_model_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    made = Vetting(tmp_path, 4096, (1,))
    message = (await refused(made, GRAMMARS["regex"])).message
    assert message.endswith("no other tokenizer.") and not message.endswith("..")
    await made.close()


async def test_verdicts_are_bounded_in_number(vetting: Vetting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vet, "MAX_VERDICTS", 2)
    for name in ("choice", "regex", "rules", "choice"):
        await vetting.check(GRAMMARS[name], "regex")
    assert vetting.trials["accepted"] == 4
    assert len(vetting._verdicts) == 2


LARGE = "(.{1,1000}){1,1000}"


@pytest.mark.parametrize("mark", ["</think>", "<|system|>"], ids=["text", "special token"])
async def test_a_grammar_after_a_thought_is_tried_with_it(vetting: Vetting, mark: str) -> None:
    """A random walk would not leave the thought."""
    assert (await refused(vetting, Grammar.of("regex", LARGE, mark))).code == "grammar_too_complex"
    sound = Grammar.of("json_lenient", '{"type":"string","format":"colour"}', mark)
    asked = Grammar.of("json", sound.text, mark)
    assert (await vetting.check(asked, "regex", may_relax=True))[0] == sound
    opened = Grammar.of("regex", LARGE, "<|system|>", "<|user|>")
    assert (await refused(vetting, opened)).code == "grammar_too_complex"


def test_replies_are_tried_after_the_mark_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    num_allowed: list[int] = []

    def seen(start: Matcher, num_words: int, seed: int) -> None:
        words = np.zeros(num_words, dtype=np.int32)
        start.mask(words)
        num_allowed.append(int(np.unpackbits(words.view(np.uint8)).sum()))

    monkeypatch.setattr(vet_process, "_walk", seen)
    assert try_out(nano_vocabulary(), 128, Trial(GRAMMARS["strict calls"], False, "<tool_call>")).code == ""
    text, call = num_allowed
    assert text > 3000 and call < 10


NOTHING = Grammar.of("json", '{"$ref":"#"}')
DEAD_END = Grammar.of("json", '{"properties":{"a":{"$ref":"#/properties/a"}},"required":["a"],"type":"object"}')


@pytest.mark.parametrize(
    ("grammar", "may_relax", "reason"),
    [
        (NOTHING, False, "no text satisfies it"),
        (NOTHING.either(GRAMMARS["strict calls"]), False, "no text satisfies it"),
        (NOTHING.either(GRAMMARS["strict calls"]), True, "no text satisfies it"),
        (DEAD_END, False, "some texts that it begins have no end"),
        (DEAD_END.either(GRAMMARS["strict calls"]), False, "some texts that it begins have no end"),
    ],
)
def test_texts_that_nothing_satisfies_are_refused_also_beside_calls(
    grammar: Grammar, may_relax: bool, reason: str
) -> None:
    verdict = try_out(nano_vocabulary(), 128, Trial(grammar, may_relax, "<tool_call>"))
    assert (verdict.code, verdict.reason) == ("invalid_grammar", reason)


async def test_without_a_process_nothing_is_kept(vetting: Vetting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vetting._process, "_command", ("/nowhere",))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="cannot be started"):
            await vetting.check(GRAMMARS["choice"], "regex")


def test_a_slow_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread's own time, which here goes on 26 ms with each look."""
    times = iter(range(0, 10_000, 26))
    monkeypatch.setattr("hiserve.grammar.vet_process.time.thread_time", lambda: next(times) / 1000)
    verdict = try_out(nano_vocabulary(), 128, Trial(GRAMMARS["json"], False))
    assert verdict.code == vet.TOO_COMPLEX
    assert "26 ms" in verdict.reason


def test_a_token_is_drawn_as_from_a_list_of_all_allowed_ones() -> None:
    for seed in range(200):
        draw = np.random.default_rng(seed)
        words = np.where(draw.random(40) < 0.3, draw.integers(-(2**31), 2**31, 40), 0).astype(np.int32)
        words[7] |= 1 << 30
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        expected = int(np.random.default_rng(seed).choice(allowed))
        assert draw_allowed(words, np.random.default_rng(seed)) == expected, f"seed {seed}"
    assert draw_allowed(np.zeros(4, dtype=np.int32), draw) is None
    assert draw_allowed(np.array([0, -(2**31)], dtype=np.int32), draw) == 63
