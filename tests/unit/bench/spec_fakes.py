"""An offline API that answers by rote: replies, drafts, times and cached tokens are given to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from hiserve.bench.spec_engine import BatchResult, Tokens
from hiserve.config.options import Options, make_options
from hiserve.core.startup_measurements import StepCosts
from hiserve.core.usage import CacheUse, DraftUse
from tests.helpers.step_costs import step_costs

Reply = Callable[[Tokens], Tokens]
PAGE = 4


def batch(**given: Any) -> BatchResult:
    usual: dict[str, Any] = {
        "seconds": 2.0,
        "num_decoded": 40,
        "num_steps": 20,
        "drafts": DraftUse(10, 30, (8, 6, 4)),
        "cached_tokens": {"device": 16, "host": 0, "store": 0},
    }
    return BatchResult(**(usual | given))


class FakeEngine:
    """Replies as it is told, and keeps prompts where an engine would.

    Args:
        reply: What follows a prompt; as long as is asked for.
        drafts: Told with every reply.
        settings: Of its configuration.
        score: Log-probability of a token and the best one, by the tokens before it and it.

    Attributes:
        log: What was asked, in words.
    """

    def __init__(
        self,
        reply: Reply,
        *,
        drafts: DraftUse | None = None,
        score: Callable[[Tokens, int], tuple[float, float]] | None = None,
        **settings: Any,
    ) -> None:
        self.settings: Options = make_options(**({"dtype": "float64", "max_model_len": 500} | settings))
        self.draft_costs: StepCosts | None = None
        self.log: list[str] = []
        self._reply = reply
        self._drafts = drafts
        self._score = score
        self._tiers: dict[tuple[int, ...], set[str]] = {}

    def flush(self, tiers: Sequence[str] = ("device", "host")) -> int:
        self.log.append("flush " + " ".join(tiers))
        for kept in self._tiers.values():
            kept.difference_update(tiers)
        return 0

    def generate(self, prompts: list[Tokens], sampling: Any = None) -> list[Any]:
        params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        self.log.append(f"{len(prompts)} prompts, {params[0].max_tokens} tokens at {params[0].temperature:g}")
        return [self._answer(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def _answer(self, prompt: Tokens, params: Any) -> Any:
        kept = self._tiers.setdefault(tuple(prompt), set())
        found = next((tier for tier in ("device", "host") if tier in kept), None)
        cached = CacheUse(**({} if found is None else {found: len(prompt) // PAGE * PAGE}))
        kept.update(("device", "host"))
        reply = self._reply(prompt)[: params.max_tokens]
        choice = SimpleNamespace(
            token_ids=reply,
            drafts=self._drafts,
            first_token_s=1.0,
            end_s=1.0 + 0.1 * len(reply),
            logprobs=self._scored(prompt + reply, len(prompt)) if params.logprobs is not None else None,
        )
        scores = None if params.prompt_logprobs is None else [None, *self._scored(prompt, 1)]
        return SimpleNamespace(outputs=[choice], cached=cached, prompt_logprobs=scores)

    def _scored(self, tokens: Tokens, start: int) -> list[Any]:
        assert self._score is not None
        found = []
        for at in range(start, len(tokens)):
            logprob, best = self._score(tokens[:at], tokens[at])
            found.append(SimpleNamespace(logprob=logprob, top={-1: best}))
        return found


def counting(prompt: Tokens) -> Tokens:
    """Goes on counting from the last token."""
    return list(range(prompt[-1] + 1, prompt[-1] + 101))


def costs() -> StepCosts:
    return step_costs(
        rows=np.array([1, 4]),
        tiers=np.array([0, 1, 3]),
        verify=np.array([[2.0, 2.5, 3.0], [4.0, 5.0, 7.0]]),
        follow=np.array([[0.5, 0.6, 0.8], [1.0, 1.1, 1.2]]),
        draft=np.array([0.25, 0.5]),
    )


class Opener:
    """Makes engines; remembers with what, and which are open."""

    def __init__(self, make: Callable[[dict[str, Any]], FakeEngine]) -> None:
        self.settings: list[dict[str, Any]] = []
        self.most_open = 0
        self._make = make
        self._num_open = 0

    @contextmanager
    def __call__(self, settings: Any) -> Iterator[FakeEngine]:
        self.settings.append(dict(settings))
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        yield self._make(self.settings[-1])
        self._num_open -= 1
