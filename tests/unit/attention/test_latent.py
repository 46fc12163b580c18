"""Latent attention against one dense softmax a token in float64, absorbed and expanded, over pages full of NaN."""

from __future__ import annotations

import dataclasses
import itertools
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve.attention import latent
from hiserve.attention.backends import open_attention
from hiserve.attention.base import AttentionShape, LatentShape
from hiserve.attention.latent import LatentAttention, absorbed_shape, attend_dense, expanded_shape, most_keys
from hiserve.attention.reference_attention import ReferenceAttention
from hiserve.core.forward import ForwardInputs
from hiserve.core.step_memory import StepShape, step_memory
from hiserve.errors import ConfigError
from hiserve.kernels.reference import merge
from hiserve.models.latent_config import LatentConfig
from tests.helpers.latent_case import LatentCase

HEADS, PAGE = 3, 4
LATENT = LatentShape(rank=10, rope_dim=4, nope_dim=6, value_dim=5, scale=0.37)
SHAPE = AttentionShape(1, HEADS, 1, LATENT.rank + LATENT.rope_dim, PAGE, torch.float64, latent=LATENT)
# (tokens cached, tokens new), rows that decode first.
ROWS = ((5, 1), (0, 1), (16, 3), (0, 9), (7, 8), (21, 2), (0, 1), (1, 12))


def case(rows: tuple[tuple[int, int], ...] = ROWS, *, hides_first: bool = False) -> LatentCase:
    return LatentCase(dataclasses.replace(SHAPE, hides_first=hides_first), rows, num_decode=3)


def check(subject: LatentCase, attention: Any) -> None:
    out = subject.run(attention)
    torch.testing.assert_close(out, subject.expected, rtol=1e-12, atol=1e-12)
    given = torch.full_like(out, torch.nan)
    assert subject.attend(attention, given) is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("min_expanded", [None, 1, 8, 9, 12])
@pytest.mark.parametrize("num_keys", [3, 4, 2048])
def test_every_token_sees_its_row_absorbed_and_expanded(
    monkeypatch: pytest.MonkeyPatch, backend: str, min_expanded: int | None, num_keys: int
) -> None:
    monkeypatch.setattr(latent, "EXPANDED_KEYS", num_keys)
    monkeypatch.setattr(latent, "EXPANDED_BYTES", 0)
    monkeypatch.setattr(latent, "_NUM_SCORES", 60)  # few queries at a time
    opened = open_attention(backend, SHAPE, torch.device("cpu"))
    assert isinstance(opened, LatentAttention)
    check(case(), LatentAttention(SHAPE, opened._absorbed, min_expanded))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("min_expanded", [None, 8])
def test_rows_in_8_bits_are_read_absorbed_and_expanded(
    monkeypatch: pytest.MonkeyPatch, backend: str, min_expanded: int | None
) -> None:
    """Exactly: by the oracle over rows that are rounded as they are stored."""
    monkeypatch.setattr(latent, "EXPANDED_KEYS", 3)
    monkeypatch.setattr(latent, "EXPANDED_BYTES", 0)
    shape = dataclasses.replace(SHAPE, latent=dataclasses.replace(LATENT, rank=32), head_dim=36, packs_rows=True)
    opened = open_attention(backend, shape, torch.device("cpu"))
    assert isinstance(opened, LatentAttention)
    check(LatentCase(shape, ROWS, num_decode=3, packs=True), LatentAttention(shape, opened._absorbed, min_expanded))


@pytest.mark.parametrize("min_expanded", [None, 1, 8])
@pytest.mark.parametrize("num_keys", [3, 2048])
def test_a_hidden_first_row_is_read_by_nobody(
    monkeypatch: pytest.MonkeyPatch, min_expanded: int | None, num_keys: int
) -> None:
    """What sees nothing is zero: in rows of one token, and where a prompt begins."""
    monkeypatch.setattr(latent, "EXPANDED_KEYS", num_keys)
    monkeypatch.setattr(latent, "EXPANDED_BYTES", 0)
    shape = dataclasses.replace(SHAPE, hides_first=True)
    subject = case(hides_first=True)
    alone = subject.expected[subject.inputs.positions == 0]
    assert torch.equal(alone, torch.zeros_like(alone))
    absorbed = ReferenceAttention(absorbed_shape(shape))
    check(subject, LatentAttention(shape, absorbed, min_expanded))


def test_rows_are_expanded_from_the_first_long_one_on_and_never_in_a_graph() -> None:
    subject, planned = case(), []

    class Absorbed(ReferenceAttention):
        def plan(self, inputs: ForwardInputs) -> None:
            planned.append(inputs.q_lens.tolist())
            super().plan(inputs)

        def ragged(self) -> Any:
            return self

        def captured(self, num_rows: int, width: int) -> Any:
            return self

    attention = LatentAttention(SHAPE, Absorbed(absorbed_shape(SHAPE)), min_expanded=8)
    for fixed in (attention, attention.ragged(), attention.captured(8, 1)):
        assert fixed is not None
        check(subject, fixed)
    assert planned == [[1, 1, 3], [1, 1, 3, 9, 8, 2, 1, 12], [1, 1, 3, 9, 8, 2, 1, 12]]
    assert LatentAttention(SHAPE, ReferenceAttention(absorbed_shape(SHAPE))).ragged() is None
    assert LatentAttention(SHAPE, ReferenceAttention(absorbed_shape(SHAPE))).captured(8, 1) is None


LONG = ((5, 1), (0, 1), (16, 3), (0, 9), (7, 12), (0, 8))


def attend_each(q: Tensor, keys: Tensor, values: Tensor, starts: list[int], key_starts: list[int]) -> Tensor:
    """Prompts behind prefixes, each as the end of one without."""
    parts = []
    for (a, b), (first, end) in zip(pairwise(starts), pairwise(key_starts), strict=True):
        padded = torch.cat((q.new_zeros((end - first - (b - a), *q.shape[1:])), q[a:b]))
        own = keys[first:end].transpose(0, 1), values[first:end].transpose(0, 1)
        parts.append(attend_dense(padded, *own, LATENT.scale, is_causal=True)[0][a - b :])
    return torch.cat(parts)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("room", [7, 6])
def test_long_rows_are_one_launch_while_the_keys_of_their_prefixes_fit(
    monkeypatch: pytest.MonkeyPatch, room: int, packs: bool
) -> None:
    """Behind the absorbed rows. Rows of 8 bits are read as they are stored, new ones as they are."""
    launched: list[tuple[list[int], list[int], tuple[int, int]]] = []

    def in_turns(
        q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, key_starts: Tensor, most: tuple[int, int], scale: float
    ) -> Tensor:
        launched.append((starts.tolist(), key_starts.tolist(), most))
        return attend_each(q, keys, values, starts.tolist(), key_starts.tolist())

    monkeypatch.setattr(latent, "attend_prompts", in_turns)
    monkeypatch.setattr(LatentAttention, "_has_launch", lambda self, device: True)
    monkeypatch.setattr(latent, "EXPANDED_KEYS", room)
    monkeypatch.setattr(latent, "EXPANDED_BYTES", 0)
    wide = dataclasses.replace(LATENT, rank=32)
    shape = dataclasses.replace(SHAPE, latent=wide, head_dim=36, packs_rows=True) if packs else SHAPE
    subject = LatentCase(shape, LONG, num_decode=1, packs=packs)
    check(subject, LatentAttention(shape, ReferenceAttention(absorbed_shape(shape)), min_expanded=8))
    assert launched == ([([0, 9, 21, 29], [0, 9, 28, 36], (12, 19))] * 2 if room == 7 else [])


def test_the_keys_of_prefixes_that_fit_follow_from_their_bytes() -> None:
    assert most_keys(SHAPE) == latent.EXPANDED_BYTES // ((HEADS * (10 + 5) + 14) * 8)


@pytest.mark.parametrize(("max_rows", "max_len"), [(8, 1 << 20), (64, 64)])
@pytest.mark.parametrize("num_heads", [1, 4, 128])
def test_a_plan_has_memory_for_the_prefixes_that_are_expanded_at_once(
    num_heads: int, max_rows: int, max_len: int
) -> None:
    """Of DeepSeek's sizes: rows that are read, keys, values, and these again as wide as keys."""
    sizes = {"rank": 512, "rope_dim": 64, "nope_dim": 128, "value_dim": 128}
    shape = AttentionShape(1, num_heads, 1, 576, 64, torch.bfloat16, latent=LatentShape(**sizes, scale=1.0))
    config = LatentConfig(**sizes, query_rank=None, scale=1.0, is_interleaved=False)
    plan = step_memory(
        StepShape(
            num_layers=1,
            hidden_size=64,
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=576,
            mlp_elements=0,
            vocab_size=64,
            latent_elements=config.step_elements(num_heads),
        ),
        dtype_bytes=2,
        max_rows=max_rows,
        max_tokens=64,
        max_len=max_len,
        page_size=64,
        graphs="off",
    )
    needed = min(most_keys(shape), max_rows * max_len) * 2 * (576 + num_heads * (192 + 128 + 192))
    assert needed <= plan["attention workspace"]


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_kernel_of_prompts_computes_them_once_it_is_ready(monkeypatch: pytest.MonkeyPatch, is_ready: bool) -> None:
    """Their numbers of tokens come from the host."""
    planned: list[tuple[list[int], list[int]]] = []

    class Kernel:
        def is_ready(self) -> bool:
            return is_ready

        def plan(self, q_lens: Any, kv_lens: Any) -> None:
            planned.append((q_lens.tolist(), kv_lens.tolist()))

        def attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
            starts, key_starts = ([0, *itertools.accumulate(each)] for each in planned[-1])
            assert out.is_contiguous() and starts[-1] == q.shape[0] == out.shape[0]
            out.copy_(attend_each(q, keys, values, starts, key_starts))

    def by_torch(q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, key_starts: Tensor, *more: Any) -> Tensor:
        assert not is_ready
        planned.append((starts.diff().tolist(), key_starts.diff().tolist()))
        return attend_each(q, keys, values, starts.tolist(), key_starts.tolist())

    monkeypatch.setattr(latent, "attend_prompts", by_torch)
    monkeypatch.setattr(LatentAttention, "_has_launch", lambda self, device: True)
    absorbed = ReferenceAttention(absorbed_shape(SHAPE))
    attention = LatentAttention(SHAPE, absorbed, min_expanded=8, prompts=Kernel())
    for rows in (LONG, tuple((0, new) for _, new in LONG)):
        subject = case(rows)
        subject.inputs = dataclasses.replace(subject.inputs, num_decode=1)
        planned.clear()
        check(subject, attention)
        expected = [9, 12, 8], [old + new for old, new in rows[3:]]
        assert planned == ([expected] if is_ready else [expected] * 2)


def test_the_shape_of_expanded_prompts_has_keys_for_every_head() -> None:
    expanded = expanded_shape(SHAPE)
    assert (expanded.num_kv_heads, expanded.head_dim, expanded.out_dim) == (HEADS, 10, 5)
    assert expanded.scale == pytest.approx(LATENT.scale)


def test_a_row_that_decodes_is_not_expanded_because_its_length_is_only_bounded() -> None:
    subject = case(((0, 9), (3, 10), (0, 2)))
    subject.inputs = dataclasses.replace(subject.inputs, num_decode=2)
    attention = LatentAttention(SHAPE, ReferenceAttention(absorbed_shape(SHAPE)), min_expanded=2)
    check(subject, attention)
    assert attention._num_absorbed == 19


def test_parts_are_joined_by_their_sums_in_float32() -> None:
    """Large scores in one part, small ones in the other: shares come from the sums, whatever the inputs' type."""
    torch.manual_seed(4)
    q, keys = torch.randn(5, HEADS, 6), torch.randn(HEADS, 11, 6) * 4
    values = torch.randn(HEADS, 11, 5)
    whole, lse = attend_dense(q, keys, values, 0.8, is_causal=False)
    parts = [attend_dense(q, keys[:, part], values[:, part], 0.8, is_causal=False) for part in (slice(4), slice(4, 11))]
    joined, sums = merge(*parts[0], *parts[1])
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums, lse, rtol=1e-6, atol=1e-6)
    narrow: list[Tensor] = [each.bfloat16() for each in (q, keys, values)]
    assert {each.dtype for each in attend_dense(narrow[0], narrow[1], narrow[2], 0.8, is_causal=False)} == {
        torch.float32
    }


def test_backends_without_latents_say_so() -> None:
    shape = dataclasses.replace(SHAPE, dtype=torch.bfloat16, head_dim=64)
    with pytest.raises(ConfigError, match="flashinfer"):
        open_attention("flashinfer", shape, torch.device("cuda"))
