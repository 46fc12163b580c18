"""Masks: their bits, after drafts, after a rebuild; the ends of grammars and what is wrong with them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor
from tokenizers import AddedToken

from hiserve.core.request import Grammar
from hiserve.errors import RequestError
from hiserve.grammar import bounds
from hiserve.grammar import matcher as matcher_room
from hiserve.grammar.matcher import LEAST_ADVANCED, Matcher, MatcherThreads, Vocabulary
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.helpers import tiny_text
from tests.helpers.grammars import GRAMMARS, is_valid, nano_tokenizer, nano_vocabulary

VOCAB_SIZE, NUM_ALL, END = 4096, 4200, 1
TOKENIZER = nano_tokenizer()


def bits(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def mask(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    matcher.mask(words)
    return bits(words)


def walk(matcher: Matcher, seed: int) -> list[int]:
    """Tokens drawn from masks, up to the end or a bound."""
    rng, said = random.Random(seed), list[int]()
    for _ in range(60):
        said.append(rng.choice(sorted(mask(matcher))))
        if matcher.advance(said[-1:]) is not None:
            break
    return said


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_walk_along_masks_gives_a_text_of_the_language_or_its_beginning(name: str) -> None:
    vocabulary = nano_vocabulary()
    for seed in range(4):
        matcher = vocabulary.compile(GRAMMARS[name])
        said = walk(matcher, seed)
        is_cut = mask(matcher) != {END}
        text = TOKENIZER.decode([token for token in said if token != END])
        assert is_valid(name, text, is_cut=is_cut), (seed, text)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_matcher_made_from_tokens_is_the_one_that_walked(name: str) -> None:
    vocabulary = nano_vocabulary()
    walked = vocabulary.compile(GRAMMARS[name])
    start = walked.copy()
    said = walk(walked, 7)
    for cut in range(len(said)):
        rebuilt, slow = start.copy(), start.copy()
        assert rebuilt.advance(said[:cut]) is None
        for token in said[:cut]:
            slow.advance([token])
            mask(slow)
        assert mask(rebuilt) == mask(slow)


COMPACT, SPACED, LINES = '{"a":[1,2],"b":{}}', '{"a": [1, 2], "b": {} }', '{\n "a": [1,\t2]\n,"b" :{}}'


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [("", [COMPACT]), ("[ ]?", [COMPACT, SPACED]), (r"[ \n]{0,2}|\t", [COMPACT, SPACED, LINES])],
)
def test_the_white_space_of_json_is_that_of_the_pattern(pattern: str, taken: list[str]) -> None:
    schema = bounds.json_schema({"required": ["a", "b"], "properties": {"a": {"type": "array"}, "b": {}}}, "guided")
    start = nano_vocabulary().compile(bounds.with_whitespace(schema, pattern, "guided"))
    for text in (COMPACT, SPACED, LINES):
        tokens = TOKENIZER.encode(text, add_special_tokens=False).tolist()
        assert (start.allowed(tokens) == tokens) == (text in taken), text


def test_any_json_may_be_without_white_space() -> None:
    grammar = bounds.with_whitespace(bounds.json_schema(True, "guided"), "", "guided")
    matcher = nano_vocabulary().compile(grammar)
    matcher.advance(TOKENIZER.encode("[1,", add_special_tokens=False).tolist())
    assert all(not TOKENIZER.decode([token])[:1].isspace() for token in mask(matcher))


def test_tokens_that_the_tokenizer_lacks_are_never_allowed() -> None:
    matcher = nano_vocabulary(NUM_ALL).compile(Grammar.of("regex", r"(.|\n)*"))
    allowed = mask(matcher, NUM_ALL)
    assert len(allowed) > 4000 and max(allowed) < VOCAB_SIZE
    assert allowed & TOKENIZER.hidden_ids <= {END}


def test_masks_after_drafts_are_those_after_the_same_tokens_and_behind_a_refused_draft_there_are_none() -> None:
    vocabulary, filler = nano_vocabulary(), MatcherThreads(1)
    start = vocabulary.compile(GRAMMARS["regex"])
    said = walk(start.copy(), 3)[:6]
    other = start.copy()
    other.advance(said[:2])
    refused = min(set(range(3, VOCAB_SIZE)) - mask_after(start, said[:2]))
    masks = np.full((12, VOCAB_SIZE // 32), -1, dtype=np.int32)
    filler.fill([(start, 0, said[:4]), (other, 5, []), (start.copy(), 6, [*said[:2], refused, said[2]])], masks)
    for index in range(5):
        assert bits(masks[index]) == mask_after(start, said[:index]), index
    assert bits(masks[5]) == bits(masks[2]) == bits(masks[8])
    assert (masks[9:] == -1).all()
    assert mask(start) == bits(masks[0]), "the matcher has moved"


@pytest.mark.parametrize("num_matchers", [3, LEAST_ADVANCED + 8])
def test_matchers_that_advance_side_by_side_are_where_each_alone_is(num_matchers: int) -> None:
    vocabulary, threads = nano_vocabulary(), MatcherThreads(2)
    choice = vocabulary.compile(Grammar.of("choice", '["quite a table"]'))
    said = TOKENIZER.encode("quite a table", add_special_tokens=False).tolist()
    thinking = vocabulary.compile(Grammar.of("any", "", "</think>").within(2))
    cases = [
        (choice, [*said, 50, 60]),  # it ends before the last two
        (choice, said[:1]),
        (choice, [said[0], 0, 60]),  # refused
        (choice, []),
        (thinking, TOKENIZER.encode("so it is", add_special_tokens=False).tolist()),
        *((start, walk(start.copy(), index)[: 2 + index]) for index, start in enumerate(map(vocabulary.compile, GRAMMARS.values()))),
    ]  # fmt: skip
    asked = [(start.copy(), tokens) for start, tokens in (cases[index % len(cases)] for index in range(num_matchers))]
    alone = [(matcher.copy(), tokens) for matcher, tokens in asked]
    ends = threads.advance(asked)
    assert ends == [matcher.advance(tokens) for matcher, tokens in alone]
    for (one, _), (other, _) in zip(asked, alone, strict=True):
        assert one.error == other.error
        assert one.error or mask(one) == mask(other)


def test_matchers_of_one_grammar_are_given_to_threads_beside_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for one another; each thread begins with another part of the list."""
    asked: list[list[object]] = []

    class Executor:
        def __init__(self, num_threads: int) -> None:
            self._executor = LLExecutor(num_threads)

        def consume_token_par(self, pairs: Any) -> Any:
            asked.append([inner for inner, _ in pairs])
            return self._executor.consume_token_par(pairs)

        def unsafe_compute_mask_ptr(self, pairs: Any, *where: int) -> None:
            asked.append([inner for inner, _ in pairs])
            self._executor.unsafe_compute_mask_ptr(pairs, *where)

    monkeypatch.setattr(matcher_room, "LLExecutor", Executor)
    starts = [nano_vocabulary().compile(GRAMMARS["json"]) for _ in range(2)]
    matchers = [starts[index % 2].copy() for index in range(LEAST_ADVANCED)]
    said = walk(starts[0].copy(), 1)[:1]
    MatcherThreads(1).advance([(matcher.copy(), said) for matcher in matchers])
    assert not asked, "one thread gains nothing"
    threads, source_of = MatcherThreads(2), {id(each._inner): each.source.number for each in matchers}
    threads.advance([(matcher, said) for matcher in matchers])
    masks = np.zeros((len(matchers), VOCAB_SIZE // 32), dtype=np.int32)
    threads.fill([(matcher, index, []) for index, matcher in enumerate(matchers)], masks)
    assert len(asked) == 2
    for inners in asked:
        numbers = [source_of[id(inner)] for inner in inners]
        assert numbers == sorted(numbers), "in parts"
    assert all(bits(words) == mask(matcher) for words, matcher in zip(masks, matchers, strict=True))


def mask_after(start: Matcher, tokens: list[int]) -> set[int]:
    matcher = start.copy()
    matcher.advance(tokens)
    return mask(matcher)


def test_the_token_after_which_nothing_may_follow_is_the_end() -> None:
    matcher = nano_vocabulary().compile(Grammar.of("choice", '["quite a table"]'))
    tokens = TOKENIZER.encode("quite a table", add_special_tokens=False).tolist()
    assert matcher.copy().advance([*tokens, 50, 60]) == len(tokens) - 1
    assert matcher.copy().advance(tokens[:-1]) is None
    failed = matcher.copy()
    assert failed.advance([tokens[0], 0, 60]) is None
    assert failed.error


def test_an_end_token_ends_a_grammar_that_may_go_on() -> None:
    matcher = nano_vocabulary().compile(Grammar.of("regex", "a+"))
    (token,) = TOKENIZER.encode("a", add_special_tokens=False).tolist()
    assert END not in mask(matcher)
    assert matcher.advance([token]) is None
    assert END in mask(matcher)
    assert matcher.advance([END, token]) == 0


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("regex", "[", "unclosed character class"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("json", '{"type":"objekt"}', "Invalid type"),
        ("json", '{"type":"string","minLength":5,"maxLength":2}', "Unsatisfiable"),
        ("json", '{"$ref":"http://example.org/x"}', "leads to http://example.org/x, which is not in the schema"),
        ("json", '{"type":"string","format":"colour"}', "Unknown format"),
        ("json", '{"oneOf":[{"type":"integer"},{"type":"number"}]}', "oneOf"),
        ("lark", "start: other", "unknown name"),
    ],
)
def test_a_grammar_that_is_none_is_refused_with_the_reason(kind: str, text: str, told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        nano_vocabulary().compile(Grammar.of(kind, text))  # type: ignore[arg-type]
    assert caught.value.code == "invalid_grammar"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "text", ['{"type":"string","format":"colour"}', '{"oneOf":[{"type":"integer"},{"type":"null"}]}']
)
def test_a_lenient_schema_says_what_it_does_not_hold(text: str) -> None:
    matcher = nano_vocabulary().compile(Grammar.of("json_lenient", text))
    assert not matcher.error
    assert ("format" in text) == bool(matcher.warnings)


def test_a_schema_or_calls_may_be_lenient_too() -> None:
    colour = Grammar.of("json", '{"type":"string","format":"colour"}')
    parts = colour.either(Grammar.of("lark", 'start: "x"')).text
    with pytest.raises(RequestError, match="Unknown format"):
        nano_vocabulary().compile(Grammar.of("either", parts))
    matcher = nano_vocabulary().compile(Grammar.of("either_lenient", parts))
    assert not matcher.error and matcher.warnings


def test_white_space_between_parts_of_json_is_bounded() -> None:
    matcher = nano_vocabulary().compile(Grammar.of("json", '{"type":"array","items":{"type":"integer"}}'))
    tokens = TOKENIZER.encode("[1,", add_special_tokens=False).tolist()
    (newline,) = TOKENIZER.encode("\n", add_special_tokens=False).tolist()
    matcher.advance(tokens)
    count = 0
    while newline in mask(matcher):
        matcher.advance([newline])
        count += 1
        assert count <= 48
    assert count == 48


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("mark", ["</think>", "<|system|>"], ids=["text", "special token"])
def test_a_reply_that_begins_in_a_thought_has_any_text_and_its_language_after_the_mark(name: str, mark: str) -> None:
    grammar = GRAMMARS[name]
    vocabulary = nano_vocabulary()
    body, matcher = (vocabulary.compile(Grammar.of(grammar.kind, grammar.text, after)) for after in ("", mark))
    said = TOKENIZER.encode('Hm, "{" or a </thin mark?\n', add_special_tokens=False).tolist()
    assert matcher.advance(said) is None
    assert END not in mask(matcher) and len(mask(matcher)) > 3000
    assert matcher.advance(TOKENIZER.encode(mark, add_special_tokens=False).tolist()) is None
    breaks = {token for token in mask(matcher) if not TOKENIZER.decode([token]).strip("\n")}
    assert mask(matcher) - breaks == mask(body) - breaks
    for token in walk(body.copy(), 5):
        assert token in mask(matcher)
        end = matcher.advance([token])
        assert not matcher.error
    assert (end is None) == (body.copy().advance(walk(body.copy(), 5)) is None)


@pytest.mark.parametrize("kind", ["any", "json"])
@pytest.mark.parametrize("budget", [0, 1, 6])
@pytest.mark.parametrize("opening", ["", "<|user|>"])
def test_a_thought_has_no_more_tokens_than_its_budget(kind: Any, budget: int, opening: str) -> None:
    opened, closed = (TOKENIZER.encode(mark, add_special_tokens=False).tolist() for mark in ("<|user|>", "<|system|>"))
    text = "" if kind == "any" else GRAMMARS["json"].text
    start = nano_vocabulary().compile(Grammar.of(kind, text, "<|system|>", opening).within(budget))
    said = TOKENIZER.encode("so it is, and so it may be for ever", add_special_tokens=False).tolist()
    for length in range(budget + 1):
        matcher = start.copy()
        if opening:
            assert opened[0] in mask(matcher)
            matcher.advance(opened)
        matcher.advance(said[:length])
        assert closed[0] in mask(matcher), "it may end earlier"
        assert (mask(matcher) == set(closed)) == (length == budget), length
        matcher.advance(closed)
        assert not matcher.error
        assert (mask(matcher) == set(range(VOCAB_SIZE))) == (kind == "any")
    if opening and kind == "any":
        matcher = start.copy()
        assert mask(matcher) == set(range(VOCAB_SIZE))
        assert matcher.advance([*said, *opened, *said, END]) is not None, "a reply without a thought is free"
        assert not matcher.error


def test_masks_after_drafts_are_those_after_the_same_tokens_within_a_budget_too() -> None:
    matcher = nano_vocabulary().compile(Grammar.of("any", "", "<|system|>").within(3))
    said = TOKENIZER.encode("so it is", add_special_tokens=False).tolist()[:3]
    drafts = [*said, *TOKENIZER.encode("<|system|>", add_special_tokens=False).tolist()]
    masks = np.full((len(drafts) + 1, VOCAB_SIZE // 32), -1, dtype=np.int32)
    for _ in range(2):  # the matcher stays where it is
        MatcherThreads(1).fill([(matcher, 0, drafts)], masks)
        assert [bits(row) for row in masks] == [
            mask_after(matcher, drafts[:length]) for length in range(len(drafts) + 1)
        ]
        assert not matcher.error


@pytest.mark.parametrize("is_special", [False, True])
def test_a_mark_that_is_a_token_is_no_text_whether_the_tokenizer_hides_it_or_not(is_special: bool) -> None:
    """The reader knows such a mark by its token alone, so that a text with it would be read as something else."""
    backend = tiny_text.byte_level_backend()
    backend.add_tokens([AddedToken(each, special=is_special) for each in ("[TOOL_CALLS]", "[OTHER]")])
    tokenizer = Tokenizer(backend, eos_token_ids=[tiny_text.END])
    ids = {token: index for index, token in tokenizer.vocab.items()}
    vocabulary = Vocabulary(tokenizer.description, len(tokenizer.vocab), [tiny_text.END])
    allowed = mask(vocabulary.compile(Grammar.of("regex", r"(.|\n)*")), len(tokenizer.vocab))
    assert ids["[TOOL_CALLS]"] not in allowed
    assert (ids["[OTHER]"] in allowed) is not is_special
    allowed = mask(vocabulary.compile(Grammar.of("regex", "a", "[TOOL_CALLS]")), len(tokenizer.vocab))
    assert ids["[TOOL_CALLS]"] in allowed
