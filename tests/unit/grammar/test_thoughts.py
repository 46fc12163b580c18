"""Budgets of thoughts, whatever their marks are, and texts in messages with headers."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason, Grammar, SamplingParams
from hiserve.grammar.matcher import Matcher, MatcherThreads
from hiserve.grammar.thoughts import SPECIAL, ThoughtBudget, ThoughtPlace
from hiserve.text.abilities import NO_MARKS, ReplyMarks
from hiserve.text.reader.buffer import Kind
from hiserve.text.reader.reader import Reader, ReplyStart
from tests.helpers.chats import chat_of
from tests.helpers.reply_formats import SIZES, read, token_bytes, tokenizer_of
from tests.helpers.tool_grammars import abilities_of, allowed_by, drawn, vocabulary_of

HARMONY = ReplyMarks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>")
# Of a format, whether its marks are tokens: the marks of a reply that begins within a thought or with one.
MARKS: list[tuple[str, bool, ReplyMarks]] = [
    ("hermes", False, ReplyMarks("", "</think>")),
    ("hermes", False, ReplyMarks("<think>", "</think>")),
    ("hermes", True, ReplyMarks("", "</think>")),
    ("hermes", True, ReplyMarks("<think>", "</think>")),
    ("mistral", False, ReplyMarks("[THINK]", "[/THINK]")),
    ("harmony", True, HARMONY),
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def ids(name: str, text: str, *, by_token: bool) -> list[int]:
    found: list[int] = tokenizer_of(name, by_token=by_token).encode(text, add_special_tokens=False).tolist()
    return found


def matcher_of(name: str, kind: Any, marks: ReplyMarks, budget: int | None, *, by_token: bool) -> Matcher:
    text = "" if kind == "any" else json.dumps(SCHEMA)
    header = "" if kind == "any" else marks.header
    grammar = Grammar.of(kind, text, marks.after, marks.opening, budget, header)
    return vocabulary_of(name, by_token=by_token).compile(grammar)


@pytest.mark.parametrize(("name", "by_token", "marks"), MARKS)
@given(seed=st.integers(0, 2**32), budget=st.integers(0, 9), kind=st.sampled_from(["any", "json"]))
@settings(max_examples=15, deadline=None)
def test_a_thought_has_no_more_tokens_than_its_budget_and_then_its_mark(
    name: str, by_token: bool, marks: ReplyMarks, seed: int, budget: int, kind: str
) -> None:
    if marks.opening and not by_token:
        kind = "any"  # before a format no thought begins with a mark of text
    rng, words = random.Random(seed), ids(name, "so it is </thi <b [/ [THIN a", by_token=by_token)
    matcher = matcher_of(name, kind, marks, budget, by_token=by_token)
    size = len(tokenizer_of(name, by_token=by_token).vocab)
    opening = ids(name, marks.opening, by_token=by_token)
    assert matcher.advance(opening) is None and not matcher.error
    said: list[int] = []
    while len(said) < budget and len(allowed := allowed_by(matcher, size)) > 1:
        said.append(rng.choice([word for word in words if word in allowed]))
        matcher.advance(said[-1:])
    forced: list[int] = []
    while len(allowed := allowed_by(matcher, size)) == 1:
        forced += allowed
        matcher.advance(allowed)
        assert not matcher.error
    text = tokenizer_of(name, by_token=by_token).decode([*said, *forced], skip_hidden=False)
    assert text.count(marks.after) == 1
    if kind == "any":
        assert text.endswith(marks.after) and len(allowed) == size


@pytest.mark.parametrize(("name", "by_token", "marks"), MARKS)
def test_masks_after_drafts_are_those_after_the_same_tokens(name: str, by_token: bool, marks: ReplyMarks) -> None:
    size = len(tokenizer_of(name, by_token=by_token).vocab)
    matcher = matcher_of(name, "any", marks, 2, by_token=by_token)
    drafts = ids(name, f"{marks.opening}a a{marks.after}b", by_token=by_token)
    allowed = matcher.allowed(drafts)
    assert drafts[: len(allowed)] == allowed
    masks: Int32Array = np.full((len(allowed) + 1, -(-size // 32)), -1, dtype=np.int32)
    for _ in range(2):  # the matcher stays where it is
        MatcherThreads(1).fill([(matcher, 0, allowed)], masks)
        for length, row in enumerate(masks):
            after = matcher.copy()
            after.advance(allowed[:length])
            found = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            assert found == allowed_by(after, size), length
    wrong = ids(name, f"{marks.opening}a a a a a a a a", by_token=by_token)
    assert matcher.allowed(wrong) == wrong[: len(ids(name, marks.opening, by_token=by_token)) + 2]


def test_a_mark_that_is_half_spelled_at_the_budget_is_spelled_to_its_end() -> None:
    matcher = matcher_of("hermes", "any", ReplyMarks("", "</think>"), 4, by_token=False)
    said = [token for char in "a</t" for token in ids("hermes", char, by_token=False)]
    assert len(said) == 4 and matcher.advance(said) is None
    rest: list[int] = []
    while len(allowed := allowed_by(matcher, len(tokenizer_of("hermes", by_token=False).vocab))) == 1:
        rest += allowed
        matcher.advance(allowed)
    assert tokenizer_of("hermes", by_token=False).decode(rest, skip_hidden=False) == "hink>"


def test_an_opening_longer_than_the_mark_is_found_behind_other_text() -> None:
    opening = [SPECIAL + b"<|channel|>", b"analysis", SPECIAL + b"<|message|>"]
    spelled = [*opening, SPECIAL + b"<|end|>", b"a"]
    budget = ThoughtBudget(b"".join(opening), spelled[3], 1, spelled.__getitem__, spelled.index)
    place: ThoughtPlace | None = budget.start
    for token in (4, 0, 1, 2, 4):
        place = budget.after(place, token)
    assert budget.forced(place) == 3


@pytest.mark.parametrize(("name", "by_token", "marks"), [each for each in MARKS if not each[2].opening])
def test_a_thought_does_not_end_within_a_character(name: str, by_token: bool, marks: ReplyMarks) -> None:
    size, said = len(tokenizer_of(name, by_token=by_token).vocab), ids(name, "🦜", by_token=by_token)
    assert len(said) > 2
    matcher = matcher_of(name, "json", marks, 1, by_token=by_token)
    for token in said:
        assert token in allowed_by(matcher, size)
        matcher.advance([token])
    assert len(allowed_by(matcher, size)) == 1 and not matcher.error


def test_all_thoughts_of_a_reply_share_its_budget() -> None:
    matcher = matcher_of("harmony", "any", HARMONY, 3, by_token=True)
    size, thought = len(tokenizer_of("harmony", by_token=True).vocab), f"{HARMONY.opening}ab{HARMONY.after}"
    matcher.advance(ids("harmony", thought, by_token=True))
    assert len(allowed_by(matcher, size)) == size
    matcher.advance(ids("harmony", f"{HARMONY.opening}a", by_token=True))
    assert allowed_by(matcher, size) == ids("harmony", "<|end|>", by_token=True)


def test_without_a_thought_no_token_is_forced() -> None:
    for name, by_token, marks in MARKS:
        if marks.opening:
            matcher = matcher_of(name, "any", marks, 0, by_token=by_token)
            said = ids(name, "Well: a < b, so it is" + (marks.opening if not by_token else ""), by_token=by_token)
            assert matcher.allowed(said) == said, name


def test_marks_of_a_reply_by_its_prompt() -> None:
    def marks(name: str, by_token: bool, prompt: str, **how: Any) -> ReplyMarks:
        given = np.array(ids(name, prompt, by_token=by_token), dtype=np.int32)
        return abilities_of(name, by_token=by_token).marks(chat_of([{"role": "user", "content": "Hi"}]), given, **how)

    assert marks("harmony", True, "<|start|>assistant") == HARMONY
    assert marks("harmony", True, f"<|start|>assistant{HARMONY.opening}") == HARMONY._replace(opening="")
    assert marks("harmony", True, "<|start|>assistant<|channel|>final<|message|>") == NO_MARKS
    assert marks("hermes", False, "a<think>\n") == ReplyMarks("", "</think>")
    assert marks("hermes", False, "a") == NO_MARKS
    assert marks("hermes", False, "a", is_free=True) == ReplyMarks("<think>", "</think>")
    assert marks("hermes", False, "a</think>", is_free=True) == NO_MARKS


@given(seed=st.integers(0, 2**32), thinks=st.booleans(), sizes=SIZES)
@settings(max_examples=40, deadline=None)
def test_a_format_is_the_text_of_the_final_message(seed: int, thinks: bool, sizes: list[int]) -> None:
    abilities, lead = abilities_of("harmony", by_token=True), HARMONY.opening if thinks else HARMONY.header
    start = matcher_of("harmony", "json", HARMONY, None if seed % 2 else 4, by_token=True)
    said = drawn("harmony", start, seed, by_token=True, lead=lead)
    if said is None:
        return
    assert abilities.syntax is not None
    reader = Reader(abilities.syntax, token_bytes("harmony", by_token=True), SamplingParams(), ReplyStart(None))
    events = read(reader, said, sizes, FinishReason.STOP)[0]
    content = "".join(each.text for each in events if each.kind is Kind.CONTENT)
    assert json.loads(content).keys() == {"a"}
    assert any(each.kind is Kind.THOUGHT for each in events) <= thinks
