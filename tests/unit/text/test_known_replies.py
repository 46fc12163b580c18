"""Replies with thoughts and calls keep their tokens in the next prompt, in whatever spelling the client returns them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hiserve.core.request import FinishReason, SamplingParams
from hiserve.errors import RequestError
from hiserve.text.abilities import Abilities
from hiserve.text.conversation import Conversation
from hiserve.text.prompt.known_replies import canonical
from hiserve.text.prompt.parts import place_after
from hiserve.text.prompt.reply_tokens import ReplyTokenCache, encode_chat, with_thoughts
from hiserve.text.reader.buffer import EventLog, called, thought
from hiserve.text.reader.formats import BY_NAME
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.tokens.detokenizer import TokenBytes
from tests.helpers import tiny_text
from tests.helpers.chats import chat_of
from tests.helpers.reply_formats import NAMES, TOOLS, template_of, tokenizer_of
from tests.helpers.widening import in_turn

USER = {"role": "user", "content": "Hi"}
RESULT = {"role": "tool", "content": "found"}


class Agent:
    """A loop of calls with one model, whose memory of replies it keeps."""

    def __init__(self, name: str, *, by_token: bool = False, template: str = "") -> None:
        self.row = BY_NAME[name]
        self.tokenizer = tokenizer_of(name, by_token=by_token)
        self.template = template_of(template or name)
        self.abilities = Abilities(self.tokenizer, TokenBytes(self.tokenizer), self.template)
        self.cache = ReplyTokenCache(row=self.row)
        self.kwargs: dict[str, Any] = {}

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> Conversation:
        return chat_of(messages, tools=TOOLS, template_kwargs=self.kwargs, **fields)

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        chat = self.chat(messages)
        known, splices = self.cache.recall(b"", chat), self.cache.splices
        return encode_chat(chat, known, self.template, self.tokenizer, splices=splices).tolist()

    def counts(self) -> dict[str, int]:
        """Replies in prompts since the last call, by what became of their tokens."""
        counts = {str(each): count for each, count in self.cache.splices.items() if count}
        self.cache.splices.clear()
        return counts

    def render(self, messages: list[dict[str, Any]]) -> str:
        return self.template.render(self.chat(messages))

    def spelled(self, text: str) -> list[int]:
        """A text in ids that the tokenizer would not choose: a token for each character, but for marks."""
        ids = []
        for index in self.tokenizer.encode(text, add_special_tokens=False).tolist():
            piece = self.tokenizer.decode([index], skip_hidden=False)
            is_plain = piece.isascii() and index not in self.tokenizer.hidden_ids
            ids += (
                tiny_text.spell_in_bytes(self.tokenizer, piece)
                if is_plain and "\n" not in piece + " " and piece.isalpha()
                else [index]
            )
        return ids

    def reply(self, messages: list[dict[str, Any]], text: str) -> tuple[list[int], dict[str, Any]]:
        """The model replies with a text; returns its ids, and the message that the client makes of it."""
        chat = self.chat(messages)
        prompt = self.encode(messages)
        ids = self.spelled(text)
        output = self.abilities.output(
            chat, self.tokenizer.encode(self.render(messages), add_special_tokens=False), SamplingParams()
        )
        delta = output.push([*ids, tiny_text.END], FinishReason.STOP)
        log = EventLog()
        log.add(delta.events)
        self.cache.remember(b"", chat, delta.text, ids, log.events)
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in called(delta.events).values()
        ]
        message = {"role": "assistant", "content": delta.text, "reasoning_content": thought(delta.events)}
        return [*prompt, *ids], message | ({"tool_calls": calls} if calls else {})

    def text_of(self, content: str, said: str, calls: list[dict[str, Any]]) -> str:
        """What the model writes to say this: as the template shows it."""
        message = {"role": "assistant", "content": content, "reasoning_content": said, "tool_calls": [
            {"function": {"name": "look", "arguments": arguments}} for arguments in calls
        ]}  # fmt: skip
        whole = self.template.render(self.chat([USER, message], add_generation_prompt=False))
        return whole.removeprefix(self.render([USER])).removesuffix("<|end|>")


def respelled(message: dict[str, Any], **separators: Any) -> dict[str, Any]:
    """The message with the arguments of its calls in another spelling."""
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(json.loads(call["function"]["arguments"]), **separators)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}


@pytest.mark.parametrize(("name", "by_token"), in_turn(NAMES, [False, True]))
def test_an_agents_next_prompt_begins_with_the_tokens_of_this_one(name: str, by_token: bool) -> None:
    agent = Agent(name, by_token=by_token)
    said = "so be it" if agent.row.thought[0] else ""
    content = "" if agent.row.is_bare else "Let me look."
    messages = [USER]
    for number in range(3):
        text = agent.text_of(content, said, [{"text": f"place {number}"}, {"number": number}])
        if agent.row.arguments == "json":
            for member in ("text", "number"):
                text = text.replace(f'"{member}": ', f'"{member}":  ')
        known, message = agent.reply(messages, text)
        message = respelled(message, separators=(",", ":"))
        del message["reasoning_content"]  # left out, as some clients do
        messages = [*messages, message, RESULT, RESULT]
        assert agent.encode(messages)[: len(known)] == known
    assert (
        known
        != agent.tokenizer.encode(agent.tokenizer.decode(known, skip_hidden=False), add_special_tokens=False).tolist()
    )


def test_arguments_of_another_value_are_the_clients() -> None:
    agent = Agent("hermes")
    text = agent.text_of("Yes.", "so", [{"text": "here", "number": 1}])
    known, message = agent.reply([USER], text)
    for arguments in ('{"text": "here", "number": true}', '{"text": "here"}', '{"text": "there", "number": 1}'):
        changed = message | {"tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}
        history = [USER, changed, RESULT]
        ids = agent.encode(history)
        assert agent.tokenizer.decode(ids, skip_hidden=False) == agent.render(history)
        place = text.index('{"text"')
        begun = agent.encode([USER]) + agent.spelled(text[:place])
        assert ids[: len(begun)] == begun, "tokens up to the change are kept"
        assert ids[: len(known)] != known


def test_a_template_that_drops_thoughts_is_obeyed() -> None:
    agent = Agent("hermes")
    agent.template = ChatTemplate(agent.template.sources.source.replace("message.reasoning_content", "false"))
    _, message = agent.reply([USER], "<think>\nso\n</think>\n\nYes, the token.")
    history = [USER, message, USER]
    assert agent.tokenizer.decode(agent.encode(history), skip_hidden=False) == agent.render(history)
    assert "so" not in agent.render(history)


def test_a_thought_is_put_back_only_to_its_own_reply() -> None:
    agent = Agent("hermes")
    _, message = agent.reply([USER], "<think>\nsecret\n</think>\n\nYes.")
    del message["reasoning_content"]
    assert "secret" in agent.tokenizer.decode(agent.encode([USER, message, USER]), skip_hidden=False)
    for history in ([USER, message | {"content": "No."}, USER], [USER, USER, message, USER]):
        assert "secret" not in agent.tokenizer.decode(agent.encode(history), skip_hidden=False)
    _, message = agent.reply([USER], agent.text_of("", "secret", [{"number": 1}]))
    calls = [{"function": {"name": "look", "arguments": '{"number": 2}'}}]
    for changed, is_put_back in ({}, True), ({"tool_calls": calls}, False):
        history = [USER, {**message, "reasoning_content": None, **changed}, RESULT]
        assert ("secret" in agent.tokenizer.decode(agent.encode(history), skip_hidden=False)) == is_put_back


def test_a_reply_that_a_stop_text_cut_keeps_the_tokens_before_it() -> None:
    agent = Agent("hermes")
    ids = agent.spelled("the token STOP")
    agent.cache.remember(b"", chat_of([USER], tools=TOOLS), "the token ", ids)
    history = [USER, {"role": "assistant", "content": "the token "}, USER]
    begun = agent.encode([USER]) + agent.spelled("the token ")
    assert agent.encode(history)[: len(begun)] == begun
    assert agent.tokenizer.decode(agent.encode(history), skip_hidden=False) == agent.render(history)


def test_spellings_of_a_value_are_one() -> None:
    assert canonical('{"b": [1.0, "é"],  "a":null}') == canonical('{"a":null,"b":[1,"\\u00e9"]}')
    assert canonical('{"a": 1}') != canonical('{"a": true}')
    assert canonical('{"a": ') == '{"a": '


VALUES = {
    "number": 12,
    "share": 0.5,
    "flag": True,
    "entries": [1, {"a": "b"}],
    "more": {"a": 1},
    "note": None,
    "text": "5",
}
RESPELLED = {
    "0.5": "5e-1",
    "true": "True",
    '[1, {"a": "b"}]': '[ 1,{"a":  "b"} ]',
    '{"a": 1}': '{\n"a":1}',
    "null": "None",
}


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if BY_NAME[name].arguments == "tagged"])
def test_tagged_values_keep_their_tokens_in_another_spelling_of_the_same_value(name: str, by_token: bool) -> None:
    agent = Agent(name, by_token=by_token)
    row = agent.row
    text = agent.text_of("Yes.", "so", [VALUES, {"number": 12}])
    for written, other in RESPELLED.items():
        opening = text.index(written, text.index(row.key[0]))
        text = text[:opening] + other + text[opening + len(written) :]
    known, message = agent.reply([USER], text)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == VALUES
    history = [USER, respelled(message, separators=(",", ":")), RESULT, RESULT]
    assert agent.encode(history)[: len(known)] == known
    assert agent.counts() == {"kept": 1}
    for key, value in {"number": 13, "text": "5.0", "flag": False, "more": {}}.items():
        _, second = message["tool_calls"]
        arguments = json.dumps(VALUES | {key: value})
        changed = message | {"tool_calls": [{"function": {"name": "look", "arguments": arguments}}, second]}
        ids = agent.encode([USER, changed, RESULT, RESULT])
        assert ids[: len(known)] != known
        shown = agent.tokenizer.decode(ids, skip_hidden=False)
        mark = shown.index(key, shown.index("Yes."))
        assert agent.render([USER, changed, RESULT, RESULT]).endswith(shown[mark:]), key
    assert agent.counts() == {"cut": 4}


def test_each_reply_in_a_prompt_is_counted_by_what_became_of_its_tokens() -> None:
    agent = Agent("hermes")
    _, message = agent.reply([USER], "<think>\nso\n</think>\n\nYes, the token.")
    agent.counts()
    history = [USER, message, USER]
    agent.encode(history)
    assert agent.counts() == {"kept": 1}
    agent.encode([USER, message | {"content": "No."}, USER])
    assert agent.counts() == {"unknown": 1}
    source = agent.template.sources.source
    change = "message.reasoning_content", "(message.reasoning_content or '') | replace('so', 'as')"
    agent.template = ChatTemplate(source.replace(*change))
    agent.encode(history)
    assert agent.counts() == {"hidden": 1}
    change = "message.content -}}", "message.content + (message.reasoning_content or '') | length | string -}}"
    agent.template = ChatTemplate(source.replace(*change))
    agent.encode(history)
    assert agent.counts() == {"inspected": 1}


def test_a_thought_without_its_outer_white_space_is_that_of_the_reply() -> None:
    agent = Agent("hermes")
    known, message = agent.reply([USER], "<think>\n so \n\n</think>\n\nYes.")
    assert message["reasoning_content"] == " so \n"
    for said in ("so", ""):
        assert agent.encode([USER, message | {"reasoning_content": said}, USER])[: len(known)] == known
    assert agent.counts() == {"kept": 2}


PAGE = 16
LAST_USER = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}"
)


def dropping(agent: Agent) -> None:
    """Gives the agent a template that shows thoughts until the user's next turn, unless its switch keeps them."""
    shown = "(message.reasoning_content or '' if preserve_thinking or loop.index0 > ns.last else '')"
    source = agent.template.sources.source.replace("(message.reasoning_content or '')", "message.reasoning_content")
    agent.template = ChatTemplate(LAST_USER + source.replace("message.reasoning_content", shown))
    agent.abilities = Abilities(agent.tokenizer, TokenBytes(agent.tokenizer), agent.template, agent.row.name)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("name", "by_token"), in_turn([name for name in NAMES if BY_NAME[name].thought[0]], [False, True])
)
def test_an_agents_steps_compute_what_is_new_though_the_client_drops_thoughts(
    name: str, by_token: bool, keeps: bool
) -> None:
    agent = Agent(name, by_token=by_token)
    dropping(agent)
    shows = agent.abilities.template
    assert (shows.thoughts, shows.keep_switch) == ("turn", "preserve_thinking")
    agent.kwargs = shows.variables(keep=keeps)

    def num_lost(known: list[int], messages: list[dict[str, Any]]) -> int:
        """Tokens of the known ones that the next prompt computes again."""
        prompt = agent.encode(messages)
        same = next((at for at, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), len(known))
        return len(known) - same // PAGE * PAGE

    messages = [USER]
    for number in range(3):
        said = f"so be it, and not for the first time: {number} tokens or more"
        known, message = agent.reply(messages, agent.text_of("Let me look.", said, [{"text": f"place {number}"}]))
        agent.counts()
        message = respelled(message, separators=(",", ":"))
        del message["reasoning_content"]
        messages = [*messages, message, RESULT]
        assert num_lost(known, messages) <= 2 * PAGE
        assert agent.counts() == {"kept": number + 1}
    messages = [*messages, USER]
    lost = num_lost(known, messages)
    if keeps:
        assert lost <= 2 * PAGE
        assert agent.counts() == {"kept": 3}
        return
    assert lost > 2 * PAGE, "the template drops the thoughts"
    assert agent.counts() == {"hidden": 3}
    prompt = agent.encode(messages)
    same = next(at for at, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b)
    chat = agent.chat(messages)
    before = agent.tokenizer.decode(prompt[:same], skip_hidden=False)
    place = place_after(with_thoughts(chat, agent.cache.recall(b"", chat)), before)
    assert (place.turn, place.part) == (1, "thought")


@pytest.mark.parametrize("by_token", [False, True])
def test_messages_with_headers_keep_their_tokens(by_token: bool) -> None:
    agent = Agent("harmony", by_token=by_token)
    assert agent.abilities.template.thoughts == "always", "the template looks for them under another name"
    messages = [USER]
    for number in range(3):
        header = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
        text = f"<|channel|>analysis<|message|>so be it<|end|><|start|>assistant{header}" + f'{{"number":  {number}}}'
        known, message = agent.reply(messages, text)
        message = respelled(message, separators=(",", ":"))
        del message["reasoning_content"]
        messages = [*messages, message, RESULT]
        agent.counts()
        assert agent.encode(messages)[: len(known)] == known
        assert agent.counts() == {"kept": number + 1}


QWEN = """\
so be it
</think>

Let me look.

<tool_call>
<function=look>
<parameter=flag>
True
</parameter>
<parameter=entries>
[1, "x"]
</parameter>
<parameter=note>
None
</parameter>
</function>
</tool_call>
<tool_call>
<function=look>
<parameter=text>
a
b
</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_an_agents_steps_with_the_template_of_qwen3_5_keep_their_tokens(by_token: bool, keeps: bool) -> None:
    """It opens a thought in the prompt, spells values as Python does, and shows results in a turn of the user."""
    agent = Agent("qwen3_coder", by_token=by_token, template="qwen3_5")
    assert agent.abilities.format is agent.row
    shows = agent.abilities.template
    assert (shows.thoughts, shows.keep_switch, shows.thinking_switch) == (
        "turn",
        "preserve_thinking",
        "enable_thinking",
    )
    assert shows.tools and not shows.later_system
    agent.kwargs = shows.variables(keep=keeps)
    messages = [USER]
    for number in range(2):
        known, message = agent.reply(messages, QWEN)
        assert (message["content"], message["reasoning_content"]) == ("Let me look.", "so be it")
        arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
        assert arguments == [{"flag": True, "entries": [1, "x"], "note": None}, {"text": "a\nb"}]
        agent.counts()
        whole = [*messages, message, RESULT, RESULT]
        del (message := respelled(message, separators=(",", ":")))["reasoning_content"]
        messages = [*messages, message, RESULT, RESULT]
        ids = agent.encode(messages)
        assert ids[: len(known)] == known and agent.counts() == {"kept": number + 1}
        if not number:
            assert agent.tokenizer.decode(ids, skip_hidden=False) == agent.render(whole)
    ids = agent.encode([*messages, USER])
    assert (ids[: len(known)] == known) == keeps
    assert agent.counts() == {"kept" if keeps else "hidden": 2}


def test_thoughts_of_qwen3_5_are_turned_off_in_the_prompt_and_its_refusals_are_the_callers() -> None:
    agent = Agent("qwen3_coder", template="qwen3_5")
    agent.kwargs = agent.abilities.template.variables(thinking=False)
    assert agent.render([USER]).endswith("<think>\n\n</think>\n\n")
    _, message = agent.reply([USER], "so be it")
    assert (message["content"], message["reasoning_content"]) == ("so be it", "")
    reminded = agent.render([USER, {"role": "system", "content": "Be brief."}, USER])
    assert "Be brief." in reminded and "<|im_start|>system\nBe brief." not in reminded
    with pytest.raises(RequestError, match="No question of a user"):
        agent.render([{"role": "system", "content": "Be brief."}])
