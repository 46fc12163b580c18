"""What speculation on a GPU is compared with: the least cost of a cycle, and the best fixed number of drafts."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from benchmarks.gpu.figures import CycleLimits, Limits
from benchmarks.gpu.sizes import BARS, LARGE, TINY
from benchmarks.gpu.spec import Held, adaptive, same_tokens
from benchmarks.widen import bundled_heads
from hiserve.bench.equality import Equality
from hiserve.models.builtin_shapes import shape_config
from hiserve.models.draft_config import DraftKind, find_draft
from hiserve.models.model_config import NANO, find_model, read_model_config

H200 = {"copy_bytes_per_s": 4.3e12, "matmul_flop_per_s": 790e12}
HIDDEN, DRAFT_VOCAB = 4096, 32_000
# One layer whose attention reads two streams, its own head of 32,000 tokens, and what joins three states.
EAGLE3 = CycleLimits(
    model=Limits.of(shape_config(LARGE), "bfloat16"),
    element=2,
    head_params=128_256 * HIDDEN,
    fuse_params=3 * HIDDEN * HIDDEN,
    layer_params=375_000_000 - DRAFT_VOCAB * HIDDEN,
    draft_head_params=DRAFT_VOCAB * HIDDEN,
)


@pytest.mark.parametrize(
    ("rows", "num_draft", "cost"),
    [(1, 0, 1.0), (1, 3, 1.15), (1, 5, 1.25), (8, 3, 1.15), (128, 3, 1.91), (128, 5, 2.60)],
)
def test_the_least_cost_of_a_cycle_is_bytes_where_rows_are_few_and_products_where_they_are_many(
    rows: int, num_draft: int, cost: float
) -> None:
    """The figures are those of a survey, which computes one token a row in every draft forward."""
    assert EAGLE3.cost(rows, num_draft, 1024, H200) == pytest.approx(cost, rel=0.02 if rows < 128 else 0.04)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_head_is_counted_tensor_by_tensor(kind: DraftKind) -> None:
    folder = find_model(NANO)
    model = read_model_config(folder)
    limits = CycleLimits.of(model, find_draft(kind, None, folder, model), "bfloat16", model.vocab_size)
    sizes = {name: each.numel() for name, each in load_file(bundled_heads(folder)[kind] / "model.safetensors").items()}
    read = {name: size for name, size in sizes.items() if name not in ("d2t", "t2d")}
    assert limits.fuse_params == read.pop("fc.weight", 0)
    assert limits.draft_head_params == read.pop("lm_head.weight", model.vocab_size * model.hidden_size)
    assert limits.layer_params == pytest.approx(sum(read.values()), rel=0.001)


def test_what_chooses_its_drafts_is_compared_with_the_best_that_does_not_and_none_is_one_of_them() -> None:
    rates = {"off": 110.0, "0": 100.0, "2": 120.0, "auto": 114.0}
    figure = adaptive(TINY.spec, "mtp", 4, rates)
    assert (figure.ratio, figure.bar, figure.is_met) == (114 / 120, BARS["adaptive"], False)
    assert figure.against == "2 drafts, 120 tokens/s; 110 without speculation"
    figure = adaptive(TINY.spec, "mtp", 4, rates | {"off": 130.0})
    assert (figure.ratio, figure.against) == (114 / 130, "no head, 130 tokens/s; 130 without speculation")


def test_replies_are_the_same_when_every_case_keeps_the_margin() -> None:
    same = Equality(verdict="same", num_replies=4, num_tokens=40)
    near = Equality(verdict="within the margin", num_replies=4, num_tokens=40, num_differing=1)
    far = Equality(verdict="different", num_replies=4, num_tokens=40, num_differing=1)
    kept = same_tokens(TINY.spec, "mtp", [{"1": same, "2": near}])
    assert (kept.value, kept.unit, kept.is_met) == (7, "of 8", True)
    lost = same_tokens(TINY.spec, "mtp", [{"1": same}, {"1": far}])
    assert (lost.ratio, lost.is_met) == (0.0, False)


def test_held_drafts_are_the_same_number_whatever_rows_may_have() -> None:
    held = Held(3)
    held.record()
    assert [held.choose(allowed, 100.0) for allowed in ([], [1], [5, 5])] == [3, 3, 3]  # type: ignore[arg-type]
