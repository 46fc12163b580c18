"""Constrained replies: those of a reference that tries every token, and the same however they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import regex
import torch

from hiserve import LLM, SamplingParams
from hiserve.core.plan import RowAdmit
from hiserve.core.request import Grammar
from hiserve.engine.grammars import GrammarRows
from hiserve.grammar import matcher as matchers
from hiserve.llm.outputs import RequestOutput
from hiserve.sampling.params import SamplingRows
from hiserve.sampling.sampler import sample
from tests.helpers.cache_paths import SMALL_MODEL
from tests.helpers.grammars import (
    GRAMMARS,
    PATTERN,
    compile_first,
    is_valid,
    nano_tokenizer,
    nano_vocabulary,
)
from tests.helpers.models import load_transformers
from tests.helpers.oracle import next_logits
from tests.helpers.small_model import small_model
from tests.helpers.tiered import engine_of
from tests.helpers.widening import some

TEXTS = ("I would like a large latte with oat milk, and", "Hello! Can you help me find a restaurant for tonight?")
END, NUM_NEW = 1, 40
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=17, max_tokens=NUM_NEW)
ASKED = {
    "greedy": SamplingParams(temperature=0.0, seed=1, max_tokens=NUM_NEW),
    "free": SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_NEW),
    "filtered": DRAWN,
    "few": SamplingParams(temperature=1.1, top_k=20, seed=9, max_tokens=NUM_NEW),
    "penalties": msgspec.structs.replace(DRAWN, repetition_penalty=1.2, frequency_penalty=0.4, logit_bias={5: 2.0}),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "drafts": {"spec": "ngram", "spec_steps": 3},
    "head": {"spec": "eagle3", "spec_steps": 2},
    "ahead": {"overlap": 1, "spec": "off", "grammar_threads": 2},
    "ahead with drafts": {"overlap": 1, "spec": "eagle3", "spec_steps": 2, "grammar_threads": 2},
    "few pages": {"overlap": 0, "spec": "off", "kv_pages": 11},
    "few pages with drafts": {"overlap": 1, "spec": "ngram", "spec_steps": 3, "kv_pages": 12},
}


def grammars_of(llm: LLM) -> GrammarRows:
    return engine_of(llm)._planner.grammars


def replies(llm: LLM, prompts: list[str], each: list[SamplingParams]) -> list[RequestOutput]:
    compile_first(grammars_of(llm), each)
    done = llm.generate(prompts, each)
    assert [output.error for output in done] == [None] * len(done)
    return done


def constrained(name: str, sampling: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(sampling, grammar=GRAMMARS[name])


Allowed = Callable[[list[int]], list[bool]]


@pytest.fixture(scope="module")
def model() -> Any:
    return load_transformers(Path(small_model()), torch.float64)


def brute_force(model: Any, allowed_after: Allowed, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """Generates with transformers' logits, each token of the vocabulary tried; ends where only an end token may follow."""
    rows = SamplingRows(2, torch.device("cpu"))
    unmasked = msgspec.structs.replace(sampling, grammar=None)
    rows.write([RowAdmit(1, np.array(prompt, dtype=np.int32), len(prompt), 0, unmasked)])
    tokens, said, computed = list(prompt), list[int](), None
    while len(said) < NUM_NEW:
        with torch.inference_mode():
            logits, computed = next_logits(model, said[-1:] or prompt, computed)
        allowed = torch.tensor(allowed_after(said))
        assert len(allowed) == logits.shape[1]
        if said and allowed.nonzero().flatten().tolist() in ([], [END]):
            return said
        known = torch.tensor([tokens] * 2, dtype=torch.int32)
        batch = rows.gather(np.array([1], dtype=np.int32), torch.tensor([1]), torch.tensor([len(tokens)]), known)
        said.append(int(sample(logits.masked_fill(~allowed, -torch.inf), batch)))
        tokens.append(said[-1])
        if said[-1] == END:
            return said
    return said


def by_regex() -> Allowed:
    """Whether a text may go on by each token, as the module ``regex`` says."""
    tokenizer, pattern = nano_tokenizer(), regex.compile(PATTERN)
    spelled = {token: tokenizer.decode([token], skip_hidden=False) for token in tokenizer.vocab}
    hidden = tokenizer.hidden_ids | {END}

    def allowed_after(said: list[int]) -> list[bool]:
        text = "".join(spelled[each] for each in said)
        is_end = pattern.fullmatch(text) is not None
        return [
            token == END and is_end
            if token in hidden
            else pattern.fullmatch(text + spelled[token], partial=True) is not None
            for token in range(len(spelled))
        ]

    return allowed_after


def by_single_tokens(grammar: Grammar) -> Allowed:
    """Whether the library takes each token alone, without any mask; where one text must follow, its first token alone may."""
    matcher, place, vocabulary = nano_vocabulary().compile(grammar), list[int](), range(len(nano_tokenizer().vocab))

    def allowed_after(said: list[int]) -> list[bool]:
        matcher.advance(said[len(place) :])
        place.extend(said[len(place) :])
        if forced := matcher._inner.compute_ff_tokens():
            return [token == forced[0] for token in vocabulary]
        return [matcher._inner.validate_tokens([token]) == 1 for token in vocabulary]

    return allowed_after


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with LLM(spec="off", **SMALL_MODEL) as llm:
        yield llm


# The sampler sees a mask and never its grammar: all ways of sampling meet the one that another library judges, one each other.
BY_REFERENCE: dict[str, tuple[str, tuple[str, ...]]] = {
    "regex": (TEXTS[0], tuple(ASKED)),
    "json": (TEXTS[1], ("greedy",)),
    "calls": (TEXTS[0], ("few",)),
    "tagged calls": (TEXTS[1], ("filtered",)),
    "calls or json": (TEXTS[1], ("free",)),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=[] if how in usual else [pytest.mark.long])
        for name, (_, usual) in BY_REFERENCE.items()
        for how in ASKED
    ],
)
def test_tokens_are_those_of_a_reference_that_tries_every_token(name: str, how: str, model: Any, engine: LLM) -> None:
    text, _ = BY_REFERENCE[name]
    allowed_after = by_regex() if name == "regex" else by_single_tokens(GRAMMARS[name])
    (output,) = replies(engine, [text], [constrained(name, ASKED[how])])
    wanted = brute_force(model, allowed_after, engine.encode(text), ASKED[how])
    assert output.outputs[0].token_ids == wanted, output.outputs[0].text
    assert len(set(wanted)) > 5
    assert is_valid(name, output.outputs[0].text, is_cut=output.outputs[0].finish_reason == "length")


@pytest.fixture(scope="module")
def plain() -> list[tuple[list[int], str | None]]:
    """Each request alone, one step after the other, without drafts."""
    with LLM(spec="off", overlap=0, **SMALL_MODEL) as llm:
        done = [replies(llm, [text], [sampling])[0].outputs[0] for text, sampling in requests()]
        assert grammars_of(llm).stats().masks > 100
    for (_, sampling), output in zip(requests(), done, strict=True):
        name = next((name for name, grammar in GRAMMARS.items() if grammar == sampling.grammar), None)
        assert name is None or is_valid(name, output.text, is_cut=output.finish_reason == "length"), output.text
        assert name is None or END not in output.token_ids[:-1]
    assert {output.finish_reason for output in done} == {"stop", "length"}
    return [(output.token_ids, output.finish_reason) for output in done]


def requests() -> list[tuple[str, SamplingParams]]:
    """Each grammar, drawn in one way of three, which take turns; some without one."""
    hard = {"min_tokens": 30, "ignore_eos": True}  # neither may hold the end of a grammar back
    asked = [
        (TEXTS[index % 2], msgspec.structs.replace(ASKED[how], grammar=grammar, **(hard if index % 2 else {})))
        for index, (grammar, how) in enumerate(zip(GRAMMARS.values(), cycle(("greedy", "free", "filtered"))))
    ]
    return asked + [(text, ASKED[how]) for text in TEXTS for how in ("greedy", "free")]


@pytest.mark.parametrize("variant", some(VARIANTS, "ahead with drafts", "few pages"))
def test_replies_do_not_depend_on_drafts_overlap_or_other_requests(
    plain: list[tuple[list[int], str | None]], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matchers, "LEAST_ADVANCED", 2)  # side by side, where there are several threads
    with LLM(**SMALL_MODEL | VARIANTS[variant]) as llm:
        texts, each = zip(*requests(), strict=True)
        done = [output.outputs[0] for output in replies(llm, list(texts), list(each))]
        stats, grammars = engine_of(llm).stats(), grammars_of(llm)
    assert [(output.token_ids, output.finish_reason) for output in done] == plain
    if "pages" in variant:
        assert stats.preemptions > 0
    if "spec" in VARIANTS[variant] and VARIANTS[variant]["spec"] != "off":
        used = sum(stats.drafts.by_source.values(), start=type(next(iter(stats.drafts.by_source.values())))())
        assert sum(used.accepted_per_position) > 0
        assert grammars.stats().refused_drafts > 0


def test_a_reply_ends_with_its_grammar_inside_an_accepted_run() -> None:
    """The prompt says the reply already, so that drafts are accepted up to the last token and guess beyond it."""
    reply = "the number is 12345 and the end is here."
    grammar = Grammar.of("regex", regex.escape(reply, literal_spaces=True).replace("\\.", "[.]"))
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=60, grammar=grammar)
    with LLM(spec="ngram", spec_steps=4, **SMALL_MODEL) as llm:
        (output,) = replies(llm, [f"{reply} And then more. {reply} And then more. Say it:"], [sampling])
        stats = engine_of(llm).stats()
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (reply, "stop")
    used = next(iter(stats.drafts.by_source.values()))
    assert sum(used.accepted_per_position) > 3


def test_scores_are_the_models_own() -> None:
    """A token that the mask forces has the log-probability that the model gives it without any mask."""
    with LLM(spec="off", **SMALL_MODEL) as llm:
        forced = constrained("choice", SamplingParams(temperature=0.0, seed=1, max_tokens=8, logprobs=2))
        (output,) = replies(llm, [TEXTS[0]], [forced])
        tokens = [*llm.encode(TEXTS[0]), *output.outputs[0].token_ids]
        scored = SamplingParams(temperature=0.0, seed=1, max_tokens=1, prompt_logprobs=2)
        (prompt,) = llm.generate([tokens], scored)
    told = [each.logprob for each in output.outputs[0].logprobs or ()]
    wanted = [each.logprob for each in (prompt.prompt_logprobs or ())[-len(told) :] if each is not None]
    np.testing.assert_allclose(told, wanted, atol=1e-9)
    assert min(told) < -3, "the mask forced nothing"


@pytest.mark.parametrize("end", ["<|system|>", "</think>"], ids=["token", "text"])
@pytest.mark.parametrize("name", some(["drafts", "ahead", "few pages"], "drafts"))
def test_a_budget_ends_the_thought_and_changes_nothing_else(name: str, end: str) -> None:
    budget, mark = 7, nano_tokenizer().encode(end, add_special_tokens=False).tolist()
    asked = [params for about, params in ASKED.items() if about != "penalties"]
    with LLM(**(SMALL_MODEL | VARIANTS[name])) as llm:
        thought = budget + len(mark)
        for params in asked:
            free = msgspec.structs.replace(params, max_tokens=budget)
            limited = msgspec.structs.replace(
                params,
                grammar=Grammar.of("any", "", end).within(budget),
                max_tokens=thought if params.temperature else NUM_NEW,
            )
            (alone,), (held,) = (replies(llm, [TEXTS[0]], [each]) for each in (free, limited))
            said = held.outputs[0].token_ids
            assert said[:budget] == alone.outputs[0].token_ids, "within the budget"
            assert said[budget:thought] == mark
            prompt = [*held.prompt_token_ids, *said[:thought]]
            if not params.temperature:
                rest = msgspec.structs.replace(params, max_tokens=NUM_NEW - thought)
                assert said[thought:] == llm.generate([prompt], [rest])[0].outputs[0].token_ids
