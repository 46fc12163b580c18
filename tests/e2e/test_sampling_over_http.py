"""Every sampling field changes what the embedded model says, on a live server with its defaults."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hiserve.models.model_config import NANO, find_model
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.e2e.live import Live, serve
from tests.helpers.widening import some

TOKENIZER = Tokenizer.load(find_model(NANO))
PROMPT = "Would you like"
OTHER = "I need a"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(tmp_path_factory.mktemp("live"), "--cpu-threads", "1") as running:
        yield running
        info = running.wait_idle()
        for worker in info["workers"]:
            stats = worker["stats"]
            assert stats["free_pages"] + stats["evictable_pages"] == worker["num_pages"], stats


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=120) as client:
        yield client


def complete(http: httpx.Client, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    """Asks for 16 greedy tokens, end tokens or not, unless the fields say otherwise; returns the reply."""
    always = {"temperature": 0, "return_token_ids": True, "ignore_eos": True}
    body = {"prompt": prompt, "max_tokens": 16, **always, **fields}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def ids_of(reply: dict[str, Any], choice: int = 0) -> list[int]:
    return list(reply["choices"][choice]["token_ids"])


@pytest.fixture(scope="module")
def greedy(http: httpx.Client) -> list[int]:
    ids = ids_of(complete(http, max_tokens=32))
    assert len(set(ids)) > 8
    return ids


# --- which token -----------------------------------------------------------------------------


def test_a_bias_forbids_and_forces_a_token(http: httpx.Client, greedy: list[int]) -> None:
    forbidden = ids_of(complete(http, logit_bias={str(greedy[0]): -100}))
    assert greedy[0] not in forbidden
    (forced,) = TOKENIZER.encode(" tea", add_special_tokens=False).tolist()[:1]
    assert ids_of(complete(http, logit_bias={str(forced): 100}, max_tokens=4)) == [forced] * 4


def test_penalties_shun_what_was_said(http: httpx.Client) -> None:
    """Where a bias makes one token win always, each penalty makes room for others."""
    (token,) = TOKENIZER.encode(" tea", add_special_tokens=False).tolist()[:1]
    bias = {"logit_bias": {str(token): 30}, "max_tokens": 24}
    plain = ids_of(complete(http, **bias)).count(token)
    assert plain >= 20
    frequency = ids_of(complete(http, **bias, frequency_penalty=2)).count(token)
    repetition = ids_of(complete(http, **bias, repetition_penalty=10)).count(token)
    assert frequency < plain
    assert repetition < plain


def test_a_presence_penalty_changes_the_reply(http: httpx.Client) -> None:
    plain = ids_of(complete(http, max_tokens=64))
    shy = ids_of(complete(http, max_tokens=64, presence_penalty=2))
    bold = ids_of(complete(http, max_tokens=64, presence_penalty=-2))
    assert len(set(shy)) > len(set(plain)) > len(set(bold))


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_tightest_filter_is_greedy(http: httpx.Client, greedy: list[int], fields: dict[str, Any]) -> None:
    hot = {"temperature": 2.0, "seed": 5}
    assert ids_of(complete(http, **hot, **fields)) == greedy[:16]
    assert ids_of(complete(http, **hot)) != greedy[:16]


def test_a_seed_repeats_a_reply(http: httpx.Client) -> None:
    replies = [ids_of(complete(http, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    assert replies[0] == replies[1] != replies[2]


# --- when to stop ----------------------------------------------------------------------------


def test_a_stop_text_ends_the_reply_before_it(http: httpx.Client, greedy: list[int]) -> None:
    text = TOKENIZER.decode(greedy)
    stop = text[5:9]
    reply = complete(http, stop=["nowhere", stop], max_tokens=32)
    (choice,) = reply["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"]) < 32
    with_it = complete(http, stop=stop, max_tokens=32, include_stop_str_in_output=True)["choices"][0]["text"]
    assert with_it == choice["text"] + stop


def test_a_stop_token_ends_the_reply(http: httpx.Client, greedy: list[int]) -> None:
    at = next(i for i in range(4, 32) if greedy[i] not in greedy[:i])
    (choice,) = complete(http, stop_token_ids=[greedy[at]], max_tokens=32)["choices"]
    assert choice["token_ids"] == greedy[: at + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", greedy[at])
    assert choice["text"] == TOKENIZER.decode(greedy[:at])


def test_min_tokens_keeps_the_reply_going(http: httpx.Client) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Thank you, bye."}], "temperature": 0}

    def num_tokens(**fields: Any) -> int:
        response = http.post("/v1/chat/completions", json={**chat, "max_tokens": 200, **fields})
        return int(response.json()["usage"]["completion_tokens"])

    plain = num_tokens()
    assert plain < 100
    assert num_tokens(min_tokens=plain + 20) >= plain + 20
    assert num_tokens(ignore_eos=True) == 200


def test_special_tokens_are_shown_on_demand(http: httpx.Client) -> None:
    end = next(index for index in sorted(TOKENIZER.hidden_ids))
    fields = {"logit_bias": {str(end): 100}, "max_tokens": 2}
    assert complete(http, **fields)["choices"][0]["text"] == ""
    assert complete(http, **fields, skip_special_tokens=False)["choices"][0]["text"] == 2 * TOKENIZER.vocab[end]


# --- choices and prompts ---------------------------------------------------------------------


def test_choices_differ_and_the_first_is_that_of_a_single_request(http: httpx.Client) -> None:
    fields = {"temperature": 1.0, "seed": 9}
    several = complete(http, n=4, **fields)
    again = complete(http, n=4, **fields)
    alone = complete(http, **fields)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    texts = [ids_of(several, i) for i in range(4)]
    assert texts == [ids_of(again, i) for i in range(4)]
    assert texts[0] == ids_of(alone)
    assert len({tuple(ids) for ids in texts}) == 4
    assert several["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert several["usage"]["completion_tokens"] == sum(map(len, texts))


def test_a_list_of_prompts_equals_single_prompts(http: httpx.Client) -> None:
    fields = {"temperature": 1.0, "seed": 3, "logprobs": 1}
    ids = TOKENIZER.encode(OTHER, add_special_tokens=True).tolist()
    together = complete(http, [PROMPT, OTHER], **fields)
    for i, prompt in enumerate([PROMPT, ids]):
        alone = complete(http, prompt, **fields)
        assert ids_of(together, i) == ids_of(alone)
        assert together["choices"][i]["text"] == alone["choices"][0]["text"]


def test_choices_share_the_prefix_of_their_prompt(http: httpx.Client, live: Live) -> None:
    page_size = live.info()["config"]["cache"]["page_size"]
    before = live.counter("hiserve:prefix_cache_hits_total")
    prompt = [7 + i % 300 for i in range(20 * page_size)]
    reply = complete(http, prompt, n=4, max_tokens=2)
    hits = live.counter("hiserve:prefix_cache_hits_total") - before
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert hits >= 3 * 19 * page_size


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streamed_choices_equal_the_whole_reply(http: httpx.Client, path: str) -> None:
    is_chat = "chat" in path
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": PROMPT}
    body = {**asked, "n": 3, "seed": 4, "max_tokens": 12, "stop": ["the"], "stream_options": {"include_usage": True}}
    body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    whole = http.post(path, json=body).json()
    lines = http.post(path, json={**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    for choice in whole["choices"]:
        chunks = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        text = "".join(c["delta"].get("content", "") if is_chat else c["text"] for c in chunks)
        assert text == (choice["message"]["content"] if is_chat else choice["text"])
        assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        names = ["content"] if is_chat else ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
        for name in names:
            joined = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"][name]]
            assert without_noise(joined) == without_noise(choice["logprobs"][name])
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def without_noise(value: Any) -> Any:
    """Rounds scores: the shape of a batch shows in the last bits of a product."""
    if isinstance(value, dict):
        return {key: without_noise(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_noise(entry) for entry in value]
    return round(value, 3) if isinstance(value, float) else value


# --- scores ----------------------------------------------------------------------------------


def test_scores_are_log_probabilities_and_greedy_takes_the_likeliest(http: httpx.Client) -> None:
    logprobs = complete(http, logprobs=20)["choices"][0]["logprobs"]
    for token, score, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert score <= 0
        assert max(top.values()) == score == top[token]
        assert sum(math.exp(value) for value in top.values()) <= 1 + 1e-5


def test_scores_do_not_know_how_the_token_was_chosen(http: httpx.Client, greedy: list[int]) -> None:
    plain = complete(http, max_tokens=1, logprobs=5)["choices"][0]["logprobs"]
    bent = complete(http, max_tokens=1, logprobs=5, temperature=5.0, top_k=1, logit_bias={str(greedy[0]): 50}, seed=1)[
        "choices"
    ][0]["logprobs"]
    assert bent["tokens"] == plain["tokens"]
    assert without_noise(bent["top_logprobs"]) == without_noise(plain["top_logprobs"])


def test_an_echo_scores_a_reply_as_it_was_scored_when_it_was_generated(http: httpx.Client) -> None:
    made = complete(http, logprobs=2, max_tokens=12, skip_special_tokens=False)
    (choice,) = made["choices"]
    both = choice["prompt_token_ids"] + choice["token_ids"]
    (echo,) = complete(http, both, echo=True, logprobs=2, max_tokens=0)["choices"]
    assert echo["text"] == PROMPT + choice["text"]
    assert echo["logprobs"]["token_logprobs"][0] is None
    assert echo["logprobs"]["token_logprobs"][-12:] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)
    for offset, token in zip(echo["logprobs"]["text_offset"], echo["logprobs"]["tokens"], strict=True):
        assert echo["text"][offset : offset + len(token)] == token
    (one_more,) = complete(http, both, echo=True, logprobs=2, max_tokens=1)["choices"]
    assert len(one_more["logprobs"]["tokens"]) == len(both) + 1


def test_prompt_logprobs_agree_with_the_echo(http: httpx.Client) -> None:
    (choice,) = complete(http, max_tokens=1, echo=True, logprobs=1, prompt_logprobs=3)["choices"]
    prompt = choice["prompt_token_ids"]
    for token, entries, score in zip(
        prompt[1:], choice["prompt_logprobs"][1:], choice["logprobs"]["token_logprobs"][1:], strict=False
    ):
        assert entries[str(token)]["logprob"] == score
        assert sorted(entry["rank"] for entry in entries.values() if entry["rank"])[:3] == [1, 2, 3]


# --- the rest --------------------------------------------------------------------------------


def test_a_salt_keeps_prefixes_apart(http: httpx.Client) -> None:
    prompt = [9 + i % 100 for i in range(100)]

    def cached(**fields: Any) -> int:
        usage = complete(http, prompt, max_tokens=1, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(), cached(cache_salt="a")] == [0, 0, 0, 96]


def test_a_final_message_is_continued(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I would like to reserve"}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    going_on = http.post("/v1/chat/completions", json={**body, "continue_final_message": True}).json()
    prompt = TOKENIZER.decode(going_on["prompt_token_ids"], skip_hidden=False)
    assert prompt.endswith("I would like to reserve")
    anew = http.post("/v1/chat/completions", json=body).json()
    assert going_on["choices"][0]["message"]["content"] != anew["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("choice", "is_greedy"), some([("model", True), ("openai", False)], ("model", True)))
def test_a_silent_request_samples_as_the_model_says(
    tmp_path: Path, greedy: list[int], choice: str, is_greedy: bool
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(find_model(NANO), folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 2.0, "top_k": 1}))
    flags = (str(folder), "--sampling-defaults", choice, "--cpu-threads", "1")
    with serve(tmp_path, *flags) as running, httpx.Client(base_url=running.url, timeout=120) as http:
        silent = {"temperature": None, "seed": 5}
        assert (ids_of(complete(http, **silent)) == greedy[:16]) is is_greedy
        assert ids_of(complete(http, **silent, top_k=0)) != greedy[:16], "what a request says goes before it"
