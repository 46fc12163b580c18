"""The gated delta rule alone, with the heads of Qwen3.5-35B-A3B: steps that decode, steps that verify drafts, and prompts.

The limit of a step is that of reading and writing each state once, and of its inputs and outputs, at the rate of a copy.
``benchmarks.hybrid`` has it as its part ``delta``; ``python -m benchmarks.kernels.delta`` compares sizes of blocks on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import ceilings
from benchmarks.gpu.ceilings import median_s, recorded
from benchmarks.gpu.driving import Part
from benchmarks.gpu.figures import Figure
from hiserve.core.forward import ForwardInputs, StateRows
from hiserve.kernels.delta import DeltaPools, DeltaShape, DeltaWeights
from hiserve.kernels.ops import ops_for

SEED = 20261128
SHAPE = DeltaShape(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
TINY_SHAPE = DeltaShape(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16)
TAPS = 4
NUM_DRAFT = 3  # of a step that verifies; as many of the one before were rejected but one
BAR = 0.70  # of 32 rows that decode
VERIFY_BAR = 1 / 1.15  # time of the same rows that decode, to that of rows that verify
MIN_READ = 512 << 20  # bytes of states that the launches of a measurement read, many times a cache of the device
REPEATS = 10
START = 1000  # tokens computed before


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Layers of equal shape whose states differ, so that no cache holds them from one launch to the next."""

    shape: DeltaShape
    weights: DeltaWeights
    pools: list[DeltaPools]
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: DeltaShape, device: torch.device, num_rows: int) -> Layers:
        """Returns as many as ``MIN_READ`` asks for, each with ``num_rows`` rows besides row 0."""
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        state = (num_rows + 1, shape.num_value_heads, shape.key_dim, shape.value_dim)
        entry = shape.num_channels + 2 * shape.num_value_heads
        num_layers = 2 if device.type == "cpu" else max(4, min(256, MIN_READ // (num_rows * state_bytes(shape))))

        def random(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(size, device=device, dtype=dtype)

        weights = DeltaWeights(random(TAPS, shape.num_channels).t(), random(state[1]), random(state[1]))
        pools = [
            DeltaPools(
                random(num_rows + 1, NUM_DRAFT + TAPS - 1, entry),
                torch.randn(state, device=device),
                random(1, TAPS - 1, entry),
                torch.zeros((1, *state[1:]), device=device),
            )
            for _ in range(num_layers)
        ]
        return cls(shape, weights, pools, device, dtype)

    def seconds(self, q_lens: Sequence[int], num_draft: int = 0, num_replayed: int = 0, start: int = START) -> float:
        """Returns the time of one layer in a step of rows with so many tokens each."""
        lengths, rows = torch.tensor(q_lens), torch.arange(1, len(q_lens) + 1)
        starts = torch.full_like(lengths, start)
        given = (rows, starts, starts - num_replayed, starts + lengths - num_draft, 0 * rows, 0 * rows)
        inputs = _batch(q_lens, StateRows(*(each.to(self.device) for each in given)))
        num_tokens = sum(q_lens)
        mixed = torch.randn((num_tokens, self.shape.num_channels), device=self.device, dtype=self.dtype)
        gates = torch.randn((num_tokens, 2 * self.shape.num_value_heads), device=self.device, dtype=self.dtype)
        delta = ops_for(self.device).delta

        def step() -> None:
            for pools in self.pools:
                delta(mixed, gates, self.weights, pools, inputs, self.shape)

        with torch.inference_mode():
            work = recorded(step) if self.device.type == "cuda" else step
            return median_s(self.device.type, work, REPEATS) / len(self.pools)


def state_bytes(shape: DeltaShape) -> int:
    """Returns the bytes of a row's state."""
    return 4 * shape.num_value_heads * shape.key_dim * shape.value_dim


def step_bytes(shape: DeltaShape, num_rows: int, num_tokens: int) -> int:
    """Returns the bytes that a layer must read and write in a step, of inputs of 16 bits."""
    values = shape.num_value_heads * shape.value_dim
    return 2 * num_rows * state_bytes(shape) + 2 * num_tokens * (
        shape.num_channels + 2 * shape.num_value_heads + values
    )


def measure_delta(device: str, limits: dict[str, float]) -> Part:
    """Times rows that decode, rows that verify, and steps of prompts: one long one, and several at once."""
    part, is_tiny = Part(), device == "cpu"
    torch.manual_seed(SEED)
    shape = TINY_SHAPE if is_tiny else SHAPE
    for num_rows in (1, 2) if is_tiny else (1, 8, 32):
        layers = Layers.of(shape, torch.device(device), num_rows)
        decode = layers.seconds([1] * num_rows)
        limit = step_bytes(shape, num_rows, num_rows) / limits["copy_bytes_per_s"]
        name, bar = f"delta decode, {num_rows}", BAR if num_rows == 32 else None
        part.figures.append(Figure(name, 1e6 * decode, "us", limit / decode, bar, "bandwidth limit"))
        verify = layers.seconds([1 + NUM_DRAFT] * num_rows, NUM_DRAFT, NUM_DRAFT - 1)
        name, bar = f"delta verify, {num_rows} x {1 + NUM_DRAFT}", VERIFY_BAR if num_rows == 32 else None
        part.figures.append(Figure(name, 1e6 * verify, "us", decode / verify, bar, "decode"))
        part.samples[name] = {"decode_s": decode, "verify_s": verify, "limit_s": limit, "num_layers": len(layers.pools)}
    num_prompts, length = (2, 24) if is_tiny else (8, 8192)
    layers = Layers.of(shape, torch.device(device), num_prompts)
    alone = num_prompts * layers.seconds([length], start=0)
    at_once = num_prompts * layers.seconds([length // num_prompts] * num_prompts, start=0)
    for name, seconds in (("one by one", alone), ("all in each step", at_once)):
        part.figures.append(Figure(f"delta prompts, {num_prompts} x {length}, {name}", 1e3 * seconds, "ms a layer"))
    part.samples["prompts"] = {"one_by_one_s": alone, "all_in_each_step_s": at_once, "tokens_a_step": length}
    return part


def _batch(q_lens: Sequence[int], state: StateRows) -> ForwardInputs:
    """Returns a batch of which ``delta`` reads all that it needs."""
    lengths, none = np.array(q_lens, dtype=np.int32), torch.zeros(0, dtype=torch.int64)
    indptr = torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32))
    return ForwardInputs(
        input_ids=none.to(torch.int32),
        positions=none,
        slots=none,
        token_rows=none,
        qo_indptr=indptr.to(state.rows.device),
        kv_lens=state.starts,
        page_table=none.to(torch.int32),
        logits_rows=none,
        q_lens=lengths,
        kv_bounds=lengths,
        max_kv_len=1,
        state=state,
    )


@contextmanager
def _patched(module: Any, **values: Any) -> Iterator[None]:
    """Sets numbers of a module for a while."""
    former = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in former.items():
            setattr(module, name, value)


def main() -> None:
    """Prints times of each size of blocks: of steps by rows, and of prompts."""
    from hiserve.kernels import delta_chunks, delta_scan, delta_step  # noqa: PLC0415 - Triton is not installed everywhere

    torch.manual_seed(SEED)
    device, rate = torch.device("cuda"), ceilings.copy_rate("cuda", 8 << 30)
    for num_rows in (1, 8, 32):
        layers = Layers.of(SHAPE, device, num_rows)
        limit = step_bytes(SHAPE, num_rows, num_rows) / rate
        for block, warps in product((16, 32, 64, 128), (1, 2, 4, 8)):
            with _patched(delta_step, _BLOCK_VALUES=block, _NUM_WARPS=warps):
                decode = layers.seconds([1] * num_rows)
                verify = layers.seconds([1 + NUM_DRAFT] * num_rows, NUM_DRAFT, NUM_DRAFT - 1)
            told = f"{1e6 * decode:8.1f} us ({limit / decode:.2f} of the limit), verify {1e6 * verify:8.1f} us"
            print(f"rows {num_rows:2}, {block:3} values, {warps} warps: {told}", flush=True)
    layers = Layers.of(SHAPE, device, 8)
    for chunk, block, warps in product((16, 32, 64), (32, 64, 128), (4, 8)):
        tile = delta_scan.ScanTile(block, 2)
        with _patched(delta_chunks, _CHUNK=chunk), _patched(delta_scan, _FEW=tile, _MANY=tile, _NUM_WARPS=warps):
            alone, at_once = layers.seconds([8192], start=0), layers.seconds([1024] * 8, start=0)
        told = f"1 x 8192 {1e3 * alone:6.2f} ms, 8 x 1024 {1e3 * at_once:6.2f} ms"
        print(f"chunks of {chunk}, {block:3} values, {warps} warps: {told}", flush=True)


if __name__ == "__main__":
    main()
