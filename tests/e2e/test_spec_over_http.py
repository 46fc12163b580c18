"""Speculation on a live server: what requests ask of it changes nothing but what is told of drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hiserve import LLM, SamplingParams, SpecParams
from hiserve.errors import RequestError
from tests.e2e.live import Live, serve

FLAGS = ("--dtype", "float64", "--cpu-threads", "1", "--kv-pages", "200", "--max-model-len", "512")
PROMPT = "The cat sat on the mat. The cat sat on the mat. The cat sat on"
ASKED: list[dict[str, Any] | None] = [None, {"enabled": False}, {"num_steps": 1}, {"enabled": True, "num_steps": 3}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    # Without the replies before, a request has the same drafts each time.
    drafts = ("--spec", "ngram", "--spec-steps", "3", "--spec-history", "0")
    with serve(tmp_path_factory.mktemp("live"), *FLAGS, *drafts, "--metrics-compat", "vllm") as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=120) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    always = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True, "seed": 7}
    response = http.post("/v1/completions", json={**always, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_what_is_asked_changes_the_drafts_and_not_the_reply(live: Live, http: httpx.Client) -> None:
    accepted = 0
    for temperature in (0.0, 0.9):
        replies = [complete(http, temperature=temperature, spec=spec) for spec in ASKED]
        tokens = [reply["choices"][0]["token_ids"] for reply in replies]
        assert tokens == [tokens[0]] * len(ASKED)
        free, off, one, three = (reply["usage"]["spec_tokens_details"] for reply in replies)
        assert free == three
        assert (off["verify_steps"], off["proposed"], off["accepted"]) == (0, 0, 0)
        assert one["proposed"] == one["verify_steps"] > 0
        assert one["accepted_per_position"][1:] == [0, 0]
        assert free["accept_length"] == 1 + free["accepted"] / free["verify_steps"]
        accepted += free["accepted"]
    assert accepted > 0, "nothing was accepted: the comparison proves nothing"


def test_drafts_are_told_in_every_form_of_reply_and_counted(live: Live, http: httpx.Client) -> None:
    live.wait_idle()
    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    before = [live.counter(f"hiserve:spec_decode_num_{name}_total") for name in names]
    told = [complete(http, temperature=0)["usage"]["spec_tokens_details"]]
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    told.append(http.post("/v1/chat/completions", json=chat).json()["usage"]["spec_tokens_details"])
    streamed = http.post(
        "/v1/chat/completions", json=chat | {"stream": True, "stream_options": {"include_usage": True}}
    )
    last = streamed.text.split("\n\n")[-3].removeprefix("data: ")
    told.append(json.loads(last)["usage"]["spec_tokens_details"])
    native = {"text": PROMPT, "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}}
    told.append(http.post("/generate", json=native).json()["meta_info"]["spec_tokens_details"])
    assert told[1] == told[2]
    info = live.wait_idle()
    after = [live.counter(f"hiserve:spec_decode_num_{name}_total") for name in names]
    sums = [sum(one[field] for one in told) for field in ("verify_steps", "proposed", "accepted", "accepted")]
    assert [now - then for now, then in zip(after, before, strict=True)] == sums
    assert [live.counter(f"vllm:spec_decode_num_{name}_total") for name in names] == after
    by_source = info["workers"][0]["stats"]["drafts"]["by_source"]
    assert sum(use["verify_steps"] for use in by_source.values()) == after[0]
    assert by_source["device"]["verify_steps"] > 0, "prompts that came again were not counted as cached"
    assert live.counter("hiserve:spec_accept_length", cache_source="device") == by_source["device"]["accept_length"]


def test_more_drafts_than_the_server_verifies_are_refused(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": PROMPT, "spec": {"num_steps": 4}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "spec.num_steps"
    assert "the most here is 3" in response.json()["error"]["message"]


def test_an_offline_batch_is_told_of_drafts_and_may_ask_for_fewer() -> None:
    settings: dict[str, Any] = {"dtype": "float64", "kv_pages": 200, "max_model_len": 512, "cpu_threads": 1}
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    asked = [SpecParams(enabled=False), SpecParams(num_steps=1), None]
    params = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, spec=spec) for spec in asked]
    with LLM(in_process=True, spec="off", **settings) as llm:
        (expected,) = llm.generate([PROMPT], plain)
        assert expected.outputs[0].drafts is None
        with pytest.raises(RequestError, match="--spec"):
            llm.generate([PROMPT], SamplingParams(spec=SpecParams(enabled=True)))
        with pytest.raises(RequestError, match="--spec"):
            list(llm.generate_each([(PROMPT, SamplingParams(spec=SpecParams(num_steps=1)))]))
    with LLM(in_process=True, spec="ngram", spec_steps=3, **settings) as llm:
        outputs = [result.outputs[0] for result in llm.generate([PROMPT] * 3, params)]
    assert [output.token_ids for output in outputs] == [expected.outputs[0].token_ids] * 3
    off, one, free = (output.drafts for output in outputs)
    assert off is not None
    assert one is not None
    assert free is not None
    assert (off.proposed, one.proposed) == (0, one.verify_steps)
    assert free.accepted > one.accepted > 0


@pytest.mark.parametrize(
    ("spec", "param", "said"),
    [
        ({"num_steps": -1}, "spec.num_steps", "between 0 and 15"),
        ({"num_steps": 16}, "spec.num_steps", "between 0 and 15"),
        ({"num_steps": "3"}, "spec.num_steps", "whole number"),
        ({"enabled": "yes"}, "spec.enabled", "true or false"),
        ({"steps": 3}, "spec", "an object with enabled, num_steps"),
        ("on", "spec", "an object"),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_server_goes_on(
    live: Live, http: httpx.Client, spec: Any, param: str, said: str
) -> None:
    before = complete(http, temperature=0)["choices"][0]["token_ids"]
    for path, prompt in (
        ("completions", {"prompt": PROMPT}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = http.post(f"/v1/{path}", json={**prompt, "spec": spec})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert said in response.json()["error"]["message"]
    assert complete(http, temperature=0)["choices"][0]["token_ids"] == before
