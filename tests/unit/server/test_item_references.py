"""References to items of stored responses, as Vercel's AI SDK sends them."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from hiserve.errors import NotFoundError, RequestError
from hiserve.server.responses import store as response_store
from hiserve.server.responses.store import KEPT_S, MAX_ITEM_ID_BYTES, ResponseStore, StoredResponse
from tests.helpers.clock import Clock
from tests.unit.server.tool_replies import CALL, SOURCE, TOOL, client_of, serving

LOOK = {"type": "function", **TOOL["function"]}
REPLY = "Let me see.\n" + CALL
SAID = {"role": "user", "content": "Hi"}


def reference(item_id: str, *, is_bare: bool = False) -> dict[str, str]:
    return {"id": item_id} if is_bare else {"type": "item_reference", "id": item_id}


@pytest.mark.parametrize("is_bare", [False, True])
async def test_references_give_the_prompt_of_the_items_that_they_name(is_bare: bool) -> None:
    async with serving(REPLY, template=SOURCE) as server, client_of(server) as client:
        reply = await client.responses.create(model="tiny", input="Hi", tools=[LOOK])  # type: ignore[list-item]
        call = reply.output[-1]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}  # type: ignore[union-attr]
        shown = (await client.responses.input_items.list(reply.id)).data[0]
        whole = {"tools": [LOOK], "input": [SAID, *(item.to_dict() for item in reply.output), output]}
        named = [reference(item.id or "", is_bare=is_bare) for item in reply.output]
        short = {"tools": [LOOK], "input": [SAID, *named, output]}
        shortest = {"tools": [LOOK], "input": [reference(shown.id or ""), *named, output]}
        calls = [await server.post("/v1/responses", body) for body in (whole, short, shortest)]
        counts = [await server.post("/v1/responses/input_tokens", body) for body in (whole, short)]
        prompts = [seen.prompt.tolist() for seen in server.engine.seen[1:]]
        listed = (await server.get(f"/v1/responses/{calls[2].json['id']}/input_items?order=asc")).json["data"]
        await client.responses.delete(reply.id)  # a later response has the items too
        later = await server.post("/v1/responses", short)
    assert {call.status for call in (*calls, later)} == {200}, calls[1].text
    assert prompts[0] == prompts[1] == prompts[2]
    assert counts[0].json == counts[1].json
    assert [item["type"] for item in listed] == ["message", "message", "function_call", "function_call_output"]


async def test_a_reference_to_an_item_that_is_not_stored_is_refused_by_its_id() -> None:
    async with serving("Yes.", api_key=("a", "b"), share_prefixes=True) as server:

        async def post(key: str, *items: Any, **fields: Any) -> Any:
            body = {"input": list(items), **fields}
            return await server.call("POST", "/v1/responses", body, authorization=f"Bearer {key}").end()

        kept = (await post("a", SAID)).json["output"][0]["id"]
        not_kept = (await post("a", SAID, store=False)).json["output"][0]["id"]
        assert (await post("a", reference(kept), SAID)).status == 200
        number = len(server.engine.seen)
        refused = [
            await post(key, SAID, reference(named)) for key, named in (("b", kept), ("a", not_kept), ("a", "msg_x"))
        ]
        twice = await post("a", reference(kept), reference(kept))
        assert len(server.engine.seen) == number
    for call, named in zip(refused, (kept, not_kept, "msg_x"), strict=True):
        error = call.json["error"]
        assert (call.status, error["code"], error["param"]) == (404, "item_not_found", "input")
        assert repr(named) in error["message"]
    assert (twice.status, twice.json["error"]["param"]) == (400, "input[1].id")
    async with serving("Yes.", responses_store="off") as server:
        assert (await server.post("/v1/responses", {"input": [reference("msg_x")]})).json["error"][
            "code"
        ] == "item_not_found"


def stored(name: str) -> StoredResponse:
    return StoredResponse(name, None, b"i" * 500, b"r" * 500, 2)


def names(store: ResponseStore, *item_ids: str) -> list[str]:
    return [each.id for each in store.holding(b"a", item_ids)]


def test_the_latest_response_with_an_item_is_found_and_used() -> None:
    clock = Clock()
    store = ResponseStore(now=clock)
    store.put(b"a", stored("x"), ["one", "two"])
    store.put(b"a", stored("y"), ["two", "three", "three"])
    store.put(b"b", stored("z"), ["two", "i" * (MAX_ITEM_ID_BYTES + 1)])
    assert names(store, "one") == ["x"]
    assert names(store, "two", "three") == ["y"]
    assert names(store) == []
    for caller, item_id in ((b"b", "one"), (b"a", "four"), (b"b", "i" * (MAX_ITEM_ID_BYTES + 1))):
        with pytest.raises(NotFoundError, match=item_id[:90]):
            store.holding(caller, [item_id])
    clock.now_s += KEPT_S - 1
    assert names(store, "one") == ["x"]
    clock.now_s += 2
    assert names(store, "one") == ["x"]
    with pytest.raises(NotFoundError, match="three"):
        store.holding(b"a", ["three"])
    store.delete(b"a", "x")
    assert store._db.execute("SELECT count(*) FROM items").fetchone() == (0,)


def test_the_responses_of_references_have_no_more_bytes_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore()
    for i in range(3):
        store.put(b"a", stored(f"r{i}"), [f"i{i}"])
    monkeypatch.setattr(response_store, "MAX_CHAIN_BYTES", 2 * stored("r").num_bytes)
    assert names(store, "i0", "i1") == ["r0", "r1"]
    with pytest.raises(RequestError, match="Send the items"):
        store.holding(b"a", ["i0", "i1", "i2"])


def test_a_file_of_the_version_without_items_keeps_its_responses(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with sqlite3.connect(path) as old:
        old.executescript(f"{response_store._TABLE} PRAGMA user_version = 1;")
        old.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", ("x", b"a", *stored("x")[1:], 9, 100.0))
    old.close()
    store = ResponseStore(path, now=lambda: 100.0)
    assert store.get(b"a", "x") == stored("x")
    assert store.put(b"a", stored("y"), ["one"])
    store.close()
    again = ResponseStore(path, now=lambda: 100.0)
    assert names(again, "one") == ["y"]
    again.close()
