"""Absorbed queries of latent attention alone: Triton's kernel, over rows in 8 bits too, and FlashInfer's where it is installed.

The limit is the longer of reading each row of the cache once, as it is stored, at the rate of a copy, and of all products, at the
rate of a matrix product. ``benchmarks.hybrid`` has it as its part ``latent_decode``.
"""

from __future__ import annotations

import importlib.util
from dataclasses import asdict

import numpy as np
import torch

from benchmarks.gpu.ceilings import median_s, recorded
from benchmarks.gpu.driving import Part
from benchmarks.gpu.figures import Figure
from hiserve.attention.base import Attention, AttentionShape
from hiserve.attention.reference_attention import ReferenceAttention
from hiserve.core.forward import ForwardInputs, LatentKV
from hiserve.core.row_shapes import PackedPages, packed_latent
from hiserve.kernels.row_codecs import load_packed, store_packed

SEED = 20261123
RANK, ROPE_DIM, PAGE_SIZE = 512, 64, 16
HEADS = {"glm-4.7-flash": 20, "v3-like": 128}
BAR = 0.70  # of 32 rows of 8,192 tokens
MIN_READ = 512 << 20  # bytes that the launches of a measurement read together, many times a cache of the device
MAX_DIFFERENCE = 0.02  # of bfloat16 outputs, relative


def measure_absorbed(device: str, limits: dict[str, float]) -> Part:
    """Times 1, 8 and 32 rows of 1,024 and 8,192 tokens, as a graph of launches over different pages."""
    part = Part()
    torch.manual_seed(SEED)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    contexts, batches = ((40,), (1, 2)) if device == "cpu" else ((1024, 8192), (1, 8, 32))
    num_pages = 1 + 2 * max(batches) * max(contexts) // PAGE_SIZE
    pools = _pools(num_pages, device, dtype)
    for model, num_heads in HEADS.items():
        shape = AttentionShape(1, num_heads, 1, RANK + ROPE_DIM, PAGE_SIZE, dtype, score_scalar=192.0)
        for context in contexts:
            for rows in batches:
                name = f"{model} absorbed, {rows} x {context}"
                bar = BAR if (rows, context) == (32, 8192) else None
                found = _measure(shape, pools, rows, context, limits, name, bar)
                part.figures += found
                part.samples[name] = [asdict(figure) for figure in found]
    return part


def _pools(num_pages: int, device: str, dtype: torch.dtype) -> tuple[LatentKV, LatentKV]:
    """Returns a pool in 8 bits, and one of the same numbers."""
    shape, slots = packed_latent(RANK, ROPE_DIM), torch.arange(num_pages * PAGE_SIZE, device=device)
    assert shape is not None
    packed = PackedPages(shape, PAGE_SIZE)
    bits = torch.empty((slots.shape[0], 1, shape.row_bytes), device=device, dtype=torch.uint8)
    pool = torch.empty((slots.shape[0], 1, RANK + ROPE_DIM), device=device, dtype=dtype)
    for some in slots.split(1 << 16):
        store_packed(bits[:, 0], some, torch.randn((some.shape[0], RANK + ROPE_DIM), device=device), packed)
        pool[some, 0] = load_packed(bits[:, 0], some, packed).to(dtype)
    unused = pool[:0, :, :RANK]
    wide = LatentKV(k=pool, v=pool[..., :RANK], to_keys=unused, to_values=unused)
    return LatentKV(k=bits, v=bits, to_keys=unused, to_values=unused, packed=packed), wide


def _measure(
    shape: AttentionShape,
    pools: tuple[LatentKV, LatentKV],
    rows: int,
    context: int,
    limits: dict[str, float],
    name: str,
    bar: float | None,
) -> list[Figure]:
    packed, wide = pools
    device, width = wide.k.device, wide.k.shape[2]
    num_bytes, flop = rows * context * packed.k.shape[2], 2 * rows * context * shape.num_heads * (width + RANK)
    num_sets = 2 if device.type == "cpu" else min(256, max(4, MIN_READ // num_bytes))
    generator = np.random.default_rng(SEED)
    batches = [_batch(generator, wide, rows, context, device) for _ in range(num_sets)]
    q = torch.randn((rows, shape.num_heads, width), device=device, dtype=shape.dtype)
    figures, outs = [], {}
    for kernel, attention in _kernels(shape, rows, device).items():
        kv = packed if kernel.endswith("8 bits") else wide
        by_bytes = rows * context * kv.k.shape[2] * kv.k.element_size() / limits["copy_bytes_per_s"]
        limit_s, what = max((by_bytes, "bandwidth limit"), (flop / limits["matmul_flop_per_s"], "matrix product"))

        def step(attention: Attention = attention, kv: LatentKV = kv) -> None:
            for inputs in batches:
                attention.plan(inputs)
                attention.forward(q, q[:, :1], q[:, :1, :RANK], kv, 0)

        def again(attention: Attention = attention, kv: LatentKV = kv) -> None:
            for _ in range(num_sets):
                attention.forward(q, q[:, :1], q[:, :1, :RANK], kv, 1)  # a later layer, which lists no pages

        with torch.inference_mode():
            attention.plan(batches[0])
            outs[kernel] = attention.forward(q, q[:, :1], q[:, :1, :RANK], kv, 0).float()
            if attention.needs_host_lengths:  # its schedules are made on the host: one of them, for the same pages
                seconds = median_s(device.type, recorded(again) if device.type == "cuda" else again, 10) / num_sets
            else:
                seconds = median_s(device.type, recorded(step) if device.type == "cuda" else step, 10) / num_sets
        figures.append(Figure(f"{name}, {kernel}", 1e6 * seconds, "us", limit_s / seconds, bar, what))
    first = next(iter(outs.values()))
    for kernel, out in outs.items():
        difference = float((out - first).norm() / first.norm())
        assert difference <= MAX_DIFFERENCE, f"{name}: {kernel} differs by {difference:.3g}, at most {MAX_DIFFERENCE:g}"
    return figures


def _kernels(shape: AttentionShape, rows: int, device: torch.device) -> dict[str, Attention]:
    """Returns each kernel as graphs of ``rows`` rows have it."""
    if device.type == "cpu":
        return {"reference": ReferenceAttention(shape), "reference, 8 bits": ReferenceAttention(shape)}
    from hiserve.attention.latent_triton import TritonLatentAttention  # noqa: PLC0415 - Triton is not installed everywhere

    found: dict[str, Attention] = {name: TritonLatentAttention(shape) for name in ("triton", "triton, 8 bits")}
    if importlib.util.find_spec("flashinfer") is not None:
        from hiserve.attention.flashinfer_latent import FlashInferLatentAttention  # noqa: PLC0415 - likewise

        graphs = FlashInferLatentAttention(shape).captured(rows, 1)
        assert graphs is not None, rows
        found["flashinfer"] = graphs
    return found


def _batch(
    generator: np.random.Generator, kv: LatentKV, rows: int, context: int, device: torch.device
) -> ForwardInputs:
    """Returns rows that decode, of pages that are drawn anew."""
    num_pages = -(-context // PAGE_SIZE)
    pages = generator.permutation(np.arange(1, kv.k.shape[0] // PAGE_SIZE))[: rows * num_pages]
    table = torch.from_numpy(pages.reshape(rows, num_pages).astype(np.int32)).to(device)
    lengths = np.full(rows, context, dtype=np.int32)

    def count(dtype: torch.dtype = torch.int64, size: int = rows) -> torch.Tensor:
        return torch.arange(size, dtype=dtype, device=device)

    return ForwardInputs(
        input_ids=count(torch.int32),
        positions=torch.full((rows,), context - 1, device=device),
        slots=count(),
        token_rows=count(),
        qo_indptr=count(torch.int32, rows + 1),
        kv_lens=torch.full((rows,), context, device=device),
        page_table=table,
        logits_rows=count(),
        q_lens=np.ones(rows, dtype=np.int32),
        kv_bounds=lengths,
        max_kv_len=context,
        num_decode=rows,
    )
