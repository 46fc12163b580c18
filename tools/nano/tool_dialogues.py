"""Chats with tools, made from the services dialogues: where the assistant sums up an order, a call says the same.

The dialogues have no calls of their own. A message such as "Please confirm: a table for 2 at Chop Bar in Oakland at
2 pm" holds the arguments of one, in words that regular expressions find. After the user's yes the assistant calls the
tool, reads its result and goes on as in the dialogue. A second kind asks for the same details as JSON.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2

from tools.nano.sources import Document, Split
from tools.nano.tokenizer import BOS, CHAT_TEMPLATE, END

Messages = tuple[tuple[str, str], ...]

JSON_SHARE = 0.25
SYSTEM_SHARE = 0.5
DIRECT_SHARE = 0.5
OWN_NAME_SHARE = 0.5
MAX_OTHER_TOOLS = 3
MAX_BYTES = 4000  # of a chat: beyond it the turns after the call are cut
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are an assistant with tools. Call one when you have all its arguments.",
    "You help people to book restaurants, hotels, travel and appointments.",
    "Use the tools to do what the user asks for.",
)
_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_WORD = rf"(?:\d+ )?(?!(?:{_MONTH}) \d)(?:[A-Z]\.|[A-Z][\w'&|-]*)"
_PLACE = rf"({_WORD}(?: (?:(?:of|the|and|&|de) )*{_WORD})*)"
_DAY = rf"((?:{_MONTH}) \d+(?:st|nd|rd|th)|(?:the )?day after tomorrow|today|tomorrow|(?:next|this) \w+day|\w+day next week)"
_COUNT = r"(\d+|[Oo]ne|[Tt]wo|[Tt]hree|[Ff]our|[Ff]ive|[Ss]ix)"
_WORDS = {word: number for number, word in enumerate(["zero", "one", "two", "three", "four", "five", "six"])}
_YES = re.compile(
    r"\b(yes|yeah|yep|yup|sure|right|correct|fine|good|great|perfect|okay|ok|exactly|sounds)\b", re.IGNORECASE
)
_SORRY = re.compile(r"\b(sorry|apolog|unable|unfortunately|could ?n.t|not successful|fail)", re.IGNORECASE)
_PREAMBLE = re.compile(
    r"^.*?\bconfirm(?:ing|ation)?\b(?: with me)?(?: again)?(?: this)?(?: the)?(?: following| booking)?(?: details?| information)?"
    r"(?: for me)?(?: please)?(?: that)?[\s:,.]*",
    re.IGNORECASE,
)
_SUMMARY = re.compile(r"\bconfirm(?!ed|ation number)", re.IGNORECASE)
# By argument: the pattern that finds it in a summary, its JSON type, its description.
ARGUMENTS = {
    "name": (rf"\b(?:at|for|with|of|see|visit|is) (?:the )?{_PLACE}", "string", "Its name"),
    "title": (
        r"\b(?:[Pp]lay(?:ing)?|[Ww]atch(?:ing)?|[Ss]ong) ([A-Z][^.?,]*?)(?= on\b| with(?:out)?\b|[.?,]|$)",
        "string",
        "Its title",
    ),
    "city": (rf"\bin {_PLACE}", "string", "The city"),
    "origin": (rf"\b(?:from|leaving|departing) {_PLACE}", "string", "Where the trip starts"),
    "destination": (rf"\b(?:to|for|arriving (?:at|in)) (?:the )?{_PLACE}", "string", "Where the trip ends"),
    "recipient": (r"\bto ([A-Z]\w+)", "string", "Who receives the money"),
    "account": (r"\b(checking|savings)\b", "string", "checking or savings"),
    "amount": (r"\$ ?([\d,]*\d(?:\.\d+)?)", "number", "Dollars"),
    "date": (rf"\b{_DAY}", "string", "The day"),
    "end_date": (rf"\b(?:check(?:ing)?[ -]?out|return\w*|leaving|until)\b[^.]*? {_DAY}", "string", "The last day"),
    "time": (
        r"\b(\d{1,2}(?::\d\d)? ?[ap]m\b|half past \d+|(?:morning|afternoon|evening) \d+(?::\d\d)?)",
        "string",
        "The time",
    ),
    "people": (
        rf"\b(?:for|table for) {_COUNT}\b(?! ?(?:ticket|[ap]m|:|\w+ tickets))|\b{_COUNT} (?:people|persons?|passengers?)",
        "integer",
        "How many people",
    ),
    "tickets": (rf"\b{_COUNT} (?:\w+ )?tickets?", "integer", "How many tickets"),
    "rooms": (rf"\b{_COUNT} rooms?", "integer", "How many rooms"),
    "kind": (
        r"\b(shared|regular|pool|luxury|standard|compact|full-size|SUV|hatchback|sedan)\b",
        "string",
        "Which kind",
    ),
    "device": (
        r"\bon (?:the |your )?(TV|kitchen speaker|bedroom speaker|living room|patio)",
        "string",
        "Where to play it",
    ),
}
# Other names of arguments, so that a call takes them from the tool's declaration.
SYNONYMS = {
    "name": "name title place where", "title": "title name", "city": "city location town", "origin": "origin from start",
    "destination": "destination to end", "recipient": "recipient to receiver", "account": "account source",
    "amount": "amount dollars sum", "date": "date day when", "end_date": "end_date until last_day", "time": "time at hour",
    "people": "people party_size guests", "tickets": "tickets count quantity", "rooms": "rooms num_rooms",
    "kind": "kind type category", "device": "device speaker player",
}  # fmt: skip
# By service: words of a summary that is about it, names of the tool, its description, its arguments, how many a call needs.
TOOLS = {
    "restaurants": (
        r"table|reserv\w+ at",
        "reserve_restaurant book_table make_reservation",
        "Reserve a table.",
        ("name", "city", "date", "time", "people"),
        3,
    ),
    "calendar": (
        r"calendar",
        "add_event create_event calendar_add",
        "Add an event to the calendar.",
        ("name", "date", "time"),
        2,
    ),
    "movies": (
        r"movie|screening|showing|film",
        "buy_movie_tickets book_cinema",
        "Buy tickets for a film.",
        ("name", "date", "time", "tickets"),
        2,
    ),
    "media": (r"play|watch|subtitle", "play_movie watch_film start_video", "Play a film.", ("title",), 1),
    "music": (r"song|play.*\bon\b", "play_song start_music", "Play a song.", ("title", "device"), 2),
    "flights": (
        r"flight|airline",
        "book_flight reserve_flight buy_plane_ticket",
        "Book a flight.",
        ("origin", "destination", "date", "people"),
        2,
    ),
    "homes": (
        r"visit|viewing|propert",
        "schedule_visit arrange_viewing",
        "Arrange a visit to a home.",
        ("name", "date"),
        2,
    ),
    "rides": (r"ride|cab|taxi", "get_ride call_cab order_taxi", "Call a cab.", ("destination", "people", "kind"), 2),
    "hotels": (
        r"hotel|room|check",
        "reserve_hotel book_hotel book_room",
        "Reserve a hotel.",
        ("name", "city", "date", "end_date", "rooms"),
        3,
    ),
    "banks": (
        r"transfer",
        "transfer_money send_money make_transfer",
        "Transfer money.",
        ("amount", "account", "recipient"),
        2,
    ),
    "buses": (
        r"\bbus(?! station)",
        "buy_bus_ticket book_bus",
        "Buy bus tickets.",
        ("origin", "destination", "date", "time", "tickets"),
        2,
    ),
    "cars": (
        r"\bcar\b|pick",
        "reserve_car rent_car book_rental",
        "Rent a car.",
        ("city", "date", "time", "end_date", "kind"),
        3,
    ),
    "services": (
        r"appointment",
        "book_appointment make_appointment schedule_appointment",
        "Make an appointment.",
        ("name", "date", "time"),
        2,
    ),
    "events": (
        r"ticket",
        "buy_event_tickets book_event get_tickets",
        "Buy tickets for an event.",
        ("name", "city", "date", "tickets"),
        3,
    ),
}
_PATTERNS = {name: re.compile(pattern) for name, (pattern, _, _) in ARGUMENTS.items()}


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

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the arguments."""
        properties = {
            name: {"type": ARGUMENTS[each][1], "description": ARGUMENTS[each][2]} for each, name in self.names.items()
        }
        return {"type": "object", "properties": properties, "required": [self.names[each] for each in self.required]}

    def declaration(self) -> dict[str, Any]:
        """Returns the tool as a chat request holds it."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema()}
        return {"type": "function", "function": function}

    def fill(self, arguments: dict[str, object]) -> dict[str, object]:
        """Returns arguments under their names in the declaration, in its order."""
        return {name: arguments[each] for each, name in self.names.items() if each in arguments}


def find_arguments(service: str, summary: str) -> dict[str, object]:
    """Returns the arguments of a service's call that an assistant's summary states, in the tool's order."""
    found: dict[str, object] = {}
    for name in TOOLS[service][3]:
        match = _PATTERNS[name].search(summary)
        if match is None:
            continue
        text = next(group for group in match.groups() if group).strip()
        kind = ARGUMENTS[name][1]
        if kind == "integer":
            found[name] = _WORDS[text.lower()] if text.lower() in _WORDS else int(text)
        else:
            found[name] = float(text.replace(",", "")) if kind == "number" else text
    return found


def find_call(messages: Messages) -> tuple[int, str, dict[str, object]] | None:
    """Finds the first summary that a user agrees to.

    Returns:
        The place of the user's yes, the service, the arguments; None if there is no such place.
    """
    for place in range(1, len(messages) - 1):
        (role, summary), (_, answer) = messages[place - 1], messages[place]
        if role == "assistant" and _SUMMARY.search(summary) and _YES.search(answer):
            for service, (hint, *_, num_needed) in TOOLS.items():
                if re.search(hint, summary, re.IGNORECASE):
                    arguments = find_arguments(service, summary)
                    if len(arguments) >= num_needed:
                        return place, service, arguments
    return None


def with_call(messages: Messages, rng: random.Random) -> str | None:
    """Returns the dialogue with a call after the user's yes, rendered with its tools; None if it has no summary.

    In ``DIRECT_SHARE`` of them the user states the summary, and the call comes at once.
    """
    found = find_call(messages)
    if found is None:
        return None
    place, service, arguments = found
    tool = Tool(service, arguments, rng)
    tools = [
        Tool(each, TOOLS[each][3][: TOOLS[each][4]], rng)
        for each in rng.sample([each for each in TOOLS if each != service], rng.randrange(MAX_OTHER_TOOLS + 1))
    ]
    tools.insert(rng.randrange(len(tools) + 1), tool)
    turns: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in messages[: place + 1]]
    if rng.random() < DIRECT_SHARE:
        turns = [{"role": "user", "content": request_of(messages[place - 1][1], rng)}]
    function = {"name": tool.name, "arguments": tool.fill(arguments)}
    turns.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
    status = "failure" if _SORRY.search(messages[place + 1][1]) else "success"
    turns.append({"role": "tool", "content": json.dumps({"status": status} | tool.fill(arguments), ensure_ascii=False)})
    turns += [{"role": role, "content": content} for role, content in messages[place + 1 :]]
    if rng.random() < SYSTEM_SHARE:
        turns.insert(0, {"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
    while sum(len(turn["content"].encode()) for turn in turns) > MAX_BYTES and turns[-2]["role"] == "user":
        del turns[-2:]
    return render(turns, [each.declaration() for each in tools])


def request_of(summary: str, rng: random.Random) -> str:
    """Turns an assistant's summary into a user's request."""
    text = _PREAMBLE.sub("", summary).strip().rstrip("?")
    return rng.choice(("I want this: ", "Please do it: ", "", "Can you help? ")) + text[:1].upper() + text[1:]


def with_json(messages: Messages, rng: random.Random) -> str | None:
    """Returns a chat that asks for the details of an order as JSON of a schema; None if the dialogue has no summary."""
    found = find_call(messages)
    if found is None:
        return None
    place, service, arguments = found
    order = list(arguments)
    rng.shuffle(order)
    tool = Tool(service, order, rng)
    tool.names = {each: tool.names[each] for each in order}
    ask = rng.choice(("Answer with JSON of this schema: ", "Reply in JSON with this schema: ", "JSON schema: "))
    turns = [
        {"role": "system", "content": ask + json.dumps(tool.schema())},
        {"role": "user", "content": request_of(messages[place - 1][1], rng)},
        {"role": "assistant", "content": json.dumps(tool.fill(arguments), ensure_ascii=False)},
    ]
    return render(turns, [])


def render(turns: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """Returns a chat as the model's template writes it, without the first ``<|bos|>`` and the last ``<|end|>``."""
    environment = jinja2.Environment(autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    text = environment.from_string(CHAT_TEMPLATE).render(
        messages=turns, tools=tools or None, add_generation_prompt=False
    )
    return text.removeprefix(BOS).removesuffix(END)


def tool_dialogues(services: Split, seed: int) -> Split:
    """Makes chats with tools of the services dialogues; each part of the split is made of the same part."""
    rng = random.Random(seed)

    def make(documents: list[Document]) -> Iterator[Document]:
        for document in documents:
            text = (with_json if rng.random() < JSON_SHARE else with_call)(document.messages, rng)
            if text is not None:
                yield Document("tools", text=text)

    return Split(list(make(services.train)), list(make(services.early)), list(make(services.report)), dropped={})
