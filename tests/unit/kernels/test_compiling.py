"""Attention kernels are compiled for Hopper, without a device: what the interpreter runs, a compiler may refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hiserve.attention.triton import TritonAttention
from hiserve.kernels.latent_decode import LatentRows, decode
from hiserve.models.builtin_shapes import SHAPES
from tests.helpers.attention import Case
from tests.helpers.compiled import SHARED_BYTES, Compiled

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # told by Triton on the CPU

DECODES, EXTENDS = ((700, 1), (3, 1)), ((0, 200), (70, 300))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    return Compiled(monkeypatch)


def names_of(compiled: Compiled) -> set[str]:
    for name, sizes in compiled.shared_bytes.items():
        assert max(sizes) <= SHARED_BYTES, name
    return set(compiled.shared_bytes)


def attend_latents(num_heads: int, rank: int, rope_dim: int, *, num_parts: int, dtype: torch.dtype) -> None:
    rows = LatentRows(torch.tensor([0, 2, 4]).int(), torch.tensor([9, 2]), torch.zeros(2, 4, dtype=torch.int32))
    decode(
        torch.zeros(4, num_heads, rank + rope_dim, dtype=dtype),
        torch.zeros(64, 1, rank + rope_dim, dtype=dtype),
        rank,
        rows,
        max_q_len=2,
        num_parts=num_parts,
        page_size=16,
        scale=0.1,
        hides_first=False,
        out=torch.zeros(4, num_heads, rank, dtype=dtype),
    )


@pytest.mark.parametrize("name", ["glm-4.7-flash", "v3-like"])
def test_absorbed_queries_of_large_models(compiled: Compiled, name: str) -> None:
    shape: dict[str, Any] = SHAPES[name]
    heads, rank, rope_dim = (shape[each] for each in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"))
    attend_latents(heads, rank, rope_dim, num_parts=3, dtype=torch.bfloat16)
    assert names_of(compiled) == {"_attend", "_join"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_absorbed_queries_of_a_small_model(compiled: Compiled, dtype: torch.dtype) -> None:
    attend_latents(4, 32, 16, num_parts=1, dtype=dtype)
    assert names_of(compiled) == {"_attend"}


@pytest.mark.parametrize(
    ("lengths", "names"),
    [(DECODES, {"_schedule", "_attend"}), (EXTENDS, {"_extend"})],
    ids=["decode", "extend"],
)
def test_heads_in_groups_with_sinks_and_a_window(
    compiled: Compiled, lengths: tuple[tuple[int, int], ...], names: set[str]
) -> None:
    case = Case(lengths, group=8, head_dim=64, window=128, sinks=True, dtype=torch.bfloat16)
    case.run(TritonAttention(case.shape))
    assert names_of(compiled) == names
