"""Grammars of tool calls: replies that read back as calls, made from the syntax that the reader reads with."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from hiserve.core.request import LENIENT, Grammar, GrammarKind
from hiserve.errors import RequestError
from hiserve.grammar import bounds
from hiserve.grammar.bounds import MAX_SCHEMA_BYTES
from hiserve.grammar.lark import Rules, as_json, escaped
from hiserve.grammar.regular import MAX_CHARS, is_whole, regular
from hiserve.grammar.tagged import TaggedArguments
from hiserve.text.abilities import Abilities
from hiserve.text.conversation import Conversation
from hiserve.text.custom_tools import CustomTool
from hiserve.text.reader.calls import NAME
from hiserve.text.reader.marks import ReplySyntax
from hiserve.text.reader.messages import ASSISTANT, FUNCTION

Function = Mapping[str, Any]
MAX_KEPT = 64  # grammars, of MAX_SCHEMA_BYTES each
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolSchema(NamedTuple):
    """The grammar of the arguments of one tool as JSON, and its field."""

    grammar: Grammar
    param: str


class ToolGrammar(NamedTuple):
    """The grammar of the replies that tools allow.

    Attributes:
        grammar: Of kind ``lark``.
        param: The field that asks for it.
        mark: The text before a call, where a reply need not have one.
        not_held: Parts of the tools' schemas that the grammar does not hold.
        schemas: Of each tool, to tell which one is at fault where the grammar is refused.
    """

    grammar: Grammar
    param: str
    mark: str
    not_held: list[str]
    schemas: list[ToolSchema]


class ToolField(NamedTuple):
    """Where a client has described a tool, for errors."""

    tool: str
    parameters: str = "parameters"


class ToolGrammars:
    """Writes the grammars of tools, and keeps the last ones by the tools: an agent has the same at each step.

    Args:
        abilities: Of the model.
    """

    def __init__(self, abilities: Abilities) -> None:
        self._abilities = abilities
        self._kept: OrderedDict[bytes, ToolGrammar] = OrderedDict()

    def of(
        self, chat: Conversation, texts: Grammar | None = None, fields: Sequence[ToolField] = ()
    ) -> ToolGrammar | None:
        """Returns the grammar of the replies that a conversation's ``tools`` and ``choice`` allow.

        Where a call is required, the reply is calls. Where it is not, the reply is any text with calls, each of which has the
        arguments that its tool takes; those of ``strict`` functions are held to the letter.

        Args:
            chat: The conversation.
            texts: What a reply without a call must be of: of JSON, so that a reply is such a text, or calls, and never both.
                Texts of another kind are the whole reply.
            fields: Of each tool; without them, those of chat completions.

        Returns:
            None where the tools add nothing: no call is required, and no tool is ``strict`` or none can be called, or the
            texts are the whole reply.

        Raises:
            RequestError: ``choice`` is not of these tools, or of a model whose replies have no calls; or a tool cannot be held.
        """
        is_free = texts is None
        syntax = _checked(self._abilities, chat, is_free=is_free)
        if syntax is None or (texts is not None and texts.kind not in LENIENT):
            return None
        allowed, functions = chat.choice.names, [tool["function"] for tool in chat.tools or ()]
        parts = [
            (index, each["name"], each.get("parameters"))
            for index, each in enumerate(functions)
            if allowed is None or each["name"] in allowed
        ]
        key = hashlib.sha256(msgspec.msgpack.encode((chat.choice, chat.is_single, is_free, parts, fields))).digest()
        found = self._kept.pop(key, None) or _written(syntax, chat, fields, is_free=is_free)
        self._kept[key] = found
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return found if texts is None else found._replace(grammar=texts.either(found.grammar))


def _checked(abilities: Abilities, chat: Conversation, *, is_free: bool) -> ReplySyntax | None:
    """Returns the spelling of the calls that a reply must have or may have; None where it is not constrained."""
    choice = chat.choice
    called = [tool["function"] for tool in chat.tools or ()]
    declared = {function["name"] for function in called}
    for index, name in enumerate(choice.names or ()):
        if name not in declared:
            param = choice.fields[index] if choice.fields else "tool_choice"
            raise RequestError(f"{param} names {name[:100]!r}, which is none of tools.", param=param)
    if choice.is_required and not called:
        raise RequestError("tool_choice asks for a call, but tools is empty.", param="tool_choice")
    is_any = is_free and not (choice.is_required or choice.names is not None or choice.strict)
    if not called or is_any or (not is_free and chat.continue_final_message):
        return None
    syntax = abilities.syntax
    if syntax is None or not has_grammar(syntax) or not abilities.template.tools:
        if not choice.is_required:
            return None
        fact = "the form of this model's calls is not known. Name it at start (--reply-format)"
        if syntax is not None and syntax.row.reads_calls:
            fact = (
                f"the marks of its form, {syntax.row.name}, are no tokens of this model. Name another (--reply-format)"
            )
        if not abilities.template.tools:
            fact = "the chat template of this model does not show tools to it"
        raise RequestError(f"tool_choice asks for a call of tools, but {fact}.", param="tool_choice")
    if chat.continue_final_message and choice.is_required:
        raise RequestError(
            "tool_choice and continue_final_message exclude each other: a reply that is continued is no call.",
            param="tool_choice",
        )
    return syntax


def _written(
    syntax: ReplySyntax, chat: Conversation, fields: Sequence[ToolField] = (), *, is_free: bool = True
) -> ToolGrammar:
    """Returns the grammar of calls, and where none is required of free text around them or not."""
    choice = chat.choice
    made = _Calls(syntax, choice.strict)
    allowed = choice.names
    for index, function in enumerate(tool["function"] for tool in chat.tools or ()):
        if allowed is None or function["name"] in allowed:
            made.add(function, fields[index] if fields else ToolField(f"tools[{index}].function"))
    is_call = choice.is_required or not is_free
    text = (
        made.calls(is_single=chat.is_single, has_mark=not is_free)
        if is_call
        else made.among_text(is_single=chat.is_single)
    )
    if (size := len(text.encode())) > MAX_SCHEMA_BYTES:
        raise RequestError(f"the schemas of tools have {size} bytes; the most is {MAX_SCHEMA_BYTES}.", param="tools")
    field = "tool_choice" if choice.is_required else "tools"
    mark = "" if choice.is_required else made.mark
    return ToolGrammar(Grammar.of("lark", text), field, mark, made.not_held, made.schemas)


def has_grammar(syntax: ReplySyntax) -> bool:
    """Whether calls of this form can be required; those that are messages need headers that no text can spell."""
    row = syntax.row
    return row.has_calls or all(map(syntax.is_token, syntax.pair(row.header)))


class _Calls:
    """Rules of the calls of some functions.

    Attributes:
        mark: The text before calls.
        not_held: Where schemas have keywords that the grammar does not hold.
        schemas: Those of the functions, each alone.
    """

    def __init__(self, syntax: ReplySyntax, strict: Collection[str]) -> None:
        self._syntax = syntax
        self._strict = strict
        self._row = syntax.row
        self._rules = Rules(syntax.stand_ins)
        self._names: list[str] = []
        row = syntax.row
        self.mark = row.header[0] + FUNCTION if row.header[0] else row.section[0] or row.call[0]
        self.not_held: list[str] = []
        self.schemas: list[ToolSchema] = []

    def add(self, function: Function, field: ToolField) -> None:
        """Adds the calls of a function.

        Raises:
            RequestError: Its name cannot be spelled, or it is strict and cannot be held.
        """
        syntax, row, rules, where = self._syntax, self._row, self._rules, field.tool
        param = f"{where}.{field.parameters}"
        name, is_strict = function["name"], function["name"] in self._strict
        marks = [mark for mark in (*syntax.name_ends, syntax.id_mark, *syntax.stand_ins.values()) if mark]
        if not NAME.fullmatch(name) or any(mark in syntax.spell(name) for mark in marks):
            raise RequestError(
                f"{where}.name is {name[:100]!r}, which cannot be required of this model: its calls have no place for such "
                "a name. Use letters, digits, _ and -.",
                param=f"{where}.name",
            )
        schema = function.get("parameters")
        schema = NO_PARAMETERS if schema is None else schema
        if schema.get("type", "object") != "object":
            raise RequestError(f"{param} must be the schema of an object.", param=param)
        schema = {"type": "object", **schema}
        kind: GrammarKind = "json" if is_strict else "json_lenient"
        self.schemas.append(ToolSchema(Grammar.of(kind, json.dumps(schema)), param))
        if row.arguments == "tagged":
            tagged = TaggedArguments(syntax, rules, schema, is_strict=is_strict)
            try:
                arguments = tagged.expression()
            except ValueError as error:
                raise RequestError(f"{param}: {error}.", param=param) from None
            if tagged.not_held and is_strict:
                raise RequestError(
                    f"{where} is strict, but calls of this model cannot hold {tagged.not_held[0]}. Leave it out, or set "
                    "strict to false.",
                    param=param,
                )
            self.not_held += [f"{name}: {each}" for each in tagged.not_held]
        else:
            arguments = as_json(schema, is_strict=is_strict)
        self._names.append(rules.rule(f"{self._head(name)} {arguments} {self._tail()}"))

    def _head(self, name: str) -> str:
        """The text of a call between its opening mark and its arguments."""
        row, syntax, literal = self._row, self._syntax, self._rules.literal
        if row.header[0]:
            (constrain,) = row.header_marks
            return literal(syntax.spell(f"{row.header[0]}{FUNCTION}{name} {constrain}json{row.header[1]}"))
        if not row.name_ends:
            first, second = row.fields
            return literal(f'{{"{first}": {json.dumps(name, ensure_ascii=False)}, "{second}": ')
        before = syntax.name_prefixes[0] if syntax.name_prefixes else ""
        kept = (syntax.key[0], *syntax.closings)  # marks that end a name and begin what follows it
        ends = [end for end in syntax.name_ends if end not in kept]
        if syntax.id_mark == ":":
            parts = [literal(f"{before}{name}:"), "/[0-9]{1,4}/", literal(ends[0])]
        elif syntax.id_mark:
            call_id = f"({literal(syntax.id_mark)} /[a-zA-Z0-9]{{{row.id_length}}}/)?"
            parts = [literal(before + name), call_id, literal(ends[0])]
        elif len(ends) < len(syntax.name_ends):
            parts = [literal(before + name), f"({literal(ends[0])})?"]
        else:
            parts = [literal(before + name + ends[0])]
        return " ".join([*parts, literal(row.fence[0])])

    def _tail(self) -> str:
        """The text between the arguments of a call and its closing mark."""
        row, literal = self._row, self._rules.literal
        if row.header[0]:
            return literal(self._syntax.spell(row.message_ends[1]))
        if row.name_ends:
            return literal(row.fence[1])
        given_id = f'(", \\"id\\": \\"" /[a-zA-Z0-9]{{{row.id_length}}}/ "\\"")? ' if row.id_length else ""
        return given_id + literal("}")

    def _groups(self, *, is_single: bool) -> tuple[str, str]:
        """Returns the opening mark of calls, and the rule of what follows it: one call, or some that share the mark."""
        syntax, row, literal = self._syntax, self._row, self._rules.literal
        space, name = "SPACE?", self._rules.rule(" | ".join(self._names))
        after_mark = "" if row.name_ends else space
        call = self._rules.rule(f"{after_mark} {name} {f'{space} {literal(syntax.call[1])}' if syntax.call[1] else ''}")
        if syntax.section[0]:
            marked = f"{literal(syntax.call[0])} {call}"
            others = "" if is_single else f"({space} {marked})*"
            return syntax.section[0], f"{space} {marked} {others} {space} {literal(syntax.section[1])}"
        others = "" if is_single else f'(", " {name})*'
        if row.is_list:
            return syntax.call[0], f'" "? "[" {name} {others} "]"'
        return syntax.call[0], f"{name} {'' if is_single else f'(/; ?/ {name})*'}" if row.is_bare else call

    def _messages(self) -> tuple[str, str, str]:
        """Returns the expressions of a message, of the text between two messages, and of the one call."""
        row, rules = self._row, self._rules
        channel, message, end = map(self._syntax.spell, (*row.header, row.message_ends[0]))
        start = self._syntax.spell(row.header_starts[0])
        said = rules.rule(f"{rules.literal(channel)} /[a-z]+( json)?/ {rules.literal(message)} /(?s:.+)/?")
        return said, rules.literal(f"{end}{start}{ASSISTANT}"), rules.rule(" | ".join(self._names))

    def calls(self, *, is_single: bool, has_mark: bool = False) -> str:
        """Returns the grammar of replies that are calls and nothing else.

        Args:
            is_single: One call.
            has_mark: They begin with their mark, also where the family may leave it out.
        """
        if self._row.header[0]:
            return self._rules.text(self._rules.rule(" | ".join(self._names)))
        mark, group = self._groups(is_single=is_single)
        is_bare, num_lines = self._row.is_bare, self._row.call_lines
        opening = self._rules.literal(mark)
        group = self._rules.rule(f"{f'({opening})?' if is_bare and not has_mark else opening} {group}")
        is_one = is_single or is_bare or self._row.is_list
        lines = f"/\\n{{1,{num_lines}}}/? " if num_lines else ""
        return self._rules.text(lines + group + ("" if is_one else f" (SPACE? {group})*"))

    def among_text(self, *, is_single: bool) -> str:
        """Returns the grammar of replies of any text and calls."""
        if self._row.header[0]:
            said, following, call = self._messages()
            text = self._rules.terminal("/(?s:.+)/")
            return self._rules.text(f"{call} | ({said} | {text})? ({following} {said})* ({following} {call})?")
        mark, group = self._groups(is_single=is_single)
        syntax, rules, group = self._syntax, self._rules, self._rules.rule(group)
        # A reply that begins so has a thought, or a call, that no rule is for.
        is_spelled = syntax.thought[0] and not syntax.is_token(syntax.thought[0])
        begins = [escaped(syntax.thought[0])] * bool(is_spelled) + [r"\{"] * self._row.is_bare
        other = f" & ~/[\\s,;]*({'|'.join(begins)})(?s:.*)/" if begins else ""
        if syntax.is_token(mark):
            text = rules.terminal(f"/(?s:.+)/{other}")
            unit = f"{text}? {rules.literal(mark)} {group}"
        else:
            # The library ends a lazy rule where it can, so that no text has the mark.
            text = rules.terminal(f"/(?s:.+)/{other}")
            unit = f"{rules.rule(f'/(?s:.*){escaped(mark)}/{other}', is_lazy=True)} {group}"
        bare = f"{group} | " if self._row.is_bare else ""
        if is_single:
            return rules.text(f"{bare}{unit} | {text}?")
        return rules.text(f"{f'({group})? ' if bare else ''}({unit})* {text}?")


class CustomTools:
    """The custom tools of a request.

    Attributes:
        names: By which the model calls them.
        not_held: By name, the grammars of the tools whose input is not held to them; the model sees them.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.not_held: dict[str, ToolSchema] = {}
        self._num_chars = 0  # of the rules that were read

    def pattern(self, tool: CustomTool) -> str | None:
        """Adds a tool; returns the regular expression of its input, if it can be held.

        Raises:
            RequestError: A grammar that cannot be held is out of bounds.
        """
        self.names.add(tool.name)
        if not tool.definition:
            return None
        if tool.syntax == "regex":
            if is_whole(tool.definition):
                return tool.definition
            grammar = bounds.regex(tool.definition, tool.param)
        else:
            if pattern := self._regular(tool.definition):
                return pattern
            grammar = bounds.rules(tool.definition, tool.param).as_kind("lark")
        self.not_held[tool.name] = ToolSchema(grammar, tool.param)
        return None

    def _regular(self, rules: str) -> str | None:
        """Returns the regular expression of rules, if they are one. The limit is of all tools: the event loop waits for them."""
        if self._num_chars + len(rules) > MAX_CHARS:
            return None
        self._num_chars += len(rules)
        return regular(rules)
