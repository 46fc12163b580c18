"""Prompts of DeepSeek-V4, whose checkpoints have no chat template: thoughts, tools, and calls in its own markup."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hiserve.text.conversation import Message

SIGNS = ("<｜DSML｜tool_calls>", "<｜DSML｜invoke name=", "<｜DSML｜parameter name=")
_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_OPEN, _CLOSE = "<think>", "</think>"
MARKS = (_BEGIN, _END, _USER, _ASSISTANT, _OPEN, _CLOSE)
# Short tasks that a model does beside a conversation, and the marks by which a prompt asks for them.
TASKS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}
_MAX_EFFORT = "max"
# The words that the model was trained on, to the letter: its documentation of prompts gives them.
_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" \
block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), \
pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE \
any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_EFFORT = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously \
stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and \
rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""


def encode(variables: Mapping[str, Any]) -> str:
    """Returns the prompt of a conversation; as a ``ChatEncoder``.

    Besides the variables of all templates it reads ``thinking``, or ``enable_thinking``: thoughts, which are off by default;
    ``thinking_mode``, ``thinking`` or ``chat``, in their place; ``drop_thinking``, or the inverse ``preserve_thinking``:
    those before the user's last turn are left out, unless there are tools; ``reasoning_effort``, of which ``max`` alone is
    known to the model; ``response_format``, any JSON. The field ``task`` of a user's turn asks for one of ``TASKS`` as its reply.

    Raises:
        ValueError: A turn has no place in such a prompt.
    """
    messages: Sequence[Message] = variables["messages"]
    tools = variables.get("tools")
    thinks = is_thinking(variables)
    keeps_all = bool(tools) or not variables.get("drop_thinking", not variables.get("preserve_thinking", False))
    asked = max((index for index, each in enumerate(messages) if each["role"] == "user"), default=-1)
    parts = [_BEGIN, _EFFORT if thinks and variables.get("reasoning_effort") == _MAX_EFFORT else ""]
    index = 0
    while index < len(messages) and messages[index]["role"] == "system":
        parts.append(messages[index]["content"])
        index += 1
    if tools:
        schemas = "\n".join(spell_json(tool["function"]) for tool in tools)
        parts.append("\n\n" + _TOOLS.replace("{schemas}", schemas))
    parts.append(spell_format(variables))
    calls: list[Any] = []
    task = ""  # that the next reply does: the text before it
    while index < len(messages):
        role = messages[index]["role"]
        if role == "assistant":
            parts.append(task or _begin_reply(messages[index], shows_thought=thinks and (keeps_all or index > asked)))
            parts.append(_say(messages[index]))
            calls, task = messages[index].get("tool_calls") or [], ""
            index += 1
        elif role in ("user", "tool"):
            end = index
            while end < len(messages) and messages[end]["role"] in ("user", "tool") and not task:
                task = _spell_task(messages[end], thinks=thinks)
                end += 1
            if task and end < len(messages) and messages[end]["role"] != "assistant":
                raise ValueError("a task of a turn that no reply follows")
            parts.append(_USER + "\n\n".join(_blocks(messages[index:end], calls)))
            index = end
        else:
            raise ValueError(f"a turn of the role {role} behind others")
    if variables.get("add_generation_prompt"):
        parts.append(task or _ASSISTANT + (_OPEN if thinks else _CLOSE))
    return "".join(parts)


def spell_format(variables: Mapping[str, Any]) -> str:
    """Returns the words that ask for replies of ``response_format``, behind the system's text and the tools; empty without one."""
    wanted = variables.get("response_format")
    return f"\n\n{_FORMAT}{spell_json(wanted)}" if wanted else ""


def _spell_task(message: Message, *, thinks: bool) -> str:
    """Returns the text before the reply that does the task of a user's turn; empty without one."""
    name = message.get("task") if message["role"] == "user" else None
    if name is None:
        return ""
    if name not in TASKS:
        raise ValueError(f"the task {name[:100]!r} is none of {', '.join(TASKS)}")
    begin = _ASSISTANT + (_OPEN if thinks else _CLOSE) if name == "action" else ""
    return begin + TASKS[name]


def is_thinking(variables: Mapping[str, Any]) -> bool:
    """Whether the reply begins with a thought."""
    mode = variables.get("thinking_mode")
    if mode is not None:
        if mode not in ("thinking", "chat"):
            raise ValueError(f"thinking_mode is {mode!r}, neither thinking nor chat")
        return bool(mode == "thinking")
    return bool(variables.get("thinking", variables.get("enable_thinking", False)))


def _begin_reply(message: Message, *, shows_thought: bool) -> str:
    """Returns the beginning of a turn of the assistant. Without its thought it ends at once, as prompts for such replies do."""
    thought = _OPEN + message.get("reasoning_content", "") if shows_thought else ""
    return _ASSISTANT + thought + _CLOSE


def _say(message: Message) -> str:
    """Returns the rest of a turn of the assistant."""
    text: str = message["content"] or ""
    if calls := message.get("tool_calls"):
        spelled = "\n".join(spell_call(each["function"]) for each in calls)
        text += f"\n\n<｜DSML｜tool_calls>\n{spelled}\n</｜DSML｜tool_calls>"
    return text + _END


def spell_call(function: Mapping[str, Any]) -> str:
    """Returns a call in the markup of DeepSeek, as V3.2 and V4 spell it."""
    arguments = function["arguments"]
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    lines = []
    for name, value in arguments.items():
        is_text = isinstance(value, str)
        spelled = value if is_text else spell_json(value)
        lines.append(f'<｜DSML｜parameter name="{name}" string="{str(is_text).lower()}">{spelled}</｜DSML｜parameter>')
    shown = "\n".join(lines)
    return f'<｜DSML｜invoke name="{function["name"]}">\n{shown}\n</｜DSML｜invoke>'


def _blocks(messages: Sequence[Message], calls: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the texts of one turn of the user: results, in the order of their calls, at the places of results; and words."""
    ordered = iter(in_order_of_calls([each for each in messages if each["role"] == "tool"], calls))
    return [
        f"<tool_result>{next(ordered)['content']}</tool_result>" if each["role"] == "tool" else each["content"]
        for each in messages
    ]


def in_order_of_calls(results: Sequence[Message], calls: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns results in the order of their calls, those of others last."""
    order = {call["id"]: place for place, call in enumerate(calls) if "id" in call}
    return sorted(results, key=lambda each: order.get(each.get("tool_call_id"), len(order)))


def spell_json(value: Any) -> str:
    """Returns JSON whose letters are not escaped."""
    return json.dumps(value, ensure_ascii=False)
