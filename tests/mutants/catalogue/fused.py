"""Guards of the layers' kernels."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FUSED = "hiserve/kernels/fused.py"
LINEAR = "hiserve/kernels/linear.py"
LAUNCH = "hiserve/kernels/launch.py"
DRAW = "hiserve/kernels/draw.py"
EXPERTS = "hiserve/kernels/experts.py"
REFERENCE = "hiserve/kernels/reference.py"
DECODER = "hiserve/models/decoder.py"
OF_FUSED = "tests/unit/kernels/test_fused.py::test_fused_kernels_compute_what_their_twins_do"
OF_LINEAR = "tests/unit/kernels/test_linear.py::test_one_row_is_projected_as_rows_are"
OF_TILES = "tests/unit/kernels/test_linear.py::test_few_rows_are_projected_as_rows_are"
OF_WAITS = "tests/unit/kernels/test_launch.py::test_a_kernel_that_begins_early_awaits_the_one_before_it_first"
OF_DEVICES = "tests/unit/kernels/test_launch.py::test_kernels_begin_early_where_the_device_can_do_it"
OF_EXPERTS = "tests/unit/kernels/test_experts.py::test_kernels_of_experts_compute_what_their_twins_do"
OF_REFERENCE = "tests/unit/kernels/test_reference.py::"
OF_LOGITS = "tests/e2e/test_transformers_oracle.py::test_float32_logits_of_every_position_agree"

MUTANTS = [
    Mutant(
        name="a residual is not written back",
        file=FUSED,
        old="        tl.store(x + row, narrow, mask=mask)\n",
        new="",
        test=OF_FUSED,
    ),
    Mutant(
        name="the padding of a norm counts",
        file=FUSED,
        old="tl.sum(value * value, 0) / SIZE",
        new="tl.sum(value * value, 0) / BLOCK",
        test=OF_FUSED,
    ),
    Mutant(
        name="heads past the last are stored",
        file=FUSED,
        old="(head < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)) & (pair < HALF)",
        new="(head < NUM_HEADS) & (pair < HALF)",
        test=OF_FUSED,
    ),
    Mutant(
        name="slots lie as close as their elements",
        file=FUSED,
        old="        kv.k.stride(0),\n",
        new="        num_kv_heads * head_dim,\n",
        test=OF_FUSED,
    ),
    Mutant(
        name="keys come back as they were",
        file=FUSED,
        old="            tl.store(source, turned, mask=mask)\n",
        new="",
        test=OF_FUSED,
    ),
    Mutant(
        name="a row's elements past its end count",
        file=LINEAR,
        old="mask=element < depth - first, other=0.0).to(tl.float32)",
        new="mask=element < DEPTH, other=0.0).to(tl.float32)",
        test=OF_LINEAR,
    ),
    Mutant(
        name="a row's projection is without its bias",
        file=LINEAR,
        old="other=0.0).to(tl.float32)\n    tl.store(out + column,",
        new="other=0.0).to(tl.float32) * 0\n    tl.store(out + column,",
        test=OF_LINEAR,
    ),
    Mutant(
        name="rows beyond the first are projected as if there were one",
        file=LINEAR,
        old="num_rows == 1 and not",
        new="not",
        test=OF_LINEAR,
    ),
    Mutant(
        name="a row's next block is not the one taken ahead",
        file=LINEAR,
        old="tl.load(rows + first + DEPTH,",
        new="tl.load(rows + first,",
        test=OF_LINEAR,
    ),
    Mutant(
        name="a large weight has one row's own kernel",
        file=LINEAR,
        old=" and weight.numel() > _MAX_ROW_ELEMENTS)",
        new=" and False)",
        test=OF_TILES,
    ),
    Mutant(
        name="tiles are for any number of rows",
        file=LINEAR,
        old="1 <= num_rows <= _TILE_ROWS[-1]:",
        new="1 <= num_rows:",
        test=OF_TILES,
    ),
    Mutant(
        name="tiles are for any depth",
        file=LINEAR,
        old=" and depth % _TILE_DEPTH == 0",
        new="",
        test=OF_TILES,
    ),
    Mutant(
        name="parts of a tile end before the blocks that are left over",
        file=LINEAR,
        old="range(part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts)",
        new="range(part * (num_blocks // num_parts), (part + 1) * (num_blocks // num_parts))",
        test=OF_TILES,
    ),
    Mutant(
        name="each part of a tile adds the bias",
        file=LINEAR,
        old="        bias if num_parts == 1 else None,\n",
        new="        bias,\n",
        test=OF_TILES,
    ),
    Mutant(
        name="what pads a tile's rows is stored",
        file=LINEAR,
        old="tl.store(target, total.T.to(out.dtype.element_ty), mask=is_row[:, None])",
        new="tl.store(target, total.T.to(out.dtype.element_ty), mask=is_row[:, None] | (part == 0))",
        test=OF_TILES,
    ),
    Mutant(
        name="a sum is without its last part",
        file=LINEAR,
        old="for part in range(num_parts):",
        new="for part in range(num_parts - 1):",
        test=OF_TILES,
    ),
    Mutant(
        name="tiles behind an attention begin early",
        file=LINEAR,
        old="is_early=not is_behind_attention",
        new="is_early=True",
        test=OF_TILES,
    ),
    Mutant(
        name="no projection is told that it is behind an attention",
        file=DECODER,
        old='ours + "out", is_behind_attention=True',
        new='ours + "out"',
        test="tests/unit/models/test_decoder.py::test_the_projection_behind_an_attention_is_told_of_it",
    ),
    Mutant(
        name="launches that are not wanted early are",
        file=LAUNCH,
        old="is_early = is_wanted and ",
        new="is_early = ",
        test=OF_DEVICES,
    ),
    Mutant(
        name="a norm does not await what it adds",
        file=FUSED,
        old="    weights = tl.load(weight + column, mask=mask, other=0.0).to(wide)\n    await_previous(IS_EARLY)\n",
        new="    weights = tl.load(weight + column, mask=mask, other=0.0).to(wide)\n",
        test=OF_WAITS,
    ),
    Mutant(
        name="a row is read before it is there",
        file=LINEAR,
        old="    await_previous(IS_EARLY)\n    totals = tl.zeros([COLUMNS, DEPTH], tl.float32)\n",
        new="    totals = tl.load(x + tl.zeros([COLUMNS, DEPTH], tl.int32)) * 0.0\n    await_previous(IS_EARLY)\n",
        test=OF_WAITS,
    ),
    Mutant(
        name="only some programs of a draw wait",
        file=DRAW,
        old="    mask = part < num_parts\n    start_next(IS_EARLY)\n    await_previous(IS_EARLY)\n",
        new="    mask = part < num_parts\n    start_next(IS_EARLY)\n    if row > 0:\n        await_previous(IS_EARLY)\n",
        test=OF_WAITS,
    ),
    Mutant(
        name="devices before Hopper launch early",
        file=LAUNCH,
        old="_FIRST_CAPABILITY = (9, 0)",
        new="_FIRST_CAPABILITY = (8, 0)",
        test=OF_DEVICES,
    ),
    Mutant(
        name="a router's NaN leads anywhere",
        file=EXPERTS,
        old="    left = tl.where(left == left, left, 0.0)  # NaN compares with nothing\n",
        new="",
        test=OF_EXPERTS,
    ),
    Mutant(
        name="experts are grouped without those before them",
        file=EXPERTS,
        old="end += tl.sum((theirs < expert).to(tl.int32), 0)",
        new="end += tl.sum((theirs < expert).to(tl.int32), 0) * 0",
        test=OF_EXPERTS,
    ),
    Mutant(
        name="there are blocks for full ones alone",
        file=EXPERTS,
        old="num_pairs // tile.rows + num_experts)",
        new="num_pairs // tile.rows + 1)",
        test=OF_EXPERTS,
    ),
    Mutant(
        name="the residual stream is normed without what is added",
        file=REFERENCE,
        old="rms_norm(residual.add_(delta), weight, eps)",
        new="rms_norm(residual.add(delta), weight, eps)",
        test=OF_REFERENCE + "test_what_is_added_to_the_residual_stays_there_and_is_normed",
    ),
    Mutant(
        name="the last layer's output is left out",
        file=DECODER,
        old="self._norm.add(self._layers[-1].close(mixed, residual), residual)",
        new="self._norm(residual)",
        test=OF_LOGITS,
    ),
]
