"""The grammars of custom tools: a call holds its input as a string of JSON, which a regular expression can hold."""

from __future__ import annotations

from hiserve.grammar import bounds
from hiserve.grammar.regular import MAX_CHARS, is_whole, regular
from hiserve.grammar.tools import ToolSchema
from hiserve.text.custom_tools import CustomTool


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
