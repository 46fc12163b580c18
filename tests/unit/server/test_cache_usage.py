"""Usage tells from which tier a prompt came, and why no more of it did."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiserve.core.usage import CacheUse
from hiserve.server.reply.format import prompt_use
from tests.unit.server.conftest import Server

USE = CacheUse(device=16, host=32, store=64, miss="evicted", miss_at=112)
SHOWN = {
    "cached_tokens": 112,
    "cached_tokens_details": {"device": 16, "host": 32, "store": 64},
    "cache_miss": {"reason": "evicted", "at": 112},
}
SHOWN_OF_A_CHAT = SHOWN | {"cache_miss": {"reason": "evicted", "at": 112, "turn": 1, "part": "text"}}


async def last_usage(server: Server, path: str, **body: Any) -> dict[str, Any]:
    asked = {"stream": True, "stream_options": {"include_usage": True}, **body}
    *_, last, _ = (await server.post(path, asked)).events
    return dict(last["usage"])


async def test_every_form_of_reply_shows_tiers_and_the_miss(server: Server) -> None:
    server.engine.cached = USE
    chat, text = {"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "Hi"}
    for path, body, shown in (
        ("/v1/chat/completions", chat, SHOWN_OF_A_CHAT),
        ("/v1/completions", text, SHOWN),
    ):
        whole = (await server.post(path, body)).json["usage"]
        assert whole["prompt_tokens_details"] == shown
        assert (await last_usage(server, path, **body))["prompt_tokens_details"] == shown


async def test_the_native_reply_names_the_tiers_as_sglang_does(server: Server) -> None:
    server.engine.cached = USE
    meta = (await server.post("/generate", {"text": "Hi"})).json["meta_info"]
    assert meta["cached_tokens"] == 112
    assert meta["cached_tokens_details"] == {"device": 16, "host": 32, "storage": 64}
    assert meta["cache_miss"] == {"reason": "evicted", "at": 112}


async def test_several_prompts_are_summed_and_the_miss_is_the_first_ones(server: Server) -> None:
    uses = {5: CacheUse(device=16, miss="cold", miss_at=16), 7: CacheUse(host=32, store=16, miss="evicted", miss_at=48)}
    server.engine.cached = lambda prompt: uses[int(prompt[0])]
    reply = (await server.complete([[5, 6], [7, 8]])).json
    assert reply["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 64,
        "cached_tokens_details": {"device": 16, "host": 32, "store": 16},
        "cache_miss": {"reason": "cold", "at": 16},
    }


@pytest.mark.parametrize("use", [CacheUse(), CacheUse(device=16)])
async def test_without_a_reason_there_is_no_miss(server: Server, use: CacheUse) -> None:
    server.engine.cached = use
    assert (await server.chat("Hi")).json["usage"]["prompt_tokens_details"]["cache_miss"] is None
    assert (await server.post("/generate", {"text": "Hi"})).json["meta_info"]["cache_miss"] is None


async def test_the_openai_client_reads_it(server: Server) -> None:
    server.engine.cached = USE
    text = (await server.chat("Hi")).text
    usage = openai.types.chat.ChatCompletion.model_validate_json(text).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 112
    assert usage.prompt_tokens_details.to_dict() == SHOWN_OF_A_CHAT


def test_uses_add_up_tier_by_tier() -> None:
    both = USE + CacheUse(device=1, host=2, store=4, miss="cold", miss_at=7)
    assert both == CacheUse(device=17, host=34, store=68, miss="evicted", miss_at=112)


@given(num_prompt=st.integers(1, 200), num_pages=st.integers(0, 20), page_size=st.sampled_from([0, 1, 16]))
def test_the_tokens_of_a_prompt_are_cached_written_or_neither(num_prompt: int, num_pages: int, page_size: int) -> None:
    num_cached = min(num_pages * page_size, num_prompt // page_size * page_size) if page_size else 0
    choices: Any = SimpleNamespace(num_prompt=num_prompt, cached=CacheUse(device=num_cached))
    use = prompt_use(choices, page_size)
    assert (use.cached, sum(use)) == (num_cached, num_prompt)
    assert use.rest == (num_prompt % page_size if page_size else num_prompt), (
        "full pages are in the cache, the others are not"
    )
