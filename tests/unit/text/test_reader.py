"""The reader of replies: every format, any chunking of the tokens, no text lost or shown twice."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiserve.config.serving import ReplyFormatName
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.text.abilities import Abilities
from hiserve.text.reader.buffer import Event, EventLog, Kind, called, thought
from hiserve.text.reader.formats import BY_NAME, FORMATS, find_format
from hiserve.text.reader.marks import ReplySyntax
from hiserve.text.reader.reader import Reader, ReplyStart
from tests.helpers import tiny_text
from tests.helpers.chats import chat_of
from tests.helpers.reply_formats import (
    NAMES,
    SIZES,
    TEMPLATES,
    TOOLS,
    marks_of,
    read,
    template_of,
    token_bytes,
    tokenizer_of,
)
from tests.helpers.widening import in_turn

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH
CALLING = ReplyStart(TOOLS)
BROKEN = {token: index for index, token in tiny_text.byte_level().vocab.items()}["ð"]  # the first byte of an emoji


def reader(name: str, *, by_token: bool = False, start: ReplyStart = CALLING, **sampling: Any) -> Reader:
    syntax = ReplySyntax(BY_NAME[name], tokenizer_of(name, by_token=by_token), is_named=True)
    return Reader(syntax, token_bytes(name, by_token=by_token), SamplingParams(**sampling), start)


def of_text(name: str, text: str, *, by_token: bool = False, finish: FinishReason = STOP, **kwargs: Any) -> list[Event]:
    ids = tokenizer_of(name, by_token=by_token).encode(text, add_special_tokens=False).tolist()
    ids += [tiny_text.END] * (finish is STOP)
    return read(reader(name, by_token=by_token, **kwargs), ids, [], finish)[0]


def shown(events: list[Event]) -> list[tuple[Kind, str]]:
    return [(event.kind, event.text) for event in events if event.text or event.kind is Kind.CALL_END]


def check_spans(events: list[Event], num_tokens: int) -> None:
    """Spans cover the tokens without a gap."""
    assert events[0].start == 0
    assert events[-1].kind is Kind.END
    assert events[-1].stop == num_tokens
    assert all(one.stop == other.start for one, other in pairwise(events))
    assert all(event.start <= event.stop for event in events)


def is_subsequence(part: str, whole: str) -> bool:
    characters = iter(whole)
    return all(character in characters for character in part)


def test_the_setting_names_every_format() -> None:
    assert get_args(ReplyFormatName) == ("auto", "none", *BY_NAME)


@pytest.mark.parametrize("name", NAMES)
def test_the_format_of_a_template_is_found_by_its_marks(name: str) -> None:
    found = find_format((TEMPLATES / f"{name}.jinja").read_text())
    assert found is not None
    assert found.name == name


def test_a_template_without_marks_has_no_format() -> None:
    assert find_format(tiny_text.TEMPLATE) is None
    thoughts = find_format(tiny_text.TEMPLATE + "<think></think>")
    assert thoughts is not None
    assert (thoughts.name, thoughts.has_calls) == ("thoughts", False)


WORDS = st.text("ab \n<>{}[]\"'\\|/é本🙂:;,.", max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
VALUES = {
    "text": WORDS,
    "number": st.integers(-(10**12), 10**12),
    "share": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
    "flag": st.booleans(),
    "entries": st.lists(JSON, max_size=3),
    "more": st.dictionaries(WORDS, JSON, max_size=3),
    "note": st.none() | st.just("a note"),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)
CALLS = st.lists(st.tuples(st.sampled_from(["look", "ns__find-it.v2"]), ARGUMENTS), max_size=3)


@pytest.mark.parametrize(("name", "by_token"), in_turn(NAMES, [False, True]))
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_what_a_template_shows_is_read_back(name: str, by_token: bool, data: st.DataObject) -> None:
    row = BY_NAME[name]
    calls = data.draw(CALLS, "calls")
    content = data.draw(WORDS, "content")
    if row.is_bare:
        content = "" if calls else content.lstrip(" {\n")
    said = data.draw(WORDS, "thought") if row.thought[0] else ""
    if not (content.strip() or said or calls):
        content = "x"
    if row.arguments == "tagged":  # a function that is not declared takes strings for strings, and JSON for the rest
        calls = [("look", arguments) for _, arguments in calls]
    message = {"role": "assistant", "content": content, "reasoning_content": said} | {
        "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    }
    template = template_of(name)
    user = {"role": "user", "content": "Hi"}
    prompt = template.render(chat_of([user]))
    whole = template.render(chat_of([user, message], add_generation_prompt=False))
    reply = whole.removeprefix(prompt).removesuffix("<|end|>")
    assert prompt + reply + "<|end|>" == whole
    tokenizer = tokenizer_of(name, by_token=by_token)
    abilities = Abilities(tokenizer, token_bytes(name, by_token=by_token), template)
    chat = chat_of([user], tools=TOOLS)
    output = abilities.output(chat, tokenizer.encode(prompt, add_special_tokens=False), SamplingParams())
    assert isinstance(output, Reader)
    ids = [*tokenizer.encode(reply, add_special_tokens=False).tolist(), tiny_text.END]
    events, _, num_tokens = read(output, ids, data.draw(SIZES), STOP)
    found = [(name, json.loads(arguments)) for _, name, arguments in called(events).values()]
    assert found == calls
    assert thought(events) == said
    assert "".join(event.text for event in events if event.kind is Kind.CONTENT) == content
    assert num_tokens == len(ids)
    check_spans(events, len(ids))


def fragments(name: str) -> st.SearchStrategy[list[str]]:
    """Parts of replies in any order: marks, JSON and words."""
    pieces = [
        '{"name": "look", ',
        '"arguments": ',
        '"parameters": ',
        '{"text": "a"}',
        "}",
        "]",
        "[",
        ", ",
        "look",
        "\n",
    ]
    pieces += ['{"name": "look", "arguments": {"a": 1}}', '"', "\\", "text", "number", "5", "😀", "<", "</"]
    marks = marks_of(BY_NAME[name])
    return st.lists(st.sampled_from([*marks, *marks, *pieces]) | WORDS, max_size=14)


@pytest.mark.parametrize(("name", "by_token"), in_turn([row.name for row in FORMATS], [False, True]))
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_chunking_gives_the_same_events_and_loses_no_text(name: str, by_token: bool, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name, by_token=by_token)
    text = "".join(data.draw(fragments(name), "fragments"))
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    for at in data.draw(st.lists(st.integers(0, len(ids)), max_size=3), "hidden tokens and broken characters"):
        ids.insert(at, data.draw(st.sampled_from([tiny_text.BOS, BROKEN])))
    finish = data.draw(st.sampled_from([STOP, LENGTH, FinishReason.COMPLETE]))
    ids += [tiny_text.END] if finish is STOP or not ids else []
    stop = tuple(data.draw(st.lists(st.sampled_from(["a", "ab", "<", "</", "}", "\n\n"]), max_size=2), "stop"))
    start = ReplyStart(
        data.draw(st.sampled_from([TOOLS, [], None]), "tools"),
        is_single=data.draw(st.booleans(), "single"),
        is_thinking=bool(BY_NAME[name].thought[0]) and data.draw(st.booleans(), "thinking"),
        is_continued=data.draw(st.booleans(), "continued"),
    )
    made = [reader(name, by_token=by_token, start=start, stop=stop) for _ in range(3)]
    one_by_one = read(made[0], ids, [1] * len(ids), finish)
    assert read(made[1], ids, data.draw(SIZES, "sizes"), finish) == one_by_one
    assert read(made[2], ids, [], finish) == one_by_one
    events, end, num_tokens = one_by_one
    check_spans(events, num_tokens if end.matched_stop or start.is_single else len(ids))
    seen = made[0]._syntax
    whole = tokenizer.decode([index for index in ids[:num_tokens] if index in seen.stand_ins or index not in tokenizer.hidden_ids],
                             skip_hidden=False)  # fmt: skip
    if not stop and not start.is_single and "�" not in whole:
        if not any(event.kind in (Kind.CALL, Kind.THOUGHT) for event in events) and not start.is_thinking:
            assert end.finish
            # Marks of thoughts without a text are no text.
            row = BY_NAME[name]
            bare = [mark for mark in (*row.thought, *row.header, *row.header_starts, *row.message_ends) if mark]
            if not any(mark in whole for mark in bare):
                assert "".join(event.text for event in events) == whole
        if BY_NAME[name].arguments == "json":
            arguments = [event.text for event in events if event.kind is Kind.ARGUMENTS and event.start < event.stop]
            assert is_subsequence("".join(arguments), whole)
            texts = [event.text for event in events if event.kind in (Kind.THOUGHT, Kind.CONTENT)]
            assert is_subsequence("".join(texts), whole)


def test_a_mark_that_is_a_token_is_known_by_it_alone() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    tokenizer = tokenizer_of("hermes", by_token=True)
    spelled = [index for char in call for index in tokenizer.encode(char, add_special_tokens=False).tolist()]
    events, _, _ = read(reader("hermes", by_token=True), [*spelled, tiny_text.END], [], STOP)
    assert shown(events) == [(Kind.CONTENT, call)]
    assert shown(of_text("hermes", call, by_token=True))[0] == (Kind.CALL, "look")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "arguments": {"a":  1.0 , "b":[]}}', '{"a":  1.0 , "b":[]}'),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": {"a": "</tool_call>\\""}}', '{"a": "</tool_call>\\""}'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1]]', '{"a": 1]]'),
        ('{"name": "f", "arguments": {"a" <b>}}', '{"a" <b>}}'),
        ('{"name": "f", "arguments": null}', "null"),
        ('{"name": "f", ', "{}"),
        ('{"name": "f", a', "a"),
    ],
)
def test_arguments_are_as_the_model_wrote_them(text: str, expected: str) -> None:
    told = shown(of_text("hermes", f"<tool_call>{text}</tool_call>"))
    assert told == [(Kind.CALL, "f"), (Kind.ARGUMENTS, expected), (Kind.CALL_END, "")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>x</tool_call>",
        '<tool_call>{"name": 5}',
        "<tool_call>",
        '<tool_call>\n{"na',
        "<tool_call><tool_call>{}",
    ],
)
def test_what_becomes_no_call_is_content_and_counted(text: str) -> None:
    made = reader("hermes")
    ids = tokenizer_of("hermes", by_token=False).encode(text, add_special_tokens=False).tolist()
    events, _, _ = read(made, ids, [1] * len(ids), LENGTH)
    assert shown(events) == [(Kind.CONTENT, text)]
    assert made.num_unread == text.count("<tool_call>")


def test_a_name_is_told_as_soon_as_it_is_complete() -> None:
    made = reader("hermes")
    encode = tokenizer_of("hermes", by_token=False).encode
    first = made.push(encode('<tool_call>{"name": "look"', add_special_tokens=False).tolist(), RUNNING)
    assert [(event.kind, event.text) for event in first.events] == [(Kind.CALL, "look")]
    then = made.push(encode(', "arguments": {"a": "b', add_special_tokens=False).tolist(), RUNNING)
    assert [(event.kind, event.text) for event in then.events] == [(Kind.ARGUMENTS, '{"a": "b')]


def test_an_object_is_a_call_without_a_mark_only_with_arguments() -> None:
    assert shown(of_text("llama3_json", '{"name": "Ann", "age": 3}')) == [(Kind.CONTENT, '{"name": "Ann", "age": 3}')]
    assert shown(of_text("llama3_json", ' {"name": "f", "parameters": {}}'))[0] == (Kind.CALL, "f")
    assert shown(of_text("llama3_json", 'So {"name": "f", "parameters": {}}'))[0][0] is Kind.CONTENT


def test_tagged_values_have_the_types_of_the_schema() -> None:
    values = {
        "text": "5",
        "number": "5",
        "flag": "True",
        "note": "null",
        "more": '{"a":  1}',
        "share": "x",
        "other": "7",
    }
    spelled = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    told = shown(of_text("qwen3_coder", f"<tool_call>\n<function=look>\n{spelled}</function>\n</tool_call>"))
    expected = '{"text": "5", "number": 5, "flag": true, "note": null, "more": {"a":  1}, "share": "x", "other": 7}'
    assert told == [(Kind.CALL, "look"), (Kind.ARGUMENTS, expected), (Kind.CALL_END, "")]


def test_a_closing_mark_within_a_value_is_text() -> None:
    value = "a\n</parameter>\nb</parameter> c"
    text = f"<tool_call>\n<function=look>\n<parameter=text>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = called(of_text("qwen3_coder", text)).values()
    assert json.loads(call[2]) == {"text": value}


@pytest.mark.parametrize("name", [name for name in NAMES if BY_NAME[name].arguments == "tagged"])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_closing_mark_within_a_string_of_json_is_text(name: str, data: st.DataObject) -> None:
    row = BY_NAME[name]
    ends = [
        row.value[1] + row.key[0],
        row.value[1] + (row.end or row.call[1]),
        f"{row.value[1]}\n{row.key[0]}a{row.key[1]}",
    ]
    strings = data.draw(st.lists(st.sampled_from([*ends, '"', "\\", "]", "{", "é"]) | WORDS, max_size=4), "strings")
    given = {"entries": ["".join(strings), strings], "more": {"".join(strings): 1}, "number": 5}
    template, user = template_of(name), {"role": "user", "content": "Hi"}
    call = {"function": {"name": "look", "arguments": given}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = template.render(chat_of([user, message], add_generation_prompt=False))
    text = whole.removeprefix(template.render(chat_of([user]))).removesuffix("<|end|>")
    start = ReplyStart(TOOLS, is_thinking=text.startswith(("</think>", "\n</think>")))
    ids = [*tokenizer_of(name, by_token=False).encode(text, add_special_tokens=False).tolist(), tiny_text.END]
    events, _, _ = read(reader(name, start=start), ids, data.draw(SIZES, "sizes"), STOP)
    ((_, _, arguments),) = called(events).values()
    assert json.loads(arguments) == given


@pytest.mark.parametrize("sizes", [[], [1] * 400])
@pytest.mark.parametrize("entries", ['["a]', '["a", "b', '["a"", "c"]', '{"a": "'])
def test_a_quotation_mark_too_many_does_not_take_the_next_arguments(entries: str, sizes: list[int]) -> None:
    text = f'<tool_call>\n<function=look>\n<parameter=entries>\n{entries}\n</parameter>\n<parameter=text>\na "b"\n'
    ids = tokenizer_of("qwen3_coder", by_token=False).encode(
        f"{text}</parameter>\n</function>", add_special_tokens=False
    )
    events, _, _ = read(reader("qwen3_coder"), [*ids.tolist(), tiny_text.END], list(sizes), STOP)
    ((_, _, arguments),) = called(events).values()
    assert json.loads(arguments) == {"entries": entries, "text": 'a "b"'}


def test_a_tagged_string_is_told_as_it_arrives() -> None:
    made = reader("minimax")
    encode = tokenizer_of("minimax", by_token=False).encode
    text = '<minimax:tool_call><invoke name="look"><parameter name="text">say "hi'
    delta = made.push(encode(text, add_special_tokens=False).tolist(), RUNNING)
    assert [event.text for event in delta.events] == ["look", '{"text": "say \\"hi']


def test_stop_texts_count_in_content_alone() -> None:
    text = 'x<think>\na b\n</think>\n\na<tool_call>{"name": "b", "arguments": {"b": 1}}</tool_call>cab'
    told = shown(of_text("hermes", text[1:], stop=("b",)))
    kinds = [Kind.THOUGHT, Kind.CONTENT, Kind.CALL, Kind.ARGUMENTS, Kind.CALL_END, Kind.CONTENT]
    assert [kind for kind, _ in told] == kinds
    assert told[0][1] == "a b"
    assert told[-1][1] == "ca"


def test_a_stop_text_does_not_reach_across_a_call() -> None:
    text = 'a<tool_call>{"name": "f", "arguments": {}}</tool_call>b'
    told = shown(of_text("hermes", text, stop=("ab",)))
    assert told[0] == (Kind.CONTENT, "a")
    assert told[-1] == (Kind.CONTENT, "b")


def test_the_id_in_a_mark_is_the_calls() -> None:
    text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    (call,) = called(of_text("kimi_k2", text)).values()
    assert call == ("functions.f:3", "f", "{}")
    (call,) = called(of_text("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}")).values()
    assert call == ("abcdefghi", "f", "{}")


@pytest.mark.parametrize(("finish", "has_ended"), [(STOP, True), (LENGTH, False)])
def test_a_call_whose_closing_mark_is_missing_ends_with_the_reply_alone(finish: FinishReason, has_ended: bool) -> None:
    for name, text in {
        "hermes": '<tool_call>{"name": "look", "arguments": {"text": "a',
        "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=text>\na",
    }.items():
        events = of_text(name, text, finish=finish)
        assert (shown(events)[-1][0] is Kind.CALL_END) == has_ended
        assert '{"text": "a' in "".join(event.text for event in events)


@pytest.mark.parametrize(("name", "by_token"), in_turn([*NAMES, "harmony"], [False, True]))
def test_a_call_that_is_cut_anywhere_after_its_name_has_what_came_of_its_arguments_and_leaves_no_content(
    name: str, by_token: bool
) -> None:
    given = {"text": 'say "hi"', "number": 5, "more": {"a": ["x"]}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": given}}]}
    template, user = template_of(name), {"role": "user", "content": "Hi"}
    whole = template.render(chat_of([user, message], add_generation_prompt=False))
    text = whole.removeprefix(template.render(chat_of([user]))).removesuffix("<|end|>")
    start = ReplyStart(TOOLS, is_thinking=text.startswith(("</think>", "\n</think>")))
    ids = tokenizer_of(name, by_token=by_token).encode(text, add_special_tokens=False).tolist()
    num_called = 0
    ((_, _, arguments),) = called(read(reader(name, by_token=by_token, start=start), ids, [], STOP)[0]).values()
    for size in range(1, len(ids)):
        made = [reader(name, by_token=by_token, start=start) for _ in range(2)]
        events, _, _ = read(made[0], ids[:size], [], LENGTH)
        assert read(made[1], ids[:size], [1] * size, LENGTH)[0] == events
        check_spans(events, size)
        kinds = [event.kind for event in events]
        if Kind.CALL in kinds:
            num_called += 1
            ((_, _, begun),) = called(events).values()
            # A text between marks may end with what turns out to be the begin of a mark, or with a line that is not of it.
            assert BY_NAME[name].arguments == "tagged" or arguments.startswith(begun), begun
            assert Kind.CONTENT not in kinds[kinds.index(Kind.CALL) :], tokenizer_of(name, by_token=by_token).decode(
                ids[:size]
            )
    assert num_called > 10


def test_a_reply_in_a_thought_that_the_prompt_opened() -> None:
    assert shown(of_text("hermes", "so\n</think>\n\nyes", start=ReplyStart(None, is_thinking=True))) == [
        (Kind.THOUGHT, "so"),
        (Kind.CONTENT, "yes"),
    ]


def test_spans_cover_every_token_and_marks_belong_to_what_follows() -> None:
    pieces = [
        "<think>",
        "so",
        "</think>",
        "yes",
        "<tool_call>",
        '{"name": "look"',
        ', "arguments": ',
        "{}",
        "}",
        "</tool_call>",
    ]
    kinds = [Kind.THOUGHT, Kind.CONTENT, Kind.CALL, Kind.ARGUMENTS, Kind.CALL_END, Kind.END]
    tokenizer = tokenizer_of("hermes", by_token=True)
    ids = [tokenizer.encode(piece, add_special_tokens=False).tolist() for piece in pieces]
    ends = [sum(map(len, ids[:number])) for number in range(len(ids) + 1)]
    events = of_text("hermes", "".join(pieces), by_token=True)
    assert [event.kind for event in events] == kinds
    parts = [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert [(event.start, event.stop) for event in events[:-1]] == [(ends[first], ends[last]) for first, last in parts]
    check_spans(events, ends[-1] + 1)


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_read_in_deltas_of_any_size(name: str, size: int) -> None:
    given = {"text": 'say "hi" to \\ all\n and <b>', "number": 5, "more": {"a": ["x y"]}, "note": 'a "b"'}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": given}}]}
    template, user = template_of(name), {"role": "user", "content": "Hi"}
    whole = template.render(chat_of([user, message], add_generation_prompt=False))
    text = whole.removeprefix(template.render(chat_of([user]))).removesuffix("<|end|>")
    start = ReplyStart(TOOLS, is_thinking=text.startswith(("</think>", "\n</think>")))
    ids = tokenizer_of(name, by_token=False).encode(text, add_special_tokens=False).tolist()
    events, _, _ = read(reader(name, start=start), [*ids, tiny_text.END], [size] * len(ids), STOP)
    ((_, _, arguments),) = called(events).values()
    assert json.loads(arguments) == given
    check_spans(events, len(ids) + 1)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_call_in_the_midst_of_words_is_found_in_deltas_of_any_size(size: int) -> None:
    text = 'Well, a <b> and 😀 so.\n<tool_call>{"name": "look", "arguments": {}}</tool_call>\n and more'
    ids = tokenizer_of("hermes", by_token=False).encode(text, add_special_tokens=False).tolist()
    made = reader("hermes")
    events, _, _ = read(made, [*ids, tiny_text.END], [size] * len(ids), STOP)
    kinds = [Kind.CONTENT, Kind.CALL, Kind.ARGUMENTS, Kind.CALL_END, Kind.CONTENT]
    assert [kind for kind, _ in shown(events)] == kinds
    assert shown(events)[0][1] == "Well, a <b> and 😀 so."
    check_spans(events, len(ids) + 1)


def test_events_in_a_row_become_one() -> None:
    row = [Event(Kind.CONTENT, "a", 0, 1), Event(Kind.CONTENT, "b", 1, 3), Event(Kind.CALL, "f", 3, 4, "id")]
    row += [Event(Kind.CALL, "f", 4, 5), Event(Kind.ARGUMENTS, "{", 5, 6), Event(Kind.ARGUMENTS, "}", 6, 7)]
    expected = [Event(Kind.CONTENT, "ab", 0, 3), *row[2:4], Event(Kind.ARGUMENTS, "{}", 5, 7)]
    log = EventLog()
    for event in row:
        log.add([event])
        assert log.events, "can be read at any time"
    whole, plain = EventLog(), EventLog()
    whole.add(row)
    plain.add(row[2:], "ab")  # whose events were left out
    assert log.events == whole.events == plain.events == expected


def test_content_alone_has_no_event_and_its_place_follows_from_the_next() -> None:
    reading = reader("hermes", by_token=True)
    ids = (
        tokenizer_of("hermes", by_token=True).encode("<think>Hm.</think>Well then.", add_special_tokens=False).tolist()
    )
    log, plain, num_alone = EventLog(), "", 0
    for token in ids:
        delta = reading.push([token], RUNNING)
        if delta.events:
            log.add(delta.events, plain)
        num_alone += bool(delta.text and not delta.events)
        plain = "" if delta.events else plain + delta.text
    log.add(reading.push([], LENGTH).events, plain)
    assert num_alone > 1
    assert [(event.kind, event.text) for event in log.events][:2] == [
        (Kind.THOUGHT, "Hm."),
        (Kind.CONTENT, "Well then."),
    ]
    check_spans(log.events, len(ids))


HEADERS = {
    "<|channel|>analysis<|message|>so<|end|>": [(Kind.THOUGHT, "so")],
    "<|channel|>commentary<|message|>Let me look.<|end|>": [(Kind.CONTENT, "Let me look.")],
    '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"text":  "a<b>"}<|call|>': [
        (Kind.CALL, "look"),
        (Kind.ARGUMENTS, '{"text":  "a<b>"}'),
        (Kind.CALL_END, ""),
    ],
    " to=functions.look<|channel|>commentary json<|message|>{}<|call|>": [
        (Kind.CALL, "look"),
        (Kind.ARGUMENTS, "{}"),
        (Kind.CALL_END, ""),
    ],
    "<|channel|>final<|message|>Done.<|return|>": [(Kind.CONTENT, "Done.")],
}


@pytest.mark.parametrize("by_token", [False, True])
@given(parts=st.lists(st.sampled_from(list(HEADERS)), min_size=1, max_size=5), sizes=SIZES)
@settings(max_examples=40, deadline=None)
def test_messages_are_read_by_their_headers(by_token: bool, parts: list[str], sizes: list[int]) -> None:
    text, expected = "<|start|>assistant".join(parts), list[tuple[Kind, str]]()
    for kind, words in [event for part in parts for event in HEADERS[part]]:
        if expected and expected[-1][0] is kind in (Kind.THOUGHT, Kind.CONTENT):
            words = expected.pop()[1] + words
        expected.append((kind, words))
    tokenizer = tokenizer_of("harmony", by_token=by_token)
    ids = [*tokenizer.encode(text, add_special_tokens=False).tolist(), tiny_text.END]
    events, _, num_tokens = read(reader("harmony", by_token=by_token), ids, sizes, STOP)
    assert shown(events) == expected
    check_spans(events, num_tokens)
    template = template_of("harmony")
    auto = Abilities(tokenizer, token_bytes("harmony", by_token=by_token), template)
    assert auto.format is BY_NAME["harmony"]


@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        ("<|channel|>final<|message|>Hel", LENGTH, [(Kind.CONTENT, "Hel")]),
        ("<|channel|>fin", LENGTH, []),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assis", LENGTH, [(Kind.THOUGHT, "so")]),
        ("no header at all", STOP, [(Kind.CONTENT, "no header at all")]),
        (
            '<|channel|>commentary to=functions.look <|message|>{"a',
            LENGTH,
            [(Kind.CALL, "look"), (Kind.ARGUMENTS, '{"a')],
        ),
        (
            "<|channel|>commentary to=functions.look <|message|><|call|>",
            STOP,
            [(Kind.CALL, "look"), (Kind.ARGUMENTS, "{}"), (Kind.CALL_END, "")],
        ),
    ],
)
def test_messages_that_are_cut_or_odd_lose_no_words(
    text: str, finish: FinishReason, expected: list[tuple[Kind, str]]
) -> None:
    assert shown(of_text("harmony", text, finish=finish)) == expected


def test_messages_to_functions_are_content_where_none_may_be_called() -> None:
    text = "<|channel|>commentary to=functions.look <|message|>{}<|call|>"
    told = shown(of_text("harmony", text, start=ReplyStart(None)))
    assert told == [(Kind.CONTENT, text.removesuffix("<|call|>"))]
    ended = "<|end|><|start|>assistant<|channel|>final<|message|>yes"
    assert shown(of_text("harmony", f"so{ended}", start=ReplyStart(TOOLS, is_thinking=True))) == [
        (Kind.THOUGHT, "so"),
        (Kind.CONTENT, "yes"),
    ]


def test_a_value_whose_mark_says_that_it_is_a_text_is_one() -> None:
    given = {"text": ("true", "5"), "number": ("true", "5"), "other": ("false", '{"a":  1}'), "more": ("false", "so")}
    spelled = "".join(
        f'<｜DSML｜parameter name="{name}" string="{is_text}">{value}</｜DSML｜parameter>\n'
        for name, (is_text, value) in given.items()
    )
    call = f'<｜DSML｜invoke name="look">\n{spelled}</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    told = shown(of_text("deepseek_v32", f"Yes.\n\n<｜DSML｜function_calls>\n{call}"))
    arguments = '{"text": "5", "number": "5", "other": {"a":  1}, "more": "so"}'
    assert told == [(Kind.CONTENT, "Yes."), (Kind.CALL, "look"), (Kind.ARGUMENTS, arguments), (Kind.CALL_END, "")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '<|python_tag|>{"name": "look", "parameters": {}}; '),
        ("llama3_json", '<|python_tag|>{"name": "look", "parameters": {}}; <|p'),
        ("mistral_list", '[TOOL_CALLS][{"name": "look", "arguments": {}}, '),
    ],
)
def test_a_reply_that_is_cut_before_another_call_leaves_no_content(name: str, text: str) -> None:
    assert [kind for kind, _ in shown(of_text(name, text, finish=LENGTH))] == [Kind.CALL, Kind.ARGUMENTS, Kind.CALL_END]


@pytest.mark.parametrize(
    "entries", ['["a</parameter>\n', '["a</parameter>\n</function>', '["a</parameter>\n<parameter=x>\nb']
)
def test_a_string_of_json_that_is_cut_after_a_mark_stays_one_value(entries: str) -> None:
    text = f"<tool_call>\n<function=look>\n<parameter=entries>\n{entries}"
    assert shown(of_text("qwen3_coder", text, finish=LENGTH))[1:] == [(Kind.ARGUMENTS, f'{{"entries": {entries}')]
