"""Calls that training chats hold say what their dialogue says, and stand where the template puts calls."""

import json
import random

import pytest

from tools.nano.orders import TOOLS, find_arguments, find_orders
from tools.nano.sources import Document, Split
from tools.nano.tool_dialogues import COPIES, render, tool_dialogues, with_calls, with_json

TABLE = "Please confirm: a table for 2 at Chop Bar in Oakland for 2:30 pm on March 9th."
DIALOGUE = (
    ("user", "Find me a place to eat."),
    ("assistant", "How about Chop Bar in Oakland?"),
    ("user", "Good. Book it."),
    ("assistant", TABLE),
    ("user", "Yes, that is right."),
    ("assistant", "Your table is reserved."),
    ("user", "Thanks."),
    ("assistant", "Have a great day."),
)


@pytest.mark.parametrize(
    ("service", "summary", "found"),
    [
        ("restaurants", TABLE, {"name": "Chop Bar", "city": "Oakland", "date": "March 9th", "time": "2:30 pm", "people": 2}),
        ("restaurants", "A table for two at 8 Immortals in San Bruno. It is for 12 pm.",
         {"name": "8 Immortals", "city": "San Bruno", "time": "12 pm", "people": 2}),
        ("flights", "A flight from Las Vegas to Sydney. Your airline is United Airlines, for 3 people, tomorrow.",
         {"origin": "Las Vegas", "destination": "Sydney", "date": "tomorrow", "people": 3}),
        ("banks", "Transfer $1,180.50 from savings account to Maria.", {"amount": 1180.5, "account": "savings", "recipient": "Maria"}),
        ("media", "Play Green Book without subtitles.", {"title": "Green Book"}),
        ("services", "An appointment with Amy N. Tran, at 11:30 am.", {"name": "Amy N. Tran", "time": "11:30 am"}),
    ],
)  # fmt: skip
def test_arguments_of_a_summary(service: str, summary: str, found: dict[str, object]) -> None:
    assert find_arguments(service, summary) == found


def test_a_call_needs_a_summary_and_a_yes() -> None:
    ((place, order),) = find_orders(DIALOGUE).items()
    assert (place, order.service) == (4, "restaurants")
    assert not find_orders((*DIALOGUE[:4], ("user", "No, for three."), *DIALOGUE[5:]))
    assert not find_orders(DIALOGUE[:3])


def test_an_answer_about_the_weather_is_the_result_of_a_call() -> None:
    asked = (
        ("user", "How is the weather on March 9th?"),
        ("assistant", "In which city?"),
        ("user", "I am in Oakland."),
    )
    ((place, order),) = find_orders(
        (*asked, ("assistant", "It will be 80 degrees with a 15 percent chance of rain."))
    ).items()
    assert (place, order.arguments) == (2, {"city": "Oakland", "date": "March 9th"})
    assert order.result == {"temperature": 80, "chance_of_rain": 15}
    assert not find_orders((*asked, ("assistant", "It will be sunny.")))


@pytest.mark.parametrize("seed", range(20))
def test_a_chat_with_a_call(seed: int) -> None:
    """Its arguments stand under the names that the declaration has, and a result follows."""
    chat = with_calls(DIALOGUE, random.Random(seed))
    assert chat is not None
    text = render(chat)
    call = json.loads(text.rsplit("<tool_call>", 1)[1].split("</tool_call>")[0])
    declared = {each.strip() for each in TOOLS["restaurants"][1].split()}
    assert call["name"] in declared and f'"name": "{call["name"]}"' in text.split("<|user|>")[0]
    assert list(call["arguments"].values()) == ["Chop Bar", "Oakland", "March 9th", "2:30 pm", 2]
    assert all(f'"{name}"' in text.split("<|user|>")[0] for name in call["arguments"])
    assert '<|tool|>{"status": "success"' in text and text.endswith("Have a great day.")


def test_every_order_of_a_declared_tool_is_a_call() -> None:
    """No chat shows an order that goes through without a call although its tool is there."""
    weather = (
        ("user", "And the weather in Oakland tomorrow?"),
        ("assistant", "It will be 80 degrees, 15 percent rain."),
    )
    called_both = 0
    for seed in range(200):
        chat = with_calls((*DIALOGUE[:6], *weather), random.Random(seed))
        assert chat is not None
        called = [call["function"]["name"] for turn in chat.messages for call in turn.get("tool_calls", ())]
        declared = {tool["function"]["name"] for tool in chat.tools}
        asked = next(turn["content"] for turn in chat.messages if turn["role"] == "user")
        services = ["restaurants", "weather"]["eather in Oakland" in asked :]  # a chat may begin with the second order
        assert called == [name for each in services for name in TOOLS[each][1].split() if name in declared], seed
        called_both += len(called) == 2
    assert called_both >= 5


def test_a_chat_with_json() -> None:
    chat = with_json(DIALOGUE, random.Random(3))
    assert chat is not None
    reply = json.loads(render(chat).split("<|assistant|>")[1])
    assert sorted(map(str, reply.values())) == sorted(["Chop Bar", "Oakland", "March 9th", "2:30 pm", "2"])


def test_parts_of_the_split_stay_apart() -> None:
    documents = [Document("services", messages=(*DIALOGUE[:-1], ("assistant", f"Bye {i}."))) for i in range(9)]
    split = tool_dialogues(Split(documents[:6], documents[6:8], documents[8:], {}), seed=1)
    assert [len(part) for part in (split.train, split.early, split.report)] == [6 * COPIES, 2, 1]
    assert tool_dialogues(Split(documents[:6], documents[6:8], documents[8:], {}), seed=1) == split
