"""Products of packed experts alone, at the widths of gpt-oss-20b and DeepSeek-V4-Flash: ``python -m benchmarks.kernels.experts``.

It compares tiles on a GPU, each with the bytes that it must read at the rate of a copy, or with its products at the rate of a matrix
product, and prints them, the fastest first; and the whole mixture with weights of 16 bits. ``benchmarks.hybrid`` has whole models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu import ceilings
from benchmarks.gpu.ceilings import median_s, recorded
from hiserve.core.activation import SILU
from hiserve.kernels import experts
from hiserve.kernels.expert_products import Tile
from hiserve.kernels.packed_products import multiply_packed
from hiserve.kernels.packed_weights import PackedWeights, packed_size, plain

SEED = 20261128
REPEATS = 10
NUM_CHOICES = 12  # of experts, which a measurement takes in turn, so that no cache holds them
NUM_PROMPT = 8192  # tokens of a step of prompts
DEVICE = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Experts of a layer."""

    hidden: int
    inner: int
    num_experts: int
    num_chosen: int

    def weights(self, kind: str) -> tuple[PackedWeights, PackedWeights]:
        """Returns random matrices of both products, of finite numbers."""
        return self._matrices(kind, 2 * self.inner, self.hidden, 2), self._matrices(kind, self.hidden, self.inner, 1)

    def _matrices(self, kind: str, rows: int, columns: int, num_parts: int) -> PackedWeights:
        size = self.num_experts, rows
        if kind == "4":
            words, scales = (
                torch.empty(*size, count, dtype=torch.int32, device=DEVICE) for count in packed_size(columns)
            )
            return PackedWeights(words.random_(-(1 << 31), 1 << 31), scales.fill_(0x78787878), columns)
        codes = torch.randint(0, 120, (*size, columns), dtype=torch.uint8, device=DEVICE)
        blocks = -(-rows // num_parts // 128), -(-columns // 128)
        return PackedWeights(codes, torch.full((self.num_experts, num_parts, *blocks), 0.01, device=DEVICE), columns)

    def read_share(self, num_tokens: int) -> float:
        """Returns the share of experts that random routing chooses."""
        return 1 - (1 - self.num_chosen / self.num_experts) ** num_tokens


SHAPES = {"gpt-oss-20b": Sizes(2880, 2880, 32, 4), "v4-flash": Sizes(4096, 2048, 64, 6)}


def choices(sizes: Sizes, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Returns shares and chosen experts of random tokens."""
    count = NUM_CHOICES if num_tokens < NUM_PROMPT else 2
    logits = torch.randn(count, num_tokens, sizes.num_experts, device=DEVICE)
    return [experts.route(each, sizes.num_chosen, True) for each in logits]


def seconds(work: Callable[[Tensor, Tensor], object], routed: list[tuple[Tensor, Tensor]]) -> float:
    """Returns the time of one call."""

    def step() -> None:
        for shares, chosen in routed:
            work(shares, chosen)

    with torch.inference_mode():
        return median_s("cuda", recorded(step), REPEATS) / len(routed)


def tiles(num_tokens: int) -> Iterator[Tile]:
    """Yields tiles for a token alone, for steps that decode, or for prompts."""
    if num_tokens < NUM_PROMPT:
        for columns, warps, stages in product((32, 64, 128), (2, 4, 8), (3, 5)):
            if 8 * warps <= columns <= 32 * warps:
                yield Tile(8 if num_tokens == 1 else 16, columns, 128, warps, stages)
        return
    for rows, columns, warps, stages in product((64, 128, 256), (64, 128), (4, 8), (3, 4)):
        if rows * columns <= 128 * 128 * warps // 4:
            yield Tile(rows, columns, 128, warps, stages)


def compare_tiles(sizes: Sizes, weights: tuple[PackedWeights, PackedWeights], num_tokens: int, rate: float) -> None:
    """Prints the time of each product with each tile; ``rate`` is in bytes or in operations a second."""
    routed = choices(sizes, num_tokens)
    num_pairs = num_tokens * sizes.num_chosen
    grouped = {
        id(chosen): (None, None) if num_tokens == 1 else experts._group(chosen, sizes.num_experts, num_pairs)
        for _, chosen in routed
    }
    x = torch.randn(num_tokens, sizes.hidden, device=DEVICE).to(torch.bfloat16)
    inside, made = x.new_empty(num_pairs, sizes.inner), x.new_empty(num_pairs, sizes.hidden)
    for name, weight in zip(("gate and up", "down"), weights, strict=True):
        limit = 2 * num_pairs * torch.Size(weight.shape[1:]).numel() / rate
        if num_tokens < NUM_PROMPT:
            limit = sizes.read_share(num_tokens) * (weight.codes.nbytes + weight.scales.nbytes) / rate
        found = []
        for tile in tiles(num_tokens):

            def work(_: Tensor, chosen: Tensor, weight: PackedWeights = weight, tile: Tile = tile) -> None:
                given = (x, inside, SILU) if weight is weights[0] else (inside, made, None)
                order, ends = grouped[id(chosen)]
                multiply_packed(given[0], weight, None, None, order, ends, given[1], chosen, given[2], tile)

            try:
                found.append((seconds(work, routed), tile))
            except Exception as error:  # noqa: BLE001 - of a tile that is too large the others are of interest
                print(f"  {tile}: {str(error).splitlines()[0]}", flush=True)
        for taken, tile in sorted(found, key=lambda each: each[0])[:4]:
            size = f"{tile.rows:3} x {tile.columns:3}, {tile.warps} warps, {tile.stages} stages"
            print(f"  {name:11} {size}: {1e6 * taken:9.1f} us, {limit / taken:.2f} of the limit", flush=True)


def main() -> None:
    torch.manual_seed(SEED)
    copy, matmul = ceilings.copy_rate("cuda", 8 << 30), ceilings.matmul_rate("cuda", 8192)
    for (shape, sizes), kind in product(SHAPES.items(), "48"):
        weights = sizes.weights(kind)
        plains = tuple(plain(each, torch.bfloat16) for each in weights)
        for num_tokens in (1, 8, 32, NUM_PROMPT):
            routed = choices(sizes, num_tokens)
            x = torch.randn(num_tokens, sizes.hidden, device=DEVICE).to(torch.bfloat16)
            packed, wide = (
                seconds(lambda *given, its=its, x=x: experts.mix_experts(x, *given, *its), routed)
                for its in (weights, plains)
            )
            told = f"{1e6 * packed:.1f} us packed, {1e6 * wide:.1f} us in 16 bits"
            print(f"{shape}, {kind} bits, {num_tokens} tokens, all launches: {told}", flush=True)
            compare_tiles(sizes, weights, num_tokens, matmul if num_tokens == NUM_PROMPT else copy)


if __name__ == "__main__":
    main()
