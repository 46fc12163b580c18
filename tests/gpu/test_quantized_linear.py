"""Weights in 8 and 4 bits on CUDA: products at real widths, and a small model in graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hiserve.core.activation import SILU
from hiserve.core.quantization import QuantSpec
from hiserve.kernels import fused, quantized, quantized_linear, terms, terms_triton
from hiserve.kernels.quantized import QuantizedWeight, dequantize, pack_codes, quantize, split_halves
from hiserve.kernels.scaled_products import round_tokens
from tests.helpers.cuda import generate, graph_engine, prompts_of
from tests.helpers.models import save_llama
from tests.helpers.quantized import MOST_LOSS, held_out_losses, quantize_checkpoint
from tests.helpers.scripted import check_graphs

pytestmark = pytest.mark.gpu

FP8 = {
    "rows": QuantSpec(8, "e4m3", (1, 0)),
    "blocks": QuantSpec(8, "e4m3", (128, 128)),
    "rounded rows": QuantSpec(8, "e4m3", (1, 0), "token"),
    "rounded blocks": QuantSpec(8, "e4m3", (128, 128), "token"),
}
INT4 = {
    "int of 128": ("int", 128, False),
    "uint of 128": ("uint", 128, True),
    "uint of 64": ("uint", 64, True),
    "uint of 32": ("uint", 32, False),
}
DTYPES = (torch.bfloat16, torch.float16)


def weight_of(name: str, rows: int, columns: int) -> QuantizedWeight:
    torch.manual_seed(rows + columns)
    if name in FP8:
        return quantize(torch.randn(rows, columns, device="cuda"), FP8[name])
    kind, group, has_order = INT4[name]
    spec = QuantSpec(4, "int" if kind == "int" else "uint", (1, group))
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device="cuda")
    zeros = torch.randint(0, 17, (columns // group, rows), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(columns // group, rows, device="cuda") + 0.5).half() / 8
    order = torch.randperm(columns, device="cuda").int() if has_order else None
    packed = pack_codes(codes, spec)
    return QuantizedWeight(spec, (rows, columns), packed, scales, zeros if kind == "uint" else None, order)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*FP8, *INT4])
def test_products_are_those_of_the_values(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows that has a kernel of its own, in one part of the depth and in several."""
    weight = weight_of(name, 1024, 4096)
    monkeypatch.setattr(quantized, "quantized_linear", lambda *_: pytest.fail("the weight was spelled out"))
    values = dequantize(weight, torch.float64)
    bias = torch.randn(1024, device="cuda").to(dtype)
    for num_rows in (1, 8, 16, 17, 32, 33, 64, 65, 128, 129, 300):
        x = torch.randn(num_rows, 4096, device="cuda").to(dtype)
        # Of the greatest output a rounding to bfloat16 is 2 ** -8 at most, and more rows have weights that are rounded too.
        inputs, tolerance = x.double(), 4e-3 if num_rows <= 128 else 6e-3
        is_rounded = "rounded" in name and num_rows > 32 and ("blocks" in name or dtype == torch.bfloat16)
        if is_rounded:
            group = 128 if "blocks" in name else 4096
            codes, scales = round_tokens(x, group)
            codes = split_halves(codes)
            inputs = (codes.double().view(num_rows, -1, group) * scales.double()[..., None]).flatten(1)
            tolerance = 1e-2
        expected = inputs @ values.T + bias.double()
        found = quantized_linear.quantized_linear(x, weight, bias).double()
        error = float((found - expected).abs().max() / expected.abs().max())
        assert error < tolerance, (num_rows, error)
        if is_rounded:  # and it is near the product of inputs that are not
            plain = x.double() @ values.T + bias.double()
            assert float((found - plain).norm() / plain.norm()) < 0.05


@pytest.mark.parametrize("name", ["rounded rows", "blocks", "int of 128", "uint of 128"])
def test_a_row_of_few_is_the_same_in_any_batch(name: str) -> None:
    weight = weight_of(name, 1024, 4096)
    x = torch.randn(32, 4096, device="cuda").to(torch.bfloat16)
    whole = quantized_linear.quantized_linear(x, weight, None)
    for num_rows in (1, 8, 9, 16, 17):
        assert torch.equal(quantized_linear.quantized_linear(x[:num_rows], weight, None), whole[:num_rows]), num_rows


@pytest.mark.parametrize("num_rows", [1, 32])
def test_inputs_are_split_as_by_the_twin(num_rows: int) -> None:
    """Alone, and behind a norm and an activation; with numbers that are not finite, and small ones."""
    residual, delta = (torch.randn(num_rows, 2048, device="cuda").bfloat16() for _ in range(2))
    residual[0, 3:131] *= 1e-3
    residual[0, 300], delta[-1, 700] = torch.inf, torch.nan
    norm, eps = torch.randn(2048, device="cuda").bfloat16(), 1e-5
    gate_up = torch.cat((residual, delta), 1)
    for split, plain in (
        (terms_triton.split_terms(residual), residual),
        (
            terms_triton.norm_terms(residual.clone(), delta, norm, eps),
            fused.add_rms_norm(delta, residual.clone(), norm, eps),
        ),
        (terms_triton.act_terms(gate_up, SILU), fused.act_mul(gate_up)),
    ):
        expected = terms.split_terms(plain)
        is_known = expected.scales.isfinite()
        assert torch.equal(split.scales, expected.scales)
        # Sums of squares are added in another order: behind a norm a number of 16 bits may be the neighbour.
        torch.testing.assert_close(split.sums, expected.sums, rtol=1e-5, atol=0.05, equal_nan=True)
        found, codes = (each.codes.view(torch.uint8).view(num_rows, 2, -1, 128) for each in (split, expected))
        differing = (found != codes).transpose(1, 2)[is_known]
        assert int(differing.sum()) <= 2e-3 * differing.numel(), (differing.sum(), differing.numel())


def test_every_code_is_widened_exactly() -> None:
    """Rows of the identity return the values: all of E4M3 but NaN, and all of 4 bits under all zero points."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes = torch.where((codes & 127) == 127, 0, codes).view(1, 256).expand(64, 256).contiguous()
    eight = QuantizedWeight(FP8["rows"], (64, 256), codes.view(torch.float8_e4m3fn), torch.ones(64, device="cuda"))
    fours = torch.arange(256, dtype=torch.uint8, device="cuda").view(1, 256).expand(64, 256) % 16
    zeros = torch.arange(8 * 64, device="cuda").view(8, 64).remainder_(17).to(torch.uint8)
    spec = QuantSpec(4, "uint", (1, 32))
    four = QuantizedWeight(spec, (64, 256), pack_codes(fours, spec), torch.ones(8, 64, device="cuda").half(), zeros)
    for weight in (eight, four):
        for dtype in DTYPES:
            x = torch.eye(256, device="cuda", dtype=dtype)
            found = torch.cat(
                [quantized_linear.quantized_linear(x[row : row + 16], weight, None) for row in range(0, 256, 16)]
            )
            assert torch.equal(found.T, dequantize(weight, dtype)), (weight.spec, dtype)
            assert torch.equal(quantized_linear.quantized_linear(x, weight, None).T, dequantize(weight, dtype))


@pytest.mark.parametrize("name", ["channel", "gptq_v2"])
def test_a_quantized_model_in_graphs_computes_what_it_does_without(tmp_path: Path, name: str) -> None:
    """In float32 decode and verify steps, mixed steps and pieces; in bfloat16, with kernels of its own, steps that decode."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    quantize_checkpoint(save_llama(tmp_path, **sizes), name)
    counts = check_graphs(tmp_path)
    assert counts.get("replay/mixed", 0) + counts.get("replay/piecewise", 0) > 0
    prompts, found = prompts_of([5, 9, 17, 40], seed=3, vocab=320), []
    for graphs in ("off", "decode"):
        subject = graph_engine(tmp_path, graphs, "bfloat16", max_rows=4)
        found.append(generate(subject, prompts, 40))
        subject.executor.close()
    assert found[0] == found[1]


def test_held_out_text_is_about_as_likely() -> None:
    """In bfloat16; prompts are computed with inputs in 8 bits too."""
    losses = held_out_losses(29, "cuda")
    found = {scheme: losses[scheme] / losses["off"] for scheme in MOST_LOSS}
    print(losses, found, flush=True)
    assert all(found[scheme] <= most for scheme, most in MOST_LOSS.items()), (losses, found)
