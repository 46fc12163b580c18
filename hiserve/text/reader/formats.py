"""The spelling of thoughts and calls in replies, by family of models: one row of plain data each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Marks = tuple[str, str]
NOTHING: Marks = ("", "")
THINK: Marks = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The marks and spelling of thoughts and calls in one family of models.

    A call is ``call[0] name name_ends arguments call[1]``, or ``call[0] {"name": …, "arguments": …} call[1]`` without
    ``name_ends``. White space around marks is not significant.

    Attributes:
        name: The value of ``--reply-format``.
        call: Marks around one call; an empty one is not written. Both empty: replies have no calls.
        section: Marks around all calls of a reply; empty where there are none.
        thought: Marks around a thought.
        thought_lines: Line breaks that are no part of a thought or content: after the opening mark, before the closing
            one, after it.
        call_lines: Line breaks before the first mark of calls that are no part of the content.
        arguments: ``json``: one JSON object. ``tagged``: each value between marks, not quoted.
        fields: Names of the object's members that hold the name of the function and its arguments.
        name_ends: Marks of which one ends the name.
        name_prefixes: Texts before a name that are no part of it.
        id_mark: Separates the id of a call from its name; the whole before ``name_ends`` is the id where it is ``:``.
        fence: Texts around JSON arguments that a model may write.
        key: Marks around the name of a tagged argument.
        key_type: Text between the name of a tagged argument and ``true`` or ``false``: whether its value is a text.
        value: Marks around its value.
        value_lines: Line breaks around a value that are no part of it.
        end: Mark after the last tagged argument.
        header: Marks of a message's channel, and of the end of its header, where replies are messages with headers.
        header_starts: Marks with which the header of another message begins.
        header_marks: Other marks within headers.
        message_ends: Marks of which one ends a message.
        is_list: Calls may form a JSON list.
        is_bare: A call may begin a reply without its mark.
        id_length: Characters of the ids that the chat template demands; 0 takes any.
        signs: Texts that a chat template of the family contains; empty: all its marks but those of thoughts.
    """

    name: str
    call: Marks = NOTHING
    section: Marks = NOTHING
    thought: Marks = NOTHING
    thought_lines: tuple[int, int, int] = (1, 1, 2)
    call_lines: int = 0
    arguments: Literal["json", "tagged"] = "json"
    fields: Marks = ("name", "arguments")
    name_ends: tuple[str, ...] = ()
    name_prefixes: tuple[str, ...] = ()
    id_mark: str = ""
    fence: Marks = NOTHING
    key: Marks = NOTHING
    key_type: str = ""
    value: Marks = NOTHING
    value_lines: int = 0
    end: str = ""
    header: Marks = NOTHING
    header_starts: tuple[str, ...] = ()
    header_marks: tuple[str, ...] = ()
    message_ends: tuple[str, ...] = ()
    is_list: bool = False
    is_bare: bool = False
    id_length: int = 0
    signs: tuple[str, ...] = ()

    @property
    def has_calls(self) -> bool:
        """Whether replies of this family have calls between marks."""
        return self.call != NOTHING

    @property
    def reads_calls(self) -> bool:
        """Whether replies of this family have calls, which may be messages."""
        return self.has_calls or self.header != NOTHING

    @property
    def marks(self) -> tuple[str, ...]:
        """Everything that separates the parts of a reply; some may be empty."""
        ends = (*self.name_ends, self.id_mark, *self.key, *self.value, self.end)
        headers = (*self.header, *self.header_starts, *self.header_marks, *self.message_ends)
        return (*self.thought, *self.section, *self.call, *ends, *headers)

    def signature(self) -> tuple[str, ...]:
        """Returns the texts by which a chat template of the family is known."""
        marks = (*self.call, *self.section, *self.name_ends, *self.key, *self.value, self.end)
        return self.signs or tuple(mark for mark in marks if mark.strip())


FORMATS = (
    ReplyFormat("thoughts", thought=THINK, signs=THINK),
    ReplyFormat(
        "harmony",
        thought=("<|channel|>analysis<|message|>", "<|end|>"),
        thought_lines=(0, 0, 0),
        header=("<|channel|>", "<|message|>"),
        header_starts=("<|start|>",),
        header_marks=("<|constrain|>",),
        message_ends=("<|end|>", "<|call|>", "<|return|>"),
        signs=("<|start|>", "<|channel|>", "<|message|>"),
    ),
    ReplyFormat("hermes", ("<tool_call>", "</tool_call>"), thought=THINK, call_lines=1),
    ReplyFormat(
        "llama3_json",
        ("<|python_tag|>", ""),
        fields=("name", "parameters"),
        is_bare=True,
        signs=("<|python_tag|>", '"parameters":'),
    ),
    ReplyFormat(
        "mistral_list",
        ("[TOOL_CALLS]", ""),
        thought=("[THINK]", "[/THINK]"),
        thought_lines=(0, 0, 0),
        is_list=True,
        id_length=9,
        signs=("[TOOL_CALLS]",),
    ),
    ReplyFormat(
        "mistral",
        ("[TOOL_CALLS]", ""),
        thought=("[THINK]", "[/THINK]"),
        thought_lines=(0, 0, 0),
        name_ends=("[ARGS]",),
        id_mark="[CALL_ID]",
        id_length=9,
        signs=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ReplyFormat(
        "qwen3_coder",
        ("<function=", ""),
        ("<tool_call>", "</tool_call>"),
        THINK,
        call_lines=2,
        arguments="tagged",
        name_ends=(">",),
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        value_lines=1,
        end="</function>",
        signs=("<tool_call>", "<function=", "<parameter="),
    ),
    ReplyFormat(
        "glm",
        ("<tool_call>", "</tool_call>"),
        thought=THINK,
        thought_lines=(0, 0, 1),
        call_lines=1,
        arguments="tagged",
        name_ends=("\n", "<arg_key>", "</tool_call>"),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    ),
    ReplyFormat(
        "deepseek_v3",
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        THINK,
        name_ends=("\n",),
        name_prefixes=("function<｜tool▁sep｜>",),
        fence=("```json\n", "\n```"),
        signs=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),
    ),
    ReplyFormat(
        "deepseek",
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        THINK,
        thought_lines=(0, 0, 0),
        name_ends=("<｜tool▁sep｜>",),
        signs=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    ),
    ReplyFormat(
        "deepseek_v32",
        ('<｜DSML｜invoke name="', "</｜DSML｜invoke>"),
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        THINK,
        thought_lines=(0, 0, 0),
        call_lines=2,
        arguments="tagged",
        name_ends=('">',),
        key=('<｜DSML｜parameter name="', '">'),
        key_type='" string="',
        value=("", "</｜DSML｜parameter>"),
        signs=("<｜DSML｜function_calls>", "<｜DSML｜invoke name=", "<｜DSML｜parameter name="),
    ),
    ReplyFormat(
        "deepseek_v4",
        ('<｜DSML｜invoke name="', "</｜DSML｜invoke>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        THINK,
        thought_lines=(0, 0, 0),
        call_lines=2,
        arguments="tagged",
        name_ends=('">',),
        key=('<｜DSML｜parameter name="', '">'),
        key_type='" string="',
        value=("", "</｜DSML｜parameter>"),
        signs=("<｜DSML｜tool_calls>", "<｜DSML｜invoke name=", "<｜DSML｜parameter name="),
    ),
    ReplyFormat(
        "kimi_k2",
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        THINK,
        thought_lines=(0, 0, 0),
        name_ends=("<|tool_call_argument_begin|>",),
        name_prefixes=("functions.",),
        id_mark=":",
    ),
    ReplyFormat(
        "minimax",
        ('<invoke name="', "</invoke>"),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        THINK,
        call_lines=1,
        arguments="tagged",
        name_ends=('">',),
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        signs=("<minimax:tool_call>", "<invoke name=", "<parameter name="),
    ),
)
BY_NAME = {row.name: row for row in FORMATS}


def find_format(template: str) -> ReplyFormat | None:
    """Returns the most specific format whose signs a chat template contains; None if there is none.

    Args:
        template: Jinja source.
    """
    fitting = [row for row in FORMATS if all(sign in template for sign in row.signature())]
    return max(fitting, key=lambda row: (row.has_calls, len(row.signature())), default=None)
