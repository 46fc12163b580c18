"""The items of stored responses: read as input, listed, and put in the place of references."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec

from hiserve.errors import RequestError
from hiserve.server.responses.store import StoredResponse, missing_item
from hiserve.server.responses.types import InputPart, Item
from hiserve.text.body.json import check_text


class _Output(msgspec.Struct):
    """The output of a stored response, read as input."""

    output: list[Item]


def all_items(chain: Sequence[StoredResponse]) -> list[Item]:
    """Returns the items of stored responses, their outputs included, in order."""
    return [item for stored in chain for item in (*own_items(stored), *_output(stored))]


def own_items(stored: StoredResponse) -> list[Item]:
    """Returns the input items of a stored response, after those of earlier responses."""
    return msgspec.json.decode(stored.items, type=list[Item])


def with_id(item: Item) -> Item:
    """Returns an item of the input as it is listed."""
    content = item.content
    if isinstance(content, str):
        content = [InputPart("output_text" if item.role == "assistant" else "input_text", content)]
    made_id = item.id or f"item_{secrets.token_hex(16)}"
    return msgspec.structs.replace(item, type=item.type or "message", id=made_id, content=content)


def references(items: Sequence[Item]) -> list[str]:
    """Returns the ids that references among items name, in order.

    Raises:
        RequestError: A reference has no id, or that of another one.
    """
    named = dict[str, None]()
    for i, item in enumerate(items):
        if not item.is_reference:
            continue
        where = f"input[{i}].id"
        if not item.id:
            raise RequestError(f"{where} is missing; an item_reference has one.", param=where)
        check_text(item.id, where)
        if item.id in named:
            raise RequestError(f"{where} is {item.id[:100]!r} again; refer to an item once.", param=where)
        named[item.id] = None
    return list(named)


def resolved(items: Sequence[Item], holding: Callable[[Sequence[str]], Sequence[StoredResponse]]) -> list[Item]:
    """Returns items with stored ones in the places of references.

    Args:
        items: Of the input.
        holding: Returns the responses that have the items with these ids.

    Raises:
        NotFoundError: No stored item has the id of a reference.
        RequestError: A reference is malformed.
    """
    wanted = references(items)
    known = {item.id: item for item in all_items(holding(wanted))}
    if lost := [each for each in wanted if each not in known]:
        raise missing_item(lost[0])
    return [known[item.id] if item.is_reference else item for item in items]


def _output(stored: StoredResponse) -> list[Item]:
    return msgspec.json.decode(stored.reply, type=_Output).output
