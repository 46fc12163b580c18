"""Which rows go to which of two backends, and what each is told of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from hiserve.attention.paired import GraphedAttention, PairedAttention
from hiserve.attention.reference_attention import ReferenceAttention
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.core.plan import Int32Array
from tests.helpers.attention import Case

DECODES, PROMPTS = ((16, 1), (40, 1), (0, 1)), ((0, 33), (16, 5), (40, 7))


class Recorded:
    """Attends as the reference does, and keeps what it was given."""

    def __init__(self, case: Case, *, needs_host_lengths: bool = False) -> None:
        self.needs_host_lengths = needs_host_lengths
        self._attention = ReferenceAttention(case.shape)
        self.planned: list[ForwardInputs] = []
        self.num_tokens: list[int] = []

    def captured(self, num_rows: int, width: int) -> Recorded:
        return self

    def ragged(self) -> Recorded:
        return self

    def plan(self, inputs: ForwardInputs) -> None:
        self.planned.append(inputs)
        self._attention.plan(inputs)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        self.num_tokens.append(q.shape[0])
        return self._attention.forward(q, k, v, kv, layer, out)


@pytest.mark.parametrize(
    ("lengths", "num_decode"),
    [(DECODES + PROMPTS, 3), (DECODES, 3), (PROMPTS, 0), (PROMPTS + DECODES, 6), (((8, 4), (9, 2), *PROMPTS), 2)],
    ids=["mixed", "decode", "prompts", "out of order", "drafts"],
)
def test_rows_go_to_the_first_up_to_the_last_that_decodes(
    lengths: tuple[tuple[int, int], ...], num_decode: int
) -> None:
    case = Case(lengths, adjacent=False)
    case.inputs = dataclasses.replace(case.inputs, num_decode=num_decode)
    decoding, prompts = Recorded(case), Recorded(case)
    out = case.run(PairedAttention(decoding, prompts))
    torch.testing.assert_close(out.double(), case.oracle()[0], atol=2e-5, rtol=2e-5)
    news = [new for _, new in lengths]
    for part, rows in ((decoding, slice(0, num_decode)), (prompts, slice(num_decode, None))):
        assert [inputs.q_lens.tolist() for inputs in part.planned] == ([news[rows]] if news[rows] else [])
        assert part.num_tokens == ([sum(news[rows])] if news[rows] else [])


@pytest.mark.parametrize("trees", [False, True])
def test_each_part_is_a_batch_of_its_own(trees: bool) -> None:
    """As if the other rows were not there."""
    mixed = Case(DECODES + PROMPTS, trees=trees)
    decoding, prompts = Recorded(mixed), Recorded(mixed)
    mixed.run(PairedAttention(decoding, prompts))
    for part, lengths, num_decode in ((decoding, DECODES, 3), (prompts, PROMPTS, 0)):
        (given,), alone = part.planned, Case(lengths, trees=trees).inputs
        for name in ("token_rows", "qo_indptr", "kv_lens"):
            assert torch.equal(getattr(given, name), getattr(alone, name)), name
        assert np.array_equal(given.kv_bounds, alone.kv_bounds)
        assert (given.max_kv_len, given.max_q_len, given.num_decode) == (alone.max_kv_len, alone.max_q_len, num_decode)
        assert given.input_ids.shape == given.positions.shape == given.slots.shape == alone.slots.shape
        # Rows after those that decode verify no drafts.
        assert (given.tree_mask is None) == (not trees or part is prompts)
        assert given.tree_mask is None or given.tree_mask.shape == alone.slots.shape


def test_what_plans_on_the_host_is_told_no_bounds_that_drafts_make_too_large() -> None:
    """Rows that decode may be shorter than the host knows."""
    case = Case(DECODES + PROMPTS)
    exact: Int32Array = case.inputs.kv_bounds
    slack = np.array([3, 3, 3, 0, 0, 0], dtype=np.int32)
    case.inputs = dataclasses.replace(case.inputs, kv_bounds=exact + slack)
    decoding, prompts = Recorded(case), Recorded(case, needs_host_lengths=True)
    pair = PairedAttention(decoding, prompts)
    assert not pair.needs_host_lengths
    case.run(pair)
    assert decoding.planned[0].kv_bounds.tolist() == (exact[:3] + 3).tolist()
    assert prompts.planned[0].kv_bounds.tolist() == exact[3:].tolist()


def test_graphs_have_what_rows_that_decode_have() -> None:
    case = Case(DECODES)
    decoding, prompts = Recorded(case), Recorded(case, needs_host_lengths=True)
    assert PairedAttention(decoding, prompts).captured(4, 1) is decoding
    assert PairedAttention(Recorded(case, needs_host_lengths=True), prompts).needs_host_lengths
    assert PairedAttention(ReferenceAttention(case.shape), prompts).captured(4, 1) is None


@pytest.mark.parametrize(("is_ready", "is_there"), [(True, True), (True, False), (False, True)])
def test_a_backend_of_graphs_has_those_that_it_captures_once_it_is_ready(is_ready: bool, is_there: bool) -> None:
    case = Case(DECODES)
    every, graph = Recorded(case), Recorded(case, needs_host_lengths=True)

    class Graphs(Recorded):
        def is_ready(self) -> bool:
            return is_ready

        def captured(self, num_rows: int, width: int) -> Recorded | None:  # type: ignore[override]
            assert is_ready and (num_rows, width) == (3, 1)
            return graph if is_there else None

    attention = GraphedAttention(every, Graphs(case, needs_host_lengths=True), min_rows=3)
    assert attention.captured(3, 1) is (graph if is_ready and is_there else every)
    assert attention.captured(2, 1) is every
    assert attention.ragged() is every and attention.needs_host_lengths
    case.run(attention)
    assert len(every.planned) == 1


def test_until_prompts_have_a_backend_the_other_computes_them_and_the_change_is_between_two_steps() -> None:
    case, may_split = Case(DECODES + PROMPTS, adjacent=False), [False]
    case.inputs = dataclasses.replace(case.inputs, num_decode=3)
    decoding, prompts = Recorded(case), Recorded(case)
    attention = PairedAttention(decoding, prompts, lambda: may_split[0])
    wanted = case.oracle()[0]

    def check() -> None:
        torch.testing.assert_close(case.run(attention).double(), wanted, atol=2e-5, rtol=2e-5)

    check()
    assert (len(decoding.planned[-1].q_lens), prompts.planned) == (6, [])
    assert attention.captured(3, 1) is decoding
    assert attention.ragged() is decoding
    plan = attention.plan

    def plan_then_allow(inputs: ForwardInputs) -> None:
        plan(inputs)
        may_split[0] = True  # behind the plan, before the layers of the step

    attention.plan = plan_then_allow  # type: ignore[method-assign]
    check()
    assert prompts.num_tokens == []
    attention.plan = plan  # type: ignore[method-assign]
    check()
    assert (len(decoding.planned[-1].q_lens), len(prompts.planned[-1].q_lens)) == (3, 3)
    may_split[0] = False
    check()
    assert len(prompts.planned) == 2, "prompts do not change back"
    assert attention.captured(3, 1) is decoding
    assert attention.ragged() is decoding
