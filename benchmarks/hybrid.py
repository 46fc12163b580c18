"""Models with windows, latents or states on one GPU: kernels alone, decode steps and prompts, against the machine.

Usage: ``python -m benchmarks.hybrid OUT.json COMMIT [--parts NAME ...] [--set NAME=VALUE ...]``: random weights of built-in
shapes in bfloat16. A step is compared with the bytes that it must read at the rate of a copy, of experts those that random
routing chooses; prompts with their products at the rate of a matrix product. ``--set`` gives every engine a setting.
``--tiny`` runs all parts with hiserve-nano on the CPU, as a test of this file; its ratios mean nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from benchmarks.gpu import ceilings
from benchmarks.gpu.driving import Bench, Part, decode, run, setting, timed_part
from benchmarks.gpu.figures import Figure, table
from benchmarks.gpu.sizes import FULL, SEED, TINY
from benchmarks.kernels.compressed import measure_compressed
from benchmarks.kernels.delta import measure_delta
from benchmarks.kernels.latent import measure_absorbed
from benchmarks.record import ENGINE, Record, gpu_parser
from hiserve.config.options import DTYPE_BYTES
from hiserve.core.kv_groups import Space
from hiserve.models.compressed_config import CompressedConfig, LayerKind
from hiserve.models.compressed_names import table_of
from hiserve.models.experts_config import packed_size
from hiserve.models.model_config import NANO, ModelConfig
from hiserve.models.quantized_names import kept_size

# With the bar of prompts.
SHAPES = {
    "glm-4.7-flash": 0.60,
    "v3-like": 0.60,
    "v3.2-like": 0.60,
    "gpt-oss-20b": 0.70,
    "gpt-oss-20b-mxfp4": 0.70,
    "gemma-3-27b": 0.70,
    "qwen3.5-35b-a3b": 0.60,
    "v4-flash-like": 0.60,
    "v4-flash-like-fp4": 0.60,
}
LONG = dict.fromkeys(
    ("v3.2-like", "v4-flash-like", "v4-flash-like-fp4"), 131_072
)  # tokens after which one row decodes as well
PAGE_SIZES = {
    "v4-flash-like": 128,
    "v4-flash-like-fp4": 128,
}  # tokens for which its longest rows stand; others have pages of 16
DECODE_BAR = 0.65
REPEATS = 2  # of prompts


class Least:
    """The least that a step of a model must read, write or multiply; all rows and, but for packed experts, weights are of one type.

    Args:
        model: Its shape.
        dtype: Type name.
        packs_rows: Rows of compressed attention are packed.
    """

    def __init__(self, model: ModelConfig, dtype: str, *, packs_rows: bool = False) -> None:
        self._packs_rows = packs_rows
        self._model, self._dtype, self._element = model, dtype, DTYPE_BYTES[dtype]
        self._table = model.vocab_size * model.hidden_size
        self._layers = model.num_params - self._table * (1 if model.tie_embeddings else 2)
        if model.experts is not None:  # of the tables that name experts, a token reads a line
            self._layers -= model.experts.hash_params(model.vocab_size)
        self._windows = model.windows or (None,) * model.num_attention_layers

    def decode_bytes(self, num_rows: int, context: float) -> float:
        """Bytes of rows that attend over so many tokens each: weights, the output head, keys and values, what rows carry."""
        model = self._model
        sizes = model.facts().packed_experts, kept_size(table_of(model), model.quantization)
        weights = float(self._element * (self._layers + self._table - sum(each.num_params for each in sizes)))
        weights += sum(each.num_bytes for each in sizes)
        if model.experts is not None:
            share = model.experts.num_per_token / model.experts.num_experts
            weights -= self._expert_bytes * (1 - share) ** num_rows  # those that no row chooses
        seen = sum(context if window is None else min(context, window) for window in self._windows)
        stored = seen * model.slot_elements / len(self._windows)
        if model.index is not None:  # no key of the index, where all rows are chosen
            most, keys = model.index.most, model.index.slot_elements
            stored = min(context, most) * (model.slot_elements - keys) + (context > most) * context * keys
        stored *= self._element
        if model.compressed is not None:
            stored = self._compressed_bytes(model.compressed, seen, context)
        return weights + num_rows * (stored + self.carried_bytes())

    def _compressed_bytes(self, compressed: CompressedConfig, seen: float, context: float) -> float:
        """Bytes of the rows of so many tokens of windows, of all layers, and of compressed rows after so many tokens."""
        row, key = compressed.width * self._element, compressed.index_width * self._element
        if self._packs_rows:
            assert compressed.packed_row is not None and compressed.packed_key is not None, compressed
            row, key = compressed.packed_row.row_bytes, compressed.packed_key.row_bytes
        return seen * row + compressed_bytes(compressed, context, row, key)

    def carried_bytes(self) -> int:
        """Bytes of a row's states, read and written, and of a token's inputs, each of which is written once and read once."""
        groups = self._model.cache_plan(self._dtype, frees_windows=False).groups
        return sum(2 * group.slot_bytes for group in groups if group.space is Space.ROW)

    def prompt_flop(self, length: int) -> float:
        """Operations of a prompt: products of the layers with a token's own experts, causal attention, updates of states."""
        model, params = self._model, float(self._layers)
        if model.experts is not None:
            params -= self._expert_params * (1 - model.experts.num_per_token / model.experts.num_experts)
        latent, compressed, delta = model.latent, model.compressed, model.delta
        width = 2 * model.head_dim if latent is None else latent.key_dim + latent.value_dim
        pairs = sum(_num_pairs(length, window) for window in self._windows)
        flop = 2 * params * length
        if (index := model.index) is not None:
            pairs = len(self._windows) * _num_pairs(length, index.most)
            scored = _num_pairs(length, None) - _num_pairs(min(length, index.most), None)
            flop += 2 * len(index.layers) * index.num_heads * index.width * scored
        if compressed is not None:
            sparse, heavy = compressed.count(LayerKind.SPARSE), compressed.count(LayerKind.HEAVY)
            rows = _num_pairs_of(length, compressed.sparse_ratio)
            chosen = _num_pairs_of(length, compressed.sparse_ratio, compressed.index_topk)
            pairs += sparse * chosen + heavy * _num_pairs_of(length, compressed.heavy_ratio)
            flop += 2 * sparse * compressed.index_heads * compressed.index_width * rows
        if delta is not None:  # what the state says of a key, its correction, what it says of a query
            state = delta.num_value_heads * delta.key_dim * delta.value_dim
            flop += 3 * 2 * len(delta.layers) * state * length
        return flop + 2 * model.num_heads * width * pairs

    @property
    def _expert_bytes(self) -> int:
        """Bytes of all experts that compute some tokens only."""
        model = self._model
        assert model.experts is not None
        chosen = msgspec.structs.replace(model.experts, shared_size=0)
        packed = packed_size(chosen, model.quantization, model.hidden_size, model.num_layers)
        return packed.num_bytes or self._element * self._expert_params

    @property
    def _expert_params(self) -> int:
        """Parameters of all experts that compute some tokens only."""
        model, experts = self._model, self._model.experts
        assert experts is not None
        one = 3 * model.hidden_size * experts.intermediate_size
        return experts.num_layers(model.num_layers) * experts.num_experts * one


def compressed_bytes(compressed: CompressedConfig, context: float, row: int, key: int) -> float:
    """Returns the bytes of compressed rows that a token reads after so many: the index, those it chooses, and all heavy ones.

    A row has ``row`` bytes, a key of the index ``key``.
    """
    rows = context // compressed.sparse_ratio
    sparse = rows * key + min(rows, compressed.index_topk) * row
    heavy = context // compressed.heavy_ratio * row
    return compressed.count(LayerKind.SPARSE) * sparse + compressed.count(LayerKind.HEAVY) * heavy


def _num_pairs_of(length: int, ratio: int, most: int | None = None) -> int:
    """Returns the pairs of a query and a compressed row that it sees, of which it chooses so many at most."""
    return sum(min((place + 1) // ratio, length if most is None else most) for place in range(length))


def _num_pairs(length: int, window: int | None) -> int:
    """Returns the pairs of a query and a key that it sees."""
    near = length if window is None else min(length, window)
    return near * (near + 1) // 2 + (length - near) * near


def measure_shape(bench: Bench, shape: str) -> Part:
    """Times steady decode steps, short rows first, whose prefixes longer ones find; then prompts that come at once."""
    part, drive = Part(), bench.engine(shape)
    dtype, is_tiny = drive.settings.model.dtype, bench.sizes.settings["device"] == "cpu"
    least = Least(drive.model, dtype, packs_rows=drive.settings.cache.packs_rows)
    contexts = [64, 256] if is_tiny else [1024, 8192, *([LONG[shape]] if shape in LONG else [])]
    page_size = drive.settings.cache.page_size
    for context in contexts:
        for num_rows in (4, 1) if is_tiny else (1,) if context == LONG.get(shape) else (32, 8, 1):
            name = f"{shape} decode, {num_rows} x {context}"
            num_pages = num_rows * -(-(context + page_size) // page_size)
            if num_pages >= drive.settings.cache.kv_pages:
                part.notes.append(f"{name}: left out, {num_pages} of {drive.settings.cache.kv_pages} pages")
                continue
            pace = decode(bench, drive, num_rows, context)
            limit_s = least.decode_bytes(num_rows, pace.mean_context) / bench.ceilings["copy_bytes_per_s"]
            ratio = limit_s / pace.median_s
            part.figures.append(Figure(name, pace.median_s * 1e3, "ms", ratio, DECODE_BAR, "bandwidth limit"))
            part.samples[name] = pace.told() | {"limit_s": limit_s}
    num_prompts, length = bench.sizes.prefill
    batches = []
    for _ in range(1 + REPEATS):
        drive.engine.flush()
        batches.append(run(drive, [bench.prompt(drive, length) for _ in range(num_prompts)], 1))
    seconds = statistics.median(batch.seconds for batch in batches[1:])
    name = f"{shape} prompts, {num_prompts} x {length}"
    share = num_prompts * least.prompt_flop(length) / seconds / bench.ceilings["matmul_flop_per_s"]
    rate = num_prompts * length / seconds
    part.figures.append(Figure(name, rate, "tokens/s", share, SHAPES[shape], "matrix product"))
    part.samples[name] = {"batches": [batch.told() for batch in batches]}
    return part


def measure_kernel(bench: Bench) -> Part:
    """Times the kernel of absorbed queries alone."""
    bench.close()
    return measure_absorbed(bench.sizes.settings["device"], bench.ceilings)


def measure_states(bench: Bench) -> Part:
    """Times the kernels of recurrent states alone."""
    bench.close()
    return measure_delta(bench.sizes.settings["device"], bench.ceilings)


def measure_unions(bench: Bench) -> Part:
    """Times the kernels of compressed attention and of streams alone."""
    bench.close()
    return measure_compressed(bench.sizes.settings["device"], bench.ceilings)


PARTS: dict[str, Callable[[Bench], Part]] = {
    "latent_decode": measure_kernel,
    "delta": measure_states,
    "compressed": measure_unions,
    **{shape: partial(measure_shape, shape=shape) for shape in SHAPES},
}


def main() -> int:
    """Writes the result file after each part; returns 1 if one failed."""
    parser = gpu_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    flags = "".join(f" --set {name}={value}" for name, value in given.set) + " --tiny" * given.tiny
    flags += f" --parts {' '.join(given.parts)}" if given.parts != list(PARTS) else ""
    device, settings = ("cpu", {"model": NANO}) if given.tiny else ("cuda", {"max_running_requests": 32})
    sizes = TINY if given.tiny else FULL
    shapes: dict[str, dict[str, Any]] = {
        shape: settings
        | (
            {"max_model_len": 512, "kv_pages": 400}
            if given.tiny
            else {
                "shape": shape,
                "max_model_len": LONG.get(shape, 8192) + 1024,
                "page_size": PAGE_SIZES.get(shape, 16),
            }
        )
        for shape in SHAPES
    }
    result = Record.of(given, f"python -m benchmarks.hybrid OUT.json COMMIT{flags}", *ENGINE)
    result |= {"seed": SEED, "ceilings": ceilings.measure(device), "engines": [], "parts": {}}
    bench = Bench(replace(sizes, shapes=shapes), result["ceilings"], dict(given.set))
    for name in given.parts:
        result["parts"][name] = timed_part(bench, name, PARTS[name])
        bench.close()
        result["engines"] = bench.built
        result.save()
    print(table(figure for part in result["parts"].values() for figure in part["figures"]))
    return int(any(part["error"] for part in result["parts"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
