"""The offline API: in this process and in processes of its own, the same results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    HiserveError,
    ModelError,
    RequestError,
    UnavailableError,
)
from hiserve.ipc.updates import TokenDelta
from hiserve.llm.offline_backends import InProcess
from hiserve.llm.outputs import ChoiceBuilder
from tests.helpers import forks
from tests.helpers.forks import forked_engines
from tests.helpers.processes import children, wait_dead
from tests.helpers.small_model import small_model
from tests.helpers.waiting import PATIENCE_S
from tests.helpers.widening import some

PAGE, END = 16, 1
SMALL: dict[str, Any] = {
    "model": small_model(),
    "spec": "off",  # to choose a number of drafts takes 1.5 s of CPU at each start
    "page_size": PAGE,
    "max_model_len": 512,
    "kv_pages": 200,
    "max_running_requests": 4,
    "max_batched_tokens": 64,
    "cpu_threads": 1,
    "log_level": "warning",
}
TEXTS = [
    "def add(a, b):\n",
    "<|bos|><|user|>I would like to find a place to eat in San Jose.<|end|><|assistant|>",
    "<|bos|><|user|>Please book a table for two people at seven in the evening, near the station.<|end|><|assistant|>",
    "The quick brown fox jumps over the lazy dog, and then it does so again and again, because it can.",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
FEW = SamplingParams(temperature=0.0, max_tokens=6)  # where replies are counted, not read
SEEDED = [SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=seed, max_tokens=24) for seed in range(4)]
MODES = ["in process", "processes"]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLM]]:
    """Both kinds, side by side; every test leaves them usable."""
    with forked_engines():
        outside = LLM(**SMALL)
    with LLM(in_process=True, **SMALL) as inside, outside:
        yield {"in process": inside, "processes": outside}


@pytest.fixture(params=MODES)
def llm(request: pytest.FixtureRequest, engines: dict[str, LLM]) -> LLM:
    return engines[request.param]


def tokens_of(results: list[Any]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


# --- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_both_kinds_give_the_same_tokens(engines: dict[str, LLM], sampling: Any) -> None:
    inside, outside = (tokens_of(engines[mode].generate(TEXTS, sampling)) for mode in MODES)
    assert inside == outside
    assert len({token for tokens in inside for token in tokens}) >= 20


def test_a_seed_changes_the_tokens_and_repeats_them(llm: LLM) -> None:
    first, again, other = (
        tokens_of(llm.generate(TEXTS[0], SamplingParams(seed=seed, max_tokens=24)))[0] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_without_a_seed_two_calls_differ(llm: LLM) -> None:
    first, second = (tokens_of(llm.generate(TEXTS[0], SamplingParams(max_tokens=24)))[0] for _ in range(2))
    assert first != second


def test_a_result_holds_prompt_tokens_text_and_reason_in_the_order_of_the_prompts(llm: LLM) -> None:
    results = llm.generate(TEXTS, GREEDY)
    assert [result.prompt for result in results] == TEXTS
    for result in results:
        assert result.prompt_token_ids == llm.tokenizer.encode(result.prompt or "", add_special_tokens=True).tolist()
        assert 0 <= result.num_cached_tokens < len(result.prompt_token_ids)
        (choice,) = result.outputs
        assert choice.index == 0
        assert choice.text == llm.tokenizer.decode(choice.token_ids)
        assert choice.finish_reason == ("length" if len(choice.token_ids) == 24 else "stop")
        assert all(type(token) is int for token in choice.token_ids + result.prompt_token_ids)
    assert {result.outputs[0].finish_reason for result in results} >= {"length"}


def test_token_ids_are_prompts_too_alone_or_among_texts(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXTS[1], add_special_tokens=True)
    expected = tokens_of(llm.generate(TEXTS[1], GREEDY))
    for prompt in (ids.tolist(), list(ids), [ids], tuple(ids.tolist())):
        (result,) = llm.generate(prompt, GREEDY)
        assert result.prompt is None
        assert result.prompt_token_ids == ids.tolist()
        assert [result.outputs[0].token_ids] == expected
    assert tokens_of(llm.generate([TEXTS[0], ids.tolist()], GREEDY))[1:] == expected


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_one_setting_a_prompt(llm: LLM) -> None:
    lengths = [3, 7, 1, 5]
    sampling = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    assert [len(tokens) for tokens in tokens_of(llm.generate(TEXTS, sampling))] == lengths


def test_more_prompts_than_rows(llm: LLM) -> None:
    alone = tokens_of(llm.generate(TEXTS, GREEDY))
    assert tokens_of(llm.generate(TEXTS * 2, GREEDY)) == alone * 2


def test_an_end_token_ends_a_reply_unless_it_is_ignored(llm: LLM) -> None:
    bias = {END: 8.0}  # with which it is the best token now and then
    long = SamplingParams(temperature=0.0, max_tokens=60, logit_bias=bias)
    stopped = llm.generate(TEXTS[1], long)[0].outputs[0]
    (end,) = set(stopped.token_ids) & llm.tokenizer.hidden_ids
    assert (stopped.finish_reason, stopped.token_ids.index(end)) == ("stop", len(stopped.token_ids) - 1)
    ignoring = SamplingParams(temperature=0.0, max_tokens=60, logit_bias=bias, ignore_eos=True)
    ignored = llm.generate(TEXTS[1], ignoring)[0].outputs[0]
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 60)
    assert ignored.token_ids[: len(stopped.token_ids)] == stopped.token_ids


def test_the_context_ends_a_reply_that_nothing_else_ends(llm: LLM) -> None:
    prompt = [100 + at % 50 for at in range(500)]
    (result,) = llm.generate(prompt, SamplingParams(temperature=0.0, ignore_eos=True))
    assert (len(result.outputs[0].token_ids), result.outputs[0].finish_reason) == (12, "length")


def test_a_second_turn_comes_from_the_cache(llm: LLM) -> None:
    prompt = [300 + 7 * at % 900 for at in range(70)]
    (first,) = llm.generate(prompt, GREEDY)
    assert first.num_cached_tokens == 0
    (again,) = llm.generate(prompt, GREEDY)
    assert again.num_cached_tokens == 69 // PAGE * PAGE
    history = [*prompt, *first.outputs[0].token_ids]
    (second,) = llm.generate([*history, 40, 41], GREEDY)
    assert second.num_cached_tokens >= len(history) - PAGE
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("llm", some(MODES, "in process"), indirect=True)
def test_without_the_prefix_cache_nothing_is_reused_and_the_tokens_are_the_same(llm: LLM) -> None:
    prompt = [400 + 7 * at % 900 for at in range(70)]
    expected = tokens_of(llm.generate(prompt, GREEDY))
    with LLM(in_process=True, disable_prefix_cache=True, **SMALL) as plain:
        results = plain.generate([prompt] * 2, GREEDY) + plain.generate(prompt, GREEDY)
        assert tokens_of(results) == expected * 3
        assert [result.num_cached_tokens for result in results] == [0] * 3


# --- choices, stops, scores -----------------------------------------------------------------------


def test_choices_differ_and_the_first_is_what_one_choice_would_be(llm: LLM) -> None:
    several = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=16, ignore_eos=True)
    (result,) = llm.generate(TEXTS[0], several)
    assert [choice.index for choice in result.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in result.outputs}) == 3
    (alone,) = llm.generate(TEXTS[0], SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True))
    assert alone.outputs[0].token_ids == result.outputs[0].token_ids
    (again,) = llm.generate(TEXTS[0], several)
    assert [choice.token_ids for choice in again.outputs] == [choice.token_ids for choice in result.outputs]


def test_a_stop_text_ends_a_choice_and_frees_its_row(llm: LLM) -> None:
    (whole,) = llm.generate(TEXTS[1], GREEDY)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:6]
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stop=("never there", stop))
    (cut,) = llm.generate(TEXTS[1], long)
    choice = cut.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert choice.token_ids == whole.outputs[0].token_ids[: len(choice.token_ids)]
    assert len(choice.token_ids) < len(whole.outputs[0].token_ids)
    assert tokens_of(llm.generate([TEXTS[1]] * 8, long)) == [choice.token_ids] * 8


def test_a_stop_token_ends_a_choice_with_it(llm: LLM) -> None:
    (whole,) = llm.generate(TEXTS[1], GREEDY)
    token = whole.outputs[0].token_ids[5]
    (cut,) = llm.generate(TEXTS[1], SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(token,)))
    choice = cut.outputs[0]
    assert choice.token_ids == whole.outputs[0].token_ids[: whole.outputs[0].token_ids.index(token) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token)


def test_scores_belong_to_their_tokens(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, prompt_logprobs=2)
    (result,) = llm.generate(TEXTS[3], sampling)
    choice = result.outputs[0]
    assert choice.logprobs is not None
    assert [score.token_id for score in choice.logprobs] == choice.token_ids
    for score in choice.logprobs:
        assert next(iter(score.top)) == score.token_id  # greedy
        assert score.top[score.token_id] == score.logprob < 0
        assert list(score.top.values()) == sorted(score.top.values(), reverse=True)
        assert len(score.top) == 3
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    scores = [score for score in result.prompt_logprobs if score is not None]
    assert [score.token_id for score in scores] == result.prompt_token_ids[1:]
    # The prompt and the reply, scored as a prompt, get the scores the reply had.
    history = [*result.prompt_token_ids, *choice.token_ids]
    (scored,) = llm.generate(history, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None
    later = scored.prompt_logprobs[len(result.prompt_token_ids) :]
    for known, score in zip(choice.logprobs, later, strict=True):
        assert score is not None
        assert abs(known.logprob - score.logprob) < 1e-3
    assert llm.generate(TEXTS[3], GREEDY)[0].outputs[0].logprobs is None


def test_the_prompt_is_scored_once_for_all_choices(llm: LLM) -> None:
    sampling = SamplingParams(seed=1, n=2, max_tokens=4, logprobs=1, prompt_logprobs=1)
    (result,) = llm.generate(TEXTS[3], sampling)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    for choice in result.outputs:
        assert choice.logprobs is not None
        assert [score.token_id for score in choice.logprobs] == choice.token_ids


def test_choices_but_the_first_take_the_prompt_from_the_cache(engines: dict[str, LLM]) -> None:
    llm = engines["in process"]
    before = llm._backend.engine.stats().cached_tokens
    (result,) = llm.generate(TEXTS[3], SamplingParams(seed=1, n=2, max_tokens=4, prompt_logprobs=1))
    pages = (len(result.prompt_token_ids) - 1) // PAGE
    assert llm._backend.engine.stats().cached_tokens - before == pages * PAGE > 0
    assert result.num_cached_tokens == 0


def test_a_stop_text_ends_the_work_too(engines: dict[str, LLM]) -> None:
    llm = engines["in process"]
    before = llm._backend.engine.stats().generated_tokens
    (result,) = llm.generate(TEXTS[0], SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stop=("e",)))
    assert result.outputs[0].finish_reason == "stop"
    generated = llm._backend.engine.stats().generated_tokens - before
    num_drafts = max(llm.settings.spec.tiers)  # that the last step may verify
    assert generated <= len(result.outputs[0].token_ids) + 1 + num_drafts


@pytest.mark.parametrize("llm", some(MODES, "processes"), indirect=True)
def test_any_number_of_prompts_is_read_as_there_is_room(llm: LLM) -> None:
    read = 0

    def requests() -> Iterator[tuple[str, SamplingParams]]:
        nonlocal read
        for _ in range(60):
            read += 1
            yield TEXTS[0], FEW

    results = llm.generate_each(requests())
    first = next(results)
    assert read < 40, "all prompts were read before the first result"
    rest = list(results)
    assert read == 60
    assert {tuple(result.outputs[0].token_ids) for result in [first, *rest]} == {tuple(first.outputs[0].token_ids)}


def test_leaving_early_frees_the_engine(llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    results = llm.generate_each([(TEXTS[0], GREEDY), *[(text, long) for text in TEXTS]])
    assert next(results).outputs[0].finish_reason == "length"
    results.close()
    assert len(tokens_of(llm.generate(TEXTS[0], GREEDY))[0]) == 24


def test_a_conversation_is_rendered_by_the_template(llm: LLM) -> None:
    asked = "I would like to find a place to eat in San Jose."
    (result,) = llm.chat([{"role": "user", "content": asked}], GREEDY)
    assert result.outputs[0].token_ids == tokens_of(llm.generate(TEXTS[1], GREEDY))[0]
    both = llm.chat([[{"role": "user", "content": asked}], [{"role": "user", "content": "Hello"}]], GREEDY)
    assert both[0].outputs[0].token_ids == result.outputs[0].token_ids
    with pytest.raises(RequestError, match="role"):
        llm.chat([{"role": "nobody", "content": "x"}])
    with pytest.raises(RequestError) as refused:
        llm.chat([{"role": "user", "content": "x"}], tools=[{"type": "hammer"}])
    assert (refused.value.param or "").startswith("tools[0]")


def test_the_model_says_how_to_sample_where_nobody_does(engines: dict[str, LLM]) -> None:
    llm = engines["in process"]
    assert (llm.default_sampling.temperature, llm.default_sampling.top_p) == (0.6, 0.9)
    with LLM(in_process=True, sampling_defaults="openai", **SMALL) as plain:
        assert plain.default_sampling == SamplingParams()


def test_the_second_turn_of_a_chat_finds_the_whole_first(llm: LLM) -> None:
    """Sampled replies are rarely spelled the tokenizer's way; their tokens are remembered."""
    hidden = dict.fromkeys(llm.tokenizer.hidden_ids, -100.0)
    sampling = SamplingParams(temperature=5.0, seed=3, max_tokens=60, logit_bias=hidden)
    opening = {"role": "user", "content": "Find me a place to eat, please, somewhere near the station."}
    (first,) = llm.chat([opening], sampling)
    reply = first.outputs[0]
    spelled = llm.tokenizer.encode(reply.text, add_special_tokens=False).tolist()
    assert spelled != reply.token_ids, "the case is no case"
    history = [opening, {"role": "assistant", "content": reply.text}, {"role": "user", "content": "And then?"}]
    (second,) = llm.chat(history, sampling)
    known = first.prompt_token_ids + reply.token_ids
    assert second.prompt_token_ids[: len(known)] == known
    # What was sampled last was never computed.
    assert second.num_cached_tokens == (len(known) - 1) // PAGE * PAGE


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_arrays_are_prompts_and_int32_ones_are_taken_as_they_are(llm: LLM, dtype: Any) -> None:
    ids = llm.tokenizer.encode(TEXTS[1], add_special_tokens=True).astype(dtype)
    several = llm.generate([ids, TEXTS[0], ids[::-1]], FEW)
    assert [result.prompt_token_ids for result in several[::2]] == [ids.tolist(), ids[::-1].tolist()]
    assert tokens_of(llm.generate(np.stack([ids, ids]), FEW)) == 2 * tokens_of(several[:1])
    assert (llm.generate(ids, FEW)[0].tokens is ids) == (dtype is np.int32)


@pytest.mark.parametrize("llm", some(MODES, "in process"), indirect=True)
def test_the_first_prompts_run_while_the_rest_are_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    taken = ChoiceBuilder.take
    num_read = 0
    encode = LLM._encode

    def reading(self: LLM, prompt: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return encode(self, prompt)

    def taking(self: ChoiceBuilder, *news: Any) -> bool:
        begun.append(num_read)
        return taken(self, *news)

    monkeypatch.setattr(LLM, "_encode", reading)
    monkeypatch.setattr(ChoiceBuilder, "take", taking)
    llm.generate([TEXTS[0]] * 40, FEW)
    assert num_read == 40
    assert begun[0] < 40, "all prompts were read before the first had a token"


def test_a_request_that_fails_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(llm.generate(TEXTS, GREEDY))
    curse(llm, llm.encode(TEXTS[1]), monkeypatch)
    results = llm.generate(TEXTS, GREEDY)
    assert [type(result.error) for result in results] == [type(None), EngineError, type(None), type(None)]
    assert tokens_of([results[at] for at in (0, 2, 3)]) == [expected[at] for at in (0, 2, 3)]
    with pytest.raises(EngineError, match="cursed"):
        print(results[1].outputs)
    monkeypatch.undo()
    assert tokens_of(llm.generate(TEXTS, GREEDY)) == expected


def curse(llm: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the engine fail every request with this prompt, as it would by a fault of its own."""
    backend: Any = llm._backend
    if not isinstance(backend, InProcess):
        generate = backend._client.generate

        async def failing(tokens: Any, *args: Any, **kwargs: Any) -> Any:
            async for delta in generate(tokens, *args, **kwargs):
                if tokens.tolist() == prompt:
                    raise EngineError("the request failed: cursed")
                yield delta

        monkeypatch.setattr(backend._client, "generate", failing)
        return
    engine, cursed = backend.engine, set[int]()
    add, step = engine.add, engine.step

    def adding(admit: Any, tokens: Any) -> None:
        if tokens.tolist() == prompt:
            cursed.add(admit.uid)
        add(admit, tokens)

    def stepping() -> Any:
        updates = step()
        if updates is not None and cursed:
            uid = cursed.pop()
            engine.abort([uid])
            updates.failed.append((uid, "engine_error", "cursed"))
        return updates

    monkeypatch.setattr(engine, "add", adding)
    monkeypatch.setattr(engine, "step", stepping)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "kind", "words"),
    [
        ([[]], RequestError, "empty"),
        ([4096], RequestError, "from 0 to 4095"),
        ([-1], RequestError, "from 0 to 4095"),
        ([[1.5]], RequestError, "integers"),
        ([[2, "x"]], RequestError, "integers"),
        ([5] * 512, ContextLengthError, "512 tokens"),
        ("word " * 600, ContextLengthError, "512 is the limit"),
        ("a\ud800b", RequestError, "lone surrogate"),
    ],
    ids=["empty", "beyond the vocabulary", "-1", "fraction", "text", "too many ids", "too long a text", "surrogate"],
)
def test_a_wrong_prompt_is_refused_and_the_next_one_served(
    llm: LLM, prompt: Any, kind: type[HiserveError], words: str
) -> None:
    with pytest.raises(kind, match=words) as refused:
        llm.generate(prompt, FEW)
    assert type(refused.value) is kind
    assert refused.value.param == "prompt"
    with pytest.raises(kind):  # one wrong prompt refuses its whole batch
        llm.generate([TEXTS[0], prompt[0] if isinstance(prompt[0], list) else prompt], FEW)
    assert len(tokens_of(llm.generate(TEXTS[0], FEW))[0]) == 6


@pytest.mark.parametrize("field", [{"stop_token_ids": (4096,)}, {"logit_bias": {5000: 1.0}}])
def test_tokens_the_model_does_not_have_are_refused_in_settings_too(llm: LLM, field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="between 0 and 4095") as refused:
        llm.generate(TEXTS[0], SamplingParams(**field))
    assert refused.value.param == next(iter(field))


def test_as_many_settings_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling parameters for 4 prompts"):
        llm.generate(TEXTS, SEEDED[:2])


def test_ctrl_c_ends_the_call_and_its_requests_and_nothing_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(llm.generate(TEXTS[0], GREEDY))
    seen: list[int] = []  # tokens that came before the call had ended
    signals = [signal.SIGINT]  # one, whatever becomes of the rest: another would end the tests

    def take(builder: ChoiceBuilder, delta: TokenDelta) -> bool:
        while signals:
            os.kill(os.getpid(), signals.pop())
        seen.extend(delta.tokens)
        return original(builder, delta)

    original = ChoiceBuilder.take
    long = SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(ChoiceBuilder, "take", take)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([TEXTS[0]] * 16, long)
    assert 0 < len(seen) < 16 * 480 / 2, "the interrupted requests ran to their end"
    assert tokens_of(llm.generate(TEXTS[0], GREEDY)) == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_page": 5}, "'kv_page'. Did you mean --kv-pages"),
        ({"page_size": 0}, "--page-size is 0; the least is 1"),
        ({"dtype": "int3"}, "--dtype is 'int3'"),
        ({"max_model_len": 9000}, "the model's context is 8192"),
        ({"in_process": True, "replicas": 2}, "in_process"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(settings: dict[str, Any], words: str) -> None:
    before = threading.active_count(), children(os.getpid())
    with pytest.raises(ConfigError, match=words):
        LLM(**settings)
    assert (threading.active_count(), children(os.getpid())) == before


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        LLM(tmp_path / "nowhere")


# --- the end ------------------------------------------------------------------------------------


def test_the_end_of_the_block_leaves_no_process_and_no_thread() -> None:
    threads, before = threading.active_count(), set(children(os.getpid()))
    with LLM(**SMALL) as llm:
        started = set(children(os.getpid())) - before
        started |= {pid for child in started for pid in children(child)}
        assert len(started) == 2  # scheduler and worker
        assert llm.generate("Hello", GREEDY)
    wait_dead(started)
    assert threading.active_count() == threads
    llm.close()  # again: nothing happens
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate("Hello", GREEDY)


def test_in_process_needs_no_other_process() -> None:
    threads, before = threading.active_count(), children(os.getpid())
    with LLM(in_process=True, **SMALL) as llm:
        assert llm.generate("Hello", GREEDY)
        assert children(os.getpid()) == before
    assert threading.active_count() == threads
    llm.close()
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate("Hello", GREEDY)


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["exit", "killed"])
def test_a_program_that_never_closes_leaves_no_process(tmp_path: Path, end: str) -> None:
    program = (
        "import os, signal\nfrom hiserve import LLM\nfrom tests.helpers.processes import children\n"
        f"llm = LLM(**{SMALL!r})\n"
        "first = children(os.getpid())\n"
        "print(*first, *(pid for child in first for pid in children(child)), flush=True)\n" + end
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    if end:  # nothing of Python's own end is left: its processes may be forks
        done = forks.run(command, environment)
    else:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
    assert done.returncode == (-9 if end else 0), done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_dead(pids)


# --- what is measured ---------------------------------------------------------------------------


def test_a_flushed_cache_gives_nothing_and_tokens_tell_when_they_came(llm: LLM) -> None:
    prompt = [*range(100, 160)]
    llm.generate(prompt, GREEDY)
    begin = time.perf_counter()
    (hit,) = llm.generate(prompt, GREEDY)
    end = time.perf_counter()
    assert hit.num_cached_tokens >= 3 * PAGE
    assert llm.flush() > 0
    (missed,) = llm.generate(prompt, GREEDY)
    assert missed.num_cached_tokens == 0
    assert missed.outputs[0].token_ids == hit.outputs[0].token_ids
    assert begin < hit.outputs[0].first_token_s < hit.outputs[0].end_s < end


def test_drafts_tell_what_they_cost_where_their_number_is_chosen() -> None:
    fixed, chosen = ({**SMALL, "spec": "ngram", "spec_steps": steps} for steps in (1, "auto"))
    with LLM(in_process=True, **fixed) as one, LLM(in_process=True, **chosen) as auto:
        assert one.draft_costs is None
        assert auto.draft_costs is not None
        assert auto.draft_costs.tiers == [0, 1, 2, 3, 5]


# --- two workers --------------------------------------------------------------------------------


@pytest.mark.wide  # test_processes.py asks the same of the client
def test_a_conversation_returns_to_the_worker_that_holds_its_prefix() -> None:
    rng = np.random.default_rng(11)
    histories = [rng.integers(3, 4096, size=100).tolist() for _ in range(4)]
    with forked_engines(), LLM(replicas=2, **SMALL) as llm:
        for turn in range(3):
            if turn == 0:  # all at once: two conversations on each worker
                results = llm.generate(histories, GREEDY)
            else:  # one by one, on two idle workers: only the prefix tells them apart
                order = rng.permutation(len(histories)).tolist()
                by_conversation = {at: llm.generate(histories[at], GREEDY)[0] for at in order}
                results = [by_conversation[at] for at in range(len(histories))]
            for at, result in enumerate(results):
                known = len(histories[at]) - 3 if turn else 0
                assert result.num_cached_tokens >= known - PAGE, f"turn {turn} of conversation {at}"
                assert turn or not result.num_cached_tokens
                histories[at] += [*result.outputs[0].token_ids, *rng.integers(3, 4096, size=3).tolist()]
