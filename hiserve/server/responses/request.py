"""Items and tools of ``/v1/responses`` to a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from hiserve.errors import RequestError
from hiserve.grammar.tools import CustomTools, ToolField
from hiserve.server.responses.types import (
    ChosenTool,
    CustomFormat,
    InputFields,
    Item,
    Parts,
    ResponseTool,
    ToolFields,
    ToolName,
)
from hiserve.text.body.json import MAX_VALUES, check_json, check_text, num_separators
from hiserve.text.body.retention import joined_texts, seconds_of
from hiserve.text.body.tools import MAX_TOOLS, check_alike
from hiserve.text.conversation import Call, Conversation, Result, Role, Text, Thought, ToolChoice, Turn, function_tool
from hiserve.text.custom_tools import CustomTool, custom_function, input_arguments

SEPARATOR = "__"
SERVED = ("function", "custom")
MESSAGE = (None, "message")


class ClientTool(NamedTuple):
    """A tool in the client's form.

    Attributes:
        name: In its namespace.
        namespace: None outside of namespaces.
        kind: ``custom`` takes a text.
        is_strict: Its arguments are always of its parameters.
    """

    name: str
    namespace: str | None = None
    kind: Literal["function", "custom"] = "function"
    is_strict: bool = False


class Tools(NamedTuple):
    """The tools of a request.

    Attributes:
        shown: In the form that chat templates take.
        names: By the name that the model calls.
        hosted: Types of the tools that OpenAI would run; they are left out.
        fields: Of those that are shown.
        custom: Those of them that are custom.
    """

    shown: list[dict[str, Any]]
    names: dict[str, ClientTool]
    hosted: list[str]
    fields: list[ToolField]
    custom: CustomTools


def read_tools(given: Sequence[ResponseTool]) -> Tools:
    """Returns the tools of a request; those of a namespace are functions ``namespace__name``.

    Raises:
        RequestError: A tool has no name, or that of a tool of another kind or namespace; or they are too many.
    """
    tools = Tools([], {}, [], [], CustomTools())
    for i, tool in enumerate(given):
        if tool.type == "namespace":
            if tool.tools is None or tool.name is None:
                raise RequestError(f"tools[{i}] is a namespace; it must have name and tools.", param=f"tools[{i}]")
            for j, inner in enumerate(tool.tools):
                _add_tool(tools, inner, tool.name, f"tools[{i}].tools[{j}]")
        else:
            _add_tool(tools, tool, None, f"tools[{i}]")
    return tools


def read_choice(chosen: str | ChosenTool | None, tools: Tools) -> tuple[ToolChoice, bool]:
    """Returns which tools a reply may call, and whether that is one call of one tool.

    Raises:
        RequestError: The choice names no tool that is served here.
    """
    strict = tuple(name for name, tool in tools.names.items() if tool.is_strict)
    if not isinstance(chosen, ChosenTool):
        return ToolChoice(chosen == "required", None, strict), False
    if chosen.type in SERVED:
        return ToolChoice(True, (_chosen_name(chosen, "tool_choice"),), strict), True
    if chosen.type != "allowed_tools":
        raise RequestError(
            f"tool_choice asks for the hosted tool {chosen.type[:100]!r}; this server runs no tools. "
            "Choose a function, or auto.",
            param="tool_choice",
        )
    allowed = {f"tool_choice.tools[{i}]": each for i, each in enumerate(chosen.tools or ()) if each.type in SERVED}
    if not allowed:
        raise RequestError("tool_choice allows no tool that is served here.", param="tool_choice")
    names = tuple(_chosen_name(each, where) for where, each in allowed.items())
    return ToolChoice(chosen.mode == "required", names, strict, tuple(allowed)), False


def _chosen_name(chosen: ToolName, where: str) -> str:
    if not chosen.name:
        raise RequestError(f"{where} names no tool of type {chosen.type}.", param=where)
    return flat_name(chosen.name, chosen.namespace)


def _add_tool(tools: Tools, tool: ToolFields, namespace: str | None, where: str) -> None:
    if tool.type not in SERVED:
        tools.hosted.append(tool.type)
        return
    if tool.name is None:
        raise RequestError(f"{where}.name is missing; a tool of type {tool.type} has one.", param=f"{where}.name")
    name = flat_name(tool.name, namespace)
    function, is_strict = (
        {"name": name, "description": tool.description, "parameters": tool.parameters},
        bool(tool.strict),
    )
    if tool.type == "custom":
        form = tool.format or CustomFormat()
        custom = CustomTool(name, tool.description, form.syntax, form.definition, f"{where}.format.definition")
        pattern = tools.custom.pattern(custom)
        function, is_strict = custom_function(custom, pattern), pattern is not None
    if len(tools.shown) == MAX_TOOLS:
        raise RequestError(f"tools has more than {MAX_TOOLS} tools, those of namespaces included.", param="tools")
    tools.shown.append(function_tool(function))
    tools.fields.append(ToolField(where, "format" if tool.type == "custom" else "parameters"))
    kind: Literal["function", "custom"] = "custom" if tool.type == "custom" else "function"
    client_tool = ClientTool(tool.name, namespace, kind, is_strict)
    other = tools.names.setdefault(name, client_tool)
    check_alike(name, client_tool._replace(is_strict=False), other._replace(is_strict=False), f"{where}.name")
    tools.names[name] = client_tool


def flat_name(name: str, namespace: str | None) -> str:
    """Returns the name by which the model calls a tool."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def conversation_of(
    fields: InputFields, earlier: Sequence[Item], tools: Tools, unseal: Callable[[str], str | None]
) -> Conversation:
    """Returns the conversation of a request.

    Args:
        fields: Of the request.
        earlier: Items of earlier responses.
        tools: Of the request.
        unseal: Opens a sealed thought; None where the seal is not this server's.

    Raises:
        RequestError: An item is malformed, or there is none; ``param`` names it.
    """
    turns = list[Turn]()
    if fields.instructions:
        check_text(fields.instructions, "instructions")
        turns.append(Turn("system", (Text(fields.instructions),)))
    turns += _turns([*earlier, *fields.items], len(earlier), unseal)
    if not turns:
        raise RequestError("input is empty; give a text or at least one item.", param="input")
    choice, is_named = read_choice(fields.tool_choice, tools)
    return Conversation(
        turns=tuple(turns),
        tools=None if fields.tool_choice == "none" else tools.shown or None,
        choice=choice,
        is_single=is_named or fields.parallel_tool_calls is False,
    )


def _turns(items: Sequence[Item], num_earlier: int, unseal: Callable[[str], str | None]) -> list[Turn]:
    """Returns the turns of items. The texts and calls of one reply are one turn of the assistant."""
    turns, reply, num_values = list[Turn](), list[Text | Thought | Call | Result](), 0
    for i, item in enumerate(items, -num_earlier):
        where = f"input[{i}]"
        _check_texts(item, where)
        num_values += num_separators(item.arguments or "")
        if num_values > MAX_VALUES:
            fault = f"the arguments of the calls up to {where} have more than {MAX_VALUES} values. Send fewer."
            raise RequestError(fault, param=f"{where}.arguments")
        is_said = item.type in MESSAGE and item.role == "assistant"
        if reply and (not _is_of_reply(item) or (is_said and any(isinstance(part, Text) for part in reply))):
            size = len(reply)
            while is_said and isinstance(reply[size - 1], Thought):  # it is of the message that follows
                size -= 1
            turns.append(_assistant(reply[:size]))
            reply = reply[size:]
        if is_said:
            reply.append(Text(_text(item.content, f"{where}.content")))
        elif item.type == "reasoning":
            thought = _thought(item, where, unseal)
            reply += [Thought(thought)] if thought else []
        elif item.type in ("function_call", "custom_tool_call"):
            reply.append(_call(item, where))
        else:
            turns.append(_turn(item, where))
    return [*turns, _assistant(reply)] if reply else turns


def _check_texts(item: Item, where: str) -> None:
    for name in Item.__struct_fields__:
        value = getattr(item, name)
        if value is not None:
            check_text(value if isinstance(value, str) else "".join([part.shown for part in value]), f"{where}.{name}")


def _is_of_reply(item: Item) -> bool:
    if item.type in MESSAGE:
        return item.role == "assistant"
    return item.type in ("reasoning", "function_call", "custom_tool_call")


def _assistant(parts: list[Text | Thought | Call | Result]) -> Turn:
    """Returns a turn of the assistant: thoughts, words, calls."""
    kinds: tuple[type, ...] = (Thought, Text, Call)
    ordered = sorted(parts, key=lambda part: kinds.index(type(part)))
    return Turn("assistant", tuple(ordered))


def _turn(item: Item, where: str) -> Turn:
    if item.type in MESSAGE:
        if item.role is None:
            raise RequestError(f"{where}.role is missing.", param=f"{where}.role")
        role: Role = "system" if item.role == "developer" else item.role
        return Turn(role, tuple(_texts(item.content, f"{where}.content")))
    call_id, texts = _needed(item.call_id, f"{where}.call_id"), _texts(item.output, f"{where}.output")
    whole = "".join(text.text for text in texts)
    return Turn("tool", (Result(call_id, whole, retain_s=max(text.retain_s for text in texts)),))


def _thought(item: Item, where: str, unseal: Callable[[str], str | None]) -> str:
    """Returns a thought as it is shown, else from its seal; empty if there is neither."""
    if item.content:
        return _text(item.content, f"{where}.content")
    return (item.encrypted_content and unseal(item.encrypted_content)) or ""


def _call(item: Item, where: str) -> Call:
    call_id, name = _needed(item.call_id, f"{where}.call_id"), _needed(item.name, f"{where}.name")
    if item.type == "custom_tool_call":
        arguments = input_arguments(item.input or "")
    else:
        arguments = "{}" if item.arguments is None else item.arguments
    call = Call(call_id, flat_name(name, item.namespace), arguments)
    check_json(call.value, f"{where}.arguments")
    return call


def _needed(text: str | None, where: str) -> str:
    if not text:
        raise RequestError(f"{where} is missing.", param=where)
    return text


def _texts(content: str | Parts | None, where: str) -> list[Text]:
    """Returns the texts of a content up to each breakpoint; one at least."""
    if not isinstance(content, list) or not content:
        return [Text(_text(content, where))]
    return joined_texts([(part.shown, seconds_of(part.prompt_cache_breakpoint)) for part in content])


def _text(content: str | Parts | None, where: str) -> str:
    if content is None:
        raise RequestError(f"{where} must be a string or a list of text parts.", param=where)
    return content if isinstance(content, str) else "".join([part.shown for part in content])
