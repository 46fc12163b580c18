"""The detokenizer shows exactly the tokenizer's decoding, in pieces that never change."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders

from hiserve.text.tokens.detokenizer import REPLACEMENT, TokenBytes
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.helpers import tiny_text

BYTE_LEVEL = tiny_text.byte_level()
BYTE_FALLBACK = tiny_text.byte_fallback()
SPELLINGS = {id(tokenizer): TokenBytes(tokenizer) for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK)}


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(places)]


def stream(tokenizer: Tokenizer, chunks: list[list[int]]) -> list[str]:
    detokenizer = SPELLINGS[id(tokenizer)].detokenizer()
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


CUTS = st.lists(st.integers(0, 1000), max_size=30)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, len(BYTE_LEVEL.vocab) + 3), max_size=40), CUTS)
def test_byte_level_deltas_join_to_the_decoding_of_any_ids(ids: list[int], cuts: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, chunked(ids, cuts))) == BYTE_LEVEL.decode(ids)


# Byte tokens are 3..258: weigh them so that runs of them, valid and not, are common.
FALLBACK_IDS = st.one_of(st.integers(0, len(BYTE_FALLBACK.vocab) + 3), st.integers(3 + 0x7E, 3 + 0xF4))


@settings(deadline=None, max_examples=300)
@given(st.lists(FALLBACK_IDS, max_size=40), CUTS)
@example([3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + 0xE2], [1, 2, 3])  # a valid character, spoilt by the byte after it
@example([3 + 0xE2, 1, 3 + 0x82, 3 + 0xAC], [1, 2, 3])  # a special token inside a character
@example([285, 285, 259], [1, 2])  # spaces at the start: one is stripped
def test_byte_fallback_deltas_join_to_the_decoding_of_any_ids(ids: list[int], cuts: list[int]) -> None:
    assert "".join(stream(BYTE_FALLBACK, chunked(ids, cuts))) == BYTE_FALLBACK.decode(ids)


TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


@settings(deadline=None, max_examples=200)
@given(TEXTS, CUTS)
def test_true_text_streams_without_replacement_characters(text: str, cuts: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).tolist()
    pieces = stream(BYTE_LEVEL, chunked(ids, cuts))
    assert "".join(pieces) == text
    assert "".join(pieces).count(REPLACEMENT) == text.count(REPLACEMENT)


def test_a_split_character_is_held_back_until_it_is_complete() -> None:
    alphabet = {token: index for index, token in BYTE_LEVEL.vocab.items()}
    spelt = [alphabet[char] for char in "ðŁĻĤ"]
    pieces = stream(BYTE_LEVEL, [[index] for index in spelt])
    assert pieces == [""] * (len(spelt) - 1) + ["🙂", ""]


def test_an_unfinished_character_appears_at_the_end_only() -> None:
    alphabet = {token: index for index, token in BYTE_LEVEL.vocab.items()}
    pieces = stream(BYTE_LEVEL, [[alphabet["a"]], [alphabet["ð"]], [alphabet["Ł"]]])
    assert pieces == ["a", "", "", REPLACEMENT]


def test_special_and_end_tokens_are_not_shown() -> None:
    ids = BYTE_LEVEL.encode("<|user|>hi<|end|>", add_special_tokens=False).tolist()
    assert ids[0] == tiny_text.USER
    assert ids[-1] == tiny_text.END
    assert "".join(stream(BYTE_LEVEL, [ids])) == "hi"


def test_an_end_token_that_is_not_marked_special_is_not_shown() -> None:
    backend = tiny_text.byte_level_backend()
    end = backend.token_to_id("the")
    assert end is not None
    tokenizer = Tokenizer(backend, eos_token_ids=[end])
    detokenizer = TokenBytes(tokenizer).detokenizer()
    assert detokenizer.push([end]) + detokenizer.flush() == ""


def test_added_tokens_outside_the_byte_alphabet_are_spelled_as_they_are() -> None:
    ids = BYTE_LEVEL.encode("a<think> 日b", add_special_tokens=False).tolist()
    assert "".join(stream(BYTE_LEVEL, [[index] for index in ids])) == "a<think> 日b"


OTHERS = {
    "none": None,
    "WordPiece": decoders.WordPiece(),
    "WordPiece, not cleaned up": decoders.WordPiece(cleanup=False),
    "Metaspace": decoders.Metaspace(),
    "Metaspace, never in front": decoders.Metaspace(prepend_scheme="never"),
    "BPEDecoder": decoders.BPEDecoder(),
    "bytes, then Metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "a pattern, bytes, stripped": decoders.Sequence(
        [decoders.Replace(Regex("▁+"), " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@settings(deadline=None, max_examples=150)
@given(ids=st.lists(st.integers(0, 17), max_size=40), cuts=CUTS, skips=st.booleans())
@example(ids=[5, 5, 4, 2], cuts=[1, 2, 3], skips=True)  # spaces at the start
@example(ids=[12, 13, 14, 12, 2], cuts=[1, 2, 3, 4], skips=True)  # a valid character, spoilt by the byte after it
@example(ids=[15, 16, 12], cuts=[2], skips=False)  # an unknown id inside a run of bytes
def test_any_other_decoder_is_streamed_too(name: str, ids: list[int], cuts: list[int], skips: bool) -> None:
    tokenizer = tiny_text.with_decoder(OTHERS[name])
    detokenizer = TokenBytes(tokenizer).detokenizer(skip_special=skips)
    pieces = [detokenizer.push(chunk) for chunk in chunked(ids, cuts)]
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids, skip_hidden=skips)


@pytest.mark.parametrize(("name", "ids"), [("WordPiece", [2, 3, 2]), ("Metaspace", [4, 5, 4]), ("BPEDecoder", [7, 7])])
def test_another_decoder_shows_each_token_at_once(name: str, ids: list[int]) -> None:
    detokenizer = TokenBytes(tiny_text.with_decoder(OTHERS[name])).detokenizer()
    assert all(detokenizer.push([index]) for index in ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(0, 300), max_size=20), cuts=CUTS)
def test_special_tokens_are_shown_when_asked_for(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    detokenizer = SPELLINGS[id(tokenizer)].detokenizer(skip_special=False)
    pieces = [detokenizer.push(chunk) for chunk in chunked(ids, cuts)]
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids, skip_hidden=False)


def test_a_piece_is_what_a_token_adds_inside_a_text() -> None:
    euro = BYTE_LEVEL.encode("€", add_special_tokens=False).tolist()
    level, fallback = (SPELLINGS[id(tokenizer)] for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK))
    assert b"".join(map(level.bytes_of, euro)) == "€".encode()
    assert level.bytes_of(tiny_text.USER) == b"<|user|>"
    assert level.bytes_of(10**6) == b""
    assert fallback.bytes_of(3 + 0xE2) == b"\xe2"
    assert fallback.bytes_of(285) == b" "
    others = {name: TokenBytes(tiny_text.with_decoder(OTHERS[name])) for name in ("WordPiece", "bytes, then Metaspace")}
    assert [others["WordPiece"].bytes_of(index) for index in (2, 3, 1)] == [b" up", b"on", b" [CLS]"]
    assert [others["bytes, then Metaspace"].bytes_of(index) for index in (4, 13, 99)] == [b" hi", b"\x82", b""]
