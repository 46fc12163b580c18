"""Every attention backend against one plain oracle: head by head, key by key, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.forward import ForwardInputs, LayerKV
from tests.helpers.models import make_attention

BACKENDS = ("reference", "cpu")
# (tokens cached, tokens new): decode, whole prompts, chunks behind a prefix, page edges of 16 and 64.
RAGGED = ((0, 5), (16, 1), (15, 1), (0, 33), (40, 7), (63, 2), (100, 1), (0, 1))
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Case:
    """A ragged batch whose pool holds NaN in every slot that no row owns."""

    def __init__(
        self,
        lengths: tuple[tuple[int, int], ...],
        *,
        page_size: int = 16,
        group: int = 2,
        head_dim: int = 64,
        adjacent: bool = True,
        dtype: torch.dtype = torch.float32,
        num_kv_heads: int = 2,
    ) -> None:
        generator = torch.Generator().manual_seed(page_size * 1000 + group * 100 + head_dim + adjacent)
        ends = [cached + new for cached, new in lengths]
        counts = [math.ceil(end / page_size) for end in ends]
        pages = torch.arange(1, sum(counts) + 1)
        if not adjacent:
            pages = pages[torch.randperm(len(pages), generator=generator)]
        self.tables = list(pages.split(counts))
        table = torch.zeros((len(ends), max(counts)), dtype=torch.int32)
        num_slots = (sum(counts) + 1) * page_size
        shape = (num_slots, num_kv_heads, head_dim)
        self.kv = LayerKV(k=torch.full(shape, torch.nan, dtype=dtype), v=torch.full(shape, torch.nan, dtype=dtype))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        new_k, new_v, slots, positions, rows = [], [], [], [], []
        for row, ((cached, new), own) in enumerate(zip(lengths, self.tables, strict=True)):
            table[row, : len(own)] = own
            place = torch.arange(cached + new)
            slot = own[place // page_size] * page_size + place % page_size
            k, v = (torch.randn((cached + new, *shape[1:]), generator=generator, dtype=dtype) for _ in range(2))
            self.kv.k[slot], self.kv.v[slot] = k, v
            self.keys.append(k)
            self.values.append(v)
            new_k.append(k[cached:])
            new_v.append(v[cached:])
            slots.append(slot[cached:])
            positions.append(place[cached:])
            rows.append(torch.full((new,), row))
        self.k, self.v = torch.cat(new_k), torch.cat(new_v)
        self.q = torch.randn((len(self.k), num_kv_heads * group, head_dim), generator=generator, dtype=dtype)
        news = torch.tensor([new for _, new in lengths])
        self.inputs = ForwardInputs(
            input_ids=torch.zeros(len(self.k), dtype=torch.int32),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            token_rows=torch.cat(rows),
            qo_indptr=torch.cat((torch.zeros(1, dtype=torch.int64), news.cumsum(0))).to(torch.int32),
            kv_lens=torch.tensor(ends),
            page_table=table,
            logits_rows=torch.zeros(0, dtype=torch.int64),
            max_q_len=int(news.max()),
            max_kv_len=max(ends),
        )

    def run(self, backend: Attention) -> Tensor:
        with torch.inference_mode():
            backend.plan(self.inputs)
            return backend.forward(self.q, self.k, self.v, self.kv, 0)

    def oracle(self) -> Tensor:
        """One softmax per token and head."""
        out = torch.zeros_like(self.q, dtype=torch.float64)
        group = self.q.shape[1] // self.k.shape[1]
        for token, (row, position) in enumerate(
            zip(self.inputs.token_rows.tolist(), self.inputs.positions.tolist(), strict=True)
        ):
            keys, values = self.keys[row][: position + 1].double(), self.values[row][: position + 1].double()
            for head in range(self.q.shape[1]):
                scores = keys[:, head // group] @ self.q[token, head].double() / math.sqrt(self.q.shape[2])
                out[token, head] = torch.softmax(scores, 0) @ values[:, head // group]
        return out


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
    case.inputs = ForwardInputs(**loose | {"page_table": wide, "max_kv_len": 16 * wide.shape[1], "max_q_len": 40})
    torch.testing.assert_close(case.run(make_attention(backend, 16, torch.float32)), expected, atol=1e-6, rtol=0)
