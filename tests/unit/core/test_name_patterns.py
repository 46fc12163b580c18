"""Patterns of names against Python's own, drawn at random; those that take these forever, and those that are refused."""

from __future__ import annotations

import random
import re
import time

import pytest

from hiserve.core.name_patterns import MAX_DEPTH, NamePattern, PatternError

FOUND = [  # in configurations of checkpoints
    r".*lm_head",
    r".*self_attn.*",
    r".*mlp\.gate$",
    r"^model\.layers\.(0|1|2)\..*",
    r"model\.layers\.\d+\.mlp\.experts\.\d+\..*",
    r".*\.(gate|up|down)_proj$",
    r"^(?!.*experts).*$",
    r"(?:vision|visual)[_.a-z]*",
    r".*layers\.[1-3]{1,2}\..*",
    r".*\.shared_expert(?=_gate).*",
    r"(?P<tower>model)\..*?norm",
    r".*layers\.\d{,2}\.mlp\.(gate|experts)",
    r"model\.layers\.\d{00001}\.",
    r".{,}\.norm",
    r"lm\_head",
    r"lm_head{|lm_{}head|l}m|[{]2}",
]
NAMES = [
    "lm_head",
    "model.layers.1.self_attn.q_proj",
    "model.layers.12.mlp.gate",
    "model.layers.2.mlp.experts.31.up_proj",
    "model.layers.7.mlp.shared_expert_gate",
    "visual.blocks.0.attn",
    "model.norm",
    "",
]


@pytest.mark.parametrize("text", FOUND)
def test_patterns_of_checkpoints_match_what_pythons_do(text: str) -> None:
    pattern = NamePattern(text)
    for name in NAMES:
        assert pattern.matches_start(name) == (re.match(text, name) is not None), name


def drawn(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["a", "b", ".", "[ab]", "[^a]", r"\w", r"\.", "^", "$", "-"])
    kind, parts = rng.randrange(6), [drawn(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    if kind == 0:
        return f"({'|'.join(parts)})"
    if kind == 1:
        return f"(?:{''.join(parts)}){rng.choice(['*', '+', '?', '{2}', '{1,3}', '{0,}', '*?', '{1,2}?'])}"
    if kind == 2 and depth == 1:
        return f"(?{rng.choice('=!')}{''.join(parts)})"
    return "".join(parts)


def test_drawn_patterns_match_what_pythons_do() -> None:
    rng, outcomes = random.Random(5), [0, 0]
    for _ in range(1500):
        text = drawn(rng, rng.randrange(1, 4))
        pattern = NamePattern(text)
        for _ in range(3):
            name = "".join(rng.choices("ab.-", k=rng.randrange(7)))
            found = pattern.matches_start(name)
            assert found == (re.match(text, name) is not None), (text, name)
            outcomes[found] += 1
    assert min(outcomes) > 500, outcomes


@pytest.mark.parametrize("text", [r"(a+)+$", r"(a|a)*$", r".*a.*a.*a.*a.*a.*b", r"((a*)*)*b", r"(?!(a+)+b).*c"])
def test_patterns_that_take_python_forever_do_not(text: str) -> None:
    begin = time.process_time()
    assert not NamePattern(text).matches_start("a" * 400 + "!")
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("a)", "closes nothing, at character 1"),
        ("(a", "without an end"),
        ("*a", "no such character"),
        ("a**", "no such character"),
        ("[b-a]", "bad character range"),
        (r"(a)\1", "no such character"),
        ("(?<=a)b", "no such group"),
        ("(?i)a", "no such group"),
        ("a{3,2}", "less than nothing"),
        ("a{2}{3}", "no such character"),
        ("a|{2}", "no such character"),
        ("a{" + "9" * 5000 + "}", "no such character"),
        ("(a{100}){100}", "more than 2000 states"),
        ("(" * (MAX_DEPTH + 1) + "a" + ")" * (MAX_DEPTH + 1), "nested too deeply"),
        ("(?=(?!a)b)", "nested too deeply"),
        ("((){9999}){9999})", "closes nothing"),
    ],
)
def test_what_is_not_supported_is_refused_at_once(text: str, fact: str) -> None:
    with pytest.raises(PatternError, match=fact):
        NamePattern(text)
