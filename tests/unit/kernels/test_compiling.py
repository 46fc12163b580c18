"""All kernels are compiled for Hopper, without a device: what the interpreter runs, a compiler may refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve.attention.exact_triton import ExactTritonAttention
from hiserve.attention.triton import TritonAttention
from hiserve.config.settings import TreeShape
from hiserve.core.activation import GELU_TANH, Activation
from hiserve.core.forward import LayerKV
from hiserve.core.quantization import QuantSpec
from hiserve.core.row_shapes import PACKED_V4, PackedPages, packed_key
from hiserve.kernels import (
    attention_decode,
    chosen_triton,
    compressed_fused,
    delta_triton,
    draft_triton,
    draw,
    exact,
    fused,
    index_store,
    latent_decode,
    page_copy,
    page_lists,
    push_sum,
    quantized_linear,
    share_draw,
    step_triton,
    term_products,
)
from hiserve.kernels.chosen_triton import attend_chosen
from hiserve.kernels.delta import DeltaShape
from hiserve.kernels.latent_decode import LatentRows, decode
from hiserve.kernels.packed_weights import PackedWeights, Weights
from hiserve.kernels.pairs import PairFrequencies
from hiserve.kernels.quantized import QuantizedWeight, pack_codes
from hiserve.kernels.routing import ExpertGroups
from hiserve.kernels.step_ops import FreeDraws, TokenMasks
from hiserve.kernels.streams_reference import MixWeights
from hiserve.models.builtin_shapes import SHAPES
from tests.helpers import compiled as compiled_kernels
from tests.helpers.attention import Case
from tests.helpers.chosen_case import ChosenCase
from tests.helpers.compiled import Compiled, launched_kernels
from tests.helpers.compressed_cases import CompressedStep
from tests.helpers.delta_cases import Chunk, Layer, nan_pools, random_inputs, random_weights
from tests.helpers.draft_cases import draft_case
from tests.helpers.grown_trees import grow_trees, logits_of
from tests.helpers.latent_case import pack_latents
from tests.helpers.packed_cases import random_4, random_8
from tests.helpers.step_cases import copied, random_case, with_trees
from tests.helpers.widening import some

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # told by Triton on the CPU

BF16 = torch.bfloat16
ABSORBED = {"latent_decode._attend", "latent_decode._join"}
TERMS = {f"terms_triton._{name}_kernel" for name in ("split", "norm", "act")}
TERMS |= {"term_products._fp8_kernel", "term_products._int4_kernel", "parts_triton._sum_kernel"}


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str], int]:
    return {}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, known: dict[tuple[str, str], int]) -> Compiled:
    return Compiled(monkeypatch, known)


def attend_latents(
    num_heads: int, rank: int, rope_dim: int, *, num_parts: int, dtype: torch.dtype, packs: bool = False
) -> None:
    rows = LatentRows(torch.tensor([0, 2, 4]).int(), torch.tensor([9, 2]), torch.zeros(2, 4, dtype=torch.int32))
    pool, packed = torch.zeros(64, 1, rank + rope_dim, dtype=dtype), None
    if packs:
        pool, packed = pack_latents(pool, rank, 16)
    decode(
        torch.zeros(4, num_heads, rank + rope_dim, dtype=dtype),
        pool,
        rank,
        rows,
        max_q_len=2,
        num_parts=num_parts,
        page_size=16,
        scale=0.1,
        hides_first=False,
        out=torch.zeros(4, num_heads, rank, dtype=dtype),
        packed=packed,
    )


@pytest.mark.parametrize(
    ("name", "packs"),
    some(product(["glm-4.7-flash", "v3-like"], [False, True]), ("glm-4.7-flash", False), ("v3-like", True)),
)
def test_absorbed_queries_of_large_models(compiled: Compiled, name: str, packs: bool) -> None:
    """Plain rows of the second have the tiles of chosen rows; packed ones of the first are widened by instructions below."""
    shape: dict[str, Any] = SHAPES[name]
    heads, rank, rope_dim = (shape[each] for each in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"))
    attend_latents(heads, rank, rope_dim, num_parts=3, dtype=BF16, packs=packs)
    assert compiled.names() == ABSORBED
    assert max(compiled.shared_bytes["latent_decode._attend"]) > 64 * 1024  # or nothing would be too much


def test_absorbed_queries_of_chosen_rows(compiled: Compiled) -> None:
    q, pool, slots = torch.zeros(2, 128, 576, dtype=BF16), torch.zeros(64, 576, dtype=BF16), torch.zeros(2, 2048).long()
    attend_chosen(q, pool, slots, torch.tensor([9, 2]), 0.1, 512)
    pool, packed = pack_latents(pool[:, None], 512, 16)
    attend_chosen(q, pool[:, 0], slots, torch.tensor([9, 2]), 0.1, 512, packed)
    assert compiled.names() == ABSORBED


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_absorbed_queries_of_a_small_model(compiled: Compiled, dtype: torch.dtype) -> None:
    attend_latents(4, 32, 16, num_parts=1, dtype=dtype)
    assert compiled.names() == {"latent_decode._attend"}


def attend(
    *lengths: tuple[int, int], trees: bool, widths: Sequence[bool] = (False, True), in_full: bool = False
) -> None:
    """Heads in groups, in 16 bits and in 8; the first of two layers has sinks, if nothing is a tree, and a window.

    Each of both goes with one layer, and with the other one beside trees, unless it is run in full.
    """
    group = 4 if trees else 8
    for packs, layer in product(widths, (0, 1)):
        if in_full or (packs == bool(layer)) != trees:
            options: dict[str, Any] = {"window": 128, "sinks": not trees, "trees": trees, "packs": packs}
            case = Case(lengths, group=group, head_dim=64, dtype=BF16, **options)
            case.run(TritonAttention(case.shape), layer)


def store() -> None:
    """Norms, rotates and stores keys and values of two tokens, two query heads and one KV head of 64 elements; latents."""
    weight, angles = torch.ones(64, dtype=BF16), torch.zeros(2, 1, 64)
    fused.add_rms_norm(weight.repeat(2, 1), weight.repeat(2, 1), weight, 1e-6)
    fused.rms_norm(torch.zeros(2, 96, dtype=BF16)[:, :64], weight, 1e-6)
    fused.rotations(torch.zeros(2, dtype=torch.int64), torch.ones(32), 1.0, torch.float32)
    kv = LayerKV(*torch.zeros(2, 16, 1, 64, dtype=BF16))
    qkv, norms = torch.zeros(2, 4, 64, dtype=BF16), torch.ones(3, 64, dtype=BF16)
    fused.rotate_and_store(qkv, norms, 1e-6, angles, angles, kv, torch.zeros(2, dtype=torch.int64))
    scales = torch.zeros(16, 1, dtype=torch.int32)
    packed = LayerKV(*torch.zeros(2, 16, 1, 64, dtype=torch.uint8), scales=scales)
    fused.rotate_and_store(qkv, norms, 1e-6, angles, angles, packed, torch.zeros(2, dtype=torch.int64))
    fused.act_mul(torch.zeros(2, 128, dtype=BF16), GELU_TANH)
    fused.sigmoid_mul(torch.zeros(2, 64, dtype=BF16), torch.zeros(2, 96, dtype=BF16)[:, 32:])
    rows = LayerKV(*torch.zeros(2, 16, 1, 576, dtype=BF16))
    q, projected, norm = torch.zeros(2, 20, 256, dtype=BF16), torch.zeros(2, 576, dtype=BF16), torch.ones(512)
    fused.store_latents(q, projected, norm, 1e-6, angles, angles, rows, torch.zeros(2, dtype=torch.int64))
    bits, packed_rows = pack_latents(rows.k, 512, 16)
    rows = LayerKV(k=bits, v=bits)
    fused.store_latents(q, projected, norm, 1e-6, angles, angles, rows, torch.zeros(2, dtype=torch.int64), packed_rows)


def mix(*, in_full: bool = False) -> None:
    """A token alone, few and many pairs of tokens and experts; with biases, and with an expert of all tokens.

    Many pairs are with the latter in float32, whose tiles are the largest, and in 16 bits if it is run in full.
    """
    gate_up, down = torch.zeros(4, 128, 64, dtype=BF16), torch.zeros(4, 64, 64, dtype=BF16)
    for num_tokens in (1, 2, 400):
        x = torch.zeros(num_tokens, 64, dtype=BF16)
        gated = None if num_tokens == 2 else (x, gate_up[0, 0])
        shares, _ = fused.route(torch.zeros(num_tokens, 4, dtype=BF16), 2, True, gated)
        fused.route_in_groups(torch.zeros(num_tokens, 32), ExpertGroups(torch.zeros(32), 8, 4, 1.0), 8, True)
        chosen = torch.zeros(num_tokens, 2, dtype=torch.int64)
        biases = torch.zeros(4, 128, dtype=BF16), torch.zeros(4, 64, dtype=BF16)
        fused.mix_experts(
            x, shares, chosen, gate_up, down, *biases, activation=Activation(slope=1.702, shift=1.0, limit=7.0)
        )
        if num_tokens < 400 or in_full:
            fused.mix_experts(x, shares, chosen, gate_up, down, shared=(gate_up[0], down[0]))
    x, shares, gate_up, down = (each.float() for each in (x, shares, gate_up, down))
    fused.mix_experts(x, shares, chosen, gate_up, down, shared=(gate_up[0], down[0]))


def mix_packed(num_tokens: int, kind: str, shared: str) -> None:
    """As ``mix``, of experts packed in 4 or 8 bits at the widths of gpt-oss, where none computes all, and of DeepSeek-V4."""
    generator, width, inner = torch.Generator().manual_seed(1), 2880 if shared == "none" else 4096, 128
    weights: dict[str, tuple[Weights, Weights]] = {
        "4": (random_4(generator, 4, 2 * inner, width), random_4(generator, 4, width, inner)),
        "8": (random_8(generator, 4, 2 * inner, width, num_parts=2), random_8(generator, 4, width, inner)),
        "plain": (torch.zeros(1, 2 * inner, width, dtype=BF16), torch.zeros(1, width, inner, dtype=BF16)),
    }
    biases = torch.zeros(4, 2 * inner, dtype=BF16), torch.zeros(4, width, dtype=BF16)
    x, chosen = torch.zeros(num_tokens, width, dtype=BF16), torch.zeros(num_tokens, 2, dtype=torch.int64)
    fused.mix_experts(
        x,
        torch.zeros(num_tokens, 2),
        chosen,
        *weights[kind],
        *(biases if shared == "none" else (None, None)),
        activation=Activation(slope=1.702, shift=1.0, limit=7.0),
        shared=None if shared == "none" else first_of(*weights[shared]),
    )


def first_of(*weights: Weights) -> tuple[Weights, Weights]:
    first, second = (
        each[0] if isinstance(each, Tensor) else PackedWeights(each.codes[0], each.scales[0], each.columns)
        for each in weights
    )
    return first, second


def project() -> None:
    """One row, few rows of a deep weight, whose product is split, and rows by a wide weight; activations of gates and ups."""
    fused.linear(torch.zeros(3, 96, dtype=BF16), torch.zeros(8, 96), None, is_after_attention=False)
    fused.linear(torch.zeros(1, 96, dtype=BF16), torch.zeros(64, 96, dtype=BF16), None, is_after_attention=False)
    deep = torch.zeros(64, 2048, dtype=BF16)
    fused.linear(torch.zeros(4, 2048, dtype=BF16), deep, torch.zeros(64, dtype=BF16), is_after_attention=False)
    parts = fused.linear_parts(torch.zeros(4, 2048, dtype=BF16), deep, deep[0, :64].clone(), is_after_attention=False)
    fused.add_rms_norm(parts, torch.zeros(4, 64, dtype=BF16), torch.ones(64, dtype=BF16), 1e-6)
    gate_up = torch.zeros(1024, 128, dtype=BF16)
    for num_rows in (1, 20, 100):
        fused.act_linear(torch.zeros(num_rows, 128, dtype=BF16), gate_up, torch.zeros(1024, dtype=BF16), GELU_TANH)


def weights_in_few_bits() -> dict[str, QuantizedWeight]:
    """Scales of rows, of blocks and of groups; with zero points and an order."""
    codes, scales = torch.zeros(128, 2048, dtype=torch.float8_e4m3fn), torch.ones(128)
    small, large, zeroed = (
        QuantSpec(4, kind, (1, group)) for kind, group in (("uint", 32), ("int", 128), ("uint", 128))
    )
    packed, of_groups = (
        (pack_codes(codes.view(torch.uint8), each) for each in (small, large)),
        torch.ones(64, 128, dtype=BF16),
    )
    zeros, order = of_groups.to(torch.uint8), torch.zeros(2048, dtype=torch.int32)
    shape = (128, 2048)
    return {
        "rows": QuantizedWeight(QuantSpec(8, "e4m3", (1, 0)), shape, codes, scales),
        "blocks": QuantizedWeight(QuantSpec(8, "e4m3", (128, 128), "token"), shape, codes, scales[:16].view(1, 16)),
        "small": QuantizedWeight(small, shape, next(packed), of_groups, zeros, order),
        "large": QuantizedWeight(large, shape, plain := next(packed), of_groups[:16]),
        "zeros": QuantizedWeight(zeroed, shape, plain, of_groups[:16], zeros[:16], order),
    }


def project_in_few_bits(cases: Sequence[tuple[str, int]]) -> None:
    weights = weights_in_few_bits()
    for name, num_rows in cases:
        x = torch.zeros(num_rows, 2048, dtype=BF16)
        fused.quantized_linear(x, weights[name], x[0, :128], is_after_attention=False)


def project_in_terms(num_rows: int) -> None:
    """Inputs of projections split behind a norm and an activation, and alone; scales of rows, of blocks and of groups."""
    weights, norm = weights_in_few_bits(), torch.ones(2048, dtype=BF16)
    x = torch.zeros(num_rows, 2048, dtype=BF16)
    split = fused.norm_inputs(x, x, norm, 1e-6, weights["rows"])
    for inputs, name in (
        (split, "rows"),
        (fused.norm_inputs(x, None, norm, 1e-6, weights["large"]), "large"),
        (fused.act_inputs(torch.zeros(num_rows, 4096, dtype=BF16), GELU_TANH, weights["blocks"]), "blocks"),
        (x, "zeros"),
    ):
        fused.quantized_linear(inputs, weights[name], norm[:128], is_after_attention=False)


def draw_tokens() -> None:
    """With masks of tokens and without."""
    logits, number = torch.zeros(2, 5000, dtype=BF16), torch.zeros(2, dtype=torch.int64)
    masks = TokenMasks(torch.zeros(2, dtype=torch.int32), torch.zeros(1, 157, dtype=torch.int32))
    for given in (None, masks):
        draw.greedy(logits, given)
        draw.draw_free(logits, torch.ones(2, dtype=torch.float64), number, number, number, None, given)
        for draws in (None, FreeDraws(torch.ones(2, dtype=torch.float64), number, number, number, number > 0)):
            entries = share_draw.best_entries(logits, 5056, draws, given)
            share_draw.join_entries(torch.stack((entries, entries)), draws)


def push() -> None:
    """Words of one element and of two, among two ranks and three."""
    for dtype, num_ranks in ((BF16, 2), (torch.float32, 3)):
        x, counts = torch.zeros(2, 2880, dtype=dtype), torch.zeros(push_sum.MAX_ROWS, dtype=torch.int32)
        inboxes = push_sum.Inboxes(torch.zeros(num_ranks, dtype=torch.int64), counts, counts[:1], 1)
        push_sum.push_sum(x, inboxes)
        push_sum.push_add_norm(x, x.clone(), x[0], 1e-6, x.clone(), inboxes)


def step() -> None:
    """Without pages of layers with a window, and with them; likewise with states."""
    generator = torch.Generator().manual_seed(1)
    drawn = [random_case(generator) for _ in range(40)]
    for case in {(case.state.windows is None, case.state.states is None): case for case in drawn}.values():
        state, made = copied(case.state), case.unfilled()
        step_triton.fill_inputs(made, state, page_size=case.page_size)
        counts = step_triton.accept(case.drawn, case.sampling_rows, case.sampling_drafts, state)
        step_triton.advance(made, case.drawn, counts, state)


def draft() -> None:
    case = draft_case(torch.Generator().manual_seed(1))
    case.outputs(draft_triton)
    lengths = {"num_draft": 3, "min_ngram": 1, "max_ngram": 3, "max_known": 9}
    continuations = torch.zeros((case.rows.shape[0], 5), dtype=torch.int32)
    draft_triton.draft_ngrams(case.rows, case.state, continuations, **lengths)


def sum_in_order() -> None:
    """Products of a row and of many, whose parts are spread and joined; attention of rows that decode, of a prompt and of a chunk."""
    for rows in (1, 2000):
        exact.linear(torch.zeros(rows, 1024, dtype=BF16), torch.zeros(64, 1024, dtype=BF16), None)
    case = Case(((9, 1), (0, 33), (9, 40)), group=4, head_dim=256, sinks=True, dtype=BF16)
    case.shape = replace(case.shape, segment=256)
    case.run(ExactTritonAttention(case.shape))


def compressed(*, in_full: bool = False) -> None:
    """Attention of DeepSeek-V4's shape in one and in several parts, and of a small model; its index; rows of both ratios.

    Chosen rows are those of the small model, and packed ones elsewhere; of the large one if it is run in full.
    """
    case, small = CompressedStep(), CompressedStep(width=32, num_heads=4, dtype=torch.float32)
    case.attend(compressed_fused, 4, ("heavy", "chosen") if in_full else ("heavy",))
    case.attend(compressed_fused, 200, ("none",))
    small.attend(compressed_fused, 4, ("chosen",))
    case.choose(compressed_fused)
    compressed_fused.slots_behind_first(case.range(1, 512, 128, 128), torch.ones(4).long(), torch.zeros(5).int())
    case.compress(compressed_fused, 4, 2)
    case.compress(compressed_fused, 128, 1)


def chosen_prompts() -> None:
    """Of DeepSeek-V3.2 and GLM-5, and of a small model whose heads are no powers of 2; choices of tokens as bits."""
    for dims, dtype in (((192, 128), BF16), ((256, 256), BF16), ((24, 12), torch.float32)):
        rows = ChosenCase(((0, 2),), num_heads=2, key_dim=dims[0], value_dim=dims[1], dtype=dtype)
        rows.attend(chosen_triton)
    keys, weights = CompressedStep().range(1, 128, 4), torch.zeros(4, 64)
    chosen_triton.choose_bits(torch.zeros(4, 64, 128, dtype=BF16), weights, keys, 512, 0.1)


def streams() -> None:
    """Of DeepSeek-V4's shape, and its routes."""
    x = torch.zeros(3, 4, 4096, dtype=BF16)
    weights = MixWeights(torch.zeros(24, 4 * 4096), torch.zeros(24), torch.zeros(3))
    _, post, matrix = compressed_fused.mix_streams(x, weights, iterations=20, eps=1e-6, norm_eps=1e-6)
    compressed_fused.merge_streams(x, x[:, 0], post, matrix)
    compressed_fused.pass_streams(x, x[:, 0], post, matrix, weights, iterations=20, eps=1e-6, norm_eps=1e-6)
    head = MixWeights(weights.weight[:4], weights.base[:4], weights.scale[:1])
    compressed_fused.join_streams(x, head, eps=1e-6, norm_eps=1e-6)
    table = torch.zeros(9, 6, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    for given in {"bias": torch.zeros(256)}, {"given": table}:
        compressed_fused.route_by_root(torch.zeros(3, 256), 6, 1.5, **given)
    positions, frequencies = torch.zeros(3, dtype=torch.int64), torch.zeros(4, 32)
    kinds = PairFrequencies(frequencies, frequencies[:, 0].contiguous(), positions.new_ones(4))
    cos, sin = (each[1] for each in compressed_fused.pair_angles(positions, kinds, torch.float32))
    heads, pool = torch.zeros(3, 64, 512, dtype=BF16), torch.zeros(128, 512, dtype=BF16)
    for given in heads, heads[:, :0]:
        compressed_fused.store_rows(given, heads[:, 0], pool[0], 1e-6, cos, sin, pool, positions)
    compressed_fused.rotate_pairs(heads[..., :128], cos, sin)


def pack() -> None:
    """Rows of DeepSeek-V4 in 8 bits: stored, made, chosen by an index, and read; and of a small model."""
    case, small = (
        CompressedStep(packs_rows=True),
        CompressedStep(width=32, num_heads=4, dtype=torch.float32, packs_rows=True),
    )
    case.attend(compressed_fused, 200, ("chosen",))
    small.attend(compressed_fused, 4, ("heavy",))
    case.choose(compressed_fused)
    case.compress(compressed_fused, 4, 2)
    pool, slots = torch.zeros(128, PACKED_V4.row_bytes, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    heads, turns = torch.zeros(3, 64, 512, dtype=BF16), torch.zeros(3, 32)
    compressed_fused.store_rows(
        heads, heads[:, 0], heads[0, 0], 1e-6, turns, turns, pool, slots, PackedPages(PACKED_V4, 128)
    )


def pages() -> None:
    """Their lists, and copies in both directions."""
    number, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32)
    for first in (None, torch.zeros(2, dtype=torch.int32)):
        page_lists.list_pages(table, number, number, torch.zeros(3, dtype=torch.int32), 16, table.flatten(), first)
    planes, held = torch.zeros(2, 4, 8, dtype=torch.int64), torch.zeros(4, 16, dtype=torch.int64)
    for to_planes in (True, False):
        page_copy.copy_pages(planes, held, table[:, :2], to_planes=to_planes, max_programs=2)


def index_rows() -> None:
    """Of DeepSeek-V3.2."""
    cos = torch.zeros(3, 1, 64)
    key, weight, pool = torch.zeros(3, 128, dtype=BF16), torch.zeros(128, dtype=BF16), torch.zeros(32, 128, dtype=BF16)
    slots, shape = torch.zeros(3, dtype=torch.int64), packed_key(128)
    assert shape is not None
    for memory, packed in ((pool, None), (torch.zeros(32, 132, dtype=torch.uint8), PackedPages(shape, 16))):
        index_store.store_index_keys(key, weight, weight, 1e-6, cos, cos, memory, slots, packed)
    index_store.rotate_first(torch.zeros(3, 64, 128, dtype=BF16), cos, cos)


def advance_states() -> None:
    """The heads of Qwen3.5-35B-A3B, and small ones in float64."""
    large = DeltaShape(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
    small = DeltaShape(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16)
    for shape, dtype, lengths in ((large, BF16, (2, 40)), (small, torch.float64, (2,))):
        heads = torch.zeros(2, shape.num_value_heads, shape.value_dim, dtype=dtype)
        fused.gated_rms_norm(heads, heads, heads[0, 0], 1e-6)
        layer = Layer(random_weights(shape, dtype), nan_pools(2, 6, 1, shape, dtype), shape, delta_triton.delta)
        for num_tokens in lengths:
            layer.step([Chunk(1, 0, 0, random_inputs(num_tokens, shape, dtype))])


def walk_trees() -> None:
    """A step whose rows verify trees: inputs, the walk, the move of keys and values in 16 bits and of bytes; the growth of trees."""
    generator, case = torch.Generator().manual_seed(1), None
    while case is None or not len(case.inputs.sampling):
        case = with_trees(generator, random_case(generator))
    made = case.unfilled()
    step_triton.fill_inputs(made, case.state, page_size=case.page_size)
    counts, path = step_triton.walk(case.drawn, case.sampling_rows, case.sampling_drafts, case.state)
    starts = made.forward.qo_indptr[: len(counts)]
    storages = [torch.zeros(2, 2, 704, 2, 64, dtype=BF16), torch.zeros(1, 1, 704, 1, 3, dtype=torch.uint8)]
    step_triton.move(storages, made.forward.slots, starts, path, counts)
    for shape, is_greedy in ((TreeShape(3, 6, 16), True), (TreeShape(3, 6, 16), False), (TreeShape(1, 4, 5), True)):
        grow_trees(draft_triton, shape, logits_of(shape, 5000, generator, BF16), is_greedy=is_greedy)


FEW = {"packed_products._packed_kernel", "experts._sum_kernel"}
MANY = FEW | {"experts._group_kernel"}
DECODED = {"attention_schedule._schedule", "attention_decode._attend"}
EXTENDED = {"attention_extend._extend", "attention_extend._join"}
# What is run, and the kernels that it launches.
RUNS: dict[str, tuple[Callable[[], None], set[str]]] = {
    # Bytes are widened by instructions in the test below, and without them in rows of trees.
    "decode": (lambda: attend((700, 1), (3, 1), trees=False, widths=(False,)), DECODED),
    "extend": (lambda: attend((2000, 17), (5, 2), trees=False), EXTENDED),
    "store": (
        store,
        {f"fused.{name}_kernel" for name in ("_norm", "_rotations", "_rotate_and_store", "_act_mul", "_sigmoid_mul")}
        | {"latent_store._store_latents"},
    ),
    "index": (
        index_rows,
        {"index_store._store_index_keys", "index_store._rotate_first"},
    ),
    "experts": (
        mix,
        {f"experts.{name}_kernel" for name in ("_route", "_group", "_sum")}
        | {
            "expert_products._product_kernel",
            "routing_triton._route_in_groups",
            "few_experts._gate_kernel",
            "few_experts._down_kernel",
        },
    ),
    "products": (
        project,
        {"skinny_linear._row_kernel", "skinny_linear._tile_kernel", "parts_triton._sum_kernel", "fused._norm_kernel"},
    ),
    "few bits": (
        lambda: project_in_few_bits(
            (("rows", 100), ("rows", 200), ("blocks", 200), ("small", 2), ("large", 100), ("large", 200))
        ),
        {"quantized_linear._fp8_kernel", "quantized_linear._int4_kernel", "parts_triton._sum_kernel"}
        | {f"scaled_products.{name}_kernel" for name in ("_round", "_upcast", "_block")},
    ),
    "terms": (lambda: project_in_terms(32), TERMS),
    "draw": (
        draw_tokens,
        {f"draw.{name}" for name in ("_find_best", "_find_drawn", "_join_parts")}
        | {f"share_draw.{name}" for name in ("_pack_best", "_join_entries")},
    ),
    "step": (
        step,
        {f"step_inputs.{name}" for name in ("_check_rows", "_place_tokens")}
        | {f"step_triton.{name}" for name in ("_count_accepted", "_advance_rows")},
    ),
    "trees": (
        walk_trees,
        {f"step_inputs.{name}" for name in ("_check_rows", "_place_tokens")}
        | {f"step_triton.{name}" for name in ("_walk_rows", "_move_rows")}
        | {f"tree_growth.{name}" for name in ("_find_candidates", "_grow_level", "_write_trees")},
    ),
    "attention to trees": (lambda: attend((700, 9), (2000, 70), trees=True), DECODED | EXTENDED),
    "draft": (
        draft,
        {f"draft_triton.{name}" for name in ("_draft_inputs", "_draft_hidden_states", "_keep_hidden_states")}
        | {"draft_triton._note_drafted", "draft_triton._draft_window", "draft_triton._draft_ngrams"},
    ),
    "states": (
        advance_states,
        {"delta_inputs._make_inputs", "delta_step._advance", "delta_chunks._solve_chunks", "delta_scan._scan_chunks"}
        | {"gated_norm_triton._gated_norm_kernel"},
    ),
    "compressed": (
        compressed,
        {f"latent_union.{name}" for name in ("_attend", "_join")}
        | {f"index_topk.{name}" for name in ("_score", "_choose")}
        | {f"compress.{name}" for name in ("_make", "_keep")}
        | {"window_slots._list_slots"},
    ),
    "chosen prompts": (chosen_prompts, {"chosen_prompts._attend", "index_topk._score", "index_topk._choose"}),
    "streams": (
        streams,
        {"streams._project", "stream_sums._weigh", "streams._merge"}
        | {"pairs_triton._turn_kernel", "pairs_triton._angles_kernel", "routing_triton._route_by_root"},
    ),
    "packed": (
        pack,
        {"latent_union._attend", "latent_union._join", "index_topk._score", "index_topk._choose"}
        | {"compress._make", "compress._keep", "pairs_triton._turn_kernel"},
    ),
    "sums in one order": (
        sum_in_order,
        {"exact_linear._product_kernel", "exact_decode._attend", "exact_extend._extend", "parts_triton._sum_kernel"}
        | {"attention_schedule._schedule"},
    ),
    "push": (push, {"push_sum._push_kernel"}),
    "pages": (pages, {"page_lists._list_pages", "page_copy._copy_pages"}),
}
# More of the same, behind ``wide``.
IN_FULL: dict[str, tuple[Callable[[], None], set[str]]] = {
    "decode": (lambda: attend((700, 1), (3, 1), trees=False, in_full=True), DECODED),
    "extend": (lambda: attend((2000, 17), (5, 2), trees=False, in_full=True), EXTENDED),
    "attention to trees": (lambda: attend((700, 9), (2000, 70), trees=True, in_full=True), DECODED | EXTENDED),
    "experts": (lambda: mix(in_full=True), RUNS["experts"][1]),
    "compressed": (lambda: compressed(in_full=True), RUNS["compressed"][1]),
}


def test_weights_of_few_bits_are_widened_by_instructions(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the kernels of the runs below convert them as the interpreter can."""
    monkeypatch.setattr(quantized_linear, "has_instructions", lambda *_: True)
    monkeypatch.setattr(attention_decode, "_has_instructions", lambda _: True)
    monkeypatch.setattr(latent_decode, "has_instructions", lambda *_: True)
    attend_latents(20, 512, 64, num_parts=1, dtype=BF16, packs=True)
    monkeypatch.setattr(term_products, "has_instructions", lambda *_: True)
    project_in_few_bits((("rows", 100), ("small", 2)))
    project_in_terms(1)
    case = Case(((9, 1),), group=8, head_dim=64, dtype=BF16, packs=True)
    case.run(TritonAttention(case.shape), 0)
    widened = {"quantized_linear._fp8_kernel", "quantized_linear._int4_kernel", "attention_decode._attend"}
    assert widened | TERMS | {"latent_decode._attend"} < compiled.names()


def test_no_product_of_64_queries_has_32_columns_of_values(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a head of 64 in 8 bits: of such a product Triton 3.6 makes code that reads shared memory out of range."""
    launched: list[Any] = []

    class Told:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **_: launched.append(given[-1])

    monkeypatch.setattr(attention_decode, "_attend", Told())
    for num_new, packs in ((9, True), (32, True), (32, False)):
        case = Case(((0, num_new),), group=2, head_dim=64, dtype=BF16, packs=packs)
        case.run(TritonAttention(case.shape), 0)
    assert [(shape.num_queries, shape.block_dim) for shape in launched] == [(32, 64), (64, 128), (64, 64)]


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        *(pytest.param(name, RUNS, id=name) for name in RUNS),
        *(pytest.param(name, IN_FULL, id=f"{name} in full", marks=pytest.mark.wide) for name in IN_FULL),
    ],
)
def test_kernels_of_a_kind_compile(
    compiled: Compiled, name: str, runs: dict[str, tuple[Callable[[], None], set[str]]]
) -> None:
    run, kernels = runs[name]
    run()
    assert compiled.names() == kernels


@pytest.mark.wide
@pytest.mark.parametrize("name", ["chosen prompts", "extend"])
def test_passes_that_are_left_out_take_no_shared_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for left_out in (compiled_kernels.HARMLESS, {}):
        with monkeypatch.context() as patch:
            patch.setattr(compiled_kernels, "HARMLESS", left_out)
            kernels = Compiled(patch, {})
            RUNS[name][0]()
            found.append(kernels.shared_bytes)
    assert found[0] == found[1]


# The least rows, those of the middle and of the tallest tiles, and a token alone.
MIXED = {1: FEW, 2: MANY, 64: MANY, 400: MANY}


@pytest.mark.parametrize(
    ("num_tokens", "kind", "shared"),
    some(
        product(MIXED, "48", ("none", "plain", "8")),
        (1, "4", "8"),
        (2, "4", "none"),
        (400, "4", "plain"),
        (400, "8", "8"),
    ),
)
def test_packed_experts_compile(compiled: Compiled, num_tokens: int, kind: str, shared: str) -> None:
    mix_packed(num_tokens, kind, shared)
    assert compiled.names() == MIXED[num_tokens]


def test_every_kernel_is_among_them() -> None:
    assert set.union(ABSORBED, FEW, MANY, *(kernels for _, kernels in RUNS.values())) == launched_kernels()
