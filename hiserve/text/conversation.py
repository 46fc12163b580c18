"""A conversation, the same in every protocol: turns of parts, and the tools that may be called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import msgspec

Message = dict[str, Any]
Role = Literal["system", "user", "assistant", "tool"]


# Fields of a function in the order in which all protocols show them to the template; others follow.
SHOWN_FIRST = ("name", "description", "parameters")
NOT_SHOWN = frozenset({"strict"})  # it constrains calls

ERROR = "Error: "  # before the result of a failed call, where the template does not show that it failed


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A text of a turn. The cache evicts the prompt up to a part with ``retain_s`` last, for so many seconds."""

    text: str
    retain_s: int = 0


class Thought(msgspec.Struct, frozen=True, tag="thought"):
    """A thought of the assistant before its text."""

    text: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A call of a tool by the assistant; ``arguments`` are the text that the model or the client wrote."""

    id: str | None
    name: str
    arguments: str
    retain_s: int = 0

    @property
    def value(self) -> Any:
        """The arguments as an object; the text where it spells none."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments
        return value if isinstance(value, dict) else self.arguments


class Result(msgspec.Struct, frozen=True, tag="result"):
    """The result of the call of this id, which may have failed."""

    id: str | None
    text: str
    is_error: bool = False
    retain_s: int = 0


class Turn(msgspec.Struct, frozen=True):
    """One turn.

    Attributes:
        role: Of its author.
        parts: In order.
        fields: Other texts that a template may show, such as a name.
    """

    role: Role
    parts: tuple[Text | Thought | Call | Result, ...]
    fields: dict[str, str] = {}

    @property
    def text(self) -> str:
        """The text, or the result."""
        return "".join([part.text for part in self.parts if isinstance(part, Text | Result)])

    @property
    def message(self) -> Message:
        """The turn in the form that chat templates take."""
        made: Message = {"role": self.role, "content": self.text, **self.fields}
        for part in self.parts:
            if isinstance(part, Thought):
                made["reasoning_content"] = made.get("reasoning_content", "") + part.text
            elif isinstance(part, Result):
                made |= {} if part.id is None else {"tool_call_id": part.id}
                made |= {"is_error": True} if part.is_error else {}
            elif isinstance(part, Call):
                call = {"type": "function", "function": {"name": part.name, "arguments": part.value}}
                made.setdefault("tool_calls", []).append(call if part.id is None else call | {"id": part.id})
        return made


class ToolChoice(msgspec.Struct, frozen=True):
    """The calls that a reply may have.

    Attributes:
        is_required: The reply is calls, at least one, and nothing else.
        names: The functions that may be called; None: all.
        strict: The functions whose arguments are always of their schema.
        fields: Where the request names each of ``names``, for errors; empty: in ``tool_choice``.
    """

    is_required: bool = False
    names: tuple[str, ...] | None = None
    strict: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the chat template.

    Attributes:
        turns: In order.
        tools: OpenAI function tools, or None; they are left out where none may be called.
        choice: Which of them a reply may call, and whether it must.
        is_single: At most one call a reply.
        documents: For templates that cite them, or None.
        template_kwargs: More variables for the template, by name.
        add_generation_prompt: End the prompt with the start of the assistant's reply.
        continue_final_message: End the prompt inside the last turn; the model continues it.
        tools_retain_s: As of parts, up to the tools.
    """

    turns: tuple[Turn, ...]
    tools: list[dict[str, Any]] | None = None
    choice: ToolChoice = ToolChoice()
    is_single: bool = False
    documents: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools_retain_s: int = 0

    @property
    def retains(self) -> bool:
        """Whether the cache is asked to evict any part last."""
        parts = (part for turn in self.turns for part in turn.parts if not isinstance(part, Thought))
        return bool(self.tools_retain_s) or any(part.retain_s for part in parts)

    @property
    def has_later_system(self) -> bool:
        """Whether a system turn follows another turn."""
        roles = [turn.role for turn in self.turns]
        return any(first != "system" and second == "system" for first, second in pairwise(roles))

    def with_reminders(self) -> Conversation:
        """Returns the conversation with later system turns as reminders at the end of the turn before.

        A turn of the assistant stays as it is: the reminder begins the user's next turn, or is one.
        """
        turns: list[Turn] = []
        is_reminder = False  # the last turn is nothing else
        for turn in self.turns:
            if turn.role != "system" or all(before.role == "system" for before in turns):
                if is_reminder and turn.role == "user":  # templates may refuse two turns of the user
                    reminders = Text(f"{turns.pop().text}\n\n")
                    turns.append(msgspec.structs.replace(turn, parts=(reminders, *turn.parts)))
                else:
                    turns.append(turn)
                is_reminder = False
                continue
            reminder = f"<system-reminder>\n{turn.text}\n</system-reminder>"
            if turns[-1].role == "assistant":
                turns.append(Turn("user", (Text(reminder),)))
                is_reminder = True
            else:
                *parts, last = turns[-1].parts
                assert isinstance(last, Text | Result), f"a turn of the {turns[-1].role} ends with a call"
                ended = msgspec.structs.replace(last, text=f"{last.text}\n\n{reminder}")
                turns[-1] = msgspec.structs.replace(turns[-1], parts=(*parts, ended))
        return msgspec.structs.replace(self, turns=tuple(turns))

    @property
    def has_errors(self) -> bool:
        """Whether a call has failed."""
        return any(isinstance(part, Result) and part.is_error for turn in self.turns for part in turn.parts)

    def with_errors_as_text(self) -> Conversation:
        """Returns the conversation with ``ERROR`` before the text of each failed call."""

        def with_error(part: Any) -> Any:
            is_error = isinstance(part, Result) and part.is_error
            return msgspec.structs.replace(part, text=ERROR + part.text) if is_error else part

        turns = [msgspec.structs.replace(turn, parts=tuple(map(with_error, turn.parts))) for turn in self.turns]
        return msgspec.structs.replace(self, turns=tuple(turns))

    @property
    def has_bare_tools(self) -> bool:
        """Whether a tool has no description."""
        return any("description" not in tool["function"] for tool in self.tools or ())

    def with_descriptions(self) -> Conversation:
        """Returns the conversation with an empty description of each tool that has none."""
        tools = [tool | {"function": {"description": "", **tool["function"]}} for tool in self.tools or ()]
        return msgspec.structs.replace(self, tools=tools)

    @property
    def has_spoken_calls(self) -> bool:
        """Whether a turn has a thought, a text and a call."""
        return any(_is_spoken_call(turn) for turn in self.turns)

    def with_texts_as_thoughts(self) -> Conversation:
        """Returns the conversation with the text between a thought and a call as the end of the thought."""
        turns = [
            msgspec.structs.replace(turn, parts=_text_as_thought(turn)) if _is_spoken_call(turn) else turn
            for turn in self.turns
        ]
        return msgspec.structs.replace(self, turns=tuple(turns))

    @property
    def messages(self) -> list[Message]:
        """The turns in the form that chat templates take."""
        return [turn.message for turn in self.turns]

    @property
    def num_chars(self) -> int:
        """Approximate characters of a prompt that shows every field."""
        contents = sum(
            len(part.name) + len(part.arguments) if isinstance(part, Call) else len(part.text)
            for turn in self.turns
            for part in turn.parts
        )
        more = [self.tools, self.documents, self.template_kwargs]
        return 16 * len(self.turns) + contents + (len(json.dumps(more)) if any(more) else 0)


def function_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a function in the form that chat templates take: the same for every protocol and order of its fields.

    Args:
        function: Its name, description and parameters; other fields follow, but for null and ``strict``.
    """
    names = [*SHOWN_FIRST, *(name for name in function if name not in SHOWN_FIRST and name not in NOT_SHOWN)]
    shown = {name: function[name] for name in names if function.get(name) is not None}
    return {"type": "function", "function": shown}


def _is_spoken_call(turn: Turn) -> bool:
    kinds = {type(part) for part in turn.parts if not isinstance(part, Text) or part.text}
    return {Thought, Text, Call} <= kinds


def _text_as_thought(turn: Turn) -> tuple[Text | Thought | Call | Result, ...]:
    """Returns one thought of the thoughts and texts, in their order, and the other parts."""
    words = [part.text for part in turn.parts if isinstance(part, Thought | Text) and part.text]
    others = [part for part in turn.parts if not isinstance(part, Thought | Text)]
    return (Thought("\n\n".join(words)), Text(""), *others)
