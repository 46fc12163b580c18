"""Turns of a chat with tools, and how DeepSeek spells marks and calls."""

from __future__ import annotations

from hiserve.text.conversation import Call, Result, Text, Thought, Turn

BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Sieht nach: „ja“", "parameters": {"type": "object"}},
}
SYSTEM, HI, MORE = Turn("system", (Text("Be brief."),)), Turn("user", (Text("Hi"),)), Turn("user", (Text("More"),))
SAID = Turn("assistant", (Thought("hm"), Text("Yes")))
CALLED = Turn(
    "assistant",
    (Thought("look"), Text("So:"), Call("a", "look", '{"where": "in \\"x\\"", "times": 2}'), Call("b", "look", "{}")),
)
FOUND = (Turn("tool", (Result("b", "second"),)), Turn("tool", (Result("a", "first"),)))
CALLS = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="look">
<｜DSML｜parameter name="where" string="true">in "x"</｜DSML｜parameter>
<｜DSML｜parameter name="times" string="false">2</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="look">

</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
