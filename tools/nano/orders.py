"""Orders in the services dialogues, found by regular expressions: the calls that the dialogues imply.

A message of the assistant such as "Please confirm: a table for 2 at Chop Bar in Oakland at 2 pm" holds the arguments of
a call, which the user's yes confirms. A question about the weather is a call as well, and the answer holds its result.
"""

import json
import re
from dataclasses import dataclass

Messages = tuple[tuple[str, str], ...]

_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_WORD = rf"(?:\d+ )?(?!(?:{_MONTH}) \d)(?:[A-Z]\.|[A-Z][\w'&|-]*)"
_PLACE = rf"({_WORD}(?: (?:(?:of|the|and|&|de) )*{_WORD})*)"
_DAY = rf"((?:{_MONTH}) \d+(?:st|nd|rd|th)|\d+(?:st|nd|rd|th) of (?:{_MONTH})|(?:the )?day after tomorrow|today|tomorrow|(?:next|this) \w+day|\w+day next week)"
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
_FORECAST = (re.compile(r"\b(\d+) (?:degrees?|F)", re.IGNORECASE), re.compile(r"\b(\d+) ?(?:%|percent)", re.IGNORECASE))
_WEATHER = (
    "What is the weather in {city}{date}?",
    "How will the weather be in {city}{date}?",
    "Weather in {city}{date} please.",
)
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
    "weather": (r"weather", "get_weather check_weather weather_forecast", "Get the weather.", ("city", "date"), 1),
}
_PATTERNS = {name: re.compile(pattern) for name, (pattern, _, _) in ARGUMENTS.items()}


@dataclass(frozen=True, slots=True)
class Order:
    """A call that a dialogue implies."""

    service: str  # a key of ``TOOLS``
    arguments: dict[str, object]  # by the names in ``ARGUMENTS``, in the tool's order
    result: dict[str, object]  # that the assistant's next message tells, besides the arguments
    request: str  # what a user says who knows all arguments


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
            found[name] = json.loads(text.replace(",", "").lstrip("0") or "0") if kind == "number" else text
    return found


def order_of(summary: str, agreed: str, answer: str) -> Order | None:
    """Returns what an assistant's summary orders; None if it is none or the user does not agree."""
    if _SUMMARY.search(summary) and _YES.search(agreed):
        for service, (hint, *_, num_needed) in TOOLS.items():
            if re.search(hint, summary, re.IGNORECASE):
                arguments = find_arguments(service, summary)
                if len(arguments) >= num_needed:
                    status = "failure" if _SORRY.search(answer) else "success"
                    return Order(service, arguments, {"status": status}, _PREAMBLE.sub("", summary).strip().rstrip("?"))
    return None


def forecast_of(asked: list[str], answer: str) -> Order | None:
    """Returns the call that gives the weather which an answer tells; ``asked`` are the user's messages up to it."""
    found = [pattern.search(answer) for pattern in _FORECAST]
    latest: dict[str, object] = {}
    for text in asked[-3:]:
        latest |= find_arguments("weather", text)
    arguments = {name: latest[name] for name in TOOLS["weather"][3] if name in latest}
    if not all(found) or "city" not in arguments:
        return None
    result: dict[str, object] = {
        name: int(match[1]) for name, match in zip(("temperature", "chance_of_rain"), found, strict=True) if match
    }
    day = arguments.get("date")
    date = f" {day}" if str(day).split()[0] in ("today", "tomorrow", "next", "this") else f" on {day}" if day else ""
    return Order("weather", arguments, result, _WEATHER[len(answer) % 3].format(city=arguments["city"], date=date))


def find_orders(messages: Messages) -> dict[int, Order]:
    """Finds the orders of a dialogue, by the place of the user's message that a call answers."""
    orders = {}
    for place in range(len(messages) - 1):
        (role, text), (_, answer) = messages[place], messages[place + 1]
        if role == "user":
            asked = [content for each, content in messages[: place + 1] if each == "user"]
            summed = order_of(messages[place - 1][1], text, answer) if place else None
            order = summed or forecast_of(asked, answer)
            if order is not None:
                orders[place] = order
    return orders
