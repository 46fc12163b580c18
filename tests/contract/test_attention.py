"""Every attention backend against one plain oracle.

On a machine with a GPU, ``-m gpu`` runs it for the backends of the GPU. Triton's interpreter must be chosen before triton
is imported: ``tests/unit/attention/test_interpreted.py`` runs this file so.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch

from hiserve.attention.reference_attention import ReferenceAttention
from hiserve.core.forward import LayerKV
from hiserve.kernels.reference import merge
from tests.contract.attention_subject import FLASHINFER_HEAD_DIM, TOLERANCE, Subject
from tests.helpers.attention import NO_PAGE, RAGGED, Case

# Tokens per page, whether the pages of a row are adjacent, query heads of one KV head, elements of a head.
LAYOUTS = (
    (1, True, 1, 64),
    (1, False, 4, 128),
    (16, True, 2, 80),
    (16, False, 1, 64),
    (16, False, 8, 64),
    (16, False, 2, 128),
    (64, True, 4, 64),
    (64, False, 2, 80),
    (64, False, 8, 128),
)
# Of these each tile is compiled anew, so on a GPU the fewest with every size of page, of group and of head, small ones too.
LAYOUTS_ON_GPU = ((16, False, 2, 256), (16, False, 8, 32), LAYOUTS[1], LAYOUTS[3], LAYOUTS[2], LAYOUTS[8])
CHAINS = ((40, 4), (63, 4), (0, 4), (5, 1), (15, 2))
TREES = ((40, 9), (63, 4), (0, 7), (5, 1), (30, 3))
# Decode rows first, then prefill: the order of the planner's batches.
ORDERED = ((16, 1), (15, 1), (63, 1), (0, 1), (0, 33), (0, 5), (40, 7), (63, 20))


def _on_gpu(name: str, dtype: str) -> Any:
    return pytest.param(Subject(name, "cuda", getattr(torch, dtype)), marks=pytest.mark.gpu, id=f"{name}-cuda-{dtype}")


def _on_cpu(name: str, dtype: str = "float32") -> Any:
    return pytest.param(Subject(name, "cpu", getattr(torch, dtype)), id=f"{name}-cpu-{dtype}")


if os.environ.get("TRITON_INTERPRET") == "1":
    FULL = [_on_cpu("triton")]
    PLAIN = WITH_TREES = FULL
    WITH_SINKS = FULL
    OTHER_TYPES = []
    NARROW = [_on_cpu("triton", "float16")]
else:
    FULL = [_on_cpu("reference"), _on_cpu("reference", "float64")]
    FULL += [_on_gpu("triton", "bfloat16")]
    WITH_TREES = [*FULL, _on_cpu("cpu", "float64")]
    OTHER_TYPES = [_on_gpu("triton", dtype) for dtype in ("float16", "float32")]  # float32 has tiles of its own
    NARROW = [_on_gpu("triton", "bfloat16"), _on_gpu("triton", "float16")]
    PLAIN = [*FULL, _on_gpu("flashinfer", "bfloat16"), _on_gpu("paired", "bfloat16")]
    WITH_SINKS = [*FULL, *(_on_cpu("cpu", dtype) for dtype in ("float32", "float64", "bfloat16")), _on_cpu("paired")]
    PLAIN += [_on_cpu("cpu"), _on_cpu("cpu", "float64"), _on_cpu("cpu", "bfloat16"), _on_cpu("paired")]


def _laid_out() -> list[Any]:
    """Subjects with layouts."""
    found = []
    for subject in (*PLAIN, *OTHER_TYPES):
        (its,) = subject.values
        layouts = LAYOUTS if its.device == "cpu" else LAYOUTS_ON_GPU
        for layout in LAYOUTS_ON_GPU[-2:] if subject in OTHER_TYPES else layouts:
            if its.uses_flashinfer and layout[-1] != FLASHINFER_HEAD_DIM:
                continue
            name = "-".join(map(str, (subject.id, *layout)))
            found.append(pytest.param(its, layout, marks=subject.marks, id=name))
    return found


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("subject", "layout"), _laid_out())
def test_equals_the_oracle_on_ragged_batches(subject: Subject, layout: tuple[int, bool, int, int]) -> None:
    page_size, adjacent, group, head_dim = layout
    subject.check(subject.case(RAGGED, page_size=page_size, group=group, head_dim=head_dim, adjacent=adjacent))


@pytest.mark.parametrize("subject", PLAIN)
@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize(
    "lengths",
    [((0, 1),), ((31, 1),), ((0, 48),), ((16, 32),), ((17, 31),), CHAINS, ORDERED, ((5, 1), (300, 1), (31, 1))],
    ids=["first", "decode", "prompt", "chunk", "odd chunk", "chains", "ordered", "decodes"],
)
def test_equals_the_oracle_whatever_the_rows_are(
    subject: Subject, group: int, lengths: tuple[tuple[int, int], ...]
) -> None:
    subject.check(subject.case(lengths, group=group, adjacent=False))


@pytest.mark.parametrize("subject", PLAIN)
@pytest.mark.parametrize("frees_windows", [False, True], ids=["kept", "freed"])
@pytest.mark.parametrize("window", [1, 7, 33])
def test_a_window_hides_what_is_behind_it_in_its_layers_only(
    subject: Subject, window: int, frees_windows: bool
) -> None:
    """With pages of their own, entries below the window are no pages: nobody reads them."""
    lengths = (*RAGGED, (200, 1), (190, 4), (150, 40))
    case = subject.case(lengths, window=window, frees_windows=frees_windows, adjacent=not frees_windows)
    attention = subject.open(case.shape)
    for layer in (0, 1):
        tolerance = TOLERANCE[subject.dtype]
        expected = case.oracle(layer)[0]
        torch.testing.assert_close(case.run(attention, layer).cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("subject", PLAIN)
def test_scores_are_scaled_by_the_scalar_of_the_model(subject: Subject) -> None:
    subject.check(subject.case(((16, 1), (0, 33), (40, 7)), score_scalar=168.0))


@pytest.mark.parametrize("subject", WITH_SINKS)
@pytest.mark.parametrize("lengths", [RAGGED, CHAINS], ids=["ragged", "chains"])
@pytest.mark.parametrize("window", [None, 12])
def test_sinks_take_their_share_and_give_nothing(
    subject: Subject, lengths: tuple[tuple[int, int], ...], window: int | None
) -> None:
    """The second layer has none."""
    case = subject.case((*lengths, (300, 1)), sinks=True, window=window, group=4)
    out = subject.check(case)
    plain = dataclasses.replace(case.shape, sinks=())
    assert (case.run(subject.open(plain)) - out).abs().max() > 0.05
    if window is not None:  # a layer of another window can be computed alone
        subject.check(case, layer=1)


@pytest.mark.parametrize("subject", FULL)
@pytest.mark.parametrize("lengths", [TREES, ((0, 63),), ((70, 16), (71, 16))], ids=["trees", "widest", "alike"])
def test_a_token_of_a_tree_sees_its_ancestors_and_the_prefix(
    subject: Subject, lengths: tuple[tuple[int, int], ...]
) -> None:
    subject.check(subject.case(lengths, trees=True, adjacent=False), has_trees=True)


@pytest.mark.parametrize("subject", WITH_TREES)
@pytest.mark.parametrize("window", [None, 12])
def test_a_node_sees_its_ancestors_that_were_computed_before(subject: Subject, window: int | None) -> None:
    """The last nodes of each row alone are computed; the others are in the pool."""
    num_nodes, num_new, num_rows = 9, 3, 3
    case = subject.case(((40, 9), (70, 9), (5, 9), (0, 1)), trees=True, window=window, group=4, adjacent=False)
    inputs, each_row = case.inputs, torch.arange(num_rows)[:, None]
    tokens = (each_row * num_nodes + torch.arange(num_nodes - num_new, num_nodes)).flatten().to(subject.device)
    of_tokens = ("input_ids", "positions", "slots", "token_rows", "tree_mask")
    of_rows = ("kv_lens", "page_table", "kv_bounds")
    last = dataclasses.replace(
        inputs,
        **{name: getattr(inputs, name)[tokens] for name in of_tokens},
        **{name: getattr(inputs, name)[:num_rows] for name in of_rows},
        qo_indptr=torch.arange(num_rows + 1, dtype=torch.int32, device=subject.device) * num_new,
        q_lens=np.full(num_rows, num_new, dtype=np.int32),
        num_decode=num_rows,
        num_nodes_before=num_nodes - num_new,
    )
    attention = subject.open(case.shape, has_trees=True)
    attention.plan(last)
    out = attention.forward(case.q[tokens], case.k[tokens], case.v[tokens], case.kv, 0)
    tolerance = TOLERANCE[subject.dtype]
    expected = case.oracle()[0][tokens.cpu()]
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("subject", FULL)
@pytest.mark.parametrize("lengths", [RAGGED, CHAINS, ((0, 1), (0, 1))], ids=["ragged", "chains", "nothing"])
def test_nobody_sees_a_hidden_first_slot_even_if_it_holds_nan(
    subject: Subject, lengths: tuple[tuple[int, int], ...]
) -> None:
    """The only token of a row sees nothing then, and gets zeros."""
    case = subject.case(lengths, hides_first=True)
    out = subject.check(case)
    alone = [token for token, (row, place) in enumerate(_tokens(lengths)) if place == 0]
    assert alone and not out[alone].any()


@pytest.mark.parametrize("subject", [*FULL, *OTHER_TYPES])
def test_everything_at_once(subject: Subject) -> None:
    """A token's window is counted from its place in the text, which is how deep it is in the tree."""
    options = {"trees": True, "sinks": True, "hides_first": True, "group": 4}
    for window in (12, 64):
        subject.check(subject.case(TREES, window=window, **options), has_trees=True)
        subject.check(subject.case(TREES, window=window, **options), layer=1, has_trees=True)


PACKED: dict[str, dict[str, Any]] = {  # odd numbers of heads, whose words of scales are half empty, too
    "windows": {"window": 12, "sinks": True, "group": 2, "num_kv_heads": 3, "adjacent": False},
    "adjacent": {"num_kv_heads": 1, "group": 8, "head_dim": 128},
    "many queries": {"num_kv_heads": 2, "group": 8, "head_dim": 64},  # 5 tokens of 8 heads are a product of 64 queries
    "trees": {"trees": True, "hides_first": True, "window": 40, "num_kv_heads": 4},
}


PACKED_LENGTHS = ((16, 1), (100, 1), (63, 2), (0, 5), (0, 33), (150, 20))


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        pytest.param(*each.values, name, marks=each.marks, id=f"{each.id}-{name}")
        for each in (*WITH_SINKS, *OTHER_TYPES)
        for name in PACKED
        if name != "trees" or each in (*FULL, *OTHER_TYPES)
    ],
)
def test_keys_and_values_in_8_bits_are_what_they_stand_for(subject: Subject, name: str) -> None:
    """Of heads and tokens of all magnitudes; what is unowned is NaN with infinite scales."""
    options = PACKED[name]
    case = subject.case(TREES if name == "trees" else PACKED_LENGTHS, packs=True, **options)
    for layer in (0, 1) if name == "windows" else (0,):
        got, expected = case.run(subject.open(case.shape), layer).cpu().double(), case.oracle(layer)[0]
        bound = min(1e-2, TOLERANCE[subject.dtype])
        error = (got - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1).clamp(min=1e-3)
        assert error.max() <= bound, (layer, error)


@pytest.mark.parametrize("subject", NARROW)
def test_weights_of_large_values_in_8_bits_fit_float16(subject: Subject) -> None:
    """Scales of values are factors of the weights: without room for them these would be infinite, and outputs NaN."""
    case = subject.case(((63, 1), (0, 5)), packs=True, num_kv_heads=2)
    assert case.kv.scales is not None
    case.kv.scales.view(torch.uint8)[:, 1::2] += 9
    case.v *= 2.0**9
    case.values = [values * 2.0**9 for values in case.values]
    got, expected = case.run(subject.open(case.shape)).cpu().double(), case.oracle()[0]
    assert expected.abs().max() > 1000
    assert (got - expected).norm() / expected.norm() < 1e-2


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # by numpy, in Triton's interpreter
@pytest.mark.parametrize("subject", PLAIN)
def test_a_row_sent_to_the_sink_leaves_its_neighbours_alone(subject: Subject) -> None:
    """Its table is all page 0, for longer than page 0 is, and page 0 holds NaN."""
    case = subject.case(RAGGED)
    attention = subject.open(case.shape)
    before = case.run(attention)
    victim = 4
    case.inputs.page_table[victim] = 0
    after = case.run(attention)
    others = case.inputs.token_rows != victim
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


@pytest.mark.parametrize("subject", PLAIN)
def test_bounds_larger_than_the_lengths_change_nothing(subject: Subject) -> None:
    """A wider table, and longer bounds where the backend does not need them exact, give the same output."""
    case = subject.case(RAGGED, adjacent=False)
    attention = subject.open(case.shape)
    expected = case.run(attention)
    wide = torch.nn.functional.pad(case.inputs.page_table, (0, 3), value=1)
    slack = np.where(np.arange(len(RAGGED)) < case.inputs.num_decode, 0 if attention.needs_host_lengths else 9, 0)
    case.inputs = dataclasses.replace(
        case.inputs,
        page_table=wide,
        kv_bounds=case.inputs.kv_bounds + slack.astype(np.int32),
        max_kv_len=16 * wide.shape[1],
    )
    tolerance = TOLERANCE[subject.dtype]
    torch.testing.assert_close(case.run(attention), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("subject", [*PLAIN, *OTHER_TYPES[1:]])
def test_each_plan_stands_until_the_next(subject: Subject) -> None:
    """Steps follow each other without anybody waiting for the device."""
    cases = [subject.case(lengths, group=4) for lengths in (RAGGED, ORDERED, CHAINS, ((300, 1), (40, 1)))]
    attention = subject.open(cases[0].shape)
    outs = [case.run(attention) for _ in range(6 if subject.device == "cuda" else 1) for case in cases]
    for index, case in enumerate(cases):
        tolerance = TOLERANCE[subject.dtype]
        expected = case.oracle()[0]
        for out in outs[index :: len(cases)]:
            torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("subject", PLAIN)
@pytest.mark.parametrize("lengths", [RAGGED, CHAINS, ((0, 5),)], ids=["ragged", "chains", "prompt"])
def test_the_output_is_written_where_the_caller_says(subject: Subject, lengths: tuple[tuple[int, int], ...]) -> None:
    case = subject.case(lengths)
    attention = subject.open(case.shape)
    expected = case.run(attention)
    room = torch.full_like(case.q, torch.nan).contiguous()
    with torch.inference_mode():
        attention.plan(case.inputs)
        assert attention.forward(case.q, case.k, case.v, case.kv, 0, room) is room
    assert torch.equal(room, expected)


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"hides_first": True}], ids=["plain", "sinks", "hidden"])
def test_the_reference_gives_the_log_of_the_sum_of_exponentials(options: dict[str, bool]) -> None:
    case = Case(RAGGED, dtype=torch.float64, **options)
    attention = ReferenceAttention(case.shape)
    case.run(attention)
    out, lse = attention.attend(case.q, case.kv, 0)
    torch.testing.assert_close((out, lse), case.oracle(), atol=1e-12, rtol=0)


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    """One part may have seen nothing, or neither."""
    case = Case(((40, 1),), dtype=torch.float64)
    whole, whole_lse = case.oracle()
    for cut in (0, 1, 17, 41):
        parts = []
        for seen in (slice(0, cut), slice(cut, 41)):
            part = Case(((40, 1),), dtype=torch.float64)
            part.keys, part.values, part.masks = [case.keys[0]], [case.values[0]], case.masks
            visible = torch.zeros(41, dtype=torch.bool)
            visible[seen] = True
            part.visible = lambda row, token, layer, visible=visible: visible  # type: ignore[method-assign]
            parts.append(part.oracle())
        (out_a, lse_a), (out_b, lse_b) = parts
        torch.testing.assert_close(merge(out_a, lse_a, out_b, lse_b), (whole, whole_lse), atol=1e-12, rtol=0)
    nothing = torch.zeros_like(whole), torch.full_like(whole_lse, -torch.inf)
    assert all(torch.equal(ours, its) for ours, its in zip(merge(*nothing, *nothing), nothing, strict=True))


@pytest.mark.parametrize("subject", [_on_gpu(name, "bfloat16") for name in ("triton", "flashinfer", "paired")])
@pytest.mark.parametrize("window", [None, 33])
def test_decode_rows_are_replayed_with_other_lengths_and_pages(subject: Subject, window: int | None) -> None:
    """A graph of four rows: each replay reads what its tensors hold then; the last row pads.

    Layers with a window have pages of their own, and the others' table is of the padding page.
    """
    steps = [
        ((5, 1), (300, 1), (31, 1), (0, 1)),
        ((6, 1), (301, 1), (0, 1), (0, 1)),
        ((511, 1), (3, 1), (15, 1), (0, 1)),
    ]
    options = {"group": 4, "adjacent": False, "window": window, "frees_windows": window is not None}
    cases = [subject.case(lengths, **options) for lengths in steps]
    width = max(case.inputs.page_table.shape[1] for case in cases)
    num_slots = max(len(case.kv.k) for case in cases)
    kv = LayerKV(
        *(case_pool.new_zeros((num_slots, *case_pool.shape[1:])) for case_pool in (cases[0].kv.k, cases[0].kv.v))
    )
    attention = subject.open(cases[0].shape).captured(4, 1)
    assert attention is not None
    table = torch.zeros((4, width), dtype=torch.int32, device="cuda")
    inputs = dataclasses.replace(
        cases[0].inputs,
        page_table=table if window is None else torch.zeros_like(table),
        window_table=None if window is None else table,
        kv_lens=torch.ones_like(cases[0].inputs.kv_lens),
        positions=torch.zeros_like(cases[0].inputs.positions),
        kv_bounds=torch.ones(4, dtype=torch.int32).numpy(),
        max_kv_len=width * 16,
    )
    qkv = [torch.empty_like(x) for x in (cases[0].q, cases[0].k, cases[0].v)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.stream(stream):
        attention.plan(inputs)
        attention.forward(*qkv, kv, 0)
        with torch.cuda.graph(graph, stream=stream):
            out = attention.forward(*qkv, kv, 0)
        for case in (*cases, *cases):
            for ours, its in zip((*qkv, kv.k[: len(case.kv.k)], kv.v[: len(case.kv.v)]), _tensors(case), strict=True):
                ours.copy_(its)
            its = case.inputs_of(0)
            own = its.page_table if its.window_table is None else its.window_table
            table.fill_(NO_PAGE)[:, : own.shape[1]] = own
            inputs.kv_lens.copy_(case.inputs.kv_lens)
            inputs.positions.copy_(case.inputs.positions)
            if attention.needs_host_lengths:
                attention.plan(dataclasses.replace(inputs, kv_bounds=case.inputs.kv_bounds))
            graph.replay()
            tolerance = TOLERANCE[subject.dtype]
            torch.testing.assert_close(out.cpu().double(), case.oracle()[0], atol=tolerance, rtol=tolerance)


def _tensors(case: Case) -> tuple[torch.Tensor, ...]:
    return case.q, case.k, case.v, case.kv.k, case.kv.v


def _tokens(lengths: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    return [(row, place) for row, (cached, new) in enumerate(lengths) for place in range(cached, cached + new)]
