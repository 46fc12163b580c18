"""The shapes that decide how much memory a model takes, and what a step takes of a CUDA device: upper bounds, by item."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hiserve.config.settings import DType, Graphs
from hiserve.core.plan import MAX_SCORED_TOKENS

# Of the driver, of compiled kernels and of libraries' own workspaces; no allocator of ours counts them.
CONTEXT_BYTES = 1 << 30
# One in so many bytes of the device stays free, for what the allocator cannot join.
SPARE_SHARE = 50
# Tokens that are drawn at once where there is more to it than the likeliest, or a draw from all. Bytes for an entry of the
# vocabulary in each: logits, their float32 copy, penalties' counts, order, probabilities, their sum in float64, noise.
# And for a known token of a row whose penalties count it.
DRAWN_SLICE, DRAWN_BYTES, COUNTED_BYTES = 256, 64, 20
# Rows whose log-probabilities are made at once, and bytes for an entry of theirs.
SCORED_SLICE, SCORED_BYTES = 128, 24
# Programs that leave partial results for each other, query vectors of one, and what libraries keep beside them.
MAX_PROGRAMS, PROGRAM_QUERIES, SCHEDULE_BYTES = 320, 128, 64 << 20
# Graphs of all sizes together have at most so many times the rows, or tokens, of the largest; a graph of any size
# costs the driver some memory, too.
ROW_BUCKETS, TOKEN_BUCKETS, MAX_PIECE_TOKENS = 7, 7, 2048
NUM_BUCKETS, GRAPH_BYTES = 21, 512 << 10
# Of mixed steps that are one graph: tokens of the largest, of all sizes together how many times those, sizes, and parts of
# its attention.
MAX_MIXED_TOKENS, MIXED_BUCKETS, NUM_MIXED, MIXED_PARTS = 512, 5, 8, 16
# Graphs of a number of rows: the forward, and each way of drawing behind it. Of drafts: what takes a step in, and
# what does where no draft is wanted; and each way of drawing, and what computes a draft, which follow steps of any width.
ROW_GRAPHS, FOLLOW_GRAPHS, CHAIN_GRAPHS = 3, 2, 3
# Copies of a head's features for each token of a draft forward: fused, of the token before, beside the embedding. Of the
# logits of each draft: a head's own, those of the model's vocabulary, those that are kept.
FEATURE_COPIES, DRAFT_LOGITS = 4, 3
# Bytes of a token's columns: ids, positions, slots, rows, offsets, and its angles twice in float32 for each element. Of
# a page in a row's table.
COLUMN_BYTES, ANGLE_BYTES, PAGE_BYTES = 48, 8, 4


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's step is made of."""

    num_layers: int
    hidden_size: int  # width of the residual stream
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_elements: int  # most elements of a token in the MLP of a layer, or in its experts, at once
    vocab_size: int  # tokens in the vocabulary

    @property
    def qkv_elements(self) -> int:
        """Queries, keys and values of a token in one layer."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class DraftShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the drafts behind a step are made of."""

    step: StepShape  # of the model or head that computes drafts
    shown_elements: int  # elements of a token's hidden states, ``aux_layers`` together
    feature_size: int  # elements of it that a page keeps for its last token


class DraftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What ``resolve`` must know of what drafts for a model."""

    kind: str  # ``eagle3``, ``mtp`` or ``draft_model``
    num_params: int
    slot_elements: int  # KV elements per token, all layers together
    step: DraftShape  # of a draft forward


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What ``resolve`` must know of a model."""

    context_length: int  # longest context, in tokens
    checkpoint_dtype: DType  # type name of the stored weights
    num_params: int
    slot_elements: int  # KV elements per token, all layers together
    step: StepShape  # of a step
    draft: DraftFacts | None = None  # its draft head or model; None without a checkpoint of one


def step_memory(
    shape: StepShape,
    *,
    dtype_bytes: int,
    max_rows: int,
    max_tokens: int,
    max_len: int,
    page_size: int,
    graphs: Graphs,
    widths: Sequence[int] = (1,),
    draft: DraftShape | None = None,
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
        widths: Tokens of each row that steps compute which draw from all of them: 1, and those with drafts.
        draft: Of what drafts behind each step, if a model or a head does.
    """
    tables = max_rows * -(-max_len // page_size) * PAGE_BYTES
    attention_bytes = 4 * MAX_PROGRAMS * PROGRAM_QUERIES * (shape.head_dim + 1)
    scored = min(MAX_SCORED_TOKENS, max_tokens)
    scores = scored * dtype_bytes + min(SCORED_SLICE, scored) * SCORED_BYTES
    num_drawn = max(max_rows, min(max_rows * max(widths), max_tokens))
    drawn = min(DRAWN_SLICE, num_drawn)
    activations = max_tokens * _token_bytes(shape, dtype_bytes) + tables
    items = {
        "activations of the largest step": activations,
        "logits, drawing and scores": shape.vocab_size * (num_drawn * dtype_bytes + drawn * DRAWN_BYTES + scores)
        + drawn * max_len * COUNTED_BYTES,
        "attention workspace": attention_bytes * (shape.num_heads // shape.num_kv_heads) + SCHEDULE_BYTES,
    }
    if draft is not None:
        kept = (max_tokens * draft.shown_elements + (max_rows + 1) * draft.feature_size) * dtype_bytes
        logits = DRAFT_LOGITS * max_rows * draft.step.vocab_size * dtype_bytes
        # By then the step's own activations are free again.
        drafting = (max_tokens + max_rows) * _draft_bytes(draft, dtype_bytes) + logits + tables
        items["features and drafts"] = kept + max(0, drafting - activations)
    if graphs != "off":
        captured = _graph_bytes(shape, dtype_bytes, max_rows, max_tokens, graphs, widths)
        items["captured graphs"] = captured + len(widths) * ROW_BUCKETS * tables
        if draft is not None:
            items["captured graphs of drafts"] = tables + _draft_graph_bytes(
                draft, dtype_bytes, max_rows, max_tokens, graphs, widths
            )
    return items


def _token_bytes(shape: StepShape, dtype_bytes: int) -> int:
    """Bytes of a token where a layer is widest: four times the residual stream, and attention's parts or the MLP's."""
    attention = 2 * shape.qkv_elements + shape.num_heads * shape.head_dim
    elements = 4 * shape.hidden_size + max(attention, shape.mlp_elements)
    return elements * dtype_bytes + COLUMN_BYTES + ANGLE_BYTES * shape.head_dim


def _draft_bytes(draft: DraftShape, dtype_bytes: int) -> int:
    """Likewise of a token that a draft forward computes."""
    return _token_bytes(draft.step, dtype_bytes) + FEATURE_COPIES * draft.feature_size * dtype_bytes


def _graph_bytes(
    shape: StepShape, dtype_bytes: int, max_rows: int, max_tokens: int, graphs: Graphs, widths: Sequence[int]
) -> int:
    """Graphs share one pool: it holds the largest one's activations, and what each leaves to be read after its replay."""
    logits = ROW_BUCKETS * max_rows * sum(widths) * shape.vocab_size * dtype_bytes
    num_tokens, num_graphs = max_rows * max(widths), ROW_GRAPHS * NUM_BUCKETS * len(widths)
    handed_over = 0
    if graphs == "all":
        piece_tokens = min(max_tokens, MAX_PIECE_TOKENS)
        num_tokens = max(num_tokens, piece_tokens)
        num_graphs += NUM_BUCKETS * (shape.num_layers + 1)
        attention = shape.qkv_elements + shape.num_heads * shape.head_dim
        handed_over = piece_tokens * (attention + TOKEN_BUCKETS * shape.hidden_size) * dtype_bytes
        mixed_tokens, num_graphs = min(max_tokens, MAX_MIXED_TOKENS), num_graphs + NUM_MIXED
        attended = shape.num_heads * (shape.head_dim + 1)
        handed_over += mixed_tokens * (attended + MIXED_BUCKETS * shape.hidden_size) * dtype_bytes
        handed_over += mixed_tokens * attended * MIXED_PARTS * 4
    return logits + handed_over + num_tokens * _token_bytes(shape, dtype_bytes) + num_graphs * GRAPH_BYTES


def _draft_graph_bytes(
    draft: DraftShape, dtype_bytes: int, max_rows: int, max_tokens: int, graphs: Graphs, widths: Sequence[int]
) -> int:
    """What graphs of all sizes show of their tokens, the logits of each number of rows, and the largest draft forward."""
    num_shown = ROW_BUCKETS * max_rows * sum(widths)
    if graphs == "all":
        num_shown += TOKEN_BUCKETS * min(max_tokens, MAX_PIECE_TOKENS) + MIXED_BUCKETS * min(
            max_tokens, MAX_MIXED_TOKENS
        )
    kept = ROW_BUCKETS * max_rows * (draft.step.vocab_size + draft.feature_size)
    forward = max_rows * (1 + max(widths)) * _draft_bytes(draft, dtype_bytes)
    forward += DRAFT_LOGITS * max_rows * draft.step.vocab_size * dtype_bytes
    num_graphs = NUM_BUCKETS * (FOLLOW_GRAPHS * len(widths) + CHAIN_GRAPHS)
    return (num_shown * draft.shown_elements + kept) * dtype_bytes + forward + num_graphs * GRAPH_BYTES
