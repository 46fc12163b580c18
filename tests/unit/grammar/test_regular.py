"""Rules in Lark's form that are one regular expression."""

from __future__ import annotations

import re
import tracemalloc

import pytest

from hiserve.grammar import regular as regular_rules
from hiserve.grammar.bounds import MAX_REGEX_BYTES
from hiserve.grammar.regular import MAX_CHARS, MAX_DEPTH, Token, is_whole, regular

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin" LF
?hunk: add
    // two kinds
    | update -> second
add: "*** Add: " name LF ("+" /(.*)/ LF -> line)+
update: "*** Update: " name LF (("@@" | "@@ " /(.+)/) LF | ("+" | "-") /(.*)/ LF)*
name: /(.+)/  # of a file
end: "*** End" LF?
%import common.LF
"""
# Rules, texts of them, others.
CASES: list[tuple[str, list[str], list[str]]] = [
    (PATCH, ["*** Begin\n*** Add: a\n+x\n*** End", "*** Begin\n*** Update: a/b\n@@\n-x\n*** End\n"], ["", "*** Begin\n*** End"]),
    ('start: "a.b" | "C"i', ["a.b", "c", "C"], ["axb", "A.B"]),
    (r'start: "\"\n\\" /x\/[/y]|z/'.replace("[/y]", "y"), ['"\n\\x/y', '"\n\\z'], ['"\n\\x']),
    ('start: "a".."c" ~ 2..3 [D] E\nD: "d"\n!E: /e/i', ["abE", "cccde"], ["ae", "abcae", "abdde"]),
    ('start: N{2} M{1,} ("x"?)y\ny: "y"\n%import common.DIGIT -> N\n%import common (LETTER, LF)\nM: LETTER', ["12aby", "12axy"], ["1ay"]),
    ("start: " + '("a") ' * 2 * MAX_DEPTH + "/b/u", ["a" * 2 * MAX_DEPTH + "b"], ["b"]),  # one after another, none in another
]  # fmt: skip
NONE = [
    "",
    'x: "a"',
    'start: "a" start?',
    'start: x\nx: "(" y ")"\ny: x | "a"',
    'start: "a"\n%ignore " "',
    "start: %json {}",
    "start: <[1]>",
    "start: (",
    'start: "a" )',
    "start: @other",
    'start{a}: "b"',
    "%import python.NAME\nstart: NAME",
    'start: "a"\nstart: "b"',
    "start: " + "(" * 100 + '"a"' + ")" * 100,
    "start: r0\n" + "\n".join(f"r{index}: r{index + 1}" for index in range(2000)) + '\nr2000: "a"',
    "start: r0\n" + "\n".join(f"r{index}: r{index + 1} r{index + 1}" for index in range(40)) + '\nr40: "a"',
    f'start: "{"a" * MAX_REGEX_BYTES}"',
    f'start: "a"\n//{"-" * MAX_CHARS}',
    "?",
    '!!!\nstart: "a"',
    r'start: "\ud800"',
    'start: "ab".."cd"',
    "start: /a)(b/",
    "start: /a # (\n)(b/x",
]


@pytest.mark.parametrize(("rules", "good", "bad"), CASES, ids=[case[0][:20] for case in CASES])
def test_rules_that_lead_forward_alone_are_a_regular_expression(rules: str, good: list[str], bad: list[str]) -> None:
    found = regular(rules)
    assert found is not None
    for text in good:
        assert re.fullmatch(found, text), text
    for text in bad:
        assert not re.fullmatch(found, text), text


@pytest.mark.parametrize("rules", NONE, ids=[case[:20] for case in NONE])
def test_other_rules_are_none_within_bounds(rules: str) -> None:
    assert regular(rules) is None


@pytest.mark.parametrize(
    "expression",
    ["a|(b)c", "^a$", r"\)", r"[)]", "[]a)]", "[^])]x", "a]b", "[a[b)]]", "[[:alpha:])]", "a#b", "(?x)a b"],
)
def test_an_expression_that_closes_its_own_groups_stays_one_part_within_another(expression: str) -> None:
    assert is_whole(expression)


@pytest.mark.parametrize("expression", ["a)(b", ")", "(?:a", r"\\)(", "[)](", "[a", "(?x)#(\na)(b#)\n"])
def test_an_expression_that_closes_other_groups_is_no_part(expression: str) -> None:
    assert not is_whole(expression)


def test_a_comment_may_not_hide_the_end_of_the_part_that_its_flags_make() -> None:
    assert regular("start: /a b/x") == "(?:(?x:a b))"
    assert regular("start: /a#b/i") == "(?:(?i:a#b))"
    assert regular("start: /a #b/x") is None


@pytest.mark.parametrize("rules", ['start: "a" start?', 'start: x\nx: "(" y ")"\ny: x | "a"'], ids=["one", "two"])
def test_a_rule_that_leads_back_to_itself_is_read_once(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop waits for the rules of 1,024 tools."""
    read: list[list[Token]] = []

    class Body(regular_rules._Body):
        def __init__(self, tokens: list[Token], rules: regular_rules._Rules) -> None:
            read.append(tokens)
            super().__init__(tokens, rules)

    monkeypatch.setattr(regular_rules, "_Body", Body)
    assert regular(rules) is None
    assert len(read) == rules.count("\n") + 1


@pytest.mark.parametrize("separator", [" ", "|"], ids=["sequence", "alternatives"])
def test_rules_of_many_long_parts_are_none_before_the_parts_fill_memory(separator: str) -> None:
    rules = f'start: {separator.join(["a"] * 4000)}\na: "{"y" * (MAX_REGEX_BYTES - 100)}"'
    assert len(rules) <= MAX_CHARS, "rules that are read"
    tracemalloc.start()
    try:
        assert regular(rules) is None
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * 2**20
