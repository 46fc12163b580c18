"""The kernels of compressed attention and of streams alone, with the widths of DeepSeek-V4-Flash.

A kernel is compared with the bytes that it must read and write at the rate of a copy. ``benchmarks.hybrid`` has them as its
part ``compressed``; ``python -m benchmarks.kernels.compressed`` compares tiles on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu import ceilings
from benchmarks.gpu.ceilings import median_s, recorded
from benchmarks.gpu.driving import Part
from benchmarks.gpu.figures import Figure
from hiserve.core.forward import StateRows
from hiserve.core.row_shapes import PackedPages, PackedShape, packed_key, packed_row
from hiserve.kernels.compress_reference import CarriedInputs, Compression, StepTokens
from hiserve.kernels.compressed_ops import compressed_ops_for
from hiserve.kernels.streams_reference import MixWeights
from hiserve.kernels.union_rows import ChosenRows, RangeRows, RowSource

SEED = 20261128
PAGE_SIZE = 128
BAR = 0.70  # of the scan of an index, 32 rows of 128k tokens
MIN_READ = 512 << 20  # bytes that the launches of a measurement read together, many times a cache of the device
REPEATS = 10


class Widths:
    """Sizes of a model, and random tensors of it.

    Args:
        device: ``cpu`` takes tiny ones.
        packs_rows: Rows and keys of the index are packed.
    """

    def __init__(self, device: str, *, packs_rows: bool = False) -> None:
        is_tiny = device == "cpu"
        self.device, self.dtype = torch.device(device), torch.float32 if is_tiny else torch.bfloat16
        self.width, self.num_heads = (32, 4) if is_tiny else (512, 64)
        self.index_width, self.index_heads, self.most = (16, 4, 8) if is_tiny else (128, 64, 512)
        self.window, self.hidden_size, self.num_streams = (16, 48, 4) if is_tiny else (128, 4096, 4)
        self.contexts = ((1, 600), (2, 300)) if is_tiny else ((32, 8192), (1, 131072))
        self.scans = ((2, 600),) if is_tiny else ((32, 131072), (1, 131072), (32, 8192))
        self.batches = (1, 3) if is_tiny else (1, 32, 8192)
        self.ops = compressed_ops_for(self.device)
        self.shapes = dict[int, PackedShape | None]()
        if packs_rows:
            self.shapes = {
                self.width: packed_row(self.width, 8 if is_tiny else 64),
                self.index_width: packed_key(self.index_width),
            }

    @property
    def element(self) -> int:
        return self.dtype.itemsize

    def randn(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def row_bytes(self, width: int) -> int:
        shape = self.shapes.get(width)
        return width * self.element if shape is None else shape.row_bytes

    def packed(self, pool: Tensor, ratio: int) -> PackedPages | None:
        """Returns how a pool holds rows, if they are packed."""
        shape = next((each for each in self.shapes.values() if each and each.row_bytes == pool.shape[1]), None)
        return None if shape is None else PackedPages(shape, PAGE_SIZE // ratio)

    def rows(self, num_rows: int, context: int, ratio: int, pool: Tensor, window: int | None = None) -> RangeRows:
        """Returns one token a row, the last of its context, and pages that are drawn anew."""
        per_row, page_rows = -(-context // PAGE_SIZE), PAGE_SIZE // ratio
        num_pages = pool.shape[0] // page_rows - 1
        order = torch.randperm(num_pages, device=self.device)[: num_rows * per_row] + 1
        row = torch.arange(num_rows, device=self.device)
        return RangeRows(
            pool=pool,
            table=order.view(num_rows, per_row).int(),
            token_rows=row,
            positions=torch.full_like(row, context - 1),
            page_rows=page_rows,
            most=max(1, context // ratio),
            ratio=ratio,
            window=window,
            packed=self.packed(pool, ratio),
        )

    def pool(self, num_rows: int, context: int, ratio: int, width: int) -> Tensor:
        """Returns pages for twice as many rows, at least ``MIN_READ`` bytes where a device has caches."""
        page_rows = PAGE_SIZE // ratio
        num_pages = 2 * num_rows * -(-context // PAGE_SIZE) + 1
        if self.device.type != "cpu":
            num_pages = max(num_pages, MIN_READ // (page_rows * self.row_bytes(width)))
        if width in self.shapes:  # bytes of small numbers
            size = (num_pages * page_rows, self.row_bytes(width))
            return torch.randint(64, size, device=self.device, dtype=torch.uint8)
        return self.randn(num_pages * page_rows, width)

    def seconds(self, calls: Iterable[Callable[[], object]]) -> float:
        """Returns the time of one of some calls, which a graph has all."""
        calls = list(calls)

        def step() -> None:
            for call in calls:
                call()

        with torch.inference_mode():
            work = recorded(step) if self.device.type == "cuda" else step
            return median_s(self.device.type, work, 2 if self.device.type == "cpu" else REPEATS) / len(calls)

    def num_sets(self, num_bytes: int) -> int:
        """Returns how many calls that read so many bytes each a measurement has."""
        return 2 if self.device.type == "cpu" else min(64, max(4, MIN_READ // num_bytes))


def measure_compressed(device: str, limits: dict[str, float]) -> Part:
    """Times attention by the kinds of layers, the index, compressors and streams."""
    part = Part()
    torch.manual_seed(SEED)
    widths, packed = Widths(device), Widths(device, packs_rows=True)
    found = [(measure, widths, "") for measure in (_attentions, _scans, _compressors, _streams)]
    found += [(measure, packed, ", packed") for measure in (_attentions, _scans)]
    for measure, sizes, beside in found:
        for what, seconds, num_bytes, bar in measure(sizes):
            name = what + beside
            limit_s = num_bytes / limits["copy_bytes_per_s"]
            figure = Figure(name, 1e6 * seconds, "us", limit_s / seconds, bar, "bandwidth limit")
            part.figures.append(figure)
            part.samples[name] = {"seconds": seconds, "bytes": num_bytes}
    return part


Found = tuple[str, float, int, float | None]  # a figure's name, seconds, least bytes, and its bar


def _attentions(widths: Widths) -> Iterable[Found]:
    sink, scale = torch.randn(widths.num_heads, device=widths.device), widths.width**-0.5
    for num_rows, context in widths.contexts:
        own = widths.pool(num_rows, context, 1, widths.width)
        q = widths.randn(num_rows, widths.num_heads, widths.width)
        for kind, ratio in (("window", 0), ("chosen", 4), ("all of 128", 128)):
            beside = 0 if not ratio else context // ratio if ratio == 128 else min(widths.most, context // ratio)
            num_bytes = num_rows * (widths.window + beside) * widths.row_bytes(widths.width)
            num_bytes += 2 * q.numel() * widths.element
            pool = widths.pool(num_rows, context, ratio or PAGE_SIZE, widths.width)
            calls = []
            for _ in range(widths.num_sets(num_bytes)):
                sources: list[RowSource] = [widths.rows(num_rows, context, 1, own, widths.window)]
                if ratio == 128:
                    sources.append(widths.rows(num_rows, context, 128, pool))
                elif ratio:
                    slots = torch.randint(PAGE_SIZE, len(pool), (num_rows, beside), device=widths.device)
                    sources.append(ChosenRows(pool, slots, widths.packed(pool, 4)))
                calls.append(partial(widths.ops.attend, q, sources, sink, scale))
            yield f"attention, {kind}, {num_rows} x {context}", widths.seconds(calls), num_bytes, None


def _scans(widths: Widths) -> Iterable[Found]:
    for num_rows, context in widths.scans:
        pool = widths.pool(num_rows, context, 4, widths.index_width)
        q = widths.randn(num_rows, widths.index_heads, widths.index_width)
        weights = torch.rand(num_rows, widths.index_heads, device=widths.device)
        num_bytes = num_rows * (context // 4) * widths.row_bytes(widths.index_width)
        sets = [widths.rows(num_rows, context, 4, pool) for _ in range(widths.num_sets(num_bytes))]
        calls = [partial(widths.ops.choose_rows, q, weights, keys, widths.most, 0.1) for keys in sets]
        bar = BAR if (num_rows, context) == (32, 131072) and not widths.shapes else None
        yield f"index, {num_rows} x {context}", widths.seconds(calls), num_bytes, bar


def _compressors(widths: Widths) -> Iterable[Found]:
    for num_tokens, (ratio, num_series) in product(widths.batches, ((4, 2), (128, 1))):
        wide, span = num_series * widths.width, num_series * ratio
        is_prompt = num_tokens > 1000
        num_rows = 1 if is_prompt else num_tokens
        how = Compression(torch.randn(ratio, wide, device=widths.device), widths.randn(widths.width), 1e-6, num_series)
        rings = torch.randn(num_rows + 1, span + 8, 2 * wide, device=widths.device)
        carried = CarriedInputs(rings, torch.zeros(1, 0, 2 * wide, device=widths.device))
        context = num_tokens if is_prompt else ratio * 64
        target = widths.rows(num_rows, context, ratio, widths.pool(num_rows, context, ratio, widths.width))
        row = torch.arange(num_rows, device=widths.device)
        starts = torch.zeros_like(row) if is_prompt else target.positions
        counts = num_tokens // num_rows * torch.arange(num_rows + 1, device=widths.device)
        if is_prompt:
            positions = torch.arange(num_tokens, device=widths.device)
            target = RangeRows(
                target.pool, target.table, 0 * positions, positions, target.page_rows, target.most, ratio
            )
        state = StateRows(row + 1, starts, starts, starts + 1, 0 * row, 0 * row)
        tokens, turns = StepTokens(counts.int(), state), torch.randn(2, num_tokens, 8, device=widths.device)
        values, scores = widths.randn(num_tokens, 2 * wide).split(wide, 1)
        num_made = num_tokens // ratio if is_prompt else num_rows
        num_bytes = num_tokens * 2 * wide * (widths.element + 4) + num_made * widths.width * widths.element
        num_bytes += 0 if is_prompt else num_rows * (span - 1) * 2 * widths.width * 4

        call = partial(widths.ops.compress, values, scores, how, carried, tokens, target, (turns[0], turns[1]))
        yield f"compressor of {ratio}, {num_tokens} tokens", widths.seconds([call] * 4), num_bytes, None


def _streams(widths: Widths) -> Iterable[Found]:
    count, hidden = widths.num_streams, widths.hidden_size
    sizes: tuple[tuple[int, ...], ...] = (((2 + count) * count, count * hidden), ((2 + count) * count,), (3,))
    weights = MixWeights(*(0.02 * torch.randn(each, device=widths.device) for each in sizes))
    for num_tokens in widths.batches:
        streams, out = widths.randn(num_tokens, count, hidden), widths.randn(num_tokens, hidden)

        mix = partial(widths.ops.mix_streams, streams, weights, iterations=20, eps=1e-6, norm_eps=1e-6)
        _, post, matrix = mix()
        one = num_tokens * hidden * widths.element
        yield f"mix of streams, {num_tokens} tokens", widths.seconds([mix] * 4), (2 * count + 1) * one, None
        merge = partial(widths.ops.merge_streams, streams, out, post, matrix)
        yield f"merge of streams, {num_tokens} tokens", widths.seconds([merge] * 4), (2 * count + 1) * one, None


def main() -> None:
    """Prints times of tiles of attention and of an index."""
    from hiserve.kernels import index_topk, latent_union  # noqa: PLC0415 - Triton is not installed everywhere

    torch.manual_seed(SEED)
    rate, widths, packed = ceilings.copy_rate("cuda", 8 << 30), Widths("cuda"), Widths("cuda", packs_rows=True)
    tiles, packed_tiles = latent_union._TILES, latent_union._PACKED_TILES
    cases = product((16, 32, 64), (16, 32, 64), (4, 8), (2, 3, 5), (("plain", widths), ("packed", packed)))
    for heads, keys, warps, stages, (kind, sizes) in cases:
        latent_union._TILES = latent_union._PACKED_TILES = (latent_union._Tile(heads, keys, warps, stages),)
        try:
            for name, seconds, num_bytes, _ in _attentions(sizes):
                print(
                    f"{kind}, {heads} heads, {keys} rows, {warps} warps, {stages} stages: {name}: {1e6 * seconds:.1f} us, {num_bytes / rate / seconds:.2f}",
                    flush=True,
                )
        except Exception as error:  # noqa: BLE001 - a tile may not fit
            print(
                f"{kind}, {heads} heads, {keys} rows, {warps} warps, {stages} stages: {type(error).__name__}",
                flush=True,
            )
    latent_union._TILES, latent_union._PACKED_TILES = tiles, packed_tiles
    for keys, waves, chunk in product((64, 128), (4, 8), (2048, 4096, 8192)):
        index_topk._NUM_KEYS, index_topk._WAVES, index_topk._MIN_CHUNK = keys, waves, chunk
        for name, seconds, num_bytes, _ in _scans(widths):
            print(
                f"{keys} keys, {waves} waves, chunks of {chunk}: {name}: {1e6 * seconds:.1f} us, {num_bytes / rate / seconds:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
