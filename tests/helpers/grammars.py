"""Grammars for hiserve-nano, and what checks a reply without the library that made the masks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import jsonschema
import regex

from hiserve.core.request import Grammar, SamplingParams
from hiserve.engine.grammars import GrammarRows
from hiserve.grammar.matcher import Vocabulary
from hiserve.grammar.tools import ToolGrammars
from hiserve.models.model_config import NANO, find_model, read_model_config
from hiserve.text.abilities import Abilities
from hiserve.text.conversation import Conversation, ToolChoice
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.tokens.detokenizer import TokenBytes
from hiserve.text.tokens.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "intent": {"enum": ["book", "cancel", "ask"]},
        "city": {"type": "string", "maxLength": 12},
        "guests": {"type": "integer", "minimum": 1, "maximum": 20},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["intent", "city", "guests", "tags"],
    "additionalProperties": False,
}
PATTERN = r"(yes|no), (at|for) [0-9]{1,2}( (am|pm))?\. [a-z ]{6,30}!"
CHOICES = ["a table", "a taxi", "the weather", "nothing"]
RULES = 'start: name (", " name)* "."\nname: /[A-Z][a-z]{1,7}/'
_SPACE = r"[ \n]{0,2}"
_TAGGED_CALL = (
    rf"<function=(book>{_SPACE}<parameter=intent>\n(book|cancel|ask)\n</parameter>{_SPACE}"
    rf"<parameter=city>\n[A-Z][a-z]{{2,9}}\n</parameter>{_SPACE}"
    rf"<parameter=guests>\n([1-9]|1[0-9]|20)\n</parameter>|bye>){_SPACE}</function>"
)
_TAGGED = rf"<tool_call>{_SPACE}{_TAGGED_CALL}({_SPACE}{_TAGGED_CALL})*{_SPACE}</tool_call>"
TAGGED_PATTERN = rf"\n{{0,2}}{_TAGGED}({_SPACE}{_TAGGED})*"
RULES_PATTERN = r"[A-Z][a-z]{1,7}(, [A-Z][a-z]{1,7})*\."
TOOL_SCHEMA = {
    "type": "object",
    "properties": {
        "intent": {"enum": ["book", "cancel", "ask"]},
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
        "guests": {"type": "integer", "minimum": 1, "maximum": 20},
    },
    "required": ["intent", "city", "guests"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "book", "parameters": TOOL_SCHEMA}},
    {"type": "function", "function": {"name": "bye"}},
]


def nano_folder() -> Path:
    return find_model(NANO)


def nano_tokenizer() -> Tokenizer:
    return Tokenizer.load(nano_folder())


def calls(row: str, choice: ToolChoice, texts: Grammar | None = None) -> Grammar:
    """The grammar of calls, or of texts, in the tokens of nano, spelled as a row of ``reader.formats`` says."""
    tokenizer = nano_tokenizer()
    abilities = Abilities(tokenizer, TokenBytes(tokenizer), ChatTemplate.load(nano_folder()), row)
    made = ToolGrammars(abilities).of(Conversation(turns=(), tools=TOOLS, choice=choice), texts)
    assert made is not None and not made.not_held
    return made.grammar


GRAMMARS = {
    "json": Grammar.of("json", json.dumps(SCHEMA)),
    "object": Grammar.of("json", '{"type":"object"}'),
    "regex": Grammar.of("regex", PATTERN),
    "choice": Grammar.of("choice", json.dumps(CHOICES)),
    "rules": Grammar.of("lark", RULES),
    "calls": calls("hermes", ToolChoice(True)),
    "tagged calls": calls("qwen3_coder", ToolChoice(True)),
    "strict calls": calls("hermes", ToolChoice(False, None, ("book",))),
    "calls or json": calls("hermes", ToolChoice(), Grammar.of("json", json.dumps(SCHEMA))),
}


def nano_vocabulary(vocab_size: int | None = None) -> Vocabulary:
    """The vocabulary of hiserve-nano, or of a model that has more tokens than it."""
    model = read_model_config(nano_folder())
    return Vocabulary.load(nano_folder(), vocab_size or model.vocab_size, model.eos_token_ids)


def is_valid(name: str, text: str, *, is_cut: bool = False) -> bool:
    """Whether a reply is of the language, or, if it was cut, may become one. No part of a JSON text is checked but its start."""
    if name in ("json", "object"):
        if is_cut:
            return text.startswith("{")
        value = json.loads(text)
        jsonschema.validate(value, SCHEMA if name == "json" else {"type": "object"})
        return True
    if name == "choice":
        return any(choice.startswith(text) for choice in CHOICES) if is_cut else text in CHOICES
    if name == "calls or json":
        is_json = text.startswith("{") or not text
        return is_valid("json" if is_json else "calls", text, is_cut=is_cut)
    if name in ("calls", "strict calls"):
        return is_calls(text, is_cut=is_cut, may_be_text=name == "strict calls")
    pattern = {"regex": PATTERN, "rules": RULES_PATTERN, "tagged calls": TAGGED_PATTERN}[name]
    return regex.fullmatch(pattern, text, partial=is_cut) is not None


def is_calls(text: str, *, is_cut: bool, may_be_text: bool) -> bool:
    """Whether a reply is valid calls in the form of hermes, amid text or not."""
    before, *parts = text.split("<tool_call>")
    if not may_be_text and (
        before.strip("\n") if parts else not "\n<tool_call>".removeprefix("\n" * (text[:1] != "\n")).startswith(text)
    ):
        return False
    for index, part in enumerate(parts):
        called, mark, after = part.partition("</tool_call>")
        if not mark:
            return is_cut and index == len(parts) - 1
        made = json.loads(called)
        jsonschema.validate(made["arguments"], TOOL_SCHEMA if made.pop("name") == "book" else {"maxProperties": 0})
        if not (made.keys() == {"arguments"} and (may_be_text or not after.strip(" \n"))):
            return False
    return bool(parts) or may_be_text or is_cut


def compile_first(rows: GrammarRows, asked: Iterable[SamplingParams]) -> None:
    """Compiles the grammars of requests that follow: when these start must not depend on how long that takes."""
    grammars = [sampling.grammar for sampling in asked if sampling.grammar is not None]
    for compiling in [rows._compiler.compile(grammar) for grammar in grammars]:
        compiling.exception()
