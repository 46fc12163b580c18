"""The kernels of index keys and queries against their twin, run by Triton's interpreter."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

SOURCE = """
import torch
from torch.testing import assert_close
from hiserve.kernels import index_rows, index_store, reference

torch.set_num_threads(1)
for dtype, width, rope_dim, tolerance in (
    (torch.float32, 24, 8, 1e-5), (torch.float16, 16, 16, 4e-3), (torch.float64, 13, 4, 1e-12)
):
    torch.manual_seed(width)
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = reference.rotations(torch.tensor([0, 5, 900]), torch.rand(rope_dim // 2), 1.0, wide)
    into = torch.randn(3, width + 7).to(dtype)  # beside other projections
    weight, bias = torch.rand(width).to(dtype) + 0.5, torch.randn(width).to(dtype)
    slots, pools = torch.tensor([4, 0, 2]), [torch.full((6, width), torch.nan, dtype=dtype) for _ in range(2)]
    for module, pool in zip((index_rows, index_store), pools):
        module.store_index_keys(into[:, 3 : 3 + width], weight, bias, 1e-6, cos, sin, pool, slots)
    assert pools[1][[1, 3, 5]].isnan().all()
    assert_close(pools[1][slots], pools[0][slots], atol=tolerance, rtol=tolerance)
    x = torch.randn(3, 19, width).to(dtype)
    expected = index_rows.rotate_first(x.clone(), cos, sin)
    assert_close(index_store.rotate_first(x, cos, sin), expected, atol=tolerance, rtol=tolerance)
"""


PACKED = """
import torch
from torch.testing import assert_close
from hiserve.core.row_shapes import PackedPages, packed_key
from hiserve.kernels import index_rows, index_store, reference
from hiserve.kernels.row_codecs import load_packed, store_packed

torch.set_num_threads(1)
for dtype, width, rope_dim in ((torch.float32, 16, 8), (torch.float16, 16, 16)):
    torch.manual_seed(width)
    cos, sin = reference.rotations(torch.tensor([0, 5, 900]), torch.rand(rope_dim // 2), 1.0, torch.float32)
    key, weight, bias = torch.randn(3, width).to(dtype), torch.rand(width).to(dtype) * 40, torch.randn(width).to(dtype)
    pages, slots = PackedPages(packed_key(width), 2), torch.tensor([4, 0, 3])
    plain = torch.zeros(6, width, dtype=dtype)
    index_store.store_index_keys(key, weight, bias, 1e-6, cos, sin, plain, slots)
    pools = [torch.full((6, width + 4), 77, dtype=torch.uint8) for _ in range(3)]
    store_packed(pools[0], slots, plain[slots], pages)
    for module, pool in zip((index_store, index_rows), pools[1:]):
        module.store_index_keys(key, weight, bias, 1e-6, cos, sin, pool, slots, pages)
    assert torch.equal(pools[0], pools[1]), "others bytes than those of what is stored where keys are not packed"
    loaded = [load_packed(pool, slots, pages) for pool in pools[1:]]
    assert_close(*loaded, atol=0.2, rtol=0.13)
    assert_close(loaded[0], plain[slots].float(), atol=0.2, rtol=0.13)
"""


def test_packed_keys_have_the_bytes_of_the_codec() -> None:
    run_interpreted(PACKED)


def test_keys_and_queries_of_an_index_are_those_of_the_twin() -> None:
    run_interpreted(SOURCE)
