"""Follows a grammar token by token, and says which tokens it allows next. Alone in importing llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from hiserve.core.plan import Int32Array
from hiserve.core.request import Grammar, GrammarKind
from hiserve.errors import RequestError
from hiserve.text.reader.formats import FORMATS
from hiserve.text.tokens.tokenizer import Tokenizer

Body = dict[str, Any]  # a grammar in the library's form
INVALID = "invalid_grammar"
# Between two parts of JSON: without a bound a model may indent for ever.
WHITESPACE = r"[ \n\r\t]{1,48}"
_REMOTE = re.compile(r"Resource '([^']{0,200})[^']*' is not present in a registry and retrieving it failed:.*")
# Where in rules that are made of tools: their author has not seen them.
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_MARKS = {mark for row in FORMATS for mark in row.marks if len(mark.strip()) > 2}
# Of the library. They bound its work in all but a few cases, for which ``grammar.vet`` has a process to lose.
LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


# The library allows the tokens of a slice at once where any text of the slice is allowed. Its own slices are up to 10 and 30
# characters: where a schema bounds a string, most tokens would be looked at one by one.
_PLAIN = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_PLAIN}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 13, 16, 20, 30)), f"{_PLAIN}+"]


class Vocabulary:
    """The tokens of a model, as grammars see them.

    Args:
        description: The tokenizer, in the form of ``tokenizer.json``.
        vocab_size: Of the model. Grammars allow no token that the tokenizer lacks.
        eos_token_ids: End tokens, which are allowed where the grammar may end.

    Raises:
        RequestError: The library cannot read the tokenizer: no grammar can be used with this model.
    """

    def __init__(self, description: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            self._tokenizer = LLTokenizer(
                _with_marks(description), n_vocab=vocab_size, eos_token=list(eos_token_ids), slices=SLICES
            )
        except ValueError as error:
            raise RequestError(f"no grammar can be used with this model's tokenizer: {_first_line(error)}") from None
        self._limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """Reads the tokenizer from a model's folder.

        Raises:
            ModelError: There is none.
            RequestError: As the constructor.
        """
        return cls(Tokenizer.load(folder).description, vocab_size, eos_token_ids)

    def compile(self, grammar: Grammar) -> Matcher:
        """Returns a matcher before its first token; the library may use any time, stack and memory. Releases the GIL.

        Raises:
            RequestError: There is no such grammar, or it is beyond the library's limits.
        """
        try:
            opening = grammar.opening and self._spell(grammar.opening)
            bodies = [_any(opening)] if grammar.kind == "any" and opening else _bodies(grammar)
            if grammar.after:
                bodies = _after_thought(opening, self._spell(grammar.after), bodies, grammar.budget)
        except ValueError as error:
            raise RequestError(_first_line(error), code=INVALID) from None
        source = json.dumps({"grammars": bodies})
        inner = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        matcher = Matcher(inner, has_budget=grammar.budget is not None)
        if matcher.error:
            is_own = grammar.kind in ("lark", "either", "either_lenient")
            raise RequestError(_PLACE.sub("", matcher.error) if is_own else matcher.error, code=INVALID)
        return matcher

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a text, in which special tokens are spelled out."""
        return self._tokenizer.tokenize_str(text, parse_special=True)

    def _spell(self, mark: str) -> str:
        """Returns a mark as rules name it: a special token by its id, which no text can spell, or a text."""
        ids = self.tokens(mark)
        is_special = len(ids) == 1 and self._tokenizer.is_special_token(ids[0])
        return f"<[{ids[0]}]>" if is_special else json.dumps(mark)


def _with_marks(description: str) -> str:
    """Returns a tokenizer in which marks of replies that are added tokens are special ones: no text of a grammar has them."""
    made = json.loads(description)
    for token in made.get("added_tokens", ()):
        token["special"] = token["special"] or token["content"] in _MARKS
    return json.dumps(made)


def _any(opening: str) -> Body:
    """Returns the grammar of any tokens, of which the first is not a mark's."""
    return {"lark_grammar": f"start: (<[^{opening.strip('<[]>')}]> <[*]>*)?" if opening else "start: <[*]>*"}


def _after_thought(opening: str, mark: str, bodies: list[Body], budget: int | None) -> list[Body]:
    """Returns the grammar of any text, a mark, up to two line breaks, and a text of another grammar.

    All up to the other text may be missing where the thought has an opening mark. The text before the mark has as many tokens
    as the budget allows, where the mark is a token.
    """
    if mark.startswith("<["):
        limit = "" if budget is None else f"[max_tokens={budget}]"
        head = f"{mark}\n" if budget == 0 else f"thought {mark}\nthought{limit}: /(.|\\n)*/"
    else:
        head = f"thought\nthought[suffix={mark}]: /(.|\\n)*/"
    first, _, rest = head.partition("\n")
    first = f"({opening} {first} BREAKS?)?" if opening else f"{first} BREAKS?"
    rules = f"start: {first} @body\n{rest}\nBREAKS: /\\n{{1,2}}/"
    return [{"lark_grammar": rules}, {**bodies[0], "name": "body"}, *bodies[1:]]


def _bodies(grammar: Grammar) -> list[Body]:
    """Returns a grammar in the library's form: the first body may name the others."""
    parts = [_body(each.kind, each.text) for each in grammar.alternatives]
    if len(parts) == 1:
        return parts
    start = "start: " + " | ".join(f"@part{index}" for index in range(len(parts)))
    return [{"lark_grammar": start}, *({**part, "name": f"part{index}"} for index, part in enumerate(parts))]


def _body(kind: GrammarKind, text: str) -> Body:
    if kind == "json" or kind == "json_lenient":
        is_lenient = kind == "json_lenient"
        schema = json.loads(text)
        if schema is True:  # the library takes options with objects alone
            schema = {}
        text = LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": WHITESPACE, "lenient": is_lenient, "coerce_one_of": is_lenient}
        )
    elif kind == "any":
        return _any("")
    else:
        text = grammar_from(kind, text)  # type: ignore[arg-type]
    try:
        (body,) = json.loads(text)["grammars"]
    except ValueError:  # the library's own form is JSON, or Lark as it is
        return {"lark_grammar": text}
    return body  # type: ignore[no-any-return]


class Matcher:
    """A place in a grammar. A matcher that has failed allows nothing, and stays failed."""

    __slots__ = ("_has_budget", "_inner")

    def __init__(self, inner: LLMatcher, *, has_budget: bool = False) -> None:
        self._inner = inner
        self._has_budget = has_budget

    def copy(self) -> Matcher:
        """Returns another one at the same place."""
        return Matcher(self._inner.deep_copy(), has_budget=self._has_budget)

    def ahead(self) -> LLMatcher:
        """Returns what may go on by drafts and back: the library cannot take tokens of a budget back, but a copy is dropped."""
        return self._inner.deep_copy() if self._has_budget else self._inner

    def advance(self, tokens: Iterable[int]) -> int | None:
        """Goes on by tokens, up to the one after which the grammar allows no other.

        Returns:
            The index of that token; None where the grammar goes on, or the matcher has failed.
        """
        inner = self._inner
        for index, token in enumerate(tokens):
            if not inner.consume_token(token):
                return None
            if inner.is_stopped():
                return None if inner.is_error() else index
        return None

    def allowed(self, tokens: list[int]) -> list[int]:
        """Returns the leading ones of some tokens that the grammar allows one after the other; stays where it is."""
        return tokens[: self._inner.validate_tokens(tokens)]

    def mask(self, words: Int32Array) -> None:
        """Writes the mask of this place into ``words``, int32 ``[ceil(vocab_size / MASK_BITS)]``, in this thread."""
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    @property
    def has_no_text(self) -> bool:
        """Whether it has failed because no text gets any further."""
        return self.error.startswith("NoExtension")

    @property
    def error(self) -> str:
        """Why it has failed, in the library's words; empty if it has not."""
        return _first_line(self._inner.get_error()) if self._inner.is_error() else ""

    @property
    def warnings(self) -> list[str]:
        """The parts of the grammar that it does not hold."""
        return self._inner.get_grammar_warnings()


class MaskFiller:
    """Computes masks of many matchers, side by side.

    Args:
        num_threads: Threads; they work without the GIL.
    """

    def __init__(self, num_threads: int) -> None:
        self._executor = LLExecutor(num_threads)

    def fill(self, matchers: Sequence[tuple[Matcher, int, list[int]]], masks: Int32Array) -> None:
        """Writes the masks of each matcher: of its place, and after each of its drafts.

        The matchers stay where they are; one that fails has an ``error`` afterwards. Masks after a draft that the grammar
        refuses stay as they were.

        Args:
            matchers: Each with the index of its first mask, and its drafts.
            masks: int32 ``[M, ceil(vocab_size / MASK_BITS)]``, contiguous. Written.
        """
        assert masks.flags.c_contiguous and masks.dtype == np.int32, f"masks {masks.dtype} {masks.strides}"
        where = masks.ctypes.data, masks.shape[1] * masks.itemsize, masks.shape[0]
        alone = [(matcher._inner, first) for matcher, first, drafts in matchers if not drafts or matcher._has_budget]
        drafted = [(matcher.ahead(), first, drafts) for matcher, first, drafts in matchers if drafts]
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *where)


def _first_line(error: object) -> str:
    """Returns the first line of what the library says, and of a regex what is wrong with it."""
    lines = str(error).strip().splitlines() or [""]
    reason = next((line for line in lines[1:] if line.startswith("error: ")), "")
    told = _REMOTE.sub(r"a $ref leads to \1, which is not in the schema. Copy it into $defs", lines[0])
    return (told + (" " + reason if reason else ""))[:400]
