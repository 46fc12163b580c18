"""Products of a layer of Llama-8B with weights in 8 and 4 bits, alone: ``python -m benchmarks.kernels.few_bits``.

It compares ways to split and to pipeline the kernel of few rows, each with the bytes that it must read at the rate of a copy, and
prints them, the fastest first; then the products of many rows; both beside weights of 16 bits. ``benchmarks.quantized`` has the whole
model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import ceilings
from benchmarks.gpu.ceilings import median_s, recorded
from hiserve.core.quantization import QuantSpec
from hiserve.kernels import quantized_linear, skinny_linear, term_products
from hiserve.kernels.quantized import QuantizedWeight, quantize
from hiserve.models.quantize import make_quantization

SEED = 20261128
REPEATS = 10
SET_BYTES = 360 << 20  # of weights of a shape, which are read in turn, so that no cache holds them
WEIGHTS = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
NUM_PROMPT = 8192  # tokens of a step of prompts
DEVICE = torch.device("cuda")
SPECS = {
    "fp8": make_quantization("fp8").linears,
    "fp8 blocks": QuantSpec(8, "e4m3", (128, 128), "token"),
    "int4": make_quantization("int4").linears,
    "int4 of 32": QuantSpec(4, "int", (1, 32)),
}


def seconds(weights: list[Tensor] | list[QuantizedWeight], x: Tensor) -> float:
    """Returns the time of one product."""
    linear: Callable[..., Tensor] = skinny_linear.linear
    if isinstance(weights[0], QuantizedWeight):
        linear = quantized_linear.quantized_linear

    def step() -> None:
        for weight in weights:
            linear(x, weight, None)

    with torch.inference_mode():
        return median_s("cuda", recorded(step), REPEATS) / len(weights)


def enough(weights: list[Any]) -> list[Any]:
    """Returns the weights, and as many copies as no cache holds."""
    size = weights[0].nbytes if isinstance(weights[0], Tensor) else weights[0].num_bytes
    return [copied(weights[index % len(weights)]) for index in range(max(2, SET_BYTES // size))]


def copied(weight: Any) -> Any:
    if isinstance(weight, Tensor):
        return weight.clone()
    return replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone())


def compare(name: str, plain: dict[str, list[Tensor]], copy_rate: float) -> None:
    """Prints the times of few rows with each number of programs and stages, and of many rows."""
    spec = SPECS[name]
    assert spec is not None
    made = {each: enough([quantize(weight, spec) for weight in weights]) for each, weights in plain.items()}
    tiles, takes_terms = dict(term_products.TILES), term_products.takes_terms(made["out"][0])
    for num_rows in (1, 8, 32):
        for which, weights in made.items():
            x = torch.randn(num_rows, weights[0].shape[1], device=DEVICE).to(torch.bfloat16)
            wide, limit, found = seconds(enough(plain[which]), x), weights[0].num_bytes / copy_rate, []
            for columns, stages, count in product((64, 128), (4, 5, 6), (1, 2, 3, 4) if takes_terms else ()):
                term_products.TILES[spec.bits] = tile = term_products.Tile(columns, columns, 4, stages, count)
                try:
                    found.append((seconds(weights, x), tile))
                except Exception as error:  # noqa: BLE001 - of stages that do not fit the others are of interest
                    print(f"  {tile}: {str(error).splitlines()[0]}", flush=True)
            term_products.TILES |= tiles
            now = seconds(weights, x)
            told = ", ".join(f"{1e6 * taken:.1f} {tuple(tile)}" for taken, tile in sorted(found)[:4])
            print(
                f"{name} {which} x {num_rows}: {1e6 * now:.1f} us, {limit / now:.2f} of the limit, {wide / now:.2f} x 16 bits; {told}",
                flush=True,
            )
    for num_rows in (64, 128, 512, NUM_PROMPT):
        taken = wide = 0.0
        for which, weights in made.items():
            x = torch.randn(num_rows, weights[0].shape[1], device=DEVICE).to(torch.bfloat16)
            taken, wide = taken + seconds(weights, x), wide + seconds(plain[which], x)
        print(f"{name} layer x {num_rows}: {1e6 * taken:.1f} us, {wide / taken:.2f} x 16 bits", flush=True)


def main() -> None:
    torch.manual_seed(SEED)
    rate = ceilings.copy_rate("cuda", 8 << 30)
    plain = {
        name: [(torch.randn(shape, device=DEVICE) * 0.02).to(torch.bfloat16) for _ in range(2)]
        for name, shape in WEIGHTS.items()
    }
    for name in SPECS:
        compare(name, plain, rate)


if __name__ == "__main__":
    main()
