"""Prompts of DeepSeek-V3.2, whose checkpoints have no chat template: thoughts, tools, and calls in its own markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hiserve.text.conversation import Message
from hiserve.text.template.deepseek_v4 import (
    MARKS,
    in_order_of_calls,
    is_thinking,
    spell_call,
    spell_format,
    spell_json,
)

SIGNS = ("<｜DSML｜function_calls>", "<｜DSML｜invoke name=", "<｜DSML｜parameter name=")
_BEGIN, _END, _USER, _ASSISTANT, _OPEN, _CLOSE = MARKS
# The words that the model was trained on, to the letter: its documentation of prompts gives them.
_TOOLS = """## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON \
format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, \
booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is \
an example:
<｜DSML｜function_calls>
...
</｜DSML｜function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{schemas}
</functions>
"""


def encode(variables: Mapping[str, Any]) -> str:
    """Returns the prompt of a conversation; as a ``ChatEncoder``.

    Besides the variables of all templates it reads ``thinking``, or ``enable_thinking``: thoughts, which are off by default;
    ``thinking_mode``, ``thinking`` or ``chat``, in their place; ``response_format``, any JSON. Thoughts before the user's last turn
    are left out.

    Raises:
        ValueError: A turn has no place in such a prompt.
    """
    messages: Sequence[Message] = variables["messages"]
    tools, thinks = variables.get("tools"), is_thinking(variables)
    asked = max((index for index, each in enumerate(messages) if each["role"] == "user"), default=-1)
    parts, index = [_BEGIN], 0
    while index < len(messages) and messages[index]["role"] == "system":
        parts.append(messages[index]["content"])
        index += 1
    if tools:
        schemas = "\n".join(spell_json(tool["function"]) for tool in tools)
        parts.append("\n\n" + _TOOLS.replace("{schemas}", schemas))
    parts.append(spell_format(variables))
    calls: list[Any] = []
    while index < len(messages):
        role, first = messages[index]["role"], index
        index += 1
        if role == "assistant":
            parts.append(_reply(messages[first], shows_thought=thinks and first > asked))
            calls = messages[first].get("tool_calls") or []
            continue
        if role == "user":
            parts.append(_USER + messages[first]["content"])
            begin = _ASSISTANT
        elif role == "tool":
            while index < len(messages) and messages[index]["role"] == "tool":
                index += 1
            results = [
                f"\n<result>{each['content']}</result>" for each in in_order_of_calls(messages[first:index], calls)
            ]
            parts.append(f"\n\n<function_results>{''.join(results)}\n</function_results>")
            begin = "\n\n"
        else:
            raise ValueError(f"a turn of the role {role} behind others")
        if index < len(messages) or variables.get("add_generation_prompt"):
            parts.append(begin + (_OPEN if thinks and index > asked else _CLOSE))
    if variables.get("add_generation_prompt") and messages[-1]["role"] not in ("user", "tool"):
        parts.append(_ASSISTANT + (_OPEN if thinks else _CLOSE))
    return "".join(parts)


def _reply(message: Message, *, shows_thought: bool) -> str:
    """Returns a turn of the assistant, behind the mark that begins or ends its thought."""
    thought = message.get("reasoning_content", "") + _CLOSE if shows_thought else ""
    text = thought + (message["content"] or "")
    if calls := message.get("tool_calls"):
        spelled = "\n".join(spell_call(each["function"]) for each in calls)
        text += f"\n\n<｜DSML｜function_calls>\n{spelled}\n</｜DSML｜function_calls>"
    return text + _END
