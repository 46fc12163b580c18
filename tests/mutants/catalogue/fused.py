"""Guards of the layers' kernels."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FUSED = "hiserve/kernels/fused.py"
LINEAR = "hiserve/kernels/linear.py"
EXPERTS = "hiserve/kernels/experts.py"
REFERENCE = "hiserve/kernels/reference.py"
DECODER = "hiserve/models/decoder.py"
OF_FUSED = "tests/unit/kernels/test_fused.py::test_fused_kernels_compute_what_their_twins_do"
OF_LINEAR = "tests/unit/kernels/test_linear.py::test_one_row_is_projected_as_rows_are"
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
        old="is_element = element < depth - first",
        new="is_element = element < depth",
        test=OF_LINEAR,
    ),
    Mutant(
        name="a row's projection is without its bias",
        file=LINEAR,
        old="    if bias is not None:\n",
        new="    if bias is not None and DEPTH == 0:\n",
        test=OF_LINEAR,
    ),
    Mutant(
        name="rows beyond the first are projected as if there were one",
        file=LINEAR,
        old="if x.shape[0] != 1 or",
        new="if x.shape[0] == 0 or",
        test=OF_LINEAR,
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
        old="return residual.add_(delta)",
        new="return residual",
        test=OF_LOGITS,
    ),
]
