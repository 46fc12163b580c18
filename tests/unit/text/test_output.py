"""What a reader sees of a choice: it ends at stops, leaks no part of them, and does not depend on chunks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hiserve.core.request import FinishReason, SamplingParams
from hiserve.text.reader.output import TextDelta, TextOutput
from hiserve.text.tokens.detokenizer import REPLACEMENT, TokenBytes
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.helpers import tiny_text
from tests.helpers.slowness import least_cpu_s

TOKENIZERS = {
    "byte level": tiny_text.byte_level(),
    "byte fallback": tiny_text.byte_fallback(),
    "window": tiny_text.with_decoder(None),
}
LEVEL = TOKENIZERS["byte level"]
SPELLINGS = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}
RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH


def push_all(output: TextOutput, chunks: list[list[int]], finish: FinishReason = LENGTH) -> list[TextDelta]:
    """Pushes chunks, the last one with the finish reason, until the choice has ended."""
    shown = []
    for i, chunk in enumerate(chunks):
        shown.append(output.push(chunk, finish if i == len(chunks) - 1 else RUNNING))
        if shown[-1].finish:
            break
    return shown


def spelt(text: str) -> list[int]:
    return tiny_text.spell_in_bytes(LEVEL, text)


def show(text: str, *stops: str, **params: Any) -> TextDelta:
    """Pushes a text one character a token; returns all that was shown, as one."""
    pieces = push_all(
        TextOutput(SPELLINGS["byte level"], SamplingParams(stop=stops, **params)), [[i] for i in spelt(text)]
    )
    return TextDelta(
        "".join(piece.text for piece in pieces), sum(piece.num_tokens for piece in pieces), *pieces[-1][2:]
    )


def reference(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> tuple[str, int, str | None]:
    """The same from the whole text: the match that ends first, after ``min_tokens``, the longest of several.

    What a token adds is known by decoding every prefix, a character only when nothing changes it any more.
    """
    whole = tokenizer.decode(ids, skip_hidden=params.skip_special_tokens)
    certain = []  # characters certain after each token
    detokenizer = TokenBytes(tokenizer).detokenizer(skip_special=params.skip_special_tokens)
    num_chars = 0
    for index in ids:
        num_chars += len(detokenizer.push([index]))
        certain.append(num_chars)
    least = certain[params.min_tokens - 2] if len(ids) > params.min_tokens - 2 >= 0 else 0
    if params.min_tokens > len(ids):
        least = len(whole)
    for end in range(least + 1, len(whole) + 1):
        matched = [stop for stop in params.stop if whole.endswith(stop, 0, end)]
        if matched:
            stop = max(matched, key=len)
            num_tokens = next((i + 1 for i, number in enumerate(certain) if number >= end), len(ids))
            return whole[: end if params.include_stop_str_in_output else end - len(stop)], num_tokens, stop
    return whole, len(ids), None


STOPS = st.lists(st.text("abt h▁é€ ", min_size=1, max_size=4), max_size=3)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=200)
@given(data=st.data(), stops=STOPS, include=st.booleans(), skips=st.booleans(), min_tokens=st.integers(0, 12))
def test_the_text_is_the_whole_decoding_up_to_the_first_stop(
    name: str, data: Any, stops: list[str], include: bool, skips: bool, min_tokens: int
) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "byte level":
        common = [*map(LEVEL.vocab.__getitem__, range(5)), *"abthéâĤ¬", "th", "the"]
        by_token = {token: index for index, token in LEVEL.vocab.items()}
        ids_of = st.sampled_from([by_token[token] for token in common if token in by_token] + [by_token["Ġ"]])
    else:
        num_tokens = len(tokenizer.vocab)
        ids_of = st.one_of(st.integers(0, num_tokens + 1), st.integers(max(num_tokens - 30, 0), num_tokens))
    ids = data.draw(st.lists(ids_of, min_size=1, max_size=25))
    if data.draw(st.booleans()) and stops:
        whole = tokenizer.decode(ids, skip_hidden=skips)
        at = data.draw(st.integers(0, max(len(whole) - 1, 0)))
        stops = [*stops, whole[at : at + data.draw(st.integers(1, 5))] or "x"]
    params = SamplingParams(
        stop=tuple(stops), include_stop_str_in_output=include, skip_special_tokens=skips, min_tokens=min_tokens
    )
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    places = sorted({0, len(ids), *cuts})
    chunks = [ids[a:b] for a, b in pairwise(places)]

    shown = push_all(TextOutput(SPELLINGS[name], params), chunks)

    text, num_counted, stop = reference(tokenizer, ids, params)
    assert "".join(piece.text for piece in shown) == text
    assert sum(piece.num_tokens for piece in shown) == num_counted
    assert (shown[-1].finish, shown[-1].matched_stop) == ((STOP, stop) if stop else (LENGTH, None))


@settings(deadline=None, max_examples=200)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
@example("aabaabaaa", ["aabaaa"])
def test_no_part_of_a_stop_leaks_and_nothing_is_held_needlessly(text: str, stops: list[str]) -> None:
    output = TextOutput(SPELLINGS["byte level"], SamplingParams(stop=tuple(stops)))
    shown = ""
    for at, index in enumerate(spelt(text)):
        piece = output.push([index], RUNNING)
        shown += piece.text
        if piece.finish:
            break
        so_far = text[: at + 1]
        ends = (so_far[-n:] for n in range(len(so_far), 0, -1))
        held = next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")
        assert shown == so_far.removesuffix(held)


def test_what_was_held_is_shown_at_the_end() -> None:
    assert show("hello wor", "world") == TextDelta("hello wor", 9, LENGTH, None)


def test_a_stop_that_spans_tokens_cuts_what_follows_from_text_and_count() -> None:
    output = TextOutput(SPELLINGS["byte level"], SamplingParams(stop=("bcd",)))
    assert output.push(spelt("ab"), RUNNING) == TextDelta("a", 2, RUNNING, None)
    assert output.push(spelt("cdef"), RUNNING) == TextDelta("", 2, STOP, "bcd")
    assert output.push(spelt("gh"), LENGTH) == TextDelta("", 0, STOP, "bcd"), "nothing comes after the end"


def test_a_stop_that_starts_inside_a_token_cuts_it() -> None:
    the = LEVEL.encode("the", add_special_tokens=False).tolist()
    assert len(the) == 1
    shown = TextOutput(SPELLINGS["byte level"], SamplingParams(stop=("he",))).push(the, RUNNING)
    assert shown == TextDelta("t", 1, STOP, "he")


def test_a_stop_after_half_a_character_waits_for_the_character() -> None:
    by_token = {token: index for index, token in LEVEL.vocab.items()}
    output = TextOutput(SPELLINGS["byte level"], SamplingParams(stop=("🙂!",)))
    shown = push_all(output, [[by_token[char]] for char in "aðŁĻĤ!b"])
    assert [piece.text for piece in shown] == ["a", "", "", "", "", ""]
    assert shown[-1] == TextDelta("", 1, STOP, "🙂!")


def test_the_stop_that_is_complete_first_counts_and_of_several_the_longest() -> None:
    assert show("xabcd", "abcd", "bc") == TextDelta("xa", 4, STOP, "bc")
    assert show("xabcd", "c", "abc", "bc") == TextDelta("x", 4, STOP, "abc")
    assert show("xabcd", "abc", "ab") == TextDelta("x", 3, STOP, "ab")


def test_the_stop_itself_is_shown_when_asked_for_and_nothing_is_held() -> None:
    output = TextOutput(SPELLINGS["byte level"], SamplingParams(stop=("bc",), include_stop_str_in_output=True))
    assert [piece.text for piece in push_all(output, [[i] for i in spelt("abcd")])] == ["a", "b", "c"]


def test_a_stop_does_not_count_before_the_least_number_of_tokens() -> None:
    assert show("abxabx", "ab", min_tokens=3) == TextDelta("abx", 5, STOP, "ab")
    assert show("abc", "ab", "abc", min_tokens=3) == TextDelta("", 3, STOP, "abc")
    assert show("abab", "ab", min_tokens=2) == TextDelta("", 2, STOP, "ab")


def test_a_stop_inside_a_run_of_bytes_counts_at_the_end() -> None:
    ids = [3 + ord("a"), 3 + ord("b")]  # byte tokens: no text is certain before the run ends
    output = TextOutput(SPELLINGS["byte fallback"], SamplingParams(stop=("b",)))
    assert push_all(output, [[ids[0]], [ids[1]]]) == [TextDelta("", 1, RUNNING, None), TextDelta("a", 1, STOP, "b")]


@pytest.mark.parametrize("stops", [(), ("zzz",)], ids=["no stops", "stops"])
def test_the_token_that_ends_a_choice_counts_but_is_not_shown(stops: tuple[str, ...]) -> None:
    end = LEVEL.encode("the", add_special_tokens=False).tolist()[0]
    params = SamplingParams(stop_token_ids=(end,), stop=stops)
    assert TextOutput(SPELLINGS["byte level"], params).push([*spelt("hi"), end], STOP) == TextDelta("hi", 3, STOP, end)
    shown = SamplingParams(stop_token_ids=(end,), stop=stops, include_stop_str_in_output=True)
    assert TextOutput(SPELLINGS["byte level"], shown).push([*spelt("hi"), end], STOP) == TextDelta(
        "hithe", 3, STOP, end
    )


@pytest.mark.parametrize(
    ("skips", "includes", "text"), [(True, True, "hi"), (False, True, "hi<|end|>"), (False, False, "hi")]
)
def test_an_end_token_is_not_named_and_shown_only_if_special_tokens_are(skips: bool, includes: bool, text: str) -> None:
    params = SamplingParams(skip_special_tokens=skips, include_stop_str_in_output=includes)
    shown = TextOutput(SPELLINGS["byte level"], params).push([*spelt("hi"), tiny_text.END], STOP)
    assert shown == TextDelta(text, 3, STOP, None)


def test_special_tokens_are_shown_and_match_stops_when_they_are_not_skipped() -> None:
    ids = [*spelt("hi"), tiny_text.USER, *spelt("x")]
    for skips, expected in ((True, TextDelta("hix", 4, LENGTH, None)), (False, TextDelta("hi", 3, STOP, "<|user|>"))):
        params = SamplingParams(skip_special_tokens=skips, stop=("<|user|>",))
        assert TextOutput(SPELLINGS["byte level"], params).push(ids, LENGTH) == expected


def test_an_aborted_choice_shows_what_was_held() -> None:
    output = TextOutput(SPELLINGS["byte level"], SamplingParams(stop=("ab",)))
    assert output.push(spelt("xa"), RUNNING).text == "x"
    assert output.push([], FinishReason.ABORT) == TextDelta("a", 0, FinishReason.ABORT, None)


def test_an_unfinished_character_is_a_replacement_at_the_end_and_may_be_a_stop() -> None:
    by_token = {token: index for index, token in LEVEL.vocab.items()}
    ids = [*spelt("a"), by_token["ð"]]
    assert TextOutput(SPELLINGS["byte level"], SamplingParams()).push(ids, LENGTH).text == "a" + REPLACEMENT
    shown = TextOutput(SPELLINGS["byte level"], SamplingParams(stop=(REPLACEMENT,))).push(ids, LENGTH)
    assert shown == TextDelta("a", 2, STOP, REPLACEMENT)


def test_a_long_stop_that_never_comes_costs_nothing() -> None:
    params = SamplingParams()
    msgspec.structs.force_setattr(params, "stop", ("ab" * 10_000_000,))  # far more than a request may have
    ids, text = spelt("ab" * 20 + "c"), "ab" * 20 + "c"
    outputs: list[TextDelta] = []
    spent_s = least_cpu_s(lambda: outputs.append(TextOutput(SPELLINGS["byte level"], params).push(ids, LENGTH)), 1.0)
    assert spent_s < 1.0, "preparing the whole text takes many seconds"
    assert {output.text for output in outputs} == {text}


@pytest.mark.parametrize("stops", [(), ("zz",), ("c", "bcd")])
def test_a_choice_that_its_grammar_ends_shows_its_last_token_and_has_stopped(stops: tuple[str, ...]) -> None:
    """Unlike one that an end token ends. A stop text in it still counts."""
    output = TextOutput(SPELLINGS["byte level"], SamplingParams(stop=stops, stop_token_ids=tuple(spelt("d"))))
    pieces = push_all(output, [[i] for i in spelt("abcd")], FinishReason.COMPLETE)
    assert "".join(piece.text for piece in pieces) == ("ab" if "c" in stops else "abcd")
    assert (pieces[-1].finish, pieces[-1].matched_stop) == (STOP, "c" if "c" in stops else None)
    assert output.push(spelt("e"), RUNNING) == TextDelta("", 0, STOP, pieces[-1].matched_stop)
