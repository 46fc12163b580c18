"""A chat's choice is read by its format: text, thoughts, calls."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from hiserve.core.request import FinishReason, SamplingParams
from hiserve.ipc.updates import TokenDelta
from hiserve.llm.outputs import ChoiceBuilder, CompletionOutput, RequestOutput
from hiserve.models.model_config import find_model
from hiserve.text.abilities import Abilities
from hiserve.text.body.chat import parse_chat
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.tokens.detokenizer import TokenBytes
from hiserve.text.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(find_model("hiserve-nano"), [1])
TEMPLATE = ChatTemplate.load(find_model("hiserve-nano"))
TOOL = {"type": "function", "function": {"name": "find"}}
CALL = 'Yes.\n<tool_call>\n{"name": "find", "arguments": {"n":  1}}\n</tool_call>'


def built(text: str, finish: FinishReason, **fields: object) -> CompletionOutput:
    chat = parse_chat({"messages": [{"role": "user", "content": "Hi"}], **fields})
    request = RequestOutput(None, np.array([5], dtype=np.int32))
    abilities = Abilities(TOKENIZER, TokenBytes(TOKENIZER), TEMPLATE)
    builder = ChoiceBuilder(request, 0, SamplingParams(), abilities.output(chat, request.tokens, SamplingParams()))
    ids = TOKENIZER.encode(text, add_special_tokens=False).tolist() + [1] * (finish is FinishReason.STOP)
    places = [*range(0, len(ids), 3), len(ids)]
    for start, end in pairwise(places):
        is_over = builder.take(TokenDelta(ids[start:end], finish if end == len(ids) else FinishReason.RUNNING))
        assert is_over == (end == len(ids))
    return request.outputs[0]


def test_calls_of_a_chat_stand_beside_its_text_and_can_be_sent_back() -> None:
    choice = built(CALL, FinishReason.STOP, tools=[TOOL])
    assert (choice.text, choice.finish_reason) == ("Yes.", "tool_calls")
    (call,) = choice.tool_calls
    assert call["function"] == {"name": "find", "arguments": '{"n":  1}'}
    message = {"role": "assistant", "content": choice.text, "tool_calls": choice.tool_calls}
    history = [{"role": "user", "content": "Hi"}, message, {"role": "tool", "tool_call_id": call["id"], "content": "1"}]
    chat = parse_chat({"messages": history, "tools": [TOOL]})
    assert TEMPLATE is not None
    assert CALL.replace("  ", " ") + "<|end|><|tool|>1<|end|>" in TEMPLATE.render(chat)
    assert json.loads(call["function"]["arguments"]) == {"n": 1}


@pytest.mark.parametrize(("finish", "reason"), [(FinishReason.LENGTH, "length"), (FinishReason.STOP, "stop")])
def test_without_tools_calls_are_text(finish: FinishReason, reason: str) -> None:
    choice = built(CALL, finish)
    assert (choice.text, choice.tool_calls, choice.finish_reason) == (CALL, [], reason)
