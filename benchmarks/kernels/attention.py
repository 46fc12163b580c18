"""Attention backends beside each other and beside what the device can do, on the heads of Llama-8B.

Usage: ``python -m benchmarks.kernels.attention OUT.json COMMIT [--heads 32 8 128] [--tiny]``. Batches of one width are timed as
a graph over all layers, which could hold rows of ``GRAPH_MAX_LEN`` tokens, as those of the engine; others by events, layer by
layer. The limit is the longer of reading all keys and values once at the rate of a copy, and of all products at the rate of a
matrix product. Bars: Triton at least 0.8 of FlashInfer where a case says so. ``--tiny`` runs small cases on the CPU, as a test of this file.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import ceilings
from benchmarks.gpu.ceilings import median_s, recorded
from benchmarks.gpu.figures import Figure, table
from benchmarks.record import Record, gpu_parser
from hiserve.attention.backends import fitting_backends, open_attention
from hiserve.attention.base import Attention, AttentionShape
from hiserve.cache.storage.device import DevicePool
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.core.kv_groups import CacheGroupSpec

SEED = 20261121
PAGE_SIZE = 16
GRAPH_MAX_LEN = 9216  # tokens of the longest row that a graph must do
BAR = 0.8
MAX_DIFFERENCE = 0.02  # of bfloat16 outputs, relative
MAX_TOKENS = 32 * 8192  # of a batch: the pool of all layers takes 34 GB then
SHAPES = [(rows, context) for context in (1024, 2048, 8192) for rows in (1, 4, 8, 16, 32, 64, 128)]


@dataclass(frozen=True)
class Case:
    """A batch."""

    name: str
    rows: tuple[tuple[int, int], ...]  # (tokens that are there, new tokens) of each row
    has_bar: bool = False  # triton is to reach its share of FlashInfer

    @property
    def is_even(self) -> bool:
        """Whether every row has the same small number of new tokens, as graphs have."""
        news = {new for _, new in self.rows}
        return len(news) == 1 and max(news) <= 8


def decode(rows: int, context: int, new: int = 1, *, has_bar: bool = False) -> Case:
    """Rows of one length; more than one new token are drafts that are verified."""
    name = f"decode {rows} x {context}" if new == 1 else f"verify {rows} x {new} at {context}"
    return Case(name, ((context - new, new),) * rows, has_bar)


FULL = (
    *(decode(*shape, has_bar=shape == (32, 2048)) for shape in SHAPES if shape[0] * shape[1] <= MAX_TOKENS),
    *(decode(rows, context, new) for new in (2, 4, 8) for rows in (1, 8, 32) for context in (2048, 8192)),
    Case("prefill 1 x 8192", ((0, 8192),), has_bar=True),
    Case("prefill 8 x 1024", ((0, 1024),) * 8),
    Case("extend 2048 after 6144", ((6144, 2048),)),
    Case("extend 4 x 256 after 6144", ((6144, 256),) * 4),
    Case("decode 31 x 2048 with a chunk of 2048", ((2047, 1),) * 31 + ((0, 2048),)),
)
TINY = (decode(2, 40), decode(2, 40, 3), Case("prefill 1 x 48", ((0, 48),)), Case("mixed", ((20, 1), (16, 24))))


class Batch:
    """A case on the device: its inputs, queries, and the new keys and values as they stand in the pool."""

    def __init__(self, case: Case, shape: AttentionShape, pool: DevicePool, num_pages: int, device: str) -> None:
        rng = np.random.default_rng(SEED)
        cached, new = (np.array(column, dtype=np.int32) for column in zip(*case.rows, strict=True))
        ends = cached + new
        counts = -(-ends // PAGE_SIZE)
        max_len = GRAPH_MAX_LEN if case.is_even and device == "cuda" else int(ends.max())
        table_ = np.zeros((len(ends), -(-max_len // PAGE_SIZE)), dtype=np.int32)
        pages = rng.permutation(np.arange(1, num_pages, dtype=np.int32))[: counts.sum()]
        table_[np.arange(table_.shape[1]) < counts[:, None]] = pages
        rows = np.repeat(np.arange(len(ends)), new)
        indptr = np.concatenate(([0], new.cumsum()))
        positions = cached[rows] + np.arange(len(rows)) - indptr[rows]
        slots = table_[rows, positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE

        def put(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

        self.inputs = ForwardInputs(
            input_ids=put(np.zeros(len(rows)), torch.int32),
            positions=put(positions),
            slots=put(slots),
            token_rows=put(rows),
            qo_indptr=put(indptr, torch.int32),
            kv_lens=put(ends),
            page_table=put(table_, torch.int32),
            logits_rows=put(indptr[1:] - 1),
            q_lens=new,
            kv_bounds=ends,
            max_kv_len=max_len,
        )
        self.layers: Sequence[LayerKV] = pool.layers("kv")
        self.q = torch.randn((len(rows), shape.num_heads, shape.head_dim), dtype=shape.dtype, device=device)
        self.k, self.v = (plane.index_select(0, self.inputs.slots) for plane in (self.layers[0].k, self.layers[0].v))
        pairs = int((new.astype(np.int64) * cached + new.astype(np.int64) * (new + 1) // 2).sum())
        self.flop = 4 * shape.num_heads * shape.head_dim * pairs
        self.kv_bytes = int(ends.sum()) * 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize

    def forward(self, attention: Attention, layer: int) -> Tensor:
        return attention.forward(self.q, self.k, self.v, self.layers[layer], layer)


def seconds(batch: Batch, attention: Attention, case: Case, num_layers: int, device: str) -> float:
    """Seconds of one layer; schedules that the host makes are made once, before a graph is captured, as runners do."""
    is_graph = device == "cuda" and case.is_even

    def step() -> None:
        if not (is_graph and attention.needs_host_lengths):
            attention.plan(batch.inputs)
        for layer in range(num_layers):
            batch.forward(attention, layer)

    attention.plan(batch.inputs)
    return median_s(device, recorded(step) if is_graph else step, 10) / num_layers


def measure(case: Case, batch: Batch, shape: AttentionShape, names: Sequence[str], device: str) -> dict[str, Any]:
    """Times every backend on a case, and compares what they compute with the first one's."""
    found: dict[str, Any] = {
        "seconds": {},
        "differences": {},
        "errors": {},
        "flop": batch.flop,
        "bytes": batch.kv_bytes,
    }
    expected: Tensor | None = None
    for name in names:
        try:
            attention = open_attention(name, shape, torch.device(device))
            if case.is_even:
                attention = attention.captured(len(case.rows), case.rows[0][1]) or attention
            attention.plan(batch.inputs)
            out = batch.forward(attention, 0).float()
            expected = out if expected is None else expected
            found["differences"][name] = float((out - expected).norm() / expected.norm())
            found["seconds"][name] = seconds(batch, attention, case, shape.num_layers, device)
        except Exception:  # noqa: BLE001 - the other backends and cases are worth having
            found["errors"][name] = traceback.format_exc()
            print(f"{case.name}, {name}: {found['errors'][name][-400:]}", flush=True)
    return found


def figures(case: Case, found: dict[str, Any], limits: dict[str, float]) -> list[Figure]:
    """Returns each backend's time against the limit, and Triton's against FlashInfer's."""
    by_bytes, by_flop = found["bytes"] / limits["copy_bytes_per_s"], found["flop"] / limits["matmul_flop_per_s"]
    limit_s, times = max(by_bytes, by_flop), found["seconds"]
    what = "bandwidth limit" if by_bytes > by_flop else "matrix product"
    lines = [
        Figure(f"{case.name}, {name}", 1e6 * took, "us", limit_s / took, None, what) for name, took in times.items()
    ]
    if case.has_bar:
        ratio = times["flashinfer"] / times["triton"] if {"flashinfer", "triton"} <= times.keys() else None
        name = f"{case.name}, triton over flashinfer"
        lines.append(Figure(name, 1e6 * times.get("triton", 0.0), "us", ratio, BAR, "FlashInfer"))
    return lines


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 8, 128), help="query heads, KV heads, their size")
    given = parser.parse_args()
    device, cases, num_layers = ("cpu", TINY, 2) if given.tiny else ("cuda", FULL, 32)
    dtype, heads = (torch.float32, (4, 2, 16)) if given.tiny else (torch.bfloat16, tuple(given.heads))
    shape = AttentionShape(num_layers, *heads, PAGE_SIZE, dtype)
    spec = CacheGroupSpec(
        name="kv",
        num_layers=num_layers,
        num_kv_heads=heads[1],
        head_dim=heads[2],
        dtype=str(dtype).removeprefix("torch."),
    )
    flags = " --tiny" * given.tiny + (f" --heads {' '.join(map(str, heads))}" if heads != (32, 8, 128) else "") * (
        not given.tiny
    )
    command = f"python -m benchmarks.kernels.attention{flags} OUT.json COMMIT"
    result = Record.of(given, command, "hiserve/attention", "hiserve/kernels")
    result |= {
        "ceilings": ceilings.measure(device),
        "seed": SEED,
        "heads": heads,
        "figures": [],
        "cases": {},
    }
    num_pages = 1 + max(sum(-(-(cached + new) // PAGE_SIZE) for cached, new in case.rows) for case in cases)
    pool = DevicePool((spec,), num_pages, PAGE_SIZE, device)
    torch.manual_seed(SEED)
    for storage in pool.storage("kv"):
        storage.normal_()
    names = [name for name in fitting_backends(shape, torch.device(device)) if name != "reference" or given.tiny]
    with torch.inference_mode():
        for case in cases:
            batch = Batch(case, shape, pool, num_pages, device)
            found = result["cases"][case.name] = measure(case, batch, shape, names, device)
            result["figures"] += [asdict(figure) for figure in figures(case, found, result["ceilings"])]
            result.save()
    print(table(result["figures"]))
    worst = max(each for case in result["cases"].values() for each in case["differences"].values())
    print(f"largest relative difference between backends {worst:.2e} (at most {MAX_DIFFERENCE:g})")
    return int(worst > MAX_DIFFERENCE or any(case["errors"] for case in result["cases"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
