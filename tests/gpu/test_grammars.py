"""Constrained replies on a device: its draw kernels, masks that arrive while a forward runs, and the same tokens with and
without graphs, drafts and overlap."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.core.plan import NO_MASK, MaskPlan
from hiserve.engine.graph_check import no_sync
from hiserve.kernels import draw, step_reference
from hiserve.kernels.step_ops import TokenMasks
from hiserve.runners import graph
from hiserve.runners.device_rows import MaskBuffers
from tests.helpers.cache_paths import SETTINGS, pool
from tests.helpers.cuda import decisions, news
from tests.helpers.grammars import GRAMMARS, is_valid
from tests.helpers.sampling import keys, random_logits, random_masks
from tests.helpers.tiered import engine_of

pytestmark = pytest.mark.gpu

TEXTS = ["I would like a small latte with oat milk, please.", "Find me a cheap hotel in Boston."]
HOW = [
    SamplingParams(temperature=0.0, seed=1, max_tokens=48),
    SamplingParams(temperature=1.0, seed=3, max_tokens=48),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=48),
]
ON_CUDA: dict[str, Any] = SETTINGS | {"device": "cuda", "dtype": "float32", "host_cache_gib": 0, **pool(16)}
VARIANTS: dict[str, dict[str, Any]] = {
    "ahead": {"graphs": "off", "spec": "off", "overlap": 1},
    "graphs": {"graphs": "all", "spec": "off", "overlap": 0},
    "graphs ahead": {"graphs": "all", "spec": "off", "overlap": 1},
    "drafts": {"graphs": "off", "spec": "eagle3", "spec_steps": 3, "overlap": 0},
    "drafts ahead": {"graphs": "off", "spec": "eagle3", "spec_steps": 3, "overlap": 1},
    "graphs with drafts": {"graphs": "all", "spec": "eagle3", "spec_steps": 3, "overlap": 1},
    "n-grams": {"graphs": "all", "spec": "ngram", "spec_steps": 3, "overlap": 1},
}
SLEEP_CYCLES = 2_000_000  # of the device: a millisecond or so


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 131_072), (5, 1303), (129, 32_001)])
def test_masked_draws_are_those_of_the_twins(dtype: torch.dtype, num_rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(7)
    logits, masks = random_logits(generator, num_rows, size, dtype), random_masks(generator, num_rows, size)
    keyed = keys(generator, num_rows)
    there = TokenMasks(masks.entries.cuda(), masks.words.cuda())
    assert torch.equal(draw.greedy(logits.cuda(), there).cpu(), step_reference.greedy(logits, masks))
    drawn = draw.draw_free(logits.cuda(), *(each.cuda() for each in keyed), None, there).cpu()
    wanted = step_reference.draw_free(logits, *keyed, None, masks)
    # The logarithms of a device differ in their last bit: seldom enough to change the best of several.
    assert (drawn != wanted).sum() <= num_rows // 50
    for row, entry in enumerate(masks.entries.tolist()):
        token = int(drawn[row])
        assert entry < 0 or int(masks.words[entry, token // 32]) >> (token % 32) & 1


def replies(**settings: Any) -> list[tuple[list[int], str | None]]:
    """Each grammar, drawn in several ways, beside rows without one."""
    asked = [msgspec.structs.replace(how, grammar=grammar) for grammar in (*GRAMMARS.values(), None) for how in HOW]
    names = [name for name in (*GRAMMARS, None) for _ in HOW]
    with LLM(**ON_CUDA | settings) as llm:
        done = [llm.generate([text] * len(asked), asked) for text in TEXTS]
        stats, grammars = engine_of(llm).stats(), engine_of(llm)._planner.grammars
    assert grammars.stats().masks > 100
    if settings["graphs"] == "all":
        assert sum(stats.graph_gate["replay"].values()) > 0
    if settings["spec"] != "off":
        assert grammars.stats().refused_drafts > 0
    outputs = [each.outputs[0] for part in done for each in part]
    for name, output in zip(names * len(TEXTS), outputs, strict=True):
        assert name is None or is_valid(name, output.text, is_cut=output.finish_reason == "length"), output.text
    return [(output.token_ids, output.finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def eager() -> list[tuple[list[int], str | None]]:
    return replies(graphs="off", spec="off", overlap=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_replies_are_those_of_eager_steps(eager: list[tuple[list[int], str | None]], variant: str) -> None:
    """In float32, where no two tokens of these replies are so close that another shape of batch changes the best."""
    assert replies(**VARIANTS[variant]) == eager


def test_each_draw_reads_the_masks_of_its_own_step() -> None:
    """The forward still runs when masks are written, and the draw when the next are, where its result was not awaited."""
    num_rows, size, rng = 48, 128_256, np.random.default_rng(5)
    generator = torch.Generator().manual_seed(5)
    logits = random_logits(generator, num_rows, size, torch.float32)
    masks, there = MaskBuffers(2 * num_rows, size, torch.device("cuda", 0)), logits.cuda()
    wanted, drawn = [], []
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        for step in range(60):
            torch.cuda._sleep(SLEEP_CYCLES)
            entries, words = masks.lend(num_rows, num_rows // 2)
            assert (entries == NO_MASK).all()
            words[:] = rng.integers(-(2**31), 2**31, words.shape, dtype=np.int64).astype(np.int32)
            entries[:] = rng.integers(-1, num_rows // 2, num_rows)
            own = TokenMasks(torch.from_numpy(entries.copy()), torch.from_numpy(words.copy()))
            wanted.append(step_reference.greedy(logits, own))
            masks.send(MaskPlan(step, entries, words))
            drawn.append(draw.greedy(there, masks.of(num_rows)))
            masks.free()
            drawn.append(draw.greedy(there, masks.of(num_rows)))
            wanted.append(step_reference.greedy(logits))
            if step % 3:
                stream.synchronize()
    stream.synchronize()
    for step, (ours, theirs) in enumerate(zip(drawn, wanted, strict=True)):
        assert torch.equal(ours.cpu(), theirs), step


@pytest.mark.parametrize("spec", [{"spec": "off"}, {"spec": "eagle3", "spec_steps": 3}], ids=["plain", "drafts"])
def test_draws_under_grammars_are_replayed_and_wait_for_nothing(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are greedy or draw from all tokens: whole steps are graphs, with the masks of each."""
    eager: list[int] = []
    inner = graph.finish_step
    monkeypatch.setattr(graph, "finish_step", lambda *given, **more: eager.append(1) or inner(*given, **more))  # type: ignore[func-returns-value]
    # A reply that is cut at 96 tokens takes 24 steps or more with three drafts, whatever the model accepts.
    asked = [
        msgspec.structs.replace(how, grammar=GRAMMARS[name], max_tokens=96)
        for name in ("json", "object")
        for how in HOW[:2]
    ]
    with LLM(**ON_CUDA | {"graphs": "all", "overlap": 1} | spec) as llm:
        for guard in (nullcontext, no_sync):  # the first time memory is pinned
            before, masks = decisions(engine_of(llm)._executor), engine_of(llm).stats().grammars.masks
            with guard():
                llm.generate(TEXTS[:1] * len(asked), asked)
        ran = news(before, decisions(engine_of(llm)._executor))
        assert engine_of(llm).stats().grammars.masks > masks + 50
    assert not eager
    assert ran["replay/decode" if spec["spec"] == "off" else "replay/verify"] > 15, ran
