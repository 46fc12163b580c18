"""A whole engine whose requests are aborted while it drafts: no page is lost, and the others' tokens stay.

Every point and state is met by ``tests/invariants/test_spec_aborts.py``, without a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from tests.helpers.cache_paths import HOST, SMALL_MODEL, pool
from tests.helpers.dialogues import conversations, shuffled, trained
from tests.helpers.gated import send
from tests.helpers.small_model import small_model
from tests.helpers.storm import load_whatever_it_costs
from tests.helpers.tiered import cache_of, check_whole, counts_of, engine_of
from tests.invariants.page_checks import check_pages

SEED, STEPS = 29, 3
ABORT_RATE = 0.1


class Aborts:
    """Aborts a request now and then, before or after what an engine does.

    Args:
        llm: Whose engine it is.
        rng: Decides.

    Attributes:
        live: Requests that have not ended.
        aborted: Those that were aborted.
        seen: How often, by what was done.
    """

    def __init__(self, llm: LLM, rng: np.random.Generator) -> None:
        self._llm, self._rng = llm, rng
        self.live: set[int] = set()
        self.aborted: set[int] = set()
        self.seen: Counter[str] = Counter()

    def around(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def wrapped(*arguments: Any) -> Any:
            self.maybe(f"before {name}")
            result = original(*arguments)
            self.maybe(f"after {name}")
            return result

        setattr(owner, name, wrapped)

    def maybe(self, where: str) -> None:
        if self.live and self._rng.random() < ABORT_RATE:
            uid = int(self._rng.choice(sorted(self.live)))
            self.live.remove(uid)
            self.aborted.add(uid)
            self.seen[where] += 1
            engine_of(self._llm).abort([uid])


@pytest.mark.parametrize("num_requests", [20, pytest.param(600, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("depth", "points"),
    [
        (0, ("plan", "run", "propose", "commit")),
        pytest.param(1, ("plan", "commit"), marks=pytest.mark.long),  # steps run in another thread
    ],
)
def test_an_abort_beside_drafts_loses_no_page_and_changes_nobodys_tokens(
    depth: int, points: tuple[str, ...], num_requests: int
) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    greedy = SamplingParams(temperature=0.0, seed=0, max_tokens=16, ignore_eos=True)
    options = SMALL_MODEL | pool(4, 96) | HOST | {"max_model_len": 96, "overlap": depth}
    with LLM(**options, spec=trained("eagle3", small_model()), spec_steps=STEPS) as llm:
        engine: Any = engine_of(llm)
        load_whatever_it_costs(llm)
        prompts = shuffled(rng, conversations(llm)[:4], num_requests)
        whole = {
            tuple(prompt): llm.generate([prompt], greedy)[0].outputs[0].token_ids for prompt in set(map(tuple, prompts))
        }
        aborts, said, waiting = Aborts(llm, rng), dict[int, list[int]](), list(enumerate(prompts))
        for name in points:
            aborts.around(engine._executor._runners if name in ("run", "propose") else engine._planner, name)
        while waiting or engine.has_work:
            while waiting and len(aborts.live) < 6:
                uid, prompt = waiting.pop()
                aborts.live.add(uid)
                send(engine, uid, prompt, greedy)
            report = engine.step()
            check_pages(engine._planner, cache_of(llm))
            at = 0
            for uid, count, finish in (
                () if report is None else zip(report.uids, report.counts, report.finishes, strict=True)
            ):
                said.setdefault(uid, []).extend(report.tokens[at : at + count].tolist())
                at += count
                if finish:
                    aborts.live.discard(uid)
        for uid, prompt in enumerate(prompts):
            heard, num_heard = said.get(uid, []), len(said.get(uid, [])) if uid in aborts.aborted else None
            assert heard == whole[tuple(prompt)][:num_heard], f"request {uid}"
        assert counts_of(llm).loads.num_fulfilled > 0
        assert len(aborts.aborted) < num_requests
        assert {f"{when} {name}" for when in ("before", "after") for name in points} == aborts.seen.keys()
        check_whole(llm)
