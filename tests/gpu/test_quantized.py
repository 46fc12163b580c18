"""Weights in 8 and 4 bits on CUDA: products at real widths against those of their values, and tokens of small models in graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from hiserve.core.quantization import QuantSpec
from hiserve.kernels import scaled_products
from hiserve.kernels.quantized import QuantizedWeight, dequantize, pack_codes
from hiserve.kernels.quantized_linear import quantized_linear
from tests.helpers.cuda import decisions, generate, graph_engine, prompts_of
from tests.helpers.models import save_llama
from tests.helpers.quantized import quantize_checkpoint

pytestmark = pytest.mark.gpu

WIDTHS = [(6144, 4096), (4096, 14336)]
KINDS = ["channel", "channel, rounded inputs", "block", "block, rounded inputs", "128", "64, zeros, order", "32"]


def weight_of(kind: str, rows: int, columns: int) -> QuantizedWeight:
    generator = torch.Generator("cuda").manual_seed(rows)

    def uneven(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator, device="cuda") + 0.1) / columns**0.5

    if kind.startswith(("channel", "block")):
        codes = torch.randn(rows, columns, generator=generator, device="cuda").mul_(60).clamp_(-448, 448)
        block = kind.startswith("block")
        spec = QuantSpec(8, "e4m3", (128, 128) if block else (1, 0), "token" if "rounded" in kind else "none")
        scales = uneven(-(-rows // 128), -(-columns // 128)) if block else uneven(rows)
        return QuantizedWeight(spec, (rows, columns), codes.to(torch.float8_e4m3fn), scales / 60)
    group = int(kind.split(",")[0])
    drawn = torch.randint(0, 16, (2, rows, columns), generator=generator, device="cuda", dtype=torch.uint8)
    zeros = drawn[1, :, : columns // group].T.contiguous() if "zeros" in kind else None
    order = torch.randperm(columns, generator=generator, device="cuda").int() if "order" in kind else None
    spec = QuantSpec(4, "int" if zeros is None else "uint", (1, group))
    scales = (uneven(columns // group, rows) / 8).bfloat16()
    return QuantizedWeight(spec, (rows, columns), pack_codes(drawn[0], spec), scales, zeros, order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), WIDTHS)
def test_products_are_those_of_the_values(kind: str, rows: int, columns: int) -> None:
    """With 1 to 8,192 tokens; where inputs are rounded to 8 bits, of the rounded ones."""
    weight = weight_of(kind, rows, columns)
    values = dequantize(weight, torch.float32)
    bias = torch.randn(rows, device="cuda").bfloat16()
    for num_tokens in (1, 2, 8, 32, 33, 100, 300, 8192):
        x = torch.randn(num_tokens, columns, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
        got = quantized_linear(x, weight, bias)
        expected = x.float() @ values.T + bias.float()
        # E4M3 has 4 significant bits: half a unit in the last place is 1/16 of a number at most, in sums of many far less.
        share = 0.06 if "rounded" in kind else 0.01
        error = (got.float() - expected).std() / expected.std()
        assert got.dtype == x.dtype and error < share, (num_tokens, float(error))


def test_inputs_are_rounded_token_by_token() -> None:
    x = torch.randn(300, 4096, device="cuda").bfloat16()
    codes, scales = scaled_products.round_tokens(x, 128)
    assert_close(scales, x.float().view(300, 32, 128).abs().amax(-1) / 448)
    assert_close(
        codes.float().view(300, 32, 128) * scales[..., None], x.float().view(300, 32, 128), rtol=0.07, atol=1e-3
    )


@pytest.mark.parametrize("name", ["channel", "fp8", "gptq_v2", "int"])
def test_tokens_of_graphs_are_those_without(tmp_path: Path, name: str) -> None:
    """In bfloat16, in steps of the same shapes."""
    quantize_checkpoint(save_llama(tmp_path), name)
    prompts = prompts_of([39, 3, 41, 17], seed=8, vocab=300)
    replies = []
    for graphs in ("off", "decode"):
        subject = graph_engine(tmp_path, graphs, "bfloat16", max_rows=4)
        replies.append(generate(subject, prompts, 24))
        counts = decisions(subject)
        subject.executor.close()
    assert replies[0] == replies[1] and counts["replay/decode"] > 0
