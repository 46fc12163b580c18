"""Which tokens of a step attend to expanded keys where an index chooses, and that they see what they would see absorbed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve.attention import chosen_prompts
from hiserve.attention.base import AttentionShape, IndexShape, LatentShape
from hiserve.attention.chosen_prompts import most_seen, plan_prompts
from hiserve.attention.indexed import IndexedAttention
from hiserve.attention.latent import LatentAttention, absorbed_shape
from hiserve.attention.reference_attention import ReferenceAttention
from hiserve.kernels import chosen_reference
from tests.helpers.latent_case import LatentCase

# By its sizes a token is expanded that sees up to 1.2 * 38 / 15 times the 5 that it chooses.
LATENT = LatentShape(rank=32, rope_dim=4, nope_dim=6, value_dim=5, scale=0.37)
SHAPE = AttentionShape(
    1, 3, 1, 36, 4, torch.float64, latent=dataclasses.replace(LATENT, rank=17), index=IndexShape(8, 5)
)
LIMIT = 15
# Cached and new. The first two decode; then rows within the limit, across it, beyond it, of few tokens, and behind much.
ROWS = ((9, 1), (0, 1), (0, 4), (0, 11), (6, 20), (30, 5), (3, 2), (9, 4))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_prompts, "BLOCK_KEYS", 4)
    monkeypatch.setattr(chosen_prompts, "most_keys", lambda shape: 9)


def shape_of(packs: bool) -> AttentionShape:
    if not packs:
        return dataclasses.replace(SHAPE, head_dim=21)
    return dataclasses.replace(SHAPE, latent=LATENT, packs_rows=True)


def test_the_limit_follows_from_the_operations_of_both_ways() -> None:
    assert most_seen(SHAPE) == int(5 * 1.2 * (2 * 17 + 4) / 15) == LIMIT
    sizes = {"rank": 512, "rope_dim": 64, "value_dim": 128, "scale": 1.0}
    deepseek = dataclasses.replace(SHAPE, latent=LatentShape(nope_dim=128, **sizes), index=IndexShape(128, 2048))
    assert most_seen(deepseek) == 4 * 2048  # and no more, whatever the rate
    glm = dataclasses.replace(deepseek, latent=LatentShape(nope_dim=192, **sizes | {"value_dim": 256}))
    assert 2048 < most_seen(glm) == int(2048 * 1.2 * 1088 / 512)


def test_beginnings_of_prompts_are_expanded_while_there_is_room_for_the_keys_before_them() -> None:
    case = LatentCase(shape_of(False), ROWS, num_decode=2)
    plan = plan_prompts(case._shape, chosen_reference, case.inputs, least=4)
    assert plan is not None and plan.tokens is not None and plan.others is not None
    # Of the fifth row nine: others see more than 15. Keys beside new ones are 0, 1 and 7 there, and 12 in the last row: too many.
    assert plan.tokens.tolist() == [*range(2, 6), *range(6, 17), *range(17, 26)]
    assert sorted(plan.tokens.tolist() + plan.others.tolist()) == list(range(48))
    assert plan.most == 15
    columns = [group.rows.columns.tolist() for group in plan._groups]
    assert columns == [[[2, 4, 0, 0, 0], [6, 11, 4, 4, 0], [17, 9, 15, 16, 6]]]
    assert [(group.rows.max_new, group.rows.host.tolist()) for group in plan._groups] == [(11, columns[0])]
    slots = plan._groups[0].slots
    assert torch.equal(slots[:4], case.inputs.slots[2:6])
    assert torch.equal(slots[4:16], case.inputs.slots[torch.tensor([*range(6, 17), 16])])
    assert torch.equal(slots[22:32], case.inputs.slots[torch.tensor([*range(17, 26), 25])])
    # Rows that decode, whose lengths the host has bounds of, are absorbed, however few tokens repay their keys.
    plan = plan_prompts(case._shape, chosen_reference, case.inputs, least=1)
    assert plan is not None and plan.tokens is not None and int(plan.tokens.min()) == 2


def test_rows_whose_keys_find_no_room_at_once_are_in_turns() -> None:
    # Beside new ones there are 4, 7, 2 and 3 keys, those that pad a row among them.
    case = LatentCase(shape_of(False), ((4, 8), (7, 5), (1, 6), (0, 5)), num_decode=0)
    plan = plan_prompts(case._shape, chosen_reference, case.inputs, least=4)
    assert plan is not None and plan.tokens is None and plan.others is None
    assert [len(group.rows.columns) for group in plan._groups] == [1, 2, 1]
    columns = [group.rows.columns[0].tolist() for group in plan._groups]
    assert columns == [[0, 8, 0, 0, 4], [8, 5, 8, 0, 7], [19, 5, 19, 0, 0]]
    assert plan_prompts(case._shape, chosen_reference, case.inputs, least=9) is None


def test_heads_that_a_kernel_has_not_are_absorbed() -> None:
    case = LatentCase(shape_of(False), ROWS, num_decode=2)

    class Ops:
        attend_expanded = staticmethod(chosen_reference.attend_expanded)

        @staticmethod
        def can_attend_expanded(*sizes: Any) -> bool:
            assert sizes == (10, 5, torch.float64)
            return False

    assert plan_prompts(case._shape, Ops(), case.inputs, least=4) is None


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("rows", [ROWS, ((4, 8), (7, 5), (1, 6))])
def test_tokens_see_the_keys_that_they_chose_expanded_and_absorbed(
    rows: tuple[tuple[int, int], ...], packs: bool
) -> None:
    shape = shape_of(packs)
    case = LatentCase(shape, rows, num_decode=2 if rows is ROWS else 0, packs=packs)
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(len(case.kv.k), 8, dtype=torch.float64, generator=generator)
    q = torch.randn(len(case.q), 4, 8, dtype=torch.float64, generator=generator)
    weights = torch.rand(len(case.q), 4, dtype=torch.float64, generator=generator)
    plain = LatentAttention(shape, ReferenceAttention(absorbed_shape(shape)))
    found: list[Tensor] = []
    for least in (4, None):
        attention = IndexedAttention(shape, plain, chosen_reference, least)
        attention.plan(case.inputs)
        assert attention.is_choosing and (attention._prompts is None) == (least is None)
        attention.choose(q, weights, keys, case.inputs)
        found.append(case.attend(attention))
        assert attention._bits is None and attention._slots is None  # drafts have that memory
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found[0], case.expected, atol=1e-3)  # to all keys
