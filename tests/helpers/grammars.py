"""Grammars for hiserve-nano, and what checks a reply without the library that made the masks."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import regex

from hiserve.core.request import Grammar
from hiserve.grammar.matcher import Vocabulary
from hiserve.models.model_config import NANO, find_model, read_model_config
from hiserve.text.tokenizer import Tokenizer

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
RULES_PATTERN = r"[A-Z][a-z]{1,7}(, [A-Z][a-z]{1,7})*\."
GRAMMARS = {
    "json": Grammar.of("json", json.dumps(SCHEMA)),
    "object": Grammar.of("json", '{"type":"object"}'),
    "regex": Grammar.of("regex", PATTERN),
    "choice": Grammar.of("choice", json.dumps(CHOICES)),
    "rules": Grammar.of("lark", RULES),
}


def nano_folder() -> Path:
    return find_model(NANO)


def nano_tokenizer() -> Tokenizer:
    return Tokenizer.load(nano_folder())


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
    pattern = PATTERN if name == "regex" else RULES_PATTERN
    return regex.fullmatch(pattern, text, partial=is_cut) is not None
