"""Products of up to 32 rows by wider tiles: ``python -m benchmarks.kernels.more_rows``."""

from __future__ import annotations

import multiprocessing
import sys
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.gpu.ceilings import median_s, recorded
from hiserve.kernels.launch import await_previous, early_launch, num_processors, start_next
from hiserve.kernels.parts_triton import sum_parts
from hiserve.kernels.skinny_linear import linear

COPY = 4.31e12
SET_BYTES = 300 << 20
LARGE = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28_672, 4096),
    "down": (4096, 14_336),
    "head": (128_256, 4096),
}
SMALL = {
    "s_qkv": (4096, 1024),
    "s_out": (1024, 2048),
    "s_gate_up": (6144, 1024),
    "s_down": (1024, 3072),
}
DEVICE = torch.device("cuda")


class Tile(NamedTuple):
    columns: int
    depth: int
    warps: int
    stages: int


TILES = {
    16: [
        Tile(64, 128, 4, 4),
        Tile(64, 128, 4, 6),
        Tile(128, 64, 4, 5),
        Tile(128, 64, 4, 8),
        Tile(128, 128, 4, 3),
        Tile(128, 128, 8, 5),
        Tile(256, 64, 8, 5),
    ],
    32: [
        Tile(64, 128, 4, 4),
        Tile(64, 128, 4, 6),
        Tile(128, 64, 4, 5),
        Tile(128, 64, 4, 8),
        Tile(128, 128, 4, 2),
        Tile(128, 128, 8, 5),
        Tile(256, 64, 8, 5),
    ],
}


@triton.jit
def _pointers(x, weight, out, num_rows, num_columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr, IS_EARLY: tl.constexpr):
    await_previous(IS_EARLY)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, COLUMNS)
    if GATED:
        half: tl.constexpr = COLUMNS // 2
        column = tl.program_id(0) * half + lane % half + lane // half * (num_columns // 2)
    else:
        column = tl.program_id(0) * COLUMNS + lane
    element = tl.arange(0, DEPTH)
    is_row = row < num_rows
    num_blocks = depth // DEPTH
    columns = weight + column.to(tl.int64)[:, None] * depth + element[None, :]
    rows = x + row[None, :] * depth + element[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in range(part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts):
        weights = tl.load(columns + block * DEPTH)
        values = tl.load(rows + block * DEPTH, mask=is_row[None, :], other=0.0)
        total = tl.dot(weights, values, total)
    start_next(IS_EARLY)
    _finish(total, out, part, row, is_row, num_rows, num_columns, COLUMNS, GATED)


@triton.jit
def _finish(total, out, part, row, is_row, num_rows, num_columns, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    if GATED:
        half: tl.constexpr = COLUMNS // 2
        gate, up = tl.split(total.reshape(2, half, total.shape[1]).permute(1, 2, 0))
        gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
        column = tl.program_id(0) * half + tl.arange(0, half)
        target = out + row[:, None] * (num_columns // 2) + column[None, :]
        tl.store(target, (gate * up).T.to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        target = out + (part * num_rows + row)[:, None] * num_columns + column[None, :]
        tl.store(target, total.T.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _descriptors(x, weight, out, num_rows, num_columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr, IS_EARLY: tl.constexpr):
    await_previous(IS_EARLY)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, ROWS)
    first = tl.program_id(0) * COLUMNS
    num_blocks = depth // DEPTH
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in range(part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts):
        weights = weight.load([first, block * DEPTH])
        values = x.load([0, block * DEPTH])
        total = tl.dot(weights, values.T, total)
    start_next(IS_EARLY)
    _finish(total, out, part, row, row < num_rows, num_rows, num_columns, COLUMNS, GATED)


def own(x: Tensor, weight: Tensor, tile: Tile, programs: int, how: str) -> Tensor:
    (num_rows, depth), num_columns, gated = x.shape, weight.shape[0], how == "gated"
    rows = 16 if num_rows <= 16 else 32
    tiles = num_columns // tile.columns
    parts = 1 if gated else max(1, min(num_processors(DEVICE) * programs // tiles, depth // tile.depth // 4))
    out = x.new_empty((num_rows, num_columns // (1 + gated)))
    target = out if parts == 1 else x.new_empty((parts, num_rows, num_columns), dtype=torch.float32)
    kernel, a, b = _pointers, x, weight
    if how == "tma":
        kernel = _descriptors
        a = TensorDescriptor.from_tensor(x, [rows, tile.depth])
        b = TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth])
    kernel[(tiles, parts)](
        a, b, target, num_rows, num_columns, depth,
        ROWS=rows, COLUMNS=tile.columns, DEPTH=tile.depth, GATED=gated,
        num_warps=tile.warps, num_stages=tile.stages, **early_launch(DEVICE),
    )  # fmt: skip
    return out if parts == 1 else sum_parts(target, None, out)


def seconds(weights: list[Tensor], x: Tensor, function: Any) -> float:
    def step() -> None:
        for weight in weights:
            function(x, weight)

    return median_s("cuda", recorded(step), 8) / len(weights)


def compile_one(case: tuple[int, Tile, str]) -> str:
    rows, tile, how = case
    try:
        with torch.inference_mode():
            x = torch.zeros((rows, 4096), dtype=torch.bfloat16, device=DEVICE)
            weight = torch.zeros((512, 4096), dtype=torch.bfloat16, device=DEVICE)
            own(x, weight, tile, 1, how)
            if how != "gated":
                own(x, torch.zeros((65_536, 4096), dtype=torch.bfloat16, device=DEVICE), tile, 1, how)
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        return f"{case}: {str(error).splitlines()[0][:150]}"
    return ""


def compare(shapes: dict[str, tuple[int, int]], num_rows: int) -> None:
    for name, shape in shapes.items():
        first = (torch.randn(shape, device=DEVICE) * 0.02).to(torch.bfloat16)
        weights = [first] + [first.clone() for _ in range(max(1, SET_BYTES // first.nbytes))]
        x = torch.randn((num_rows, shape[1]), device=DEVICE).to(torch.bfloat16)
        expected = F.linear(x, first)
        limit = first.nbytes / COPY
        told = [f"now {1e6 * seconds(weights, x, lambda a, b: linear(a, b, None)):.1f}"]
        for how in ("plain", "tma", "gated") if "gate_up" in name else ("plain", "tma"):
            found = []
            for tile, programs in product(TILES[16 if num_rows <= 16 else 32], (1, 2)):
                if shape[0] % tile.columns or shape[1] % tile.depth or (how == "gated" and programs == 2):
                    continue
                try:
                    got = own(x, first, tile, programs, how)
                    if how == "gated":
                        gate, up = expected.float().chunk(2, 1)
                        error = float((got.float() - F.silu(gate) * up).abs().max() / got.abs().max())
                    else:
                        error = float((got - expected).abs().max() / expected.abs().max())
                    mark = "" if error < 1e-2 else f" WRONG {error:.1e}"
                    took = seconds(weights, x, lambda a, b: own(a, b, tile, programs, how))  # noqa: B023
                    found.append((took, f"{1e6 * took:.1f} {tuple(tile)}x{programs}{mark}"))
                except Exception as error:  # noqa: BLE001
                    print(f"  {how} {tile}: {str(error).splitlines()[0][:120]}", flush=True)
            told.append(f"{how}: " + "; ".join(text for _, text in sorted(found)[:4]))
        print(f"{name} x {num_rows}: limit {1e6 * limit:.1f}, " + "\n    ".join(told), flush=True)


def main() -> None:
    cases = [
        (rows, tile, how) for rows, tiles in TILES.items() for tile in tiles for how in ("plain", "tma", "gated")
    ]
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        for said in pool.imap_unordered(compile_one, cases, 1):
            if said:
                print(said, flush=True)
    torch.manual_seed(0)
    with torch.inference_mode():
        for num_rows in (1, 8, 32):
            compare(LARGE, num_rows)
        for num_rows in (8, 32):
            compare(SMALL, num_rows)


if __name__ == "__main__":
    sys.exit(main())
