"""Attention to chosen rows, and the choice, in Triton; ``kernels.chosen_reference`` is the twin."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.core.row_shapes import PackedPages
from hiserve.core.step_memory import MAX_PROGRAMS, PROGRAM_QUERIES
from hiserve.kernels.chosen_prompts import attend_expanded as attend_expanded
from hiserve.kernels.chosen_prompts import can_attend_expanded as can_attend_expanded
from hiserve.kernels.index_topk import choose_bits as choose_bits
from hiserve.kernels.index_topk import choose_rows as choose_rows
from hiserve.kernels.latent_decode import LatentRows, choose_num_parts, decode
from hiserve.kernels.launch import num_processors

_MAX_TOKENS = 65_535  # of a launch: programs along its second dimension


def attend_chosen(
    q: Tensor,
    pool: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    rank: int,
    packed: PackedPages | None = None,
) -> Tensor:
    """Like ``chosen_reference.attend_chosen``: each token is a row of its own, whose pages have one token."""
    num_heads, out = q.shape[1], q.new_empty((*q.shape[:2], rank))
    for first in range(0, q.shape[0], _MAX_TOKENS):
        mine = slice(first, first + _MAX_TOKENS)
        queries = q[mine]
        starts = torch.arange(queries.shape[0] + 1, dtype=torch.int32, device=q.device)
        num_parts = choose_num_parts(
            queries.shape[0],
            num_heads,
            slots.shape[1],
            q.dtype,
            num_sms=num_processors(q.device),
            room=MAX_PROGRAMS * PROGRAM_QUERIES,
        )
        decode(
            queries,
            pool[:, None],
            rank,
            LatentRows(starts, counts[mine], slots[mine]),
            max_q_len=1,
            num_parts=num_parts,
            page_size=1,
            scale=scale,
            hides_first=False,
            out=out[mine],
            packed=packed,
        )
    return out
