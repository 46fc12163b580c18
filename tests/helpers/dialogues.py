"""Text for hiserve-nano and its heads: conversations of the kind they were trained on, and beginnings that they were not."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np

from hiserve import LLM
from hiserve.models.model_config import NANO, find_model
from hiserve.text.tokens.tokenizer import Tokenizer

HELD_OUT = Path(__file__).parents[1] / "data/held_out_prompts.jsonl"
OPENINGS = (
    ("Hi, I'd like a large cappuccino with oat milk.", "Sure, please confirm that your order looks correct."),
    ("Can I get two decaf lattes and a mocha, please?", "Alright, does your order look correct on that screen?"),
    ("Can you find me a cheap hotel in Boston?", "Sure. For which dates, and how many rooms do you need?"),
    ("I want to book a table at an Italian restaurant.", "Which city should I search in, and for what time?"),
    ("What movies are playing near me this weekend?", "What kind of movie would you like to see?"),
    ("Please find me a flight to Chicago next Friday.", "From which city do you want to leave?"),
)
FOLLOW_UPS = (
    "Yes, that looks good to me.",
    "Actually, can I change one thing, please?",
    "For two people, in New York at 7 pm.",
    "How much is it in all?",
    "I'm not sure. What do you have?",
    "No thanks, that is all I need.",
)


def trained(kind: str, model: str = NANO) -> str:
    """Returns the ``spec`` of a proposer; a head is the one that comes with the model, a draft model the model itself."""
    if kind in ("eagle3", "mtp"):
        assert (find_model(model) / kind / "config.json").is_file(), f"no {kind} came with {model}"
    return f"draft:{model}" if kind == "draft_model" else kind


def conversations(llm: LLM) -> list[list[int]]:
    """Returns prompts of 34 to 47 tokens, each a first question, its answer and what is said then; many begin alike."""
    pairs = itertools.product(OPENINGS, FOLLOW_UPS)
    roles = "user", "assistant", "user"
    return [
        llm.encode_chat(
            [{"role": role, "content": text} for role, text in zip(roles, (*opening, follow_up), strict=True)]
        )
        for opening, follow_up in pairs
    ]


def shuffled(rng: np.random.Generator, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Returns so many of them in any order, again and again."""
    return [prompts[index] for index in rng.integers(len(prompts), size=count).tolist()]


def held_out_prompts(*sources: str) -> list[list[int]]:
    """Returns tokens of text that hiserve-nano was not trained on; sources are ``coffee``, ``services``, ``pytask``, ``python``."""
    tokenizer = Tokenizer.load(find_model(NANO))
    rows = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    texts = [row["prompt"] for row in rows if row["source"] in sources]
    return [tokenizer.encode(text, add_special_tokens=False).tolist() for text in texts]
