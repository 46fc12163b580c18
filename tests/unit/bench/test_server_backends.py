"""What a reply tells about the cache, and what a request says about it, in each dialect."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from hiserve.bench.load_client import BACKENDS, RequestDefaults
from hiserve.bench.workload import Sample


def read(backend: str, event: Any) -> Sample:
    sample = Sample()
    BACKENDS[backend]().reader(sample)(msgspec.json.encode(event), 1.0)
    return sample


def usage(**details: Any) -> Any:
    return {"usage": {"prompt_tokens": 64, "completion_tokens": 2, "prompt_tokens_details": details}}


def test_cached_tokens_come_by_tier_with_the_reason_of_the_miss() -> None:
    tiers = {"device": 16, "host": 32, "store": 0}
    miss = {"reason": "evicted", "position": 48}
    sample = read("openai", usage(cached_tokens=48, cached_tokens_details=tiers, cache_miss=miss))
    assert (sample.num_cached, sample.cached_by_tier, sample.miss) == (48, tiers, "evicted")


@pytest.mark.parametrize("more", [{}, {"cached_tokens_details": None, "cache_miss": None}, {"cache_miss": {}}])
def test_tiers_that_are_not_told_are_not_made_up(more: Any) -> None:
    sample = read("openai", usage(cached_tokens=48, **more))
    assert (sample.num_cached, sample.cached_by_tier, sample.miss) == (48, {}, "")


def test_the_native_reply_tells_the_store_as_storage() -> None:
    tiers = {"device": 16, "host": 0, "storage": 32, "storage_backend": "file"}
    meta = {"prompt_tokens": 64, "completion_tokens": 2, "cached_tokens": 48, "cached_tokens_details": tiers}
    sample = read("generate", {"text": "a", "meta_info": meta})
    assert (sample.num_cached, sample.cached_by_tier) == (48, {"device": 16, "host": 0, "store": 32})


@pytest.mark.parametrize("backend", ["openai", "openai-chat", "generate"])
def test_a_salt_is_sent_where_there_is_one(backend: str) -> None:
    prompt = "hi" if backend == "openai-chat" else np.array([1, 2], dtype=np.int32)
    body = BACKENDS[backend]().body(prompt, 1, RequestDefaults(model="m", cache_salt="a"))
    assert body["cache_salt"] == "a"
    assert "cache_salt" not in BACKENDS[backend]().body(prompt, 1, RequestDefaults(model="m"))


@pytest.mark.parametrize(
    ("backend", "events"),
    [
        ("openai", [{"choices": [{"text": "It "}]}, {"choices": [{"text": "rains."}]}]),
        (
            "openai-chat",
            [
                {"choices": [{"delta": {"reasoning_content": "Hm. "}}]},
                {"choices": [{"delta": {"content": "It "}}]},
                {"choices": [{"delta": {"content": "rains."}, "finish_reason": "stop"}]},
            ],
        ),
        ("generate", [{"text": "It "}, {"text": "It rains."}]),
    ],
)
def test_the_text_of_a_reply_is_kept_piece_by_piece_without_thoughts(backend: str, events: list[Any]) -> None:
    sample = Sample()
    take = BACKENDS[backend]().reader(sample)
    for event in events:
        take(msgspec.json.encode(event), 1.0)
    assert "".join(sample.chunk_texts) == "It rains."
    assert len(sample.chunk_texts) == len(sample.chunk_s)
