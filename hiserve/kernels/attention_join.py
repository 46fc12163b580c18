"""Parts of rows over whose keys several programs attend: the last program to finish joins them."""

from __future__ import annotations

import math

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_GROUP = tl.constexpr(16)
"""Parts that one program joins: of a row of more each group of so many is joined first, by programs side by side."""
_NUM_LOADED = tl.constexpr(8192)
"""Elements of parts that are asked for at once: 64 for each thread of four warps."""
_MAX_LOADED = tl.constexpr(16)  # parts


@triton.jit
def queries_of(number, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Token and head of this program's queries of the given numbers."""
    num_kv_heads: tl.constexpr = SHAPE.num_heads // SHAPE.group
    query = tl.program_id(0) // num_kv_heads * SHAPE.num_queries + number
    return query // SHAPE.group, tl.program_id(0) % num_kv_heads * SHAPE.group + query % SHAPE.group


@triton.jit
def close(mixed, top, total, sink):  # type: ignore[no-untyped-def]
    """Divides by the sum of weights, ``exp2(score - top)``, and takes its log; zeros and -inf without keys."""
    if sink is not None:
        sink = sink * _LOG2_E
        higher = tl.maximum(top, sink)
        rescale = tl.exp2(top - higher)
        mixed = mixed * rescale[:, None]
        total = total * rescale + tl.exp2(sink - higher)
        top = higher
    divisor = tl.where(total > 0, total, 1.0)
    return mixed / divisor[:, None], (top + tl.log2(divisor)) * _LN_2


@triton.jit
def finish(mixed, top, total, token, head, start, q_len, results, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes results of queries whose keys are all in this part."""
    is_query, dim = token < q_len, tl.arange(0, SHAPE.block_dim)
    sink = None
    if results.sinks is not None:
        sink = tl.load(results.sinks + head, is_query, other=0.0)
    mixed, log_total = close(mixed, top, total, sink)
    place = (start + token) * SHAPE.num_heads + head
    is_element = is_query[:, None] & (dim < SHAPE.head_dim)[None, :]
    tl.store(results.out + place[:, None] * SHAPE.head_dim + dim, mixed, is_element)
    if results.lse is not None:
        tl.store(results.lse + place, log_total, is_query)


@triton.jit
def store_part(part, mixed, log_total, token, head, max_q_len, q_len, results, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a part, all of whose threads have then stored before one of them raises a count, which publishes the stores."""
    is_query, dim = token < q_len, tl.arange(0, SHAPE.block_dim)
    place = (part * max_q_len + token) * SHAPE.num_heads + head
    is_element = is_query[:, None] & (dim < SHAPE.head_dim)[None, :]
    tl.store(results.part_out + place[:, None] * SHAPE.head_dim + dim, mixed, is_element)
    tl.store(results.part_lse + place, log_total, is_query)
    tl.debug_barrier()


@triton.jit
def _is_last(rows, part, num_parts):  # type: ignore[no-untyped-def]
    """Raises the count that lies at a part; whether it counts all of ``num_parts`` now. It is 0 then, for the next layer."""
    count = rows.counts + part * tl.num_programs(0) + tl.program_id(0)
    is_last = tl.atomic_add(count, 1, sem="acq_rel") == num_parts - 1
    if is_last:
        tl.store(count, 0)
    return is_last


@triton.jit
def join_parts(part, first_part, num_parts, max_q_len, start, q_len, rows, results, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Joins the parts of a row, if all are there; of more than a group those of this part's group first.

    They are joined in order, so that the result is the same whichever program joins. A group counts at its first part, and lies
    there when it is joined; groups count at the row's second part.
    """
    token, head = queries_of(tl.arange(0, SHAPE.num_joined), SHAPE)
    before = (part - first_part) // _GROUP * _GROUP
    size = tl.minimum(_GROUP, num_parts - before)
    if _is_last(rows, first_part + before, size):
        mixed, top, total = _joined(first_part + before, 1, size, token, head, max_q_len, q_len, results, SHAPE)
        if num_parts <= _GROUP:
            finish(mixed, top, total, token, head, start, q_len, results, SHAPE)
        else:
            mixed, log_total = close(mixed, top, total, None)
            tl.debug_barrier()  # all threads have read the part in whose place the group is stored
            store_part(first_part + before, mixed, log_total, token, head, max_q_len, q_len, results, SHAPE)
            num_groups = tl.cdiv(num_parts, _GROUP)
            if _is_last(rows, first_part + 1, num_groups):
                mixed, top, total = _joined(
                    first_part, _GROUP, num_groups, token, head, max_q_len, q_len, results, SHAPE
                )
                finish(mixed, top, total, token, head, start, q_len, results, SHAPE)


@triton.jit
def _joined(  # type: ignore[no-untyped-def]
    first_part, STEP: tl.constexpr, num_parts, token, head, max_q_len, q_len, results,
    SHAPE: tl.constexpr
):  # fmt: skip
    """Returns the sum of every ``STEP``-th part: weighted values, top score, sum of weights.

    Loads bypass the L1 cache, which does not contain the stores of other programs.
    """
    # Bound to names, as Triton 3.6 has no shapes of fields.
    QUERIES: tl.constexpr = SHAPE.num_joined
    DIM: tl.constexpr = SHAPE.block_dim
    LOADED: tl.constexpr = max(1, min(_MAX_LOADED, _NUM_LOADED // (SHAPE.num_joined * SHAPE.block_dim)))
    dim, top = tl.arange(0, DIM)[None, :], tl.full([QUERIES], float("-inf"), tl.float32)
    for first in range(0, num_parts, _GROUP):
        part = first + tl.arange(0, _GROUP)
        at = ((first_part + STEP * part)[:, None] * max_q_len + token[None, :]) * SHAPE.num_heads + head[None, :]
        is_there = (part < num_parts)[:, None] & (token < q_len)[None, :]
        logs = tl.load(results.part_lse + at, is_there, other=float("-inf"), cache_modifier=".cg") * _LOG2_E
        top = tl.maximum(top, tl.max(logs, 0))
    offset = tl.where(top == float("-inf"), 0.0, top)
    mixed = tl.zeros([QUERIES, DIM], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for first in range(0, num_parts, LOADED):
        for place in tl.static_range(0, LOADED):
            part = first + place
            is_there = token < tl.where(part < num_parts, q_len, 0)
            at = ((first_part + STEP * part) * max_q_len + token) * SHAPE.num_heads + head
            log = tl.load(results.part_lse + at, is_there, other=float("-inf"), cache_modifier=".cg") * _LOG2_E
            is_element = is_there[:, None] & (dim < SHAPE.head_dim)
            found = results.part_out + at[:, None] * SHAPE.head_dim + dim
            weight = tl.exp2(log - offset)
            total += weight
            mixed += tl.load(found, is_element, other=0.0, cache_modifier=".cg") * weight[:, None]
    return mixed, top, total
