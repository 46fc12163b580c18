"""Every attention backend against one plain oracle."""

from __future__ import annotations

import pytest
import torch

from hiserve.core.forward import ForwardInputs
from tests.helpers.attention import RAGGED, Case
from tests.helpers.models import make_attention

BACKENDS = ("reference", "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("adjacent", [True, False], ids=["adjacent", "scattered"])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 80), (4, 128), (8, 64)])
def test_equals_the_oracle_on_ragged_batches(
    backend: str, page_size: int, adjacent: bool, group: int, head_dim: int
) -> None:
    case = Case(RAGGED, page_size=page_size, group=group, head_dim=head_dim, adjacent=adjacent)
    out = case.run(make_attention(backend, page_size, torch.float32))
    assert out.shape == case.q.shape
    torch.testing.assert_close(out.double(), case.oracle(), atol=TOLERANCE[torch.float32], rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("adjacent", [True, False], ids=["adjacent", "scattered"])
def test_float64_stays_float64(backend: str, adjacent: bool) -> None:
    case = Case(RAGGED, adjacent=adjacent, dtype=torch.float64)
    out = case.run(make_attention(backend, 16, torch.float64))
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, case.oracle(), atol=TOLERANCE[torch.float64], rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_types_are_close(backend: str, dtype: torch.dtype) -> None:
    case = Case(RAGGED, dtype=dtype)
    out = case.run(make_attention(backend, 16, dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), case.oracle(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [((0, 1),), ((31, 1),), ((0, 48),), ((16, 32),), ((17, 31),)])
def test_one_row_alone(backend: str, lengths: tuple[tuple[int, int], ...]) -> None:
    case = Case(lengths)
    torch.testing.assert_close(
        case.run(make_attention(backend, 16, torch.float32)).double(), case.oracle(), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_sent_to_the_sink_leaves_its_neighbours_alone(backend: str) -> None:
    """Its table is all page 0, for longer than page 0 is, and page 0 holds NaN."""
    case = Case(RAGGED)
    attention = make_attention(backend, 16, torch.float32)
    before = case.run(attention)
    victim = 4
    case.inputs.page_table[victim] = 0
    after = case.run(attention)
    others = case.inputs.token_rows != victim
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_larger_than_the_lengths_change_nothing(backend: str) -> None:
    """The host knows upper bounds only: a wider table and a longer bound give the same output."""
    case = Case(RAGGED, adjacent=False)
    expected = case.run(make_attention(backend, 16, torch.float32))
    wide = torch.cat((case.inputs.page_table, torch.full((len(RAGGED), 3), 1, dtype=torch.int32)), 1)
    loose = {name: getattr(case.inputs, name) for name in ForwardInputs.__slots__}
    case.inputs = ForwardInputs(**loose | {"page_table": wide, "max_kv_len": 16 * wide.shape[1]})
    torch.testing.assert_close(case.run(make_attention(backend, 16, torch.float32)), expected, atol=1e-6, rtol=0)
