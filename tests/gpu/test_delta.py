"""The kernels of the gated delta rule on CUDA, with heads of real size, against their twin in float64."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from hiserve.kernels.delta import DeltaPools, DeltaShape, DeltaWeights
from hiserve.kernels.ops import ops_for
from tests.helpers.delta_cases import TAPS, Chunk, Layer, batch_of, nan_pools, random_inputs, random_weights

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHAPE = DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=128, value_dim=128)
RING = 6  # of four tokens a step, of which three may be rejected
# Largest error against float64, to the norm of all outputs.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
PAGE = 64


def on_device(layer: Layer) -> Layer:
    """The same layer for the kernels."""
    weights = DeltaWeights(*(getattr(layer.weights, each.name).to(DEVICE) for each in fields(DeltaWeights)))
    pools = DeltaPools(*(getattr(layer.pools, each.name).to(DEVICE) for each in fields(DeltaPools)))
    return Layer(weights, pools, layer.shape, ops_for(torch.device(DEVICE)).delta)


def widened(layer: Layer) -> Layer:
    """The same layer in float64."""
    weights = DeltaWeights(*(getattr(layer.weights, each.name).double() for each in fields(DeltaWeights)))
    pools = DeltaPools(*(getattr(layer.pools, each.name).double() for each in fields(DeltaPools)))
    return Layer(weights, pools, layer.shape)


def check(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    assert found.isfinite().all(), what
    error = float((found.cpu().double() - wanted).norm() / wanted.norm())
    assert error <= tolerance, f"{what} differ by {error:.3g}, at most {tolerance:g}"


class Pair:
    """A layer of the kernels, and the twin of it that has the same steps in float64."""

    def __init__(self, dtype: torch.dtype, num_tokens: int) -> None:
        torch.manual_seed(7)
        layer = Layer(random_weights(SHAPE, dtype), nan_pools(6, RING, 4, SHAPE, dtype, TAPS), SHAPE)
        self.ours, self.twin, self.tolerance = on_device(layer), widened(layer), TOLERANCE[dtype]
        self.inputs = random_inputs(num_tokens, SHAPE, dtype)

    def chunks(self, *given: tuple[int, ...]) -> list[Chunk]:
        """Chunks of ``(row, start, state_len, end, num_draft, snap_at, snap_slot)``; the last ones may be left out."""
        return [Chunk(row, start, lag, self.inputs[start:end], *rest) for row, start, lag, end, *rest in given]

    def step(self, *given: tuple[int, ...]) -> None:
        chunks = self.chunks(*given)
        wide = [replace(chunk, inputs=chunk.inputs.double()) for chunk in chunks]
        near = [replace(chunk, inputs=chunk.inputs.to(DEVICE)) for chunk in chunks]
        for chunk, found, wanted in zip(chunks, self.ours.step(near), self.twin.step(wide), strict=True):
            check(found, wanted, self.tolerance, f"outputs of row {chunk.row} from {chunk.start} on")
            row = chunk.row
            check(self.ours.pools.state[row], self.twin.pools.state[row], self.tolerance, f"states of row {row}")
            ring = self.ours.pools.ring[row].cpu().double()
            assert torch.equal(ring.nan_to_num(7), self.twin.pools.ring[row].nan_to_num(7)), f"ring of row {row}"

    def check_snapshot(self, slot: int) -> None:
        check(self.ours.pools.snap_state[slot], self.twin.pools.snap_state[slot], self.tolerance, f"snapshots {slot}")
        assert torch.equal(self.ours.pools.snap_ring[slot].cpu().double(), self.twin.pools.snap_ring[slot])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_prompts_decode_and_verify_compute_what_the_twin_does(dtype: torch.dtype) -> None:
    pair = Pair(dtype, 700)
    pair.step((1, 0, 0, 300, 0, 4 * PAGE, 1), (2, 0, 0, 40), (3, 0, 0, 3))
    pair.check_snapshot(1)
    pair.step((2, 40, 40, 41), (3, 3, 3, 7, 3), (1, 300, 300, 650, 0, 10 * PAGE, 2))  # beside rows that decode
    pair.check_snapshot(2)
    pair.step((1, 650, 650, 654, 3), (2, 41, 41, 45, 3), (3, 5, 4, 9, 3))
    pair.step((1, 652, 651, 656, 3), (2, 42, 42, 46, 3), (3, 9, 6, 13, 3))
    pair.step((1, 655, 653, 656, 0), (2, 46, 43, 50, 3), (3, 10, 10, 64 + 8, 0, PAGE, 3))
    pair.check_snapshot(3)


def test_a_row_resumes_from_a_snapshot_in_another_row() -> None:
    pair = Pair(torch.float32, 300)
    pair.step((1, 0, 0, 200, 0, 2 * PAGE, 1))
    for layer in (pair.ours, pair.twin):
        layer.restore(1, 4, 2 * PAGE)
    pair.step((4, 2 * PAGE, 2 * PAGE, 200))
    error = (pair.ours.pools.state[4] - pair.ours.pools.state[1]).norm() / pair.ours.pools.state[1].norm()
    assert error <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_graph_serves_all_lengths_replays_and_snapshots(dtype: torch.dtype) -> None:
    """Of two rows, of which one is padding at times; each replay has other rows, lags and boundaries."""
    pair = Pair(dtype, 120)
    pair.step((1, 0, 0, 90), (2, 0, 0, 62))
    width = 4
    static = batch_of(pair.chunks((1, 0, 0, width), (0, 0, 0, width)), device=DEVICE)
    assert static.state is not None
    fed = torch.zeros(2 * width, pair.inputs.shape[1], dtype=dtype, device=DEVICE)
    mixed, gates = fed.split_with_sizes((SHAPE.num_channels, 2 * SHAPE.num_value_heads), 1)
    layer = pair.ours

    def run() -> Tensor:
        return layer.run(mixed, gates, layer.weights, layer.pools, static, SHAPE)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # on rows 1 and 0: what it changes is restored
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    layer.pools.state[1].copy_(pair.twin.pools.state[1])
    layer.pools.ring[1].copy_(pair.twin.pools.ring[1])
    for step in (
        [(1, 90, 90, 94, 3), (2, 62, 62, 66, 3)],
        [(1, 92, 91, 96, 3), (0, 0, 0, 4)],
        [(2, 63, 63, 67, 3, PAGE, 1), (1, 96, 93, 100, 3)],
        [(2, 67, 64, 71, 0, 68, 2), (1, 97, 97, 101, 0, 101, 3)],
    ):
        chunks = pair.chunks(*step)
        batch = batch_of(chunks, device=DEVICE)
        assert batch.state is not None
        for each in fields(batch.state):
            getattr(static.state, each.name).copy_(getattr(batch.state, each.name))
        fed.copy_(torch.cat([chunk.inputs for chunk in chunks]))
        graph.replay()
        wanted = pair.twin.step([replace(chunk, inputs=chunk.inputs.double()) for chunk in chunks])
        for chunk, found, exact in zip(chunks, out.split(width), wanted, strict=True):
            check(found, exact, pair.tolerance, f"outputs of row {chunk.row} from {chunk.start} on")
    pair.check_snapshot(1)
    pair.check_snapshot(2)
    pair.check_snapshot(3)


def test_long_prompts_of_many_heads() -> None:
    """The heads of Qwen3.5-35B-A3B: the chunks' kernel against the one that computes token by token, on the device."""
    torch.manual_seed(8)
    shape = DeltaShape(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
    layers = [
        on_device(Layer(random_weights(shape, dtype), nan_pools(3, RING, 1, shape, dtype, TAPS), shape))
        for dtype in (torch.bfloat16, torch.float32)
    ]
    weights = layers[0].weights
    layers[1].weights = DeltaWeights(*(getattr(weights, each.name).float() for each in fields(DeltaWeights)))
    inputs = random_inputs(4096, shape, torch.bfloat16).to(DEVICE)
    found, exact = (layer.step([Chunk(1, 0, 0, inputs.to(layer.pools.ring.dtype))])[0] for layer in layers)
    check(found, exact.cpu().double(), TOLERANCE[torch.bfloat16], "outputs")
    check(layers[0].pools.state[1], layers[1].pools.state[1].cpu().double(), TOLERANCE[torch.bfloat16], "states")
