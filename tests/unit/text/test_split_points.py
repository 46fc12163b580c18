"""A prompt is encoded as far as it counts, and what is encoded has the tokens of the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import tokenizers
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

from hiserve.errors import ContextLengthError
from hiserve.models.model_config import find_model
from hiserve.text.prompt import steps as encoding_steps
from hiserve.text.prompt.steps import Encode, PromptLimit, run_steps, text_steps
from hiserve.text.tokens import split_points
from hiserve.text.tokens.split_points import SplitPoints
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.helpers import tiny_text
from tests.helpers.widening import some

SEED = 20261122
CORPUS = [
    *tiny_text.CORPUS,
    "我想订一个房间，谢谢。请问？ 可以、",
    "don't it's 12345 we'll",
    "Привет мир, как дела",
] * 2
# How families of models split a text into words.
PATTERNS = {
    "contractions, words, numbers, marks": r"'s|'t|'re|'ll| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "three digits": r"(?i:'s|'t|'re|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "capitals": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}]*[\p{Ll}\p{Lo}\p{M}]+(?i:'s|'t)?|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "ideographs": r"\p{N}{1,3}|[一-龥぀-ヿ]+|[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+",
}
# It splits where it depends on what stands before, however far away.
THREES = r"[\s\S]{1,3}"


def trained(split: pre_tokenizers.PreTokenizer | None, **changes: object) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    if split is not None:
        backend.pre_tokenizer = split
    for name, value in changes.items():
        setattr(backend, name, value)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in tiny_text.SPECIAL],
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend)


def by_pattern(pattern: str) -> Tokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    both = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    around = processors.TemplateProcessing(
        single="<|bos|> $A <|end|>", special_tokens=[("<|bos|>", tiny_text.BOS), ("<|end|>", tiny_text.END)]
    )
    return trained(both, post_processor=around, normalizer=normalizers.NFC())


def unigram() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"])
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend)


def word_piece() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, show_progress=False, special_tokens=["[UNK]", "[CLS]", "[SEP]"])
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return Tokenizer(backend)


def with_added(*added: AddedToken) -> Tokenizer:
    backend = tiny_text.byte_level_backend()
    backend.add_tokens(list(added))
    return Tokenizer(backend)


MADE: dict[str, Callable[[], Tokenizer]] = {
    "the embedded model": lambda: Tokenizer.load(find_model("hiserve-nano")),
    "byte level": tiny_text.byte_level,
    "start token": tiny_text.with_start_token,
    "byte fallback, no words": tiny_text.byte_fallback,
    "spaces as marks": lambda: trained(pre_tokenizers.Metaspace()),
    "prefix space": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no words": lambda: trained(None),
    "unigram": unigram,
    "word pieces": word_piece,
    "added tokens": lambda: with_added(
        AddedToken("<|l|>", lstrip=True), AddedToken("<|r|>", rstrip=True), AddedToken("cup", single_word=True)
    ),
    "tokens that overlap": lambda: with_added(
        AddedToken("a<|end|>", normalized=False), AddedToken("é<|bos", normalized=False)
    ),
    "an added token over a space": lambda: with_added(AddedToken("k q")),
    **{name: (lambda pattern=pattern: by_pattern(pattern)) for name, pattern in PATTERNS.items()},
}
WITHOUT = {
    "threes": lambda: by_pattern(THREES),
    "a word that takes the spaces behind it": lambda: with_added(AddedToken("coffee", rstrip=True)),
}


@cache
def made(name: str) -> SplitPoints:
    return SplitPoints((MADE | WITHOUT)[name]())


FRAGMENTS = st.one_of(
    st.sampled_from(CORPUS),
    st.sampled_from(
        [*"aZé國가はدд 0.\n\t，。 \u0301\u200d🙂▁'", "  ", "\r\n", "'s ", "12345", " \n", "<|end|>", "<|bos|>", "aaa"]
    ),
    st.sampled_from(["<|l|>", "<|r|>", "a<|end|>", "é<|bos|>", " cup ", "coffee ", "coffee  \n", "ink quo"]),
    st.text(max_size=4),
)
TEXTS = st.lists(FRAGMENTS, min_size=1, max_size=60).map("".join)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few characters, so that a text has many cuts."""
    monkeypatch.setattr(encoding_steps, "PIECE_CHARS", 24)
    monkeypatch.setattr(encoding_steps, "TOKEN_CHARS", 1)


def encoded(name: str, text: str, limit: PromptLimit, *, adds: bool = True) -> list[int]:
    found = text_steps(text, made(name), limit, add_special_tokens=adds)
    return list(map(int, run_steps(found, made(name).tokenizer)))


@pytest.mark.parametrize(
    ("name", "num_texts"), some(product(MADE | WITHOUT, (50, 150)), *((name, 50) for name in MADE | WITHOUT))
)
@pytest.mark.usefixtures("small_pieces")
def test_a_part_of_a_prompt_has_the_tokens_of_the_whole(name: str, num_texts: int) -> None:
    print(f"seed {SEED}")
    num_parts = 0

    @seed(SEED)
    @settings(max_examples=num_texts, deadline=None, database=None)
    @example(text="a b\n" * 200, most=7, adds=True)
    @example(text="12345 " * 50 + "x 1 2 3", most=100, adds=False)
    @example(text="1a<|end|>2é<|bos|>" * 40, most=30, adds=False)
    @example(text="ink quo " * 60, most=30, adds=False)
    @given(text=TEXTS, most=st.integers(1, 80), adds=st.booleans())
    def check(text: str, most: int, adds: bool) -> None:
        nonlocal num_parts
        whole = made(name).tokenizer.encode(text, add_special_tokens=adds).tolist()
        assert encoded(name, text, PromptLimit(most, from_end=True), adds=adds) == whole[-most:]
        assert encoded(name, text, PromptLimit(len(whole)), adds=adds) == whole
        found = text_steps(text, made(name), PromptLimit(10**9), add_special_tokens=adds)
        step = found.send(None)
        while True:
            num_parts += isinstance(step, Encode)
            try:
                step = found.send(made(name).tokenizer.encode(step.text, add_special_tokens=step.add_special_tokens))
            except StopIteration:
                break

    check()
    assert name in WITHOUT or name == "no words" or num_parts > 2 * num_texts, "no text was cut"
    has_no_space = name in WITHOUT or name in ("no words", "an added token over a space")
    assert (made(name).first("I had a token of text", 0, 21) is None) == has_no_space


WORDS = "a small coffee for two, please " * 40_000


@pytest.mark.parametrize("most", [1, 100, 5000])
def test_of_a_long_text_the_end_that_counts_is_encoded(most: int) -> None:
    """The work is counted: characters that the tokenizer got, and the longest piece of them."""
    given_chars: list[int] = []
    tokenizer = made("three digits").tokenizer
    found = text_steps(WORDS, made("three digits"), PromptLimit(most, from_end=True), add_special_tokens=True)
    done = None
    while True:
        try:
            step = found.send(done)
        except StopIteration as end:
            ids = end.value
            break
        assert isinstance(step, Encode)
        given_chars.append(len(step.text))
        done = tokenizer.encode(step.text, add_special_tokens=step.add_special_tokens)
    tail = WORDS[-20 * most - 2000 :]
    assert ids.tolist() == tokenizer.encode(tail, add_special_tokens=True).tolist()[-most:]
    assert sum(given_chars) <= 12 * most + 2 * encoding_steps.PIECE_CHARS // 64
    assert max(given_chars, default=0) <= 2 * encoding_steps.PIECE_CHARS


def test_a_text_that_does_not_fit_is_encoded_until_that_is_known() -> None:
    num_chars = 0
    found = text_steps(WORDS, made("byte level"), PromptLimit(1000, param="text"), add_special_tokens=True)
    step = found.send(None)
    refused: ContextLengthError | None = None
    while refused is None:
        assert isinstance(step, Encode)
        num_chars += len(step.text)
        try:
            step = found.send(made("byte level").tokenizer.encode(step.text, add_special_tokens=False))
        except ContextLengthError as error:
            refused = error
    assert "this model's maximum context length is 1000 tokens" in str(refused)
    assert refused.param == "text"
    assert num_chars <= 2 * encoding_steps.PIECE_CHARS < len(WORDS) / 5


@pytest.mark.parametrize("from_end", [False, True])
def test_a_text_without_a_place_to_cut_is_refused_where_it_is_too_long(from_end: bool) -> None:
    text = "1234567890" * (split_points.MAX_WHOLE_CHARS // 10 + 10)
    with pytest.raises(ContextLengthError, match="without a place where it could be divided") as refused:
        encoded("byte level", text, PromptLimit(10**9, from_end=from_end))
    assert refused.value.param == "prompt"
    whole = (
        made("byte level").tokenizer.encode(text[: encoding_steps.PIECE_CHARS + 1000], add_special_tokens=True).tolist()
    )
    assert encoded("byte level", text[: encoding_steps.PIECE_CHARS + 1000], PromptLimit(10**9)) == whole


def test_marks_with_the_sign_of_a_space_leave_cuts_at_spaces() -> None:
    """As ``<｜begin▁of▁sentence｜>`` of DeepSeek; where a normalizer makes that sign of spaces, no cut is within such a mark."""
    mark = AddedToken("<｜begin▁of▁sentence｜>", special=True, normalized=False)
    plain = tiny_text.byte_level_backend()
    plain.add_special_tokens([mark])
    assert SplitPoints(Tokenizer(plain)).first("one two", 0, 7) == 3
    spaces = tiny_text.byte_level_backend()
    spaces.normalizer = normalizers.Replace(" ", "▁")
    spaces.add_tokens([AddedToken("of▁sentence", normalized=True)])
    found = SplitPoints(Tokenizer(spaces))
    assert not found.exist or found.first("of sentence", 0, 11) is None
