"""The pages for a person with a browser: true, complete, self-contained, and silent about the model behind keys."""

from __future__ import annotations

import re

from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import Server, make_server


async def test_the_start_page_names_the_model_and_a_command_that_works(server: Server) -> None:
    call = await server.get("/")
    assert call.status == 200 and call.headers["content-type"].startswith("text/html")
    assert "tiny" in call.text and "/v1/chat/completions" in call.text
    for path in re.findall(r'href="([^"]+)"', call.text):
        assert (await server.get(path)).status == 200, path
    (body,) = re.findall(r"-d '(.*?)'", call.text.replace("&quot;", '"').replace("&#x27;", "'"))
    assert (await server.post("/v1/chat/completions", body.encode())).status == 200


async def test_the_docs_describe_every_route_and_field(server: Server) -> None:
    page = (await server.get("/docs")).text
    document = (await server.get("/openapi.json")).json
    for path, operations in document["paths"].items():
        for method in operations.keys() - {"head"}:
            assert f"<code>{method.upper()} {path}</code>" in page
    for name in document["components"]["schemas"]["ChatCompletionRequest"]["properties"]:
        assert f"<td><code>{name}</code>" in page
    assert "a number between -2 and 2" in page, "ranges are shown"


async def test_the_docs_say_which_fields_change_nothing_and_what_objects_hold(server: Server) -> None:
    page = (await server.get("/docs")).text
    assert "``" not in page, "code is shown as code"
    for words in ("or null", "null or", "items at least 0", "True", "False"):
        assert words not in page, words
    (generate,) = re.findall(r"<code>POST /generate</code></h2>(.*?)<h2>", page)
    served, neutral = generate.split("change nothing</summary>")
    for name in ("text", "input_ids", "sampling_params.temperature", "return_logprob"):
        assert f"<code>{name}</code>" in served and f"<code>{name}</code>" not in neutral
    for name in ("user", "response_format", "use_beam_search", "tool_choice", "sampling_params.metadata"):
        assert f"<code>{name}</code>" in neutral and f"<code>{name}</code>" not in served
    (chat,) = re.findall(r"<code>POST /v1/chat/completions</code></h2>(.*?)<h2>", page)
    assert "<code>tool_choice</code>" in chat.split("change nothing</summary>")[0]


async def test_pages_load_nothing_and_run_nothing(server: Server) -> None:
    for path in ("/", "/docs"):
        call = await server.get(path)
        assert "default-src 'none'" in call.headers["content-security-policy"]
        assert not re.search(r"<script|src=|@import|url\(|<link", call.text)


async def test_behind_keys_the_start_page_names_no_model_and_the_docs_want_one() -> None:
    made = make_server(FakeEngineClient(script=lambda prompt: []), api_key=("alpha",))
    start = await made.get("/")
    assert start.status == 200 and "tiny" not in start.text and "Authorization: Bearer KEY" in start.text
    assert (await made.get("/docs")).status == 401
