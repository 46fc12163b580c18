"""Chats with tools, made from the services dialogues: where the assistant sums up an order, a call says the same.

The dialogues have no calls of their own; ``tools.nano.orders`` finds what they imply. After the user's yes the assistant
calls the tool, reads its result and goes on as in the dialogue. A second kind of chat asks for the same details as JSON.
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jinja2

from tools.nano.orders import ARGUMENTS, TOOLS, Messages, Order, find_orders
from tools.nano.sources import Document, Split
from tools.nano.tokenizer import BOS, CHAT_TEMPLATE, END

JSON_SHARE = 0.25
SYSTEM_SHARE = 0.5
DIRECT_SHARE = 0.5
OWN_NAME_SHARE = 0.5
DESCRIBED_SHARE = 0.7
CLOSED_SHARE = 0.3
MAX_OTHER_TOOLS = 3
MAX_BYTES = 4000  # of a dialogue: beyond it the turns after the first call are cut
COPIES = 2  # chats of a training dialogue, each with names of its own
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are an assistant with tools. Call one when you have all its arguments.",
    "You help people to book restaurants, hotels, travel and appointments.",
    "Use the tools to do what the user asks for.",
)
# Other names of arguments, so that a call takes them from the tool's declaration.
SYNONYMS = {
    "name": "name title place where", "title": "title name", "city": "city location town", "origin": "origin from start",
    "destination": "destination to end", "recipient": "recipient to receiver", "account": "account source",
    "amount": "amount dollars sum", "date": "date day when", "end_date": "end_date until last_day", "time": "time at hour",
    "people": "people party_size guests", "tickets": "tickets count quantity", "rooms": "rooms num_rooms",
    "kind": "kind type category", "device": "device speaker player",
}  # fmt: skip


class Tool:
    """A service's tool with names of its own, as one chat declares it.

    Attributes:
        name: In declaration and call.
        names: The argument's name in the declaration, by the name in ``ARGUMENTS``.
    """

    def __init__(self, service: str, arguments: Iterable[str], rng: random.Random) -> None:
        """Draws the names; ``arguments`` are required, in the order of the declaration."""
        _, names, self.description, known, _ = TOOLS[service]
        self.name = rng.choice(names.split())
        self.required = list(arguments)
        self.names: dict[str, str] = {}
        for each in [*self.required, *(other for other in known if other not in self.required)]:
            free = [name for name in SYNONYMS[each].split() if name not in self.names.values()]
            self.names[each] = free[0] if rng.random() < OWN_NAME_SHARE else rng.choice(free)
        self.is_described = rng.random() < DESCRIBED_SHARE
        self.is_closed = rng.random() < CLOSED_SHARE

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the arguments."""
        properties = {
            name: {"type": ARGUMENTS[each][1]} | ({"description": ARGUMENTS[each][2]} if self.is_described else {})
            for each, name in self.names.items()
        }
        schema = {"type": "object", "properties": properties, "required": [self.names[each] for each in self.required]}
        return schema | ({"additionalProperties": False} if self.is_closed else {})

    def declaration(self) -> dict[str, Any]:
        """Returns the tool as a chat request holds it."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema()}
        return {"type": "function", "function": function}

    def fill(self, arguments: dict[str, object]) -> dict[str, object]:
        """Returns arguments under their names in the declaration, in its order."""
        return {name: arguments[each] for each, name in self.names.items() if each in arguments}


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as a request holds it, its last message the assistant's."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def chat_tools(orders: Iterable[Order], main: Order, rng: random.Random) -> dict[str, Tool]:
    """Draws the tools that a chat declares, by service: that of ``main`` and up to ``MAX_OTHER_TOOLS`` more."""
    others = rng.sample([each for each in TOOLS if each != main.service], rng.randrange(MAX_OTHER_TOOLS + 1))
    others.insert(rng.randrange(len(others) + 1), main.service)
    tools = {}
    for service in others:
        mine = [order.arguments for order in orders if order.service == service]
        known, num_needed = TOOLS[service][3:]
        needed = (
            [name for name in known if all(name in arguments for arguments in mine)] if mine else known[:num_needed]
        )
        tools[service] = Tool(service, needed, rng)
    return tools


def with_calls(messages: Messages, rng: random.Random) -> Chat | None:
    """Returns the dialogue with a call and its result for every order of a declared tool; None if it has no order.

    In ``DIRECT_SHARE`` of them the chat begins with one of the orders, and the call comes at once.
    """
    orders = find_orders(messages)
    if not orders:
        return None
    first = rng.choice(list(orders))
    tools = chat_tools(orders.values(), orders[first], rng)
    is_direct = rng.random() < DIRECT_SHARE
    turns: list[dict[str, Any]] = []
    if rng.random() < SYSTEM_SHARE:
        turns.append({"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
    size = 0
    for place, (role, content) in enumerate(messages):
        if is_direct and place < first:
            continue
        size += len(content.encode())
        if role == "user" and place > first and size > MAX_BYTES:
            break
        said = request_of(orders[first].request, rng) if is_direct and place == first else content
        turns.append({"role": role, "content": said})
        order = orders.get(place)
        if order is not None and order.service in tools:
            turns += call_turns(tools[order.service], order)
    return Chat(turns, [tool.declaration() for tool in tools.values()])


def call_turns(tool: Tool, order: Order) -> list[dict[str, Any]]:
    """Returns the assistant's call and the tool's result."""
    arguments = tool.fill(order.arguments)
    call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
    result = json.dumps(order.result | arguments, ensure_ascii=False)
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]


def request_of(request: str, rng: random.Random) -> str:
    """Begins an order with words of a user."""
    return rng.choice(("I want this: ", "Please do it: ", "", "Can you help? ")) + request[:1].upper() + request[1:]


def with_json(messages: Messages, rng: random.Random) -> Chat | None:
    """Returns a chat that asks for the details of an order as JSON of a schema; None if the dialogue has no order."""
    orders = find_orders(messages)
    if not orders:
        return None
    order = rng.choice(list(orders.values()))
    names = list(order.arguments)
    rng.shuffle(names)
    tool = Tool(order.service, names, rng)
    tool.names = {each: tool.names[each] for each in names}
    ask = rng.choice(("Answer with JSON of this schema: ", "Reply in JSON with this schema: ", "JSON schema: "))
    turns = [
        {"role": "system", "content": ask + json.dumps(tool.schema())},
        {"role": "user", "content": request_of(order.request, rng)},
        {"role": "assistant", "content": json.dumps(tool.fill(order.arguments), ensure_ascii=False)},
    ]
    return Chat(turns, [])


def render(chat: Chat) -> str:
    """Returns a chat as the model's template writes it, without the first ``<|bos|>`` and the last ``<|end|>``."""
    environment = jinja2.Environment(autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    text = environment.from_string(CHAT_TEMPLATE).render(
        messages=chat.messages, tools=chat.tools or None, add_generation_prompt=False
    )
    return text.removeprefix(BOS).removesuffix(END)


def tool_dialogues(services: Split, seed: int) -> Split:
    """Makes chats with tools of the services dialogues; each part of the split is made of the same part."""
    rng = random.Random(seed)

    def make(documents: list[Document]) -> Iterator[Document]:
        for document in documents:
            chat = (with_json if rng.random() < JSON_SHARE else with_calls)(document.messages, rng)
            if chat is not None:
                yield Document("tools", text=render(chat))

    return Split(
        list(make(services.train * COPIES)), list(make(services.early)), list(make(services.report)), dropped={}
    )
