"""Latent attention on CUDA: graphs over absorbed queries, expanded prompts, and the fused kernel of expanded ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve.attention.backends import open_attention
from hiserve.attention.base import AttentionShape, LatentShape
from hiserve.attention.latent import attend_dense, attend_prompts
from tests.helpers.latent_case import LatentCase
from tests.helpers.latent_models import FAMILIES, save_latent
from tests.helpers.scripted import check_graphs

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"qk_rope_head_dim": 16}  # of a matrix product on the device


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_compute_what_the_reference_does(tmp_path: Path, family: str) -> None:
    """Decode, verify and mixed steps."""
    save_latent(family, tmp_path, **SIZES)
    check_graphs(tmp_path)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (256, 256)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_fused_kernel_gives_outputs_and_sums(key_dim: int, value_dim: int, is_causal: bool) -> None:
    """The heads of DeepSeek-V3 and of GLM-4.7-Flash; sums are natural logarithms."""
    torch.manual_seed(3)
    q = torch.randn(300, 4, key_dim, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(4, 300, key_dim, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(4, 300, value_dim, device="cuda", dtype=torch.bfloat16)
    out, lse = attend_dense(q, keys, values, key_dim**-0.5, is_causal=is_causal)
    exact = attend_dense(q.double(), keys.double(), values.double(), key_dim**-0.5, is_causal=is_causal)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), exact[1], atol=1e-3, rtol=1e-3)


Lengths = tuple[tuple[int, int], ...]  # of prompts: tokens of the prefix, and new ones
LENGTHS: Lengths = ((0, 300), (5, 1), (777, 129), (0, 1))


def prompts(lengths: Lengths, key_dim: int, value_dim: int) -> list[torch.Tensor]:
    """Queries, keys and values in bfloat16."""
    num_new, num_keys = sum(new for _, new in lengths), sum(map(sum, lengths))
    sizes = (num_new, key_dim), (num_keys, key_dim), (num_keys, value_dim)
    return [torch.randn(count, 4, size, device="cuda", dtype=torch.bfloat16) for count, size in sizes]


def starts_of(counts: Iterable[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], device="cuda").cumsum(0).int()


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (256, 256)])
def test_one_launch_attends_over_several_prompts(key_dim: int, value_dim: int) -> None:
    torch.manual_seed(4)
    q, keys, values = prompts(LENGTHS, key_dim, value_dim)
    starts, key_starts = starts_of(new for _, new in LENGTHS), starts_of(map(sum, LENGTHS))
    out = attend_prompts(q, keys, values, starts, key_starts, (300, 906), key_dim**-0.5)
    check_prompts(out, q, keys, values, LENGTHS)


def check_prompts(out: torch.Tensor, q: Any, keys: Any, values: Any, lengths: Lengths) -> None:
    """Each prompt is as the end of one alone without a prefix, in float64."""
    scale = q.shape[2] ** -0.5
    assert out.dtype == torch.bfloat16
    new, whole = [each for _, each in lengths], [sum(each) for each in lengths]
    parts = (out.split(new), q.split(new), keys.split(whole), values.split(whole))
    for each in zip(*parts, strict=True):
        ours, one, own_keys, own_values = (part.double() for part in each)
        padded = torch.cat((one.new_zeros((own_keys.shape[0] - one.shape[0], *one.shape[1:])), one))
        exact, _ = attend_dense(padded, own_keys.transpose(0, 1), own_values.transpose(0, 1), scale, is_causal=True)
        torch.testing.assert_close(ours, exact[-one.shape[0] :], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (256, 256)])
def test_flashinfer_attends_over_several_prompts(key_dim: int, value_dim: int) -> None:
    """Plans of other lengths follow each other, and nobody waits for the device between them."""
    module = pytest.importorskip("hiserve.attention.flashinfer_latent")
    torch.manual_seed(5)
    latent = LatentShape(512, 64, key_dim - 64, value_dim, scale=key_dim**-0.5)
    kernel = module.FlashInferPrompts(AttentionShape(1, 4, 1, 576, 16, torch.bfloat16, latent=latent))
    cases = []
    for lengths in (LENGTHS, ((0, 128),), ((3000, 64), (0, 2000)), LENGTHS):
        q, keys, values = prompts(lengths, key_dim, value_dim)
        out = values.new_full((*q.shape[:2], value_dim), torch.nan)
        cases.append((out, q, keys, values, lengths))
    for out, q, keys, values, lengths in cases:
        kernel.plan(
            *(np.array(each, dtype=np.int32) for each in ([new for _, new in lengths], [sum(each) for each in lengths]))
        )
        kernel.attend(q, keys, values, out)
    for case in cases:
        check_prompts(*case)


@pytest.mark.parametrize("num_heads", [20, 32, 128])
def test_flashinfer_decodes_in_a_graph_whose_lengths_change(num_heads: int) -> None:
    """Each replay has a schedule of its own; rows grow, shrink and leave. ``auto`` has such graphs of 80 queries, without drafts."""
    latent = LatentShape(512, 64, 128, 128, scale=192**-0.5)
    shape = AttentionShape(1, num_heads, 1, 576, 16, torch.bfloat16, latent=latent)
    subject = LatentCase(shape, ((700, 1), (63, 1), (0, 1), (40, 1)), num_decode=4, device="cuda")
    oracle = open_attention("triton", shape, torch.device("cuda"))
    whole = open_attention("auto", shape, torch.device("cuda"), has_drafts=False)
    attention = whole.captured(4, 1)
    assert attention is not None and attention.needs_host_lengths
    drafting = whole.captured(4, 2)
    assert drafting is not None and not drafting.needs_host_lengths
    with torch.inference_mode():
        torch.testing.assert_close(subject.run(attention).cpu().double(), subject.expected, atol=2e-2, rtol=2e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = subject.attend(attention)
        for lengths in ((701, 64, 1, 41), (16, 17, 1, 5), (701, 1, 1, 33), (2, 64, 1, 41)):
            subject.inputs.kv_lens.copy_(torch.tensor(lengths))
            planned = dataclasses.replace(subject.inputs, kv_bounds=np.array(lengths, dtype=np.int32))
            attention.plan(planned)
            out.fill_(torch.nan)
            graph.replay()
            oracle.plan(planned)
            torch.testing.assert_close(out, subject.attend(oracle), atol=2e-2, rtol=2e-2)
