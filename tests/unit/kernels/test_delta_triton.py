"""The kernels of the gated delta rule against their twin, run by Triton's interpreter."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

HEADER = """
import torch
from torch.testing import assert_close
from hiserve.kernels import delta as twin, delta_chunks, delta_inputs, delta_scan, delta_step, delta_triton
from hiserve.kernels.delta import DeltaShape
from hiserve.kernels.delta_triton import delta
from tests.helpers.delta_cases import Chunk, Layer, batch_of, nan_pools, random_inputs, random_weights

torch.set_num_threads(1)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}

class Pair:
    # A layer of the twin and one of the kernels, with the same steps.
    def __init__(self, shape, dtype, ring, taps=4, state_dtype=None):
        torch.manual_seed(ring)
        weights = random_weights(shape, dtype, taps)
        self.layers = [Layer(weights, nan_pools(6, ring, 4, shape, dtype, taps, state_dtype), shape) for _ in range(2)]
        self.layers[1].run = delta
        self.tolerance = max(TOLERANCE[dtype], TOLERANCE.get(state_dtype, 0))
        self.kept = TOLERANCE[state_dtype] if state_dtype else self.tolerance
        self.inputs = random_inputs(60, shape, dtype)

    def step(self, *chunks, **more):
        made = []
        for row, start, state_len, end, *rest in chunks:
            made.append(Chunk(row, start, state_len, self.inputs[start:end], *rest))
        wanted, found = (layer.step(made, **more) for layer in self.layers)
        for wants, ours in zip(wanted, found, strict=True):
            assert_close(ours, wants, rtol=self.tolerance, atol=self.tolerance)
        for name in ("ring", "state", "snap_ring", "snap_state"):
            # Row 0 and slot 0 take what padding writes.
            wants, ours = (getattr(layer.pools, name)[1:] for layer in self.layers)
            assert_close(ours, wants, rtol=self.kept, atol=self.kept, equal_nan=True, msg=name)
"""
STEPS = """
delta_step._BLOCK_VALUES = 16
for shape, dtype, ring, taps, state_dtype in (
    (DeltaShape(1, 2, 16, 32), torch.float32, 7, 4, None),
    (DeltaShape(2, 2, 32, 16), torch.float16, 6, 4, torch.bfloat16),
    (DeltaShape(1, 1, 16, 16), torch.float16, 6, 4, torch.float64),
    (DeltaShape(1, 2, 16, 16), torch.float64, 4, 2, None),
):
    pair = Pair(shape, dtype, ring, taps, state_dtype)
    # (row, start, state_len, end, drafts, snap_at, slot): new rows, one of them with a snapshot before the convolution is full.
    pair.step((1, 0, 0, 5, 0, 2, 1), (2, 0, 0, 3, 2), (3, 0, 0, 1), num_spare=1)
    # Replays of one and two drafts, a snapshot in a replay, one that a draft does not reach, and one at the end of the step.
    pair.step((1, 5, 5, 7, 1, 7, 2), (2, 2, 1, 4, 1, 2, 3), (3, 1, 1, 3, 0, 3, 1))
    if dtype == torch.float32:
        pair.step((1, 7, 6, 8, 0, 7, 2), (2, 4, 3, 5, 0), (3, 3, 3, 4, 0, 3, 2))
"""
PADDING = """
# As in a graph for larger steps: padded rows, a row without tokens, tokens of no row, bounds for more tokens; views of one tensor.
torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
shape = DeltaShape(1, 2, 16, 16)
pair = Pair(shape, torch.float32, 5)
pair.step((2, 0, 0, 4))
before = pair.layers[1].pools.state[2].clone()
chunks = [Chunk(0, 0, 0, pair.inputs[:2]), Chunk(0, 0, 0, pair.inputs[:2]), Chunk(1, 0, 0, pair.inputs[:3])]
batch, outs = batch_of(chunks, 1, [3, 3, 3, 3]), []
mixed, gates = torch.cat([chunk.inputs for chunk in chunks] + [pair.inputs[:2]]).split_with_sizes((64, 4), 1)
for layer in pair.layers:
    layer.pools.state[0], layer.pools.ring[0] = torch.nan, torch.nan
    outs.append(layer.run(mixed, gates, layer.weights, layer.pools, batch, shape))
assert_close(outs[1], outs[0], rtol=2e-5, atol=2e-5)
assert (outs[1][7:] == 0).all() and not outs[1].isnan().any()
assert torch.equal(pair.layers[1].pools.state[2], before)
assert pair.layers[1].pools.snap_state[1:].isnan().all() and pair.layers[1].pools.snap_ring[1:].isnan().all()
pair.step((2, 4, 4, 6))
"""
PROMPTS = """
twin.MAX_STEP_TOKENS, delta_inputs._BLOCK_PACKED = 3, 2  # blocks with and without inputs of the ring
usual = delta_triton._IN_CHUNKS
for shape, dtype, chunk, state_dtype in (
    (DeltaShape(1, 2, 16, 32), torch.float32, 16, None),
    (DeltaShape(1, 1, 32, 16), torch.float16, 16, torch.bfloat16),
    (DeltaShape(1, 1, 16, 16), torch.float16, 0, torch.float64),
    (DeltaShape(1, 1, 16, 16), torch.float64, 0, None),
):
    delta_chunks._CHUNK, delta_scan._FEW = chunk, delta_scan.ScanTile(16, 2)
    delta_triton._IN_CHUNKS = (torch.float32, *usual)  # to see more digits than 16 bits have
    pair, end = Pair(shape, dtype, 5, state_dtype=state_dtype), 24 if chunk else 7
    # A row that decodes, and prompts: one of which is short, one with a snapshot, one whose last tokens may be rejected.
    pair.step((1, 0, 0, 2, 1))
    pair.step((1, 1, 1, 2, 0), (2, 0, 0, end, 0, 6, 1), (3, 0, 0, 3), widths=[1, end + 3, 1])
    if dtype == torch.float32:
        # Slot 1 is that of another row, whose boundary this one has passed before.
        pair.step((2, end, end, end + 5, 2, end + 2, 2), (3, 3, 3, 5, 1, 3, 1))
        pair.step((2, end + 4, end + 3, end + 9, 0, end + 4, 3), (3, 4, 4, 8, 0, 6, 1))
"""
ODD = """
# Heads that no kernel takes.
for shape in (DeltaShape(1, 2, 12, 16), DeltaShape(1, 1, 16, 8)):
    pair = Pair(shape, torch.float32, 5)
    pair.step((1, 0, 0, 20, 0, 16, 1), (2, 0, 0, 3, 2))
    pair.step((1, 20, 20, 21), (2, 2, 1, 4, 1))
"""
ALIKE = """
delta_triton._IN_CHUNKS = (torch.float32, torch.float16)
delta_chunks._CHUNK = 32
# Equal keys, written whole and kept whole: sums of powers of their products would cancel.
shape = DeltaShape(1, 1, 16, 16)
for dtype in (torch.float32, torch.float16):
    pair = Pair(shape, dtype, 5)
    pair.inputs[:, 16:32] = 3.0
    pair.inputs[:, -2], pair.inputs[:, -1] = 20.0, -20.0
    pair.step((1, 0, 0, 33))
"""


def test_steps_of_few_tokens_replay_fold_and_snapshot_as_the_twin_does() -> None:
    run_interpreted(HEADER + STEPS)


def test_padding_changes_nothing() -> None:
    run_interpreted(HEADER + PADDING)


def test_prompts_fold_and_snapshot_as_the_twin_does() -> None:
    run_interpreted(HEADER + PROMPTS)


def test_keys_that_are_alike_lose_no_digits() -> None:
    run_interpreted(HEADER + ALIKE)


def test_heads_of_odd_sizes_use_the_twin() -> None:
    run_interpreted(HEADER + ODD)
