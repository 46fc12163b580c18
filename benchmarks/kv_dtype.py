"""Keys and values in 8 bits beside those in the type of the model: what rounding loses, and what half of the bytes gains.

Usage: ``python -m benchmarks.kv_dtype OUT.json COMMIT [--parts NAME ...] [--tiny]``. ``rounding`` compares scales of a token, as they
are used, with others, on a CPU: keys and values of hiserve-nano, and random ones. The other parts take a GPU and the shape of
Llama-8B: ``kernel`` is attention of rows that decode alone, over tiles of keys; ``decode`` steps of an engine; ``tokens`` those that
a pool of all free memory holds; ``hit`` the load of a prefix from the host. Each compares the two within one run. ``--tiny`` runs
all parts with hiserve-nano on the CPU, as a test of this file; its ratios mean nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.drive import Drive
from benchmarks.gpu import ceilings
from benchmarks.gpu.driving import Bench, Part, decode, timed_part
from benchmarks.gpu.figures import Figure, table
from benchmarks.gpu.sizes import FULL, LARGE, SEED, TINY
from benchmarks.kernels import attention as kernels
from benchmarks.record import ENGINE, ROOT, Record, gpu_parser
from hiserve.attention.backends import open_attention
from hiserve.attention.base import AttentionShape
from hiserve.attention.triton import TritonAttention
from hiserve.cache.storage.device import DevicePool
from hiserve.core.kv_groups import CacheGroupSpec, pack_heads
from hiserve.kernels.attention_schedule import KeyTile
from hiserve.models.decoder import attention_shape
from hiserve.models.loading import load_decoder
from hiserve.models.model_config import NANO, find_model, read_model_config

DTYPES = ("bf16", "fp8")
BARS = {"decode": 1.25, "tokens": 1.95, "hit": 1 / 0.55}
LARGEST = 448.0  # of E4M3
HEADROOM = 2.0  # of the scale of a page over its first token
PROMPTS = ROOT / "tests" / "data" / "held_out_prompts.jsonl"
PAGE_SIZE = 16
TILES = ((64, 4, 3, None), (64, 4, 3, 160), (64, 4, 4, None), (64, 4, 4, 160), (128, 4, 2, None), (128, 8, 3, None))


def rounded(x: Tensor, scales: Tensor) -> Tensor:
    """Returns elements as E4M3 with a scale keeps them; those that do not fit are the largest that do."""
    return (x / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype) * scales


def scales_of(x: Tensor, page_size: int) -> dict[str, Tensor]:
    """Returns the scales to compare for keys or values, ``[T, heads, head_dim]``: each ``[T, heads, 1]``."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    pages = (HEADROOM * largest[::page_size]).repeat_interleave(page_size, 0)[: x.shape[0]]
    return {
        "token, power of 2": torch.exp2((largest / LARGEST).log2().ceil()),
        "token, float16": (largest / LARGEST).half().to(x.dtype).clamp(min=6e-8),
        "page, float32": pages / LARGEST,
    }


def rounding_errors(q: Tensor, k: Tensor, v: Tensor, page_size: int) -> dict[str, float]:
    """Returns the relative error of the outputs of attention for each kind of scale, and the share that did not fit a page's.

    ``q`` is ``[T, heads, head_dim]``, ``k`` and ``v`` ``[T, kv_heads, head_dim]``.
    """

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        group = q.shape[1] // keys.shape[1]
        heads = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (keys, values))
        queries, keys, values = q.transpose(0, 1), *heads
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)

    expected, of_k, of_v = attend(k, v), scales_of(k, page_size), scales_of(v, page_size)
    found = {}
    for name in of_k:
        got = attend(rounded(k, of_k[name]), rounded(v, of_v[name]))
        found[name] = float((got - expected).norm() / expected.norm())
    pages = "page, float32"
    parts = [(each.abs() > LARGEST * of[pages]).double().mean() for each, of in ((k, of_k), (v, of_v))]
    return found | {"share beyond a page's scale": float(sum(parts)) / 2}


class _Watched:
    """Attention that keeps what it is given."""

    def __init__(self, shape: AttentionShape) -> None:
        self._inner = open_attention("reference", shape, torch.device("cpu"))
        self.plan, self.seen = self._inner.plan, list[tuple[Tensor, Tensor, Tensor]]()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Any, layer: int, out: Tensor | None = None) -> Tensor:
        self.seen.append((q.clone(), k.clone(), v.clone()))
        return self._inner.forward(q, k, v, kv, layer, out)


def nano_heads(num_tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns queries, keys and values of each layer of hiserve-nano for held-out texts, float64."""
    folder, texts = find_model(NANO), PROMPTS.read_text(encoding="utf-8").splitlines()
    config = read_model_config(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(json.loads(each)["prompt"] for each in texts)).ids[:num_tokens]
    model = load_decoder(folder, config, dtype="float64", device="cpu", load_format="auto", max_len=num_tokens)
    shape = attention_shape(config, dtype=torch.float64, page_size=PAGE_SIZE, sinks=model.sinks)
    num_pages = 1 + -(-num_tokens // PAGE_SIZE)
    pool = DevicePool(config.kv_groups("float64"), num_pages, PAGE_SIZE, "cpu")
    batch = kernels.Batch(kernels.Case("text", ((0, len(ids)),)), shape, pool, num_pages, "cpu")
    inputs, attention = replace(batch.inputs, input_ids=torch.tensor(ids, dtype=torch.int32)), _Watched(shape)
    attention.plan(inputs)
    model.forward(inputs, pool.layers("kv"), attention)  # type: ignore[arg-type]
    return attention.seen


def random_heads(num_tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns the heads of Llama-8B: of a normal distribution; and with a few large elements in keys, as those of trained models."""
    torch.manual_seed(SEED)
    q, k, v = (torch.randn(num_tokens, heads, 128, dtype=torch.float64) for heads in (32, 8, 8))
    large = k.clone()
    large[..., ::43] *= 12
    uneven = v * torch.exp2(torch.randint(-4, 5, (num_tokens, 8, 1)))
    return [(q, k, v), (q / 4, large, v), (q, k, uneven)]


def measure_rounding(bench: Bench) -> Part:
    """Compares scales by what attention returns."""
    part, num_tokens = Part(), 64 if bench.sizes is TINY else 1024
    named = {f"hiserve-nano, layer {n}": each for n, each in enumerate(nano_heads(num_tokens))}
    named |= dict(zip(("normal", "large elements in keys", "uneven values"), random_heads(num_tokens), strict=True))
    for name, heads in named.items():
        part.samples[name] = rounding_errors(*heads, PAGE_SIZE)
        part.figures += [Figure(f"{name}: {kind}", error, "rel") for kind, error in part.samples[name].items()]
    return part


def heads_pool(shape: AttentionShape, num_pages: int, device: str, *, packs: bool) -> DevicePool:
    """Makes a pool of random keys and values."""
    kv = CacheGroupSpec(
        name="kv",
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=str(shape.dtype).removeprefix("torch."),
    )
    pool = DevicePool(pack_heads((kv,)) if packs else (kv,), num_pages, shape.page_size, device)
    if packs:
        pool.storage("kv").random_(0, 120)  # no NaN
        pool.storage("kv_scales").fill_(0x7A7A7A7A)  # 2 to the power of -5
    else:
        pool.storage("kv").normal_()
    return pool


def measure_kernel(bench: Bench) -> Part:
    """Times attention of rows that decode, over tiles of keys in 8 bits."""
    bench.close()
    part, is_tiny = Part(), bench.sizes is TINY
    heads, num_layers, device = ((4, 2, 16), 1, "cpu") if is_tiny else ((32, 8, 128), 8, "cuda")
    shape = AttentionShape(num_layers, *heads, PAGE_SIZE, torch.float32 if is_tiny else torch.bfloat16)
    shapes = [(2, 40)] if is_tiny else [(32, 8192), (8, 8192), (1, 8192), (128, 1024)]
    cases = [kernels.decode(*each) for each in shapes] + ([] if is_tiny else [kernels.decode(32, 8192, 4)])
    num_pages = 1 + max(sum(-(-sum(row) // PAGE_SIZE) for row in case.rows) for case in cases)
    took: dict[str, dict[str, float]] = {case.name: {} for case in cases}
    for dtype in DTYPES:
        its = replace(shape, packs_rows=dtype == "fp8")
        pool = heads_pool(its, num_pages, device, packs=its.packs_rows)
        for case in cases:
            batch = kernels.Batch(case, its, pool, num_pages, device)
            batch.q = batch.q.contiguous()
            for tile in (None, *(TILES if its.packs_rows and not is_tiny else ())):
                attention = open_attention("reference" if is_tiny else "triton", its, torch.device(device))
                if tile is not None:
                    assert isinstance(attention, TritonAttention)
                    attention._tile = KeyTile(*tile)
                name = dtype if tile is None else f"fp8 {tile}"
                took[case.name][name] = kernels.seconds(batch, attention, case, num_layers, device)
        del pool, batch, attention
    for name, times in took.items():
        part.figures += [
            Figure(f"{name}, {what}", 1e6 * seconds, "us", times["bf16"] / seconds, None, "bf16")
            for what, seconds in times.items()
        ]
    part.samples = took
    return part


def measure_decode(bench: Bench) -> Part:
    """Times steady steps of an engine for each type."""
    part, is_tiny = Part(), bench.sizes is TINY
    cases = [(2, 64)] if is_tiny else [(32, 8192), (8, 8192), (1, 8192), (128, 1024), (1, 1024)]
    for dtype in DTYPES:
        drive = bench.engine(LARGE, kv_dtype=dtype, attention_backend="auto" if is_tiny else "triton")
        for rows, context in cases:
            part.samples.setdefault(f"{rows} x {context}", {})[dtype] = decode(bench, drive, rows, context).told()
    for name, paces in part.samples.items():
        times = [paces[dtype]["median_s"] for dtype in DTYPES]
        bar = BARS["decode"] if name == "32 x 8192" else None
        part.figures.append(Figure(f"decode, {name}", 1e3 * times[1], "ms", times[0] / times[1], bar, "bf16"))
    return part


def measure_tokens(bench: Bench) -> Part:
    """Compares the tokens that a page takes the bytes of, and those that a pool of all free memory holds."""
    part, bytes_of = Part(), []
    for dtype in DTYPES:
        drive = bench.engine(LARGE, kv_dtype=dtype)
        pool = drive.memory["KV pool"] / drive.settings.cache.kv_pages / drive.settings.cache.page_size
        bytes_of.append(pool)
        part.samples[dtype] = {"bytes_of_token": pool, "memory": drive.memory}
    ratio = bytes_of[0] / bytes_of[1] * (0.5 if bench.sizes is TINY else 1)  # nano's are float32 on a CPU
    part.figures.append(Figure("tokens a pool holds", bytes_of[1], "bytes", ratio, BARS["tokens"], "bf16"))
    return part


def measure_hit(bench: Bench) -> Part:
    """Times the load of a prefix from the host, and the first token behind it."""
    part, is_tiny = Part(), bench.sizes is TINY
    length, repeats = (256, 2) if is_tiny else (16_384, 7)
    more = {"host_cache_gib": 0.1 if is_tiny else 12.0, "spec": "off"}
    more |= {"kv_pages": 100} if is_tiny else {"kv_pages": 4096, "max_model_len": 17_408, "max_batched_tokens": 2048}
    for dtype in DTYPES:
        drive = bench.engine(LARGE, kv_dtype=dtype, attention_backend="auto" if is_tiny else "triton", **more)
        prefix, found = bench.prompt(drive, length), []
        for _ in range(2 + repeats):
            found.append(_hit(drive, np.concatenate((prefix, bench.prompt(drive, 32)))))
        part.samples[dtype] = found[2:]
    for what in ("load_s", "ttft_s"):
        times = [statistics.median(each[what] for each in part.samples[dtype]) for dtype in DTYPES]
        bar = BARS["hit"] if what == "load_s" else None
        part.figures.append(
            Figure(f"host hit of {length}, {what}", 1e3 * times[1], "ms", times[0] / times[1], bar, "bf16")
        )
    return part


def _hit(drive: Drive, prompt: np.ndarray) -> dict[str, Any]:
    drive.leave_device()
    drive.loads.clear()
    seen = drive.add(prompt, 1)
    drive.finish(seen)
    drive.settle()
    return {
        "ttft_s": seen.ttft_s,
        "host_tokens": seen.cached.host if seen.cached else 0,
        "load_s": sum(load.seconds for load in drive.loads),
        "load_bytes": sum(load.num_bytes for load in drive.loads),
    }


PARTS: dict[str, Callable[[Bench], Part]] = {
    "rounding": measure_rounding,
    "kernel": measure_kernel,
    "decode": measure_decode,
    "tokens": measure_tokens,
    "hit": measure_hit,
}


def main() -> int:
    """Writes the result file after each part; returns 1 if one failed."""
    parser = gpu_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    flags = " --tiny" * given.tiny + (f" --parts {' '.join(given.parts)}" if given.parts != list(PARTS) else "")
    command = f"python -m benchmarks.kv_dtype OUT.json COMMIT{flags}"
    on_cpu = given.tiny or given.parts == ["rounding"]
    result = Record(given.out, command, *ENGINE, at_commit=given.commit, num_gpus=int(not on_cpu))
    result |= {"seed": SEED, "bars": BARS, "engines": [], "parts": {}}
    sizes = TINY if given.tiny else FULL
    bench = Bench(sizes, ceilings.measure("cpu") if on_cpu else ceilings.measure("cuda"), {})
    with torch.inference_mode():
        for name in given.parts:
            result["parts"][name] = timed_part(bench, name, PARTS[name])
            result["engines"] = bench.built
            result.save()
    bench.close()
    print(table(figure for part in result["parts"].values() for figure in part["figures"]))
    return int(any(part["error"] for part in result["parts"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
