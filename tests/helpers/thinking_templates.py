"""Chat templates that show and hide thoughts as families do, each in a few lines of our own."""

from __future__ import annotations

from typing import NamedTuple

from hiserve.text.template.probes import TemplateAbilities

_LAST = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for t in tools or [] -%}{{- '[' + t.function.name + ']' -}}{%- endfor -%}
"""
_CALLS = "{%- for c in m.tool_calls or [] -%}{{- '<call>' + c.function.name + c.function.arguments | tojson + '</call>' -}}{%- endfor -%}"


def _template(
    thought: str, start: str = "", *, checks: str = "", field: str = "reasoning_content", head: str = ""
) -> str:
    """A template with a rule for thoughts, a start of the reply, and checks of each message ``m``."""
    return (
        _LAST + head + "{%- for m in messages -%}" + checks + "{{- '<|' + m.role + '|>' -}}"
        "{%- if m.role == 'assistant' -%}" + thought.replace("FIELD", field) + "{%- endif -%}"
        "{{- m.content -}}" + _CALLS + "{{- '<|end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}" + start + "{%- endif -%}"
    )


_SHOW = "{{- '<think>' + m.FIELD + '</think>' -}}"
_AFTER_USER = "{%- if m.FIELD and loop.index0 > ns.last -%}" + _SHOW + "{%- endif -%}"
_NO_LATER_SYSTEM = (
    "{%- if m.role == 'system' and not loop.first -%}{{- raise_exception('system first') -}}{%- endif -%}"
)
_NO_LOST_RESULT = "{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls -%}{{- raise_exception('no call') -}}{%- endif -%}"


class Family(NamedTuple):
    """A template and what its probes must find."""

    source: str
    shows: TemplateAbilities


def _found(**found: object) -> TemplateAbilities:
    base: dict[str, object] = {"tools": True, "later_system": True, "turn_end": "<|end|>\n"}
    return TemplateAbilities(**{**base, **found})  # type: ignore[arg-type]


FAMILIES = {
    "silent": Family(_template(""), _found()),
    "whole": Family(_template("{%- if m.FIELD -%}" + _SHOW + "{%- endif -%}"), _found(thoughts="always")),
    "hybrid": Family(
        _template(
            _AFTER_USER, "{%- if enable_thinking is defined and not enable_thinking -%}<think></think>{%- endif -%}"
        ),
        _found(thoughts="turn", thinking_switch="enable_thinking"),
    ),
    "preserving": Family(
        _template(
            "{%- if m.FIELD and (preserve_thinking or loop.index0 > ns.last) -%}" + _SHOW + "{%- endif -%}", "<think>"
        ),
        _found(thoughts="turn", keep_switch="preserve_thinking"),
    ),
    "clearing": Family(
        _template(
            "{%- if m.FIELD and ((clear_thinking is defined and not clear_thinking) or loop.index0 > ns.last) -%}"
            + _SHOW
            + "{%- else -%}<think></think>{%- endif -%}",
            "{%- if enable_thinking is defined and not enable_thinking -%}</think>{%- else -%}<think>{%- endif -%}",
        ),
        _found(thoughts="turn", keep_switch="clear_thinking", thinking_switch="enable_thinking"),
    ),
    "strict": Family(
        _template(_AFTER_USER, checks=_NO_LATER_SYSTEM + _NO_LOST_RESULT, start="<think>"),
        _found(thoughts="turn", later_system=False),
    ),
    "last_reply": Family(
        _template(
            "{%- if m.FIELD and loop.last -%}" + _SHOW + "{%- endif -%}",
            "{%- if thinking -%}<think>{%- else -%}</think>{%- endif -%}",
        ),
        _found(thoughts="turn", thinking_switch="thinking"),
    ),
    "effort": Family(
        _template(
            "{%- if m.FIELD and m.tool_calls and loop.index0 > ns.last -%}"
            "{%- if m.content -%}{{- raise_exception('content and thinking') -}}{%- endif -%}"
            + _SHOW
            + "{%- endif -%}",
            field="thinking",
            head="{{- 'Reasoning: ' + (reasoning_effort or 'medium') -}}",
        ),
        _found(thoughts="turn", effort_switch="reasoning_effort"),
    ),
    "toolless": Family(_template("").replace("tools or []", "[]"), _found(tools=False)),
    "refusing": Family("{{- raise_exception('no') -}}", TemplateAbilities(tools=True)),
}
