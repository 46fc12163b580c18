"""Packed experts on CUDA: numbers, products at real widths, and tokens of small models in graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hiserve.core.activation import SILU, Activation
from hiserve.kernels import experts
from hiserve.kernels.packed_products import PACKED_TILES, multiply_packed
from hiserve.kernels.packed_weights import PackedWeights, Weights, pack_words, plain
from hiserve.layers import StackedExperts
from tests.helpers.block_scaled import quantize
from tests.helpers.cuda import decisions, generate, graph_engine, prompts_of
from tests.helpers.latent_models import save_latent
from tests.helpers.models import save_family
from tests.helpers.packed_cases import random_4, random_8
from tests.helpers.packed_models import pack_gpt_oss

pytestmark = pytest.mark.gpu

BF16, HALF = torch.bfloat16, torch.float16
GPT_OSS = Activation(slope=1.702, shift=1.0, limit=7.0)


def on_cuda(weights: PackedWeights) -> PackedWeights:
    return PackedWeights(weights.codes.cuda(), weights.scales.cuda(), weights.columns)


@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_every_number_under_every_scale_is_upcast_exactly(dtype: torch.dtype) -> None:
    """Rows of the identity return the weights: all bytes under all scales up to the largest, by all tiles."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 129, 16, 16)
    scales = torch.arange(129, dtype=torch.uint8).view(1, 129, 1).expand(1, 129, 16)
    fours = PackedWeights(*pack_words(codes, scales.contiguous()), 512)
    eights = random_8(torch.Generator().manual_seed(1), 1, 140, 512)
    for packed in (on_cuda(fours), on_cuda(eights)):
        x = torch.eye(512, dtype=dtype, device="cuda")
        order, ends = experts._group(torch.zeros(512, 1, dtype=torch.int64, device="cuda"), 1, 512)
        for tile, _ in PACKED_TILES:
            out = torch.full((512, packed.shape[1]), torch.nan, dtype=dtype, device="cuda")
            multiply_packed(x, packed, None, None, order, ends, out, order[:, None].long(), None, tile)
            assert torch.equal(out, packed.unpacked(dtype)[0].T), (packed.kind, tile)


def weights_of(kind: str, *shape: int, num_parts: int = 1) -> Weights:
    generator = torch.Generator().manual_seed(sum(shape))
    if kind == "plain":
        return (torch.randn(shape, generator=generator) * 0.02).to(BF16).cuda()
    made = (
        random_4(generator, *shape, scales=(118, 122))
        if kind == "4"
        else random_8(generator, *shape, num_parts=num_parts)
    )
    if kind == "8":
        made.scales.mul_(0.2)
    return on_cuda(made)


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 32, 200, 1000, 4000])
@pytest.mark.parametrize(
    ("kind", "shared", "width", "inner", "num_experts"),
    [
        ("4", "none", 2880, 2880, 8),
        ("4", "8", 4096, 2048, 16),
        ("4", "plain", 4096, 2048, 16),
        ("8", "8", 7168, 2048, 8),
    ],
)
def test_experts_mix_as_with_plain_weights(
    num_tokens: int, kind: str, shared: str, width: int, inner: int, num_experts: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, width, generator=generator).to(BF16).cuda()
    routed = experts.route(torch.randn(num_tokens, num_experts, generator=generator).cuda(), 4, True)
    weights = (
        weights_of(kind, num_experts, 2 * inner, width, num_parts=2),
        weights_of(kind, num_experts, width, inner),
    )
    both = None
    biases: tuple[Tensor | None, Tensor | None] = None, None
    if shared == "none":
        biases = (
            torch.randn(num_experts, 2 * inner, generator=generator).to(BF16).cuda(),
            torch.randn(num_experts, width, generator=generator).to(BF16).cuda(),
        )
    else:
        both = weights_of(shared, 2 * inner, width, num_parts=2), weights_of(shared, width, inner)
    activation = GPT_OSS if shared == "none" else SILU
    found = experts.mix_experts(x, *routed, *weights, *biases, activation, both)
    plains = [plain(each, BF16) for each in weights]
    shareds = None if both is None else (plain(both[0], BF16), plain(both[1], BF16))
    expected = experts.mix_experts(x, *routed, *plains, *biases, activation, shareds)
    error, spread = (found.float() - expected.float()).abs(), expected.float().std()
    # Few rows scale sums of numbers in 8 bits, where plain weights were rounded once more.
    mean = 6e-3 if "8" in (kind, shared) else 2e-3
    assert error.max() < 0.05 * spread and error.mean() < mean * spread, (error.max(), error.mean(), spread)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_tokens_of_graphs_are_those_without(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, in steps of the same shapes; experts are packed, as a look at each call tells."""
    if family == "gpt_oss":
        pack_gpt_oss(save_family(family, tmp_path, head_dim=64))
    else:
        quantize(save_latent(family, tmp_path, moe_intermediate_size=136, qk_rope_head_dim=16), BF16)
    kinds, call = set(), StackedExperts.__call__

    def watch(self: StackedExperts, *given: Tensor) -> Tensor:
        kinds.add((type(self.gate_up), type(self.down)))
        return call(self, *given)

    monkeypatch.setattr(StackedExperts, "__call__", watch)
    prompts = prompts_of([39, 3, 41, 17], seed=8, vocab=300)
    replies = []
    for graphs in ("off", "decode"):
        subject = graph_engine(tmp_path, graphs, "bfloat16", max_rows=4)
        replies.append(generate(subject, prompts, 24))
        counts = decisions(subject)
        subject.executor.close()
    assert replies[0] == replies[1] and kinds == {(PackedWeights, PackedWeights)}
    assert counts["replay/decode"] > 0 and len({token for reply in replies[0].values() for token in reply}) > 8
