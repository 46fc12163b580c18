"""What lies between attentions, op by op, beside what the device can do, on the sizes of Llama-8B.

Usage: ``python -m benchmarks.kernels.layers OUT.json COMMIT [--tiny]``. Each op runs as a node of a graph, over buffers that
take turns so that nothing is read from a cache that a step would have overwritten. Its limit is the longest of a node of a
graph, of its bytes at the rate of a copy, and of its products at the rate of a matrix product. There are no bars.
``--tiny`` runs small sizes on the CPU, as a test of this file.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import ceilings
from benchmarks.gpu.ceilings import median_s, recorded
from benchmarks.gpu.figures import Figure, table
from benchmarks.record import Record, gpu_parser
from hiserve.core.forward import LayerKV
from hiserve.kernels.ops import Ops, ops_for
from hiserve.kernels.step_ops import step_ops_for

SEED = 20261121
EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Widths of a decoder, and numbers of tokens.

    Attributes:
        tokens: Batches of ops.
        linear_tokens: Batches of products.
        turn_bytes: Buffers take turns over at least so many bytes.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tokens: tuple[int, ...]
    linear_tokens: tuple[int, ...]
    turn_bytes: int

    @property
    def qkv_heads(self) -> int:
        """Heads of queries, keys and values together."""
        return self.heads + 2 * self.kv_heads

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns (outputs, inputs) of the products."""
        return {
            "qkv": (self.qkv_heads * self.head_dim, self.hidden),
            "out": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


FULL = Sizes(4096, 32, 8, 128, 14_336, 128_256, (1, 32, 128, 2048), (1, 8, 32, 128, 256, 2048, 8192), 512 << 20)
TINY = Sizes(32, 4, 2, 8, 64, 100, (1, 4), (1, 2, 4), 1 << 14)


@dataclass(frozen=True)
class Work:
    """One op on one number of tokens.

    Attributes:
        run: Runs it once, on the buffers of turn ``i``.
        num_bytes: It reads and writes at least.
        flop: It computes at least, in products.
    """

    name: str
    run: Callable[[int], object]
    turns: int
    num_bytes: int
    flop: int = 0


class Maker:
    """Makes buffers and ops on them."""

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
        self._sizes = sizes
        self._device = torch.device(device)
        self._dtype = dtype
        self._ops: Ops = ops_for(self._device)

    def works(self) -> Iterator[Work]:
        """Yields all ops on all numbers of tokens."""
        for tokens in self._sizes.tokens:
            yield self._norm(tokens)
            yield self._rotation(tokens)
            yield self._gate(tokens)
        yield from map(self._greedy, self._sizes.tokens[:-1])
        for name, (outputs, inputs) in self._sizes.matrices.items():
            turns = self._turns(outputs * inputs)
            weights = self._draw(turns, outputs, inputs)
            for tokens in self._sizes.linear_tokens[: -2 if name == "head" else None]:
                yield self._linear(name, weights, tokens)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _turns(self, num_elements: int) -> int:
        return max(2, min(32, self._sizes.turn_bytes // (num_elements * self._dtype.itemsize)))

    def _bytes(self, *tensors: Tensor) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    def _norm(self, tokens: int) -> Work:
        width = self._sizes.hidden
        turns = self._turns(3 * tokens * width)
        delta, residual, weight = self._draw(turns, tokens, width), self._draw(turns, tokens, width), self._draw(width)

        def run(turn: int) -> Tensor:
            return self._ops.add_rms_norm(delta[turn], residual[turn], weight, EPS)

        return Work(f"add and norm, {tokens}", run, turns, 4 * delta[0].nbytes)

    def _rotation(self, tokens: int) -> Work:
        sizes = self._sizes
        turns = self._turns(2 * tokens * sizes.qkv_heads * sizes.head_dim)
        qkv = self._draw(turns, tokens, sizes.qkv_heads, sizes.head_dim)
        cos, sin = self._draw(tokens, 1, sizes.head_dim), self._draw(tokens, 1, sizes.head_dim)
        pool = self._draw(2, turns * tokens, sizes.kv_heads, sizes.head_dim)
        slots = torch.randperm(turns * tokens, device=self._device).view(turns, tokens)

        def run(turn: int) -> Any:
            kv = LayerKV(k=pool[0], v=pool[1])
            return self._ops.rotate_and_store(qkv[turn], None, EPS, cos, sin, kv, slots[turn])

        written = qkv[0].nbytes + qkv[0].nbytes // sizes.qkv_heads * sizes.kv_heads  # queries; keys twice; values once
        return Work(f"rotate and store, {tokens}", run, turns, qkv[0].nbytes + written)

    def _gate(self, tokens: int) -> Work:
        width = 2 * self._sizes.intermediate
        turns = self._turns(tokens * width)
        gate_up = self._draw(turns, tokens, width)
        return Work(
            f"gate, {tokens}", lambda turn: self._ops.silu_mul(gate_up[turn]), turns, gate_up[0].nbytes * 3 // 2
        )

    def _greedy(self, tokens: int) -> Work:
        ops = step_ops_for(self._device)
        turns = self._turns(tokens * self._sizes.vocab)
        logits = self._draw(turns, tokens, self._sizes.vocab)
        return Work(f"greedy, {tokens}", lambda turn: ops.greedy(logits[turn]), turns, logits[0].nbytes)

    def _linear(self, name: str, weights: Tensor, tokens: int) -> Work:
        turns, outputs, inputs = weights.shape
        x = self._draw(tokens, inputs)
        num_bytes = weights[0].nbytes + x.nbytes + tokens * outputs * x.itemsize
        return Work(
            f"{name}, {tokens}",
            lambda turn: self._ops.linear(x, weights[turn], None),
            turns,
            num_bytes,
            2 * tokens * outputs * inputs,
        )


def measure(work: Work, device: str) -> float:
    """Seconds of one run."""

    def turns() -> None:
        for turn in range(work.turns):
            work.run(turn)

    if device == "cuda":
        return median_s(device, recorded(turns), 10) / work.turns
    return median_s(device, turns, 3) / work.turns


def main() -> int:
    """Writes the result file; returns 1 if an op failed."""
    given = gpu_parser(__doc__).parse_args()
    device, sizes, dtype = ("cpu", TINY, torch.float32) if given.tiny else ("cuda", FULL, torch.bfloat16)
    flags = " --tiny" * given.tiny
    command = f"python -m benchmarks.kernels.layers{flags} OUT.json COMMIT"
    result = Record.of(given, command, "hiserve/layers", "hiserve/kernels")
    limits = ceilings.measure(device)
    result |= {"ceilings": limits, "seed": SEED, "sizes": asdict(sizes), "figures": [], "errors": {}}
    torch.manual_seed(SEED)
    with torch.inference_mode():
        for work in Maker(sizes, device, dtype).works():
            try:
                took = measure(work, device)
            except Exception:  # noqa: BLE001 - the other ops are worth having
                result["errors"][work.name] = traceback.format_exc()
                print(f"{work.name}: {result['errors'][work.name][-400:]}", flush=True)
                continue
            by_bytes, by_flop = work.num_bytes / limits["copy_bytes_per_s"], work.flop / limits["matmul_flop_per_s"]
            limit_s = max(by_bytes, by_flop, limits.get("graph_node_s", 0.0))
            result["figures"].append(asdict(Figure(work.name, 1e6 * took, "us", limit_s / took, None, "limit")))
            result.save()
    print(table(result["figures"]))
    return int(bool(result["errors"]))


if __name__ == "__main__":
    raise SystemExit(main())
