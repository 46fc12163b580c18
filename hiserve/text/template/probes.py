"""The abilities of a chat template, found by rendering small conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from hiserve.errors import RequestError
from hiserve.text.conversation import Call, Conversation, Result, Text, Thought, Turn
from hiserve.text.template.chat_template import PROBE, PROBE_ID, ChatTemplate

USER = Turn("user", (Text("Hi"),))
THOUGHT = Turn("assistant", (Thought(PROBE), Text("Yes")))
CALL = Turn("assistant", (Thought(PROBE), Text(""), Call(PROBE_ID, "look", '{"where": "here"}')))
RESULT = Turn("tool", (Result(PROBE_ID, "found"),))
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
# Variables by which families switch thoughts, each with the value that keeps those of earlier turns.
KEEP_SWITCHES: dict[str, bool] = {"preserve_thinking": True, "clear_thinking": False}
THINKING_SWITCHES = ("enable_thinking", "thinking")
EFFORT_SWITCH = "reasoning_effort"
EFFORTS = ("low", "high", "max")  # values of which families know some
SWITCHES = frozenset({*KEEP_SWITCHES, *THINKING_SWITCHES, EFFORT_SWITCH})


class TemplateAbilities(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a conversation that a chat template shows, and its switches.

    Attributes:
        tools: Tools of a request.
        later_system: A system turn after a turn of the user or a reply, at its place. Elsewhere it becomes a reminder.
        thoughts: Thoughts ``always``, until the user's next ``turn``, or ``never``.
        keep_switch: The variable that keeps the thoughts of earlier turns; empty if there is none.
        thinking_switch: The variable that turns thoughts on and off; empty if there is none.
        effort_switch: The variable for the effort of thoughts; empty if there is none.
        turn_end: The text after the words of the assistant.
    """

    tools: bool = False
    later_system: bool = False
    thoughts: Literal["always", "turn", "never"] = "never"
    keep_switch: str = ""
    thinking_switch: str = ""
    effort_switch: str = ""
    turn_end: str = ""

    def variables(
        self, *, keep: bool | None = None, thinking: bool | None = None, effort: str | None = None
    ) -> dict[str, Any]:
        """Returns the variables that set the switches that the template has; None leaves a switch at its default."""
        made: dict[str, Any] = {}
        if self.keep_switch and keep is not None:
            made[self.keep_switch] = KEEP_SWITCHES[self.keep_switch] is keep
        if self.thinking_switch and thinking is not None:
            made[self.thinking_switch] = thinking
        if self.effort_switch and effort is not None:
            made[self.effort_switch] = effort
        return made


def probe(template: ChatTemplate) -> TemplateAbilities:
    """Returns the abilities of a template. Conversations that it refuses show nothing."""

    def text(*turns: Turn, add_generation_prompt: bool = True, **variables: Any) -> str:
        chat = Conversation(
            turns=turns,
            tools=TOOLS if CALL in turns else None,
            template_kwargs=variables,
            add_generation_prompt=add_generation_prompt,
        )
        try:
            return template.render(chat)
        except RequestError:
            return ""

    keep_switch = _keep_switch(lambda **variables: PROBE in text(USER, THOUGHT, USER, **variables))
    is_kept = PROBE in text(USER, THOUGHT, USER)
    is_shown = is_kept or PROBE in text(USER, THOUGHT) or PROBE in text(USER, CALL, RESULT)
    said = Turn("assistant", (Text(PROBE),))
    thinking_switch = next(
        (name for name in THINKING_SWITCHES if text(USER, **{name: True}) != text(USER, **{name: False})), ""
    )
    thinks: dict[str, Any] = {thinking_switch: True} if thinking_switch else {}
    efforts = {text(USER, **thinks | {EFFORT_SWITCH: effort}) for effort in EFFORTS} - {""}
    _, shown, turn_end = text(USER, said, add_generation_prompt=False).rpartition(PROBE)
    return TemplateAbilities(
        tools=template.shows_tools,
        later_system=template.shows_later_system,
        thoughts="always" if is_kept else "turn" if is_shown else "never",
        keep_switch=keep_switch,
        thinking_switch=thinking_switch,
        effort_switch=EFFORT_SWITCH if len(efforts) > 1 else "",
        turn_end=turn_end if shown else "",
    )


def _keep_switch(is_kept: Callable[..., bool]) -> str:
    """Returns the variable of which one value keeps the thoughts of earlier turns, and the other does not."""
    for name, value in KEEP_SWITCHES.items():
        if is_kept(**{name: value}) and not is_kept(**{name: not value}):
            return name
    return ""
