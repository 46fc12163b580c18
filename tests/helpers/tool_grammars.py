"""Replies drawn from grammars of tool calls, and what reads and checks them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hiserve.grammar.matcher import Matcher, Vocabulary
from hiserve.text.abilities import Abilities
from hiserve.text.reader.formats import BY_NAME
from tests.helpers import tiny_text
from tests.helpers.reply_formats import marks_of, template_of, token_bytes, tokenizer_of

NUM_DRAWN = 600
Schema = dict[str, Any]


def end_of(name: str) -> int:
    """The token that ends a reply; where that of the tiny tokenizer ends a message, another."""
    if not BY_NAME[name].header[0]:
        return tiny_text.END
    (end,) = tokenizer_of(name, by_token=True).encode("<|return|>", add_special_tokens=False).tolist()
    return int(end)


@cache
def vocabulary_of(name: str, *, by_token: bool) -> Vocabulary:
    tokenizer = tokenizer_of(name, by_token=by_token)
    return Vocabulary(tokenizer.description, len(tokenizer.vocab), [end_of(name)])


@cache
def abilities_of(name: str, *, by_token: bool) -> Abilities:
    return Abilities(
        tokenizer_of(name, by_token=by_token), token_bytes(name, by_token=by_token), template_of(name), name
    )


def allowed_by(matcher: Matcher, vocab_size: int) -> list[int]:
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    matcher.mask(words)
    assert not matcher.error, matcher.error
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


@cache
def closing_tokens(name: str, *, by_token: bool) -> frozenset[int]:
    """The tokens whose text closes something: a string, a list, a call, the reply."""
    tokenizer = tokenizer_of(name, by_token=by_token)
    marks = [mark[:size] for mark in marks_of(BY_NAME[name]) for size in range(1, len(mark) + 1)]
    closing = {*'"}]<|', *marks, tokenizer.decode([end_of(name)], skip_hidden=False)}
    texts = (tokenizer.decode([token], skip_hidden=False) for token in range(len(tokenizer.vocab)))
    return frozenset(token for token, text in enumerate(texts) if text in closing)


def drawn(name: str, start: Matcher, seed: int, *, by_token: bool, lead: str = "") -> list[int] | None:
    """The tokens of a reply of the grammar that begins with a text, drawn so that they end; None if they do not.

    The closer the end, the likelier are the tokens that close something.
    """
    tokenizer, rng, matcher = tokenizer_of(name, by_token=by_token), random.Random(seed), start.copy()
    said: list[int] = tokenizer.encode(lead, add_special_tokens=False).tolist()
    assert matcher.advance(said) is None and not matcher.error
    end, haste, closing = end_of(name), rng.choice([1, 4, 30]), closing_tokens(name, by_token=by_token)
    while len(said) < NUM_DRAWN:
        allowed = allowed_by(matcher, len(tokenizer.vocab))
        weight = haste * (1 + len(said) // 40)
        said += rng.choices(allowed, [weight if token in closing else 1 for token in allowed])
        is_over = matcher.advance(said[-1:]) is not None
        assert not matcher.error, matcher.error
        if is_over:
            return said if said[-1] == end else [*said, end]
    return None


TEXTS = st.text("ab \n<>{}[]\"'\\|/é本5-", max_size=6)
STRINGS: st.SearchStrategy[Schema] = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 9)),
    st.builds(lambda n: {"type": "string", "minLength": 2, "maxLength": n}, st.integers(2, 9)),
    st.builds(lambda values: {"enum": values}, st.lists(TEXTS, min_size=1, max_size=3, unique=True)),
    st.builds(lambda value: {"const": value}, TEXTS),
    st.sampled_from([{"type": "string", "pattern": each} for each in ("^a[0-9]{1,3}$", "b+", "^(x|yz)", "^/a/b?$")]),
    st.just({"type": "string"}),
)
NUMBERS: st.SearchStrategy[Schema] = st.one_of(
    st.builds(lambda n: {"type": "integer", "minimum": n, "maximum": n + 40}, st.integers(-50, 50)),
    st.builds(lambda n: {"type": "number", "maximum": n}, st.integers(-9, 9)),
    st.sampled_from([{"type": "integer"}, {"type": "number"}, {"enum": [1, 2.5, None, True]}, {"const": -3}]),
)
PLAIN: st.SearchStrategy[Schema] = STRINGS | NUMBERS | st.sampled_from([{"type": "boolean"}, {"type": "null"}])


def _object(properties: dict[str, Schema], is_open: bool, num_required: int) -> Schema:
    made: Schema = {"type": "object", "properties": properties, "required": list(properties)[:num_required]}
    return made if is_open else {**made, "additionalProperties": False}


def _union(word: str, each: list[Schema]) -> Schema:
    return {word: each}


NAMES = st.sampled_from(["text", "n", "a b", "x-1", "größe", "y.z"])
VALUES: st.SearchStrategy[Schema] = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.booleans(), st.integers(0, 3)),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(_union, st.just("anyOf"), st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=4,
) | st.sampled_from(
    [{}, {"type": ["string", "null"]}, {"type": ["string", "integer"], "maxLength": 3}, {"$ref": "#/$defs/d"}]
)
PARAMETERS = st.builds(
    lambda schema, inner: {**schema, "$defs": {"d": inner}},
    st.builds(_object, st.dictionaries(NAMES, VALUES, max_size=4), st.booleans(), st.integers(0, 4)),
    PLAIN,
)
