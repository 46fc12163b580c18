"""No template runs or grows without end, whatever it does, and ordinary ones do not notice."""

from __future__ import annotations

import itertools
import json
import resource
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hiserve.errors import ModelError, RequestError
from hiserve.text.template import budget as render_budget
from hiserve.text.template.chat_template import TOO_SLOW, ChatTemplate
from tests.helpers.chats import chat_of
from tests.helpers.slowness import least_cpu_s
from tests.helpers.widening import some

MAX_S = 0.05
GROW = "{% set ns = namespace(x=START) %}{% for i in range(100) %}{% set ns.x = STEP %}{% endfor %}"
SHARED = GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]")
TWIN = SHARED.replace("ns", "y")
LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}BODY{% endfor %}{% endfor %}"
CHAT = chat_of([{"role": "user", "content": "x" * 1000}])


def grow(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step)


# Without a bound, each of these takes minutes, or gigabytes.
ENDLESS = {
    "loops": LOOPS,
    "loops that write nothing": LOOPS.replace("BODY", "{% set x = b %}"),
    "loops with much text": LOOPS.replace("BODY", "x" * 10_000),
    "a loop's condition": "{% for a in range(100000) %}{% for b in range(100000) if b < 0 %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for m in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "a captured block": "{% set x %}" + LOOPS.replace("BODY", "{{ messages[0].content }}") + "{% endset %}",
    "a filtered block": "{% filter upper %}" + LOOPS.replace("BODY", "{{ messages[0].content }}") + "{% endfilter %}",
    "product": "{% set x = 'x' * 10**9 %}",
    "product, number first": "{% set x = 1000000000 * 'x' %}",
    "product of a list": "{% set x = [1] * 1000000000 %}",
    "power": "{% set x = 10 ** 1000000000 %}",
    "large numbers": grow("3", "ns.x * ns.x"),
    "concatenation": grow("'x'", "ns.x ~ ns.x"),
    "sum of texts": grow("'x'", "ns.x + ns.x"),
    "sum of lists": grow("[1]", "ns.x + ns.x"),
    "slices": "{% set y = 'x' * 1000000 %}" + LOOPS.replace("BODY", "{% set x = y[1:] %}"),
    "shared lists shown": SHARED + "{{ ns.x }}",
    "shared lists as JSON": SHARED + "{{ ns.x | tojson }}",
    "shared lists as text": SHARED + "{{ ns.x | upper }}",
    "shared lists joined": SHARED + "{% set y = ns.x ~ '' %}",
    "shared lists in a form": SHARED + "{{ '{}'.format(ns.x) }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "join": "{% set x = range(100000) | join('x' * 10000) %}",
    "join, as a method": "{% set x = ('x' * 10000).join(range(100000) | map('string')) %}",
    "replace": "{% set x = ('x' * 10000) | replace('x', 'y' * 100000) %}",
    "replace, as a method": "{% set x = ('x' * 10000).replace('', 'y' * 100000) %}",
    "center": "{% set x = 'x'.center(1000000000) %}",
    "zfill": "{% set x = 'x'.zfill(1000000000) %}",
    "expandtabs": "{% set x = '\\t'.expandtabs(1000000000) %}",
    "translate": "{% set x = ('x' * 100000).translate({120: 'y' * 100000}) %}",
    "to_bytes": "{% set x = (1).to_bytes(1000000000, 'big') %}",
    "format": "{% set x = '{:1000000000}'.format(1) %}",
    "format, a nested width": "{% set x = '{:{w}}'.format(1, w=1000000000) %}",
    "format, many fields": "{% set x = ('{0}' * 10000).format('x' * 100000) %}",
    "format_map": "{% set x = '{a:1000000000}'.format_map({'a': 1}) %}",
    "percent": "{% set x = '%1000000000d' % 1 %}",
    "percent, a given width": "{% set x = '%*d' % (1000000000, 1) %}",
    "percent, many fields": "{% set x = ('%(a)s' * 10000) % {'a': 'x' * 100000} %}",
    "the filter format": "{% set x = '%1000000000d' | format(1) %}",
    "indent": "{% set x = 'x' | indent(1000000000) %}",
    "indent of JSON": "{% set x = [1] | tojson(indent=1000000000) %}",
    "chained generators": "{% set x = [0] * 1000000 %}{% set y = x"
    + " | map('string') | map('length')" * 20
    + " | list %}",
    "sum of many lists": "{% set x = ([[1]] * 100000) | sum(start=[]) %}",
    **{
        f"shared lists, {what}": SHARED + TWIN + what
        for what in (
            *("{% if ns.x == y.x %}{% endif %}", "{% if 1 < 2 < ns.x < y.x %}{% endif %}", "{{ ns.x != y.x }}"),
            *("{{ ns.x in [y.x] }}", "{{ ns.x not in [1, y.x] }}", "{{ ns.x is eq y.x }}", "{{ ns.x is in [y.x] }}"),
            *("{{ [ns.x] | select('eq', y.x) | list }}", "{{ [ns.x] | reject('ge', y.x) | list }}"),
            *("{{ [ns.x, y.x] | sort }}", "{{ [ns.x, y.x] | max }}", "{{ [ns.x, y.x] | min | length }}"),
            *(
                "{{ [{'a': ns.x}, {'a': y.x}] | sort(attribute='a') | length }}",
                "{{ {'a': ns.x, 'b': y.x} | dictsort(by='value') }}",
            ),
            *(
                "{{ [{'a': ns.x}, {'a': y.x}] | groupby('a') | length }}",
                "{{ [ns.x].index(y.x) }}",
                "{{ [ns.x].count(y.x) }}",
            ),
            *("{{ ns.x is lower }}", "{% for z in [ns.x, y.x] %}{{ loop.changed(z) }}{% endfor %}"),
            *("{{ [ns.x, 1] | map('list') | unique | list }}", "{{ ([ns.x], 1).index(([y.x], 2)) }}"),
        )
    },
    **{
        f"shared tuples, {what}": SHARED.replace("[ns.x, ns.x]", "(ns.x, ns.x)").replace("[1]", "(1,)") + what
        for what in (
            *(
                "{{ {}[ns.x] }}",
                "{{ {ns.x: 1} | length }}",
                "{{ {}.get(ns.x) }}",
                "{{ ns.x in {} }}",
                "{{ dict([(ns.x, 1)]) }}",
            ),
            *(
                "{{ {}.fromkeys([ns.x]) }}",
                "{{ [ns.x] | unique | list }}",
                "{{ {'a': 1} is in [ns.x] }}{{ ns.x == ns.x[:] + (1,) }}",
            ),
        )
    },
    "lipsum": "{% set x = lipsum(10000000) %}",
}


SIMILAR = {
    *("loops that write nothing", "a loop's condition", "a filtered block", "product, number first", "sum of texts"),
    *("shared lists as text", "join, as a method", "replace, as a method", "percent, a given width"),
    *(
        f"shared lists, {what}"
        for what in (
            *("{{ ns.x != y.x }}", "{{ ns.x not in [1, y.x] }}", "{{ ns.x is in [y.x] }}"),
            *("{{ [ns.x] | reject('ge', y.x) | list }}", "{{ [ns.x, y.x] | min | length }}", "{{ [ns.x].count(y.x) }}"),
        )
    ),
    *(f"shared tuples, {what}" for what in ("{{ {}.get(ns.x) }}", "{{ ns.x in {} }}", "{{ {}.fromkeys([ns.x]) }}")),
}  # to another template
assert set(ENDLESS) > SIMILAR


@pytest.mark.parametrize("name", some(ENDLESS, *(name for name in ENDLESS if name not in SIMILAR)))
def test_a_template_that_would_not_end_is_stopped(name: str) -> None:
    template = ChatTemplate(ENDLESS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def render() -> None:
        with pytest.raises(RequestError, match="refuses these messages") as caught:
            template.render(CHAT, max_s=MAX_S)
        assert caught.value.param == "messages"

    assert least_cpu_s(render, MAX_S + 1.0) < MAX_S + 1.0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 500_000, f"{grown} KiB more memory"


def test_time_that_is_over_has_a_code_of_its_own() -> None:
    with pytest.raises(RequestError, match=r"longer than 0\.05 s") as caught:
        ChatTemplate(ENDLESS["macros"]).render(CHAT, max_s=0.05)
    assert caught.value.code == TOO_SLOW


def test_time_in_which_a_rendering_gets_no_cpu_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ages_s = itertools.count(step=60)
    monkeypatch.setattr(render_budget, "time", SimpleNamespace(monotonic=lambda: next(ages_s), thread_time=lambda: 0.0))
    assert ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").render(CHAT, max_s=0.05)


@pytest.mark.parametrize("source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ x" + " | trim" * 300 + " }}"])
def test_a_template_that_is_nested_too_deeply_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="nested too deeply"):
        ChatTemplate(source)


def test_nothing_is_computed_when_a_template_is_compiled() -> None:
    source = "{{ 'x' | indent(100000000) | length }}{{ 7 ** 7000000 > 1 }}"
    assert least_cpu_s(lambda: ChatTemplate(source), 1.0) < 1.0


@pytest.mark.parametrize("name", ["center", "batch", "slice", "wordwrap", "urlize", "round"])
def test_a_filter_that_has_no_bound_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match=f"No filter named '{name}'"):
        ChatTemplate("{{ 'x' | " + name + " }}")


ORDINARY = [
    "{{ messages[1:] | map(attribute='role') | join(', ') }}",
    "{{ messages | selectattr('role', 'equalto', 'tool') | list | length }}",
    "{{ (messages | last).content | trim | upper | replace('B', 'cc') }}",
    "{{ '%s-%03d' % ('a', 7) }} {{ '{}-{b:>5}'.format(1, b='x') }} {{ '{a}'.format_map({'a': 2}) }} {{ '%d%%' | format(3) }}",
    "{{ ', '.join(['a', 'b']) }}{{ 'aab'.replace('a', 'x', 1) }}{{ 'x'.center(5) }}|{{ 'a b'.split() }}",
    "{{ [1, 2] + [3] }}{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 'a' ~ 1 ~ none }}{{ -1 * 2.5 }}{{ 2 ** -1 }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}",
    "{% for m in messages if m.role != 'tool' %}{{ loop.index0 }}{{ loop.last }}{{ m.content }}{% else %}-{% endfor %}",
    "{% macro f(m, mark='*') %}{{ mark }}{{ m.content }}{{ caller() if caller else '' }}{% endmacro %}"
    "{{ f(messages[0]) }}{% call f(messages[1], mark='+') %}!{% endcall %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m | length }}{% endfor %}",
    "{% for m in [1, [2, [3]]] recursive %}{% if m is iterable %}({{ loop(m) }}){% else %}{{ m }}{% endif %}{% endfor %}",
    "{% filter upper %}a{{ messages[0].role }}{% endfilter %}{% set x %}b{% endset %}{{ x }}{% with y = 2 %}{{ y }}{% endwith %}",
    "{{ {'a': 1, 'b': [2]}.items() | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [3, 1] | sort | first }}{{ [1, 2] | sum }}",
    "{{ 'a\\nb' | indent(2) }}{{ 'a\\nb' | indent('> ', first=true) }}{{ '<a>' | e }}{{ '<a>' | safe }}{{ undefined_name }}",
    "{% if messages is iterable and messages is not string %}{{ messages | map('length') | sum }}{% endif %}",
    "{{ 1 < 2 < 3 }}{{ 1 < 2 > 3 }}{{ 3 in [1, 3] }}{{ 'a' in 'cab' }}{{ [1] == [1] }}{{ messages[0] == messages[0] }}{{ 5 not in (1,) }}",
    "{{ messages[0] in messages }}{{ 'role' in messages[0] }}{{ messages[1] != messages[0] }}{{ {'a': {'b': [1]}} == {'a': {'b': [1]}} }}",
    "{{ 1 is lt 2 }}{{ 'a' is in ['a'] }}{{ 'x' is eq 'x' }}{{ [3, 1, 2] | sort(reverse=true) }}{{ [2, 1, 2] | unique | list }}",
    "{{ messages | sort(attribute='role') | map(attribute='role') | list }}{{ messages | groupby('role') | length }}{{ 'A' is upper }}",
    "{{ [3, 1] | max }}{{ [1, 3] | min }}{{ [1, 2].index(2) }}{{ {'a': 1}.get('a') }}{{ dict(a=1) }}{{ {'b': 2, 'a': 3} | dictsort(by='value') }}",
    "{{ 1 > 2 > undefined_name.x }}{{ none == none }}{{ messages | map(attribute='role') | unique | list }}{{ [1, 2, 1].count(1) }}",
    "{{ messages[::-1][0].content[-1:] }}{{ [messages[0]] | string }}{{ 3 | abs }}{{ '4' | int + 1 }}{{ x | default('d') }}",
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": " ab "},
    {"role": "assistant", "content": "b<é>"},
    {"role": "tool", "content": "c"},
]


@pytest.mark.parametrize("source", ORDINARY)
def test_an_ordinary_template_renders_as_in_jinjas_own_sandbox(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    ).from_string(source)
    assert ChatTemplate(source).render(chat_of(MESSAGES)) == plain.render(messages=MESSAGES)


def test_json_is_plain_and_takes_the_options_of_transformers() -> None:
    source = "{{ messages[1] | tojson }}{{ messages[2] | tojson(indent=2, sort_keys=true) }}{{ 'é' | tojson(ensure_ascii=true) }}"
    expected = (
        json.dumps(MESSAGES[1], ensure_ascii=False) + json.dumps(MESSAGES[2], indent=2, sort_keys=True) + '"\\u00e9"'
    )
    assert ChatTemplate(source).render(chat_of(MESSAGES)) == expected


def test_renderings_in_several_threads_have_budgets_of_their_own() -> None:
    template = ChatTemplate("{% for i in range(1000) %}{{ i }}{% endfor %}")
    with pytest.raises(RequestError):
        template.render(CHAT, max_s=0.0)
    assert len(template.render(CHAT)) == 2890
