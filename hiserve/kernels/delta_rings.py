"""Copies of inputs within kernels of the gated delta rule: into the ring of a row, and into a snapshot.

Each channel of an input belongs to one program, which alone reads and writes it: values to the program of their columns, gates
to the first program of their head, keys and queries to the first of the first head that they serve.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hiserve.kernels.delta_inputs import either, where_all


@triton.jit
def copy_input(new, old, gate, target, is_new, is_old, SIZES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies the program's channels of one input; zeros if it is neither new nor old.

    Args:
        new: Channels of a new input.
        old: An input of the ring.
        gate: Gates of a new input.
        target: An input of a ring or of a snapshot.
        is_new: Whether it is taken from the step.
        is_old: Whether it is taken from the ring.
        SIZES: ``DeltaSizes``.
        BLOCK: Value columns of a program; programs are numbered by head, then by block.
    """
    num_blocks: tl.constexpr = SIZES.value_dim // BLOCK
    group: tl.constexpr = SIZES.num_value_heads // SIZES.num_key_heads
    keys: tl.constexpr = SIZES.num_key_heads * SIZES.key_dim
    head, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    key, value, pair = tl.arange(0, SIZES.key_dim), tl.arange(0, BLOCK), tl.arange(0, 2)
    is_key, is_pair = where_all((block == 0) & (head % group == 0), key), where_all(block == 0, pair)
    column = 2 * keys + head * SIZES.value_dim + block * BLOCK + value
    found = either(new + column, old + column, where_all(is_new, value), where_all(is_old, value))
    tl.store(target + column, found)
    for part in tl.static_range(0, 2):
        column = part * keys + head // group * SIZES.key_dim + key
        found = either(new + column, old + column, is_key & where_all(is_new, key), is_key & where_all(is_old, key))
        tl.store(target + column, found, mask=is_key)
    column = head + pair * SIZES.num_value_heads
    is_mine = is_pair & where_all(is_new, pair)
    found = either(gate + column, old + SIZES.num_channels + column, is_mine, is_pair & where_all(is_old, pair))
    tl.store(target + SIZES.num_channels + column, found, mask=is_pair)


@triton.jit
def store_inputs(ring, row, snap_ring, slot, boundary, given, start, end, SIZES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the program's channels of the inputs before a boundary into a snapshot, then the row's newest into its ring.

    The latter overwrite what the former read. ``given`` has new inputs and gates, their strides, and where position 0 lies before
    the batch; a boundary behind the end is none.
    """
    mixed, gates, mixed_stride, gates_stride, first = given
    mixed, gates = mixed + first * mixed_stride, gates + first * gates_stride
    ring += row * (SIZES.ring * SIZES.entry_size)
    if boundary <= end:
        for place in range(SIZES.taps - 1):
            position = (boundary - SIZES.taps + 1 + place).to(tl.int64)
            new, gate = mixed + position * mixed_stride, gates + position * gates_stride
            old = ring + position % SIZES.ring * SIZES.entry_size
            target = snap_ring + (slot * (SIZES.taps - 1) + place) * SIZES.entry_size
            copy_input(new, old, gate, target, position >= start, (position >= 0) & (position < start), SIZES, BLOCK)
        tl.debug_barrier()
    for ago in range(tl.minimum(end - start, SIZES.ring)):
        position = (end - 1 - ago).to(tl.int64)
        new, gate = mixed + position * mixed_stride, gates + position * gates_stride
        target = ring + position % SIZES.ring * SIZES.entry_size
        copy_input(new, target, gate, target, position >= start, position < start, SIZES, BLOCK)
