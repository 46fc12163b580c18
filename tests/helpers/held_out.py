"""Beginnings of text that hiserve-nano was not trained on."""

from __future__ import annotations

import json
from pathlib import Path

from hiserve.models.model_config import NANO, find_model
from hiserve.text.tokenizer import Tokenizer

FILE = Path(__file__).parents[1] / "data/held_out_prompts.jsonl"


def held_out_prompts(*sources: str) -> list[list[int]]:
    """Returns their tokens; sources are ``coffee``, ``services``, ``pytask`` and ``python``."""
    tokenizer = Tokenizer.load(find_model(NANO))
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    texts = [row["prompt"] for row in rows if row["source"] in sources]
    return [tokenizer.encode(text, add_special_tokens=False).tolist() for text in texts]
