"""Follows a grammar token by token, and says which tokens it allows next. Alone in importing llguidance."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from hiserve.core.plan import MASK_BITS, Int32Array
from hiserve.core.request import Grammar, GrammarKind
from hiserve.errors import RequestError
from hiserve.grammar.bounds import INVALID
from hiserve.grammar.thoughts import SPECIAL, ThoughtBudget
from hiserve.text.reader.formats import FORMATS
from hiserve.text.tokens.tokenizer import Tokenizer

Body = dict[str, Any]  # a grammar in the library's form
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


# Fewer matchers advance in the calling thread. A token takes each some 7 us; beside an H200 a step of 32 rows took 2.5 ms with
# threads and 2.0 without, one of 128 rows 4.2 and 4.7.
LEAST_ADVANCED = 128

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
        marked = _with_marks(description)
        self._ids: dict[str, int] = {
            token["content"]: token["id"] for token in marked.get("added_tokens", ()) if token["special"]
        }
        self._special = re.compile(f"({'|'.join(map(re.escape, sorted(self._ids, key=len, reverse=True))) or '(?!)'})")
        try:
            self._tokenizer = LLTokenizer(
                json.dumps(marked), n_vocab=vocab_size, eos_token=list(eos_token_ids), slices=SLICES
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
            opening, after, header = map(self._rule, (grammar.opening, grammar.after, grammar.header))
            bodies = _bodies(grammar, header)
            if after and grammar.kind != "any":
                bodies = _after_thought(opening, after, bodies, has_header=bool(header))
        except ValueError as error:
            raise RequestError(_first_line(error), code=INVALID) from None
        source = json.dumps({"grammars": bodies})
        begin_s = time.thread_time()
        inner = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        matcher = Matcher(inner, Source(id(inner), time.thread_time() - begin_s), self._budget(grammar))
        if matcher.error:
            is_own = grammar.kind in ("lark", "either", "either_lenient")
            raise RequestError(_PLACE.sub("", matcher.error) if is_own else matcher.error, code=INVALID)
        return matcher

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a text, in which special tokens are spelled out."""
        return self._tokenizer.tokenize_str(text, parse_special=True)

    def _parts(self, mark: str) -> list[int | str]:
        """Returns the special tokens and the texts of a mark."""
        return [self._ids.get(part, part) for part in self._special.split(mark) if part]

    def _rule(self, mark: str) -> str:
        """Returns a mark as rules name it: a special token by its id, which no text can spell, or a text."""
        return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in self._parts(mark))

    def _spelled(self, mark: str) -> bytes:
        """Returns a mark as a budget looks for it."""
        parts = self._parts(mark)
        return b"".join(part.encode() if isinstance(part, str) else self._spell(part) for part in parts)

    def _spell(self, token: int) -> bytes:
        if self._tokenizer.is_special_token(token):
            return SPECIAL + b"%d;" % token
        return self._tokenizer.decode_bytes([token])

    def _first_token(self, spelled: bytes) -> int:
        if spelled.startswith(SPECIAL):
            return int(spelled[1 : spelled.index(b";")])
        text = spelled.partition(SPECIAL)[0]
        tokens = self._tokenizer.tokenize_bytes(text)
        if self._tokenizer.decode_bytes(tokens) != text:  # some tokenizers put a space before any text
            tokens = self._tokenizer.greedy_tokenize(text.decode())
        return tokens[0]

    def _budget(self, grammar: Grammar) -> ThoughtBudget | None:
        """Returns the budget of the thoughts of a grammar's replies, if they have one."""
        if grammar.budget is None:
            return None
        opening, mark = self._spelled(grammar.opening), self._spelled(grammar.after)
        return ThoughtBudget(opening, mark, grammar.budget, self._spell, self._first_token)


def _with_marks(description: str) -> Body:
    """Returns a tokenizer in which marks of replies that are added tokens are special ones: no text of a grammar has them."""
    made: Body = json.loads(description)
    for token in made.get("added_tokens", ()):
        token["special"] = token["special"] or token["content"] in _MARKS
    return made


def _after_thought(opening: str, mark: str, bodies: list[Body], *, has_header: bool) -> list[Body]:
    """Returns the grammar of any text, a mark, up to two line breaks without a header, and a text of another grammar.

    All up to the other text may be missing where the thought has an opening mark.
    """
    if mark.startswith("<["):
        first, rest = f"thought {mark}", "thought: /(.|\\n)*/"
    else:
        first, rest = "thought", f"thought[suffix={mark}]: /(.|\\n)*/"
    first += "" if has_header else " BREAKS?"
    first = f"({opening} {first})?" if opening else first
    rules = f"start: {first} @body\n{rest}\nBREAKS: /\\n{{1,2}}/"
    return [{"lark_grammar": rules}, {**bodies[0], "name": "body"}, *bodies[1:]]


def _bodies(grammar: Grammar, header: str) -> list[Body]:
    """Returns a grammar in the library's form: the first body may name the others.

    Args:
        grammar: The grammar.
        header: The rule before texts; calls have their own.
    """
    parts = [(each.kind, _body(each.kind, each.text)) for each in grammar.alternatives]
    if len(parts) == 1 and not header:
        return [parts[0][1]]
    each = [f"{'' if kind == 'lark' else header} @part{index}" for index, (kind, _) in enumerate(parts)]
    start = f"start: {' | '.join(each)}"
    return [{"lark_grammar": start}, *({**part, "name": f"part{index}"} for index, (_, part) in enumerate(parts))]


def _body(kind: GrammarKind, text: str) -> Body:
    if kind == "json" or kind == "json_lenient":
        is_lenient = kind == "json_lenient"
        schema = json.loads(text)
        if schema is True:  # the library takes options with objects alone
            schema = {}
        text = LLMatcher.grammar_from_json_schema(
            schema,
            defaults={"whitespace_pattern": WHITESPACE},
            overrides={"lenient": is_lenient, "coerce_one_of": is_lenient},
        )
    elif kind == "any":
        return {"lark_grammar": "start: <[*]>*"}
    else:
        text = grammar_from(kind, text)  # type: ignore[arg-type]
    try:
        (body,) = json.loads(text)["grammars"]
    except ValueError:  # the library's own form is JSON, or Lark as it is
        return {"lark_grammar": text}
    return body  # type: ignore[no-any-return]


class Source(NamedTuple):
    """A compiled grammar: a number that tells it from others, and the seconds of CPU time that it took."""

    number: int
    compile_s: float


class Matcher:
    """A place in a grammar. A matcher that has failed allows nothing, and stays failed.

    Copies share the states of the grammar that they have come through, and a lock: their masks cost half, and are computed one
    after another.

    Attributes:
        source: The compiled grammar, which copies share.
    """

    __slots__ = ("_budget", "_inner", "_place", "source")

    def __init__(self, inner: LLMatcher, source: Source, budget: ThoughtBudget | None = None) -> None:
        self.source = source
        self._inner = inner
        self._budget = budget
        self._place = None if budget is None else budget.start

    def copy(self) -> Matcher:
        """Returns another one at the same place."""
        made = Matcher(self._inner.deep_copy(), self.source, self._budget)
        made._place = self._place
        return made

    def advance(self, tokens: Iterable[int]) -> int | None:
        """Goes on by tokens, up to the one after which the grammar allows no other.

        Returns:
            The index of that token; None where the grammar goes on, or the matcher has failed.
        """
        for index, token in enumerate(tokens):
            if not self._inner.consume_token(token) or not self._goes_on(token):
                return None if self._inner.is_error() else index
        return None

    def _goes_on(self, token: int) -> bool:
        """Follows the budget after a token that the grammar took; returns whether another may follow."""
        if self._budget is not None:
            self._place = self._budget.after(self._place, token)
        return not self._inner.is_stopped()

    def allowed(self, tokens: list[int]) -> list[int]:
        """Returns the leading ones of some tokens that the grammar allows one after the other; stays where it is."""
        tokens = tokens[: self._inner.validate_tokens(tokens)]
        wrong = (index for index, token in self.forced(tokens) if index < len(tokens) and tokens[index] != token)
        return tokens[: next(wrong, len(tokens))]

    def forced(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """Yields the places where a budget allows one token alone, and the token: of this place, and after each of some tokens."""
        budget, place = self._budget, self._place
        if budget is None:
            return
        for index in range(len(tokens) + 1):
            token = budget.forced(place)
            if token is not None:
                yield index, token
            if index < len(tokens):
                place = budget.after(place, tokens[index])

    @property
    def has_budget(self) -> bool:
        """Whether a budget may allow one token alone."""
        return self._budget is not None

    def mask(self, words: Int32Array) -> None:
        """Writes the mask of this place into ``words``, int32 ``[ceil(vocab_size / MASK_BITS)]``, in this thread."""
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self.force([], words[None])

    def force(self, tokens: list[int], masks: Int32Array) -> None:
        """Allows one token alone where a budget does: in ``masks``, int32 ``[1 + len(tokens), …]``, of the places of ``forced``."""
        for index, token in self.forced(tokens):
            masks[index] = 0
            masks[index].view(np.uint32)[token // MASK_BITS] = 1 << token % MASK_BITS

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


class MatcherThreads:
    """Advances many matchers, and computes their masks, side by side.

    Args:
        num_threads: Threads; they work without the GIL.
    """

    def __init__(self, num_threads: int) -> None:
        self._executor = LLExecutor(num_threads)
        self._least = LEAST_ADVANCED if num_threads > 1 else sys.maxsize

    def advance(self, matchers: Sequence[tuple[Matcher, list[int]]]) -> list[int | None]:
        """Goes on by the tokens of each, and returns what ``Matcher.advance`` does of each."""
        if len(matchers) < self._least:
            return [matcher.advance(tokens) for matcher, tokens in matchers]
        ends: list[int | None] = [None] * len(matchers)
        # Copies of one matcher wait for one another: each thread begins with another part of them.
        going, place = sorted(range(len(matchers)), key=lambda index: matchers[index][0].source.number), 0
        while going := [index for index in going if place < len(matchers[index][1])]:
            asked = [(matchers[index][0], matchers[index][1][place]) for index in going]
            took = self._executor.consume_token_par([(matcher._inner, token) for matcher, token in asked])
            still = []
            for index, (matcher, token), has_taken in zip(going, asked, took, strict=True):
                if has_taken and matcher._goes_on(token):
                    still.append(index)
                elif not matcher._inner.is_error():
                    ends[index] = place
            going, place = still, place + 1
        return ends

    def fill(self, matchers: Sequence[tuple[Matcher, int, list[int]]], masks: Int32Array) -> None:
        """Writes the masks of each matcher: of its place, and after each of its drafts.

        The matchers stay where they are; one that fails has an ``error`` afterwards. Masks after a draft that the grammar
        refuses stay as they were.

        Args:
            matchers: Each with the index of its first mask, and its drafts.
            masks: int32 ``[M, ceil(vocab_size / MASK_BITS)]``, contiguous. Written.
        """
        assert masks.flags.c_contiguous and masks.dtype == np.int32, f"masks {masks.dtype} {masks.strides}"
        matchers = sorted(matchers, key=_source)  # each thread begins with another part of them
        where = masks.ctypes.data, masks.shape[1] * masks.itemsize, masks.shape[0]
        alone = [(matcher._inner, first) for matcher, first, drafts in matchers if not drafts]
        drafted = [(matcher._inner, first, drafts) for matcher, first, drafts in matchers if drafts]
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *where)
        for matcher, first, drafts in matchers:
            if matcher.has_budget:
                matcher.force(drafts, masks[first:])


def _source(job: tuple[Matcher, int, list[int]]) -> int:
    return job[0].source.number


def _first_line(error: object) -> str:
    """Returns the first line of what the library says, and of a regex what is wrong with it."""
    lines = str(error).strip().splitlines() or [""]
    reason = next((line for line in lines[1:] if line.startswith("error: ")), "")
    message = _REMOTE.sub(r"a $ref leads to \1, which is not in the schema. Copy it into $defs", lines[0])
    return (message + (" " + reason if reason else ""))[:400]
