"""Messages and tools in Anthropic's form to a conversation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from hiserve.errors import RequestError
from hiserve.grammar.tools import ToolField
from hiserve.server.messages.types import (
    Block,
    MessagesFields,
    MessagesTool,
    MessagesToolChoice,
    MessagesTurn,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from hiserve.text.abilities import Thinking
from hiserve.text.body.json import check_json, check_text
from hiserve.text.body.retention import CacheControl, check_breakpoints, joined_texts, seconds_of
from hiserve.text.conversation import Call, Conversation, Result, Text, Thought, ToolChoice, Turn, function_tool

# The first system block of Claude Code. It differs between sessions, so that they would share no prefix.
BILLING_HEADER = "x-anthropic-billing-header:"
# The one argument of a call whose arguments are no JSON object.
INVALID_JSON = "INVALID_JSON"
# At this code clients send the whole conversation.
NO_THREADS = "thread_unsupported_request"
CLEAR_THINKING = "clear_thinking"
KEEPS_ALL = ("all", {"type": "all"})
# Efforts that no family has.
HIGHEST = {"xhigh": "high", "max": "high"}
ROLES: dict[type, tuple[str, ...]] = {
    TextBlock: ("user", "assistant", "system"),
    ToolResultBlock: ("user",),
    ThinkingBlock: ("assistant",),
    RedactedThinkingBlock: ("assistant",),
    ToolUseBlock: ("assistant",),
}
Unseal = Callable[[str], str | None]


class MessagesPrompt(NamedTuple):
    """The prompt of a request.

    Attributes:
        chat: The conversation.
        thinking: Switches of thoughts.
        ignored: How many parts of the request are ignored, by the names of ``metrics.registry.IGNORED``.
        tool_fields: Of the tools that are shown.
    """

    chat: Conversation
    thinking: Thinking
    ignored: Counter[str]
    tool_fields: Sequence[ToolField] = ()


def read_messages(fields: MessagesFields, unseal: Unseal, *, keeps_volatile: bool) -> MessagesPrompt:
    """Returns the conversation of a request.

    Args:
        fields: Of the request.
        unseal: Opens the signature of a thought; None where it is not this server's.
        keeps_volatile: Keep a billing header before the system prompt.

    Raises:
        RequestError: A field is malformed or not supported; ``param`` names it.
    """
    if fields.thread is not None:
        raise RequestError(
            "thread is not supported: this server keeps no conversations. Send all of it in messages.",
            code=NO_THREADS,
            param="thread",
        )
    ignored = Counter[str]()
    check_breakpoints(_breakpoints(fields))
    turns = _system(fields.system, ignored, keeps_volatile=keeps_volatile)
    for i, message in enumerate(fields.messages):
        turns += _turns(message, f"messages[{i}]", unseal, ignored)
    last = turns[-1]
    is_open = last.role == "assistant"
    if is_open and any(isinstance(part, Call) for part in last.parts):
        where = f"messages[{len(fields.messages) - 1}]"
        raise RequestError(f"{where} is a tool_use without a tool_result after it. Send the result.", param=where)
    choice, is_single = _choice(fields)
    tools, tool_fields = _tools(fields, ignored)
    chat = Conversation(
        turns=tuple(turns),
        tools=tools,
        tools_retain_s=max((seconds_of(tool.cache_control) for tool in fields.tools or ()), default=0),
        choice=choice,
        is_single=is_single,
        add_generation_prompt=not is_open,
        continue_final_message=is_open,
    )
    return MessagesPrompt(chat, _thinking(fields, ignored), ignored, tool_fields)


def _system(system: str | list[TextBlock] | None, ignored: Counter[str], *, keeps_volatile: bool) -> list[Turn]:
    blocks = [TextBlock(system)] if isinstance(system, str) else system or []
    if blocks and blocks[0].text.startswith(BILLING_HEADER) and not keeps_volatile:
        ignored["billing_header"] += 1
        blocks = blocks[1:]
    turn = _worded("system", blocks, "system")
    return [turn] if turn.text else []


def _turns(message: MessagesTurn, where: str, unseal: Unseal, ignored: Counter[str]) -> list[Turn]:
    """Returns the turns of a message; each result in a message of the user is one of the tool."""
    role, param = message.role, f"{where}.content"
    blocks = [TextBlock(message.content)] if isinstance(message.content, str) else message.content
    for i, block in enumerate(blocks):
        if role not in ROLES[type(block)]:
            kind = block.__struct_config__.tag
            raise RequestError(
                f"{param}[{i}] is a {kind}, which is no part of a {role} message.", param=f"{param}[{i}]"
            )
    if role == "assistant":
        return [Turn("assistant", _assistant_parts(blocks, param, unseal, ignored))]
    turns, texts = list[Turn](), list[TextBlock]()
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        assert isinstance(block, ToolResultBlock), "no block of a user"
        if texts:
            turns.append(_worded(role, texts, param))
            texts = []
        turns.append(Turn("tool", (_result(block, f"{param}[{i}]"),)))
    return [*turns, _worded(role, texts, param)] if texts or not turns else turns


def _worded(role: Any, blocks: Sequence[TextBlock], param: str) -> Turn:
    texts = joined_texts([(block.text, seconds_of(block.cache_control)) for block in blocks]) or [Text("")]
    turn = Turn(role, tuple(texts))
    check_text(turn.text, param)
    return turn


def _assistant_parts(
    blocks: Sequence[Block], param: str, unseal: Unseal, ignored: Counter[str]
) -> tuple[Text | Thought | Call | Result, ...]:
    """Returns the thoughts, texts and calls of the assistant."""
    thoughts, words, calls, ttl_s = list[Thought](), list[str](), list[Call](), 0
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            words.append(block.text)
            ttl_s = max(ttl_s, seconds_of(block.cache_control))
        elif isinstance(block, ToolUseBlock):
            calls.append(_call(block, f"{param}[{i}]"))
        elif isinstance(block, ThinkingBlock | RedactedThinkingBlock):
            thought = unseal(block.signature if isinstance(block, ThinkingBlock) else block.data)
            ignored["thought"] += thought is None
            thoughts += [Thought(thought)] if thought else []
    text = "".join(words)
    check_text(text, param)
    return (*thoughts, Text(text, ttl_s), *calls)


def _call(block: ToolUseBlock, where: str) -> Call:
    check_json([block.id, block.name, block.input], where)
    written = block.input.get(INVALID_JSON) if len(block.input) == 1 else None
    arguments = written if isinstance(written, str) else json.dumps(block.input, ensure_ascii=False)
    return Call(block.id, block.name, arguments, seconds_of(block.cache_control))


def _result(block: ToolResultBlock, where: str) -> Result:
    given = block.content or ""
    text = given if isinstance(given, str) else "".join([part.text for part in given if isinstance(part, TextBlock)])
    check_text(block.tool_use_id, f"{where}.tool_use_id")
    check_text(text, f"{where}.content")
    inner = given if isinstance(given, list) else []
    retain_s = max(seconds_of(each.cache_control) for each in (block, *inner))
    return Result(block.tool_use_id, text, bool(block.is_error), retain_s)


def _tools(fields: MessagesFields, ignored: Counter[str]) -> tuple[list[dict[str, Any]] | None, list[ToolField]]:
    """Returns the tools of the prompt: those that the client runs, of deferred ones those that a search has found."""
    found, shown, places = _references(fields.messages), list[dict[str, Any]](), list[ToolField]()
    for i, tool in enumerate(fields.tools or ()):
        where = f"tools[{i}]"
        if tool.type not in (None, "custom"):
            ignored["hosted_tool"] += 1
        elif tool.defer_loading and tool.name not in found:
            ignored["deferred_tool"] += 1
        else:
            shown.append(_tool(tool, where))
            places.append(ToolField(where, "input_schema"))
    return None if fields.tool_choice and fields.tool_choice.type == "none" else shown or None, places


def _choice(fields: MessagesFields) -> tuple[ToolChoice, bool]:
    """Returns which tools a reply may call, and whether at most one."""
    given = fields.tool_choice or MessagesToolChoice("auto")
    if given.type == "none":
        return ToolChoice(), False
    if given.type == "tool" and given.name is None:
        raise RequestError("tool_choice.name is missing; tool_choice.type asks for it.", param="tool_choice.name")
    strict = tuple(tool.name for tool in fields.tools or () if tool.strict and tool.name is not None)
    names = (given.name,) if given.type == "tool" and given.name is not None else None
    is_single = given.type == "tool" or bool(given.disable_parallel_tool_use)
    return ToolChoice(given.type in ("any", "tool"), names, strict), is_single


def _tool(tool: MessagesTool, where: str) -> dict[str, Any]:
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            raise RequestError(f"{where}.{name} is missing.", param=f"{where}.{name}")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    check_json(function, where)
    return function_tool(function)


def _breakpoints(fields: MessagesFields) -> Iterator[CacheControl | None]:
    """Yields the breakpoint of each block, or None."""
    yield fields.cache_control
    contents = [message.content for message in fields.messages]
    for block in chain(fields.tools or (), *(each for each in (fields.system, *contents) if isinstance(each, list))):
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
            yield from (part.cache_control for part in block.content)
        yield None if isinstance(block, ThinkingBlock | RedactedThinkingBlock) else block.cache_control


def _references(messages: Sequence[MessagesTurn]) -> set[str]:
    """Returns the names of the tools that searches have found."""
    results = [
        block.content
        for message in messages
        if not isinstance(message.content, str)
        for block in message.content
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list)
    ]
    return {part.tool_name for parts in results for part in parts if isinstance(part, ToolReferenceBlock)}


def _thinking(fields: MessagesFields, ignored: Counter[str]) -> Thinking:
    """Returns the switches of thoughts, and counts ignored fields."""
    config, effort = fields.thinking, fields.output_config and fields.output_config.effort
    edits = (fields.context_management and fields.context_management.edits) or []
    keeps = any(edit.type.startswith(CLEAR_THINKING) and edit.keep in KEEPS_ALL for edit in edits)
    ignored["context_edit"] += len([edit for edit in edits if not edit.type.startswith(CLEAR_THINKING)])
    is_on = None if config is None else config.type != "disabled"
    budget = None if config is None else config.budget_tokens
    return Thinking(is_on, HIGHEST.get(effort, effort) if effort else None, True if keeps else None, budget)
