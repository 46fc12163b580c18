"""The tools of a chat request, the choice among them, and the calls in its messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hiserve.errors import RequestError
from hiserve.text.body.json import check_json, num_separators
from hiserve.text.conversation import Call, ToolChoice, function_tool
from hiserve.text.custom_tools import CustomTool, Pattern, Syntax, custom_function, input_arguments

MAX_TOOLS = 1024
Name = Annotated[str, Meta(min_length=1)]
Kind = Literal["function", "custom"]


class CalledFunction(msgspec.Struct, frozen=True):
    """A function and the arguments of one call of it: an object, or the JSON text that spells one."""

    name: Name
    arguments: str | dict[str, Any] = "{}"


class CalledCustom(msgspec.Struct, frozen=True):
    """A custom tool and the input of one call of it."""

    name: Name
    input: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool in a message of the assistant."""

    type: Kind = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        """Refuses a call without the object that its type names."""
        _check_named(self, self.type)


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call; the arguments of a ``strict`` one are always of its ``parameters``."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomGrammar(msgspec.Struct, frozen=True):
    """The grammar of a custom tool's input; the prompt shows the definition."""

    definition: str
    syntax: Syntax


class CustomFormat(msgspec.Struct, frozen=True):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"] = "text"
    grammar: CustomGrammar | None = None

    def __post_init__(self) -> None:
        """Refuses a grammar that is missing."""
        if self.type == "grammar":
            _check_named(self, self.type)


class Custom(msgspec.Struct, frozen=True):
    """A custom tool, whose calls have one text."""

    name: Name
    description: str | None = None
    format: CustomFormat | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may call."""

    type: Kind
    function: Function | None = None
    custom: Custom | None = None

    def __post_init__(self) -> None:
        """Refuses a tool without the object that its type names."""
        _check_named(self, self.type)

    @property
    def name(self) -> str:
        """The name."""
        described: Function | Custom = getattr(self, self.type)
        return described.name


class ToolName(msgspec.Struct, frozen=True):
    """The name of a tool."""

    name: Name


class NamedTool(msgspec.Struct, frozen=True):
    """A tool by its name."""

    type: Kind
    function: ToolName | None = None
    custom: ToolName | None = None

    def __post_init__(self) -> None:
        """Refuses a tool without the object that its type names."""
        _check_named(self, self.type)

    @property
    def name(self) -> str:
        """The name."""
        named: ToolName = getattr(self, self.type)
        return named.name


class AllowedTools(msgspec.Struct, frozen=True):
    """Some of the tools; ``required``: one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ChosenTools(msgspec.Struct, frozen=True):
    """A tool that must be called, or the tools that may be."""

    type: Literal["function", "custom", "allowed_tools"]
    function: ToolName | None = None
    custom: ToolName | None = None
    allowed_tools: AllowedTools | None = None


def tools_of(
    values: Sequence[dict[str, Any]], tools: Sequence[Tool], pattern: Pattern
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns tools in the form that chat templates take, and the names of those whose arguments are always of their schema.

    Args:
        values: The tools as the client gave them: other fields of a function are shown, too.
        tools: The same, read.
        pattern: Of custom tools.

    Raises:
        RequestError: As ``check_alike``.
    """
    shown: list[dict[str, Any]] = []
    strict: list[str] = []
    kinds: dict[str, Kind] = {}
    for i, (value, tool) in enumerate(zip(values, tools, strict=True)):
        check_alike(tool.name, tool.type, kinds.setdefault(tool.name, tool.type), f"tools[{i}].{tool.type}.name")
        if tool.custom is not None and tool.type == "custom":
            form = tool.custom.format
            grammar = form.grammar if form is not None and form.type == "grammar" else None
            syntax, definition = (None, None) if grammar is None else (grammar.syntax, grammar.definition)
            param = f"tools[{i}].custom.format.grammar.definition"
            custom = CustomTool(tool.custom.name, tool.custom.description, syntax, definition, param)
            held = pattern(custom)
            shown.append(function_tool(custom_function(custom, held)))
            strict += [custom.name] * bool(held)
        else:
            shown.append(function_tool(value["function"]))
            strict += [tool.function.name] if tool.function is not None and tool.function.strict else []
    return shown, tuple(strict)


def choice_of(chosen: str | ChosenTools | None, strict: tuple[str, ...]) -> tuple[ToolChoice, bool]:
    """Returns the tools that a reply may call, and whether the choice names one.

    Args:
        chosen: ``tool_choice``.
        strict: As ``tools_of`` returns them.

    Raises:
        RequestError: The object that ``type`` names is missing.
    """
    if not isinstance(chosen, ChosenTools):
        return ToolChoice(chosen == "required", None, strict), False
    part: ToolName | AllowedTools | None = getattr(chosen, chosen.type)
    if part is None:
        fault = f"tool_choice.{chosen.type} is missing; tool_choice.type asks for it."
        raise RequestError(fault, param="tool_choice")
    if isinstance(part, ToolName):
        return ToolChoice(True, (part.name,), strict), True
    names = tuple(tool.name for tool in part.tools)
    fields = tuple(f"tool_choice.allowed_tools.tools[{i}]" for i in range(len(names)))
    return ToolChoice(part.mode == "required", names, strict, fields), False


def check_alike(name: str, tool: object, other: object, param: str) -> None:
    """Checks that calls by a name can be shown to the client as calls of one tool.

    Args:
        name: By which the model calls both tools.
        tool: The kind of one, and whatever else its calls show.
        other: The same of the other.
        param: The field that names the first.

    Raises:
        RequestError: They differ.
    """
    if tool != other:
        raise RequestError(
            f"{param} is {name[:100]!r}, by which the model calls a tool of another kind too: its calls could be of either. "
            "Rename one.",
            param=param,
        )


def call_of(call: ToolCall, where: str) -> Call:
    """Returns a call in a message.

    Raises:
        RequestError: Its arguments are out of bounds.
    """
    if call.custom is not None and call.type == "custom":
        check_json([call.id, call.custom.name, call.custom.input], where)
        return Call(call.id, call.custom.name, input_arguments(call.custom.input))
    assert call.function is not None, f"a call of type {call.type}"
    name, given = call.function.name, call.function.arguments
    made = Call(call.id, name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
    check_json([call.id, name, given if isinstance(given, dict) else made.value], where)
    return made


def num_arguments(call: ToolCall) -> int:
    """Returns how many values the arguments of a call have at most, where they are a text that is to be parsed."""
    given = None if call.function is None else call.function.arguments
    return num_separators(given) if isinstance(given, str) else 0


def _check_named(part: msgspec.Struct, kind: str) -> None:
    """Refuses an object without its field ``kind``, as msgspec does for a field that is always needed.

    Raises:
        ValueError: It has none.
    """
    if getattr(part, kind) is None:
        raise ValueError(f"Object missing required field `{kind}`")
