"""What a step takes of a CUDA device beside weights, pool and tables: upper bounds, item by item."""

from __future__ import annotations

import msgspec

from hiserve.config import Graphs
from hiserve.core.plan import MAX_SCORED_TOKENS

# Of the driver, of compiled kernels and of libraries' own workspaces; no allocator of ours counts them.
CONTEXT_BYTES = 1 << 30
# One in so many bytes of the device stays free, for what the allocator cannot join.
SPARE_SHARE = 50
# Bytes for an entry of the vocabulary in each row that draws: logits, their float32 copy, penalties' counts, order,
# probabilities, their sum in float64, noise. And for a known token of a row whose penalties count it.
DRAWN_BYTES, COUNTED_BYTES = 64, 20
# Rows whose log-probabilities are made at once, and bytes for an entry of theirs.
SCORED_SLICE, SCORED_BYTES = 128, 24
# Programs that leave partial results for each other, query vectors of one, and what libraries keep beside them.
MAX_PROGRAMS, PROGRAM_QUERIES, SCHEDULE_BYTES = 320, 128, 64 << 20
# Graphs of all sizes together have at most so many times the rows, or tokens, of the largest; a graph of any size
# costs the driver some memory, too.
ROW_BUCKETS, TOKEN_BUCKETS, MAX_PIECE_TOKENS = 7, 5, 2048
NUM_BUCKETS, GRAPH_BYTES = 18, 512 << 10
# Graphs of a number of rows: the forward, and each way of drawing behind it.
ROW_GRAPHS = 3
# Bytes of a token's columns: ids, positions, slots, rows, offsets, and its angles twice in float32 for each element. Of
# a page in a row's table.
COLUMN_BYTES, ANGLE_BYTES, PAGE_BYTES = 48, 8, 4


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's step is made of.

    Attributes:
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Elements per head.
        mlp_elements: Elements that the MLP of a layer, or a token's experts, hold of a token at once, at most.
        vocab_size: Tokens in the vocabulary.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_elements: int
    vocab_size: int

    @property
    def qkv_elements(self) -> int:
        """Queries, keys and values of a token in one layer."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def step_memory(
    shape: StepShape,
    *,
    dtype_bytes: int,
    max_rows: int,
    max_tokens: int,
    max_len: int,
    page_size: int,
    graphs: Graphs,
) -> dict[str, int]:
    """Returns bytes, item by item; together they bound what any step takes.

    Args:
        shape: Of the model.
        dtype_bytes: Of an element of weights and activations.
        max_rows: Rows that run at once.
        max_tokens: Of a step.
        max_len: Longest row, in tokens.
        page_size: Tokens per page.
        graphs: Which steps are captured; resolved.
    """
    assert graphs != "auto", "which steps are captured is not known yet"
    tables = max_rows * -(-max_len // page_size) * PAGE_BYTES
    attention_bytes = 4 * MAX_PROGRAMS * PROGRAM_QUERIES * (shape.head_dim + 1)
    scored = min(MAX_SCORED_TOKENS, max_tokens)
    scores = scored * dtype_bytes + min(SCORED_SLICE, scored) * SCORED_BYTES
    items = {
        "activations of the largest step": max_tokens * _token_bytes(shape, dtype_bytes) + tables,
        "logits, drawing and scores": shape.vocab_size * (max_rows * DRAWN_BYTES + scores)
        + max_rows * max_len * COUNTED_BYTES,
        "attention workspace": attention_bytes * (shape.num_heads // shape.num_kv_heads) + SCHEDULE_BYTES,
    }
    if graphs != "off":
        captured = _graph_bytes(shape, dtype_bytes, max_rows, max_tokens, graphs)
        items["captured graphs"] = captured + ROW_BUCKETS * tables
    return items


def _token_bytes(shape: StepShape, dtype_bytes: int) -> int:
    """Bytes of a token where a layer is widest: four times the residual stream, and attention's parts or the MLP's."""
    attention = 2 * shape.qkv_elements + shape.num_heads * shape.head_dim
    elements = 4 * shape.hidden_size + max(attention, shape.mlp_elements)
    return elements * dtype_bytes + COLUMN_BYTES + ANGLE_BYTES * shape.head_dim


def _graph_bytes(shape: StepShape, dtype_bytes: int, max_rows: int, max_tokens: int, graphs: Graphs) -> int:
    """Graphs share one pool: it holds the largest one's activations, and what each leaves to be read after its replay."""
    logits = ROW_BUCKETS * max_rows * shape.vocab_size * dtype_bytes
    num_tokens, num_graphs = max_rows, ROW_GRAPHS * NUM_BUCKETS
    handed_over = 0
    if graphs == "all":
        piece_tokens = min(max_tokens, MAX_PIECE_TOKENS)
        num_tokens = max(num_tokens, piece_tokens)
        num_graphs += NUM_BUCKETS * (shape.num_layers + 1)
        attention = shape.qkv_elements + shape.num_heads * shape.head_dim
        handed_over = piece_tokens * (attention + TOKEN_BUCKETS * shape.hidden_size) * dtype_bytes
    return logits + handed_over + num_tokens * _token_bytes(shape, dtype_bytes) + num_graphs * GRAPH_BYTES
