"""Layers of the gated delta rule, and rows whose inputs arrive in any chunks, with any drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiserve.core.forward import ForwardInputs, StateRows
from hiserve.kernels.delta import DeltaPools, DeltaShape, DeltaWeights
from hiserve.kernels.delta import delta as twin

Delta = Callable[[Tensor, Tensor, DeltaWeights, DeltaPools, ForwardInputs, DeltaShape], Tensor]
SHAPE = DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16)
TAPS = 4


@dataclass(frozen=True)
class Chunk:
    """Tokens of a row in a step.

    Attributes:
        row: Its number.
        start: Tokens computed before.
        state_len: Tokens that the stored state covers.
        inputs: ``[n, C + 2 * num_value_heads]``.
        num_draft: The last of them that may be rejected.
        snap_at: Boundary of a snapshot.
        snap_slot: Its slot; 0 is none.
    """

    row: int
    start: int
    state_len: int
    inputs: Tensor
    num_draft: int = 0
    snap_at: int = 0
    snap_slot: int = 0


def random_weights(shape: DeltaShape, dtype: torch.dtype, taps: int = TAPS) -> DeltaWeights:
    """Weights whose decay is neither 0 nor 1."""
    heads = shape.num_value_heads
    conv = torch.randn(shape.num_channels, taps, dtype=torch.float64) / taps**0.5
    return DeltaWeights(
        conv.to(dtype).t().contiguous().t(),
        torch.rand(heads).mul_(4).add_(0.05).log_().to(dtype),
        torch.randn(heads).to(dtype),
    )


def random_inputs(num_tokens: int, shape: DeltaShape, dtype: torch.dtype) -> Tensor:
    """Inputs ``[n, C + 2 * num_value_heads]``."""
    return torch.randn(num_tokens, shape.num_channels + 2 * shape.num_value_heads, dtype=torch.float64).to(dtype)


def nan_pools(
    num_rows: int,
    ring: int,
    num_slots: int,
    shape: DeltaShape,
    dtype: torch.dtype,
    taps: int = TAPS,
    state_dtype: torch.dtype | None = None,
) -> DeltaPools:
    """Pools without any state; their type is float32 at least where none is given."""
    width = shape.num_channels + 2 * shape.num_value_heads
    state = (shape.num_value_heads, shape.key_dim, shape.value_dim)
    kept = state_dtype or torch.promote_types(dtype, torch.float32)
    return DeltaPools(
        torch.full((num_rows, ring, width), torch.nan, dtype=dtype),
        torch.full((num_rows, *state), torch.nan, dtype=kept),
        torch.full((num_slots, taps - 1, width), torch.nan, dtype=dtype),
        torch.full((num_slots, *state), torch.nan, dtype=kept),
    )


def batch_of(
    chunks: Sequence[Chunk], num_spare: int = 0, widths: Sequence[int] | None = None, device: str | torch.device = "cpu"
) -> ForwardInputs:
    """The batch of some chunks, with ``num_spare`` rows without tokens; ``widths`` are bounds of their lengths."""
    q_lens = np.array([len(chunk.inputs) for chunk in chunks] + [0] * num_spare, dtype=np.int32)
    columns = [
        [chunk.row for chunk in chunks],
        [chunk.start for chunk in chunks],
        [chunk.state_len for chunk in chunks],
        [chunk.start + len(chunk.inputs) - chunk.num_draft for chunk in chunks],
        [chunk.snap_at for chunk in chunks],
        [chunk.snap_slot for chunk in chunks],
    ]
    rows = StateRows(*(torch.tensor([*column, *[0] * num_spare], device=device) for column in columns))
    none = torch.zeros(0, dtype=torch.int64)
    return ForwardInputs(
        input_ids=none.to(torch.int32),
        positions=none,
        slots=none,
        token_rows=none,
        qo_indptr=torch.from_numpy(np.concatenate(([0], q_lens.cumsum())).astype(np.int32)).to(device),
        kv_lens=none,
        page_table=none.to(torch.int32),
        logits_rows=none,
        q_lens=q_lens if widths is None else np.array(widths, dtype=np.int32),
        kv_bounds=q_lens,
        max_kv_len=1,
        state=rows,
    )


@dataclass
class Layer:
    """A layer with its pools.

    Attributes:
        run: What computes it.
    """

    weights: DeltaWeights
    pools: DeltaPools
    shape: DeltaShape = SHAPE
    run: Delta = twin

    def step(self, chunks: Sequence[Chunk], num_spare: int = 0, widths: Sequence[int] | None = None) -> list[Tensor]:
        """Computes a batch; returns the outputs of each chunk, ``[n, num_value_heads, value_dim]``."""
        inputs = torch.cat([chunk.inputs for chunk in chunks])
        mixed, gates = (each.contiguous() for each in inputs.split_with_sizes(self._sizes, 1))
        batch = batch_of(chunks, num_spare, widths, self.pools.ring.device)
        out = self.run(mixed, gates, self.weights, self.pools, batch, self.shape)
        return list(out.split_with_sizes([len(chunk.inputs) for chunk in chunks]))

    def restore(self, slot: int, row: int, boundary: int) -> None:
        """Lets a row start from a snapshot."""
        taps, ring = self.pools.snap_ring.shape[1] + 1, self.pools.ring.shape[1]
        self.pools.ring[row] = torch.nan
        for place, position in enumerate(range(boundary - taps + 1, boundary)):
            self.pools.ring[row, position % ring] = self.pools.snap_ring[slot, place]
        self.pools.state[row] = self.pools.snap_state[slot]

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.shape.num_channels, 2 * self.shape.num_value_heads


def plain(inputs: Tensor, weights: DeltaWeights, shape: DeltaShape) -> tuple[Tensor, Tensor]:
    """The layer as it is written down, in float64: outputs ``[n, num_value_heads, value_dim]``, the state after each token."""
    inputs, conv = inputs.double(), weights.conv.double()
    channels, taps = conv.shape
    keys = shape.num_key_heads * shape.key_dim
    state = torch.zeros(shape.num_value_heads, shape.key_dim, shape.value_dim, dtype=torch.float64)
    outs, states = [], []
    for t in range(len(inputs)):
        total = sum(conv[:, taps - 1 - ago] * inputs[t - ago, :channels] for ago in range(min(taps, t + 1)))
        assert isinstance(total, Tensor)
        q, k, v = (total * total.sigmoid()).split_with_sizes((keys, keys, channels - 2 * keys))
        q, k = (each.view(shape.num_key_heads, -1) for each in (q, k))
        q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        b, a = inputs[t, channels:].chunk(2)
        write = b.sigmoid()
        keep = (-weights.a_log.double().exp() * torch.log1p((a + weights.dt_bias.double()).exp())).exp()
        for head in range(shape.num_value_heads):
            mine = head * shape.num_key_heads // shape.num_value_heads
            value = v.view(shape.num_value_heads, -1)[head]
            old = state[head] * keep[head]
            state[head] = old + torch.outer(k[mine], write[head] * (value - old.T @ k[mine]))
        read_by = q.repeat_interleave(shape.num_value_heads // shape.num_key_heads, 0)
        outs.append(torch.einsum("hk,hkv->hv", read_by, state) * shape.key_dim**-0.5)
        states.append(state.clone())
    return torch.stack(outs), torch.stack(states)
