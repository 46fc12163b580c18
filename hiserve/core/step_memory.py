"""The shape of a model, and upper bounds of the device memory of a step, by item."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hiserve.config.options import AUTO_TIERS
from hiserve.config.settings import DType, Graphs
from hiserve.core.kv_groups import CarriedBytes
from hiserve.core.packed_experts import PackedSize
from hiserve.core.plan import MASK_BITS, MAX_SCORED_TOKENS

CONTEXT_BYTES = (
    1 << 30
)  # of the driver, compiled kernels and workspaces of libraries, which the allocator does not count
SPARE_SHARE = 50  # one in so many bytes of the device stays free, against fragmentation
# Sampling with filters or penalties: tokens per slice; bytes per vocabulary entry of a token (logits, float32 copy, counts
# of penalties, order, probabilities, float64 sums, noise); bytes per known token of a row with penalties.
DRAWN_SLICE, DRAWN_BYTES, COUNTED_BYTES = 256, 64, 20
# Log-probabilities: rows per slice, bytes per vocabulary entry of a row.
SCORED_SLICE, SCORED_BYTES = 128, 24
# Attention: programs with partial results, query vectors per program, bytes of schedules and workspaces of libraries.
MAX_PROGRAMS, PROGRAM_QUERIES, SCHEDULE_BYTES = 320, 128, 64 << 20
# Under ``--exact``: keys of a segment at least, segments of the longest row at most, query vectors of rows that are split, words
# beside the elements of a segment's sum.
LEAST_SEGMENT, MAX_SEGMENTS, SPLIT_QUERIES, SEGMENT_WORDS = 256, 64, 64, 2
INDEX_BYTES = 64 << 20  # of scores of rows by an index at once, where one token has no more
SCORE_BYTES = 8  # of a score, and of half a row that is chosen from several parts of a context, with its score
DELTA_CHUNK = (
    64  # tokens of a prompt that are solved at once in layers of the gated delta rule; each has as many shares
)
# Under latent attention: keys of prefixes at least, whose keys and values of all heads are in memory at once, and bytes of these
# where they take more.
EXPANDED_KEYS, EXPANDED_BYTES = 2048, 384 << 20
# Graphs of all sizes: rows, or tokens, as a multiple of those of the largest; tokens of the largest piece; number of sizes;
# bytes of the driver per graph.
ROW_BUCKETS, TOKEN_BUCKETS, MAX_PIECE_TOKENS = 7, 7, 2048
NUM_BUCKETS, GRAPH_BYTES = 21, 512 << 10
# Mixed steps as one graph: tokens of the largest, tokens of all sizes as a multiple of these, number of sizes, parts of the
# attention.
MAX_MIXED_TOKENS, MIXED_BUCKETS, NUM_MIXED, MIXED_PARTS = 512, 5, 8, 16
# Graphs per size: of a step, the forward and two ways of sampling; of drafts, per width ``prepare`` and ``update_only``, and
# for all widths two ways of ``draft``, and ``extend``; two ways of each tree beside chains.
ROW_GRAPHS, FOLLOW_GRAPHS, CHAIN_GRAPHS, TREE_GRAPHS = 3, 2, 3, 2
# Per token of a draft forward, copies of the features: fused, of the token before, beside the embedding. Per draft, copies
# of the logits: of the head's vocabulary, of the model's, and the kept ones.
FEATURE_COPIES, DRAFT_LOGITS = 4, 3
# Bytes of a token's columns (ids, positions, slots, rows, offsets), of its angles per element (twice float32), and of a
# page in a row's table.
COLUMN_BYTES, ANGLE_BYTES, PAGE_BYTES = 48, 8, 4
MASK_BYTES = 4  # of a word of a mask


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """The dimensions of a model's step."""

    num_layers: int
    hidden_size: int  # width of the residual stream
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_elements: int  # most elements of a token in the MLP of a layer, or in its experts, at once
    vocab_size: int  # tokens in the vocabulary
    latent_elements: int = 0  # elements of a token in one layer's latent attention; 0 without
    index_ratio: int = 0  # tokens of a row that an index chooses or not; 0 without an index

    @property
    def qkv_elements(self) -> int:
        """Queries, keys and values of a token in one layer."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class DraftShape(msgspec.Struct, frozen=True, kw_only=True):
    """The dimensions of a draft forward."""

    step: StepShape  # of the model or head that computes drafts
    shown_elements: int  # elements of a token in the outputs of ``aux_layers``
    feature_size: int  # elements of it that a page keeps for its last token


class StoredBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the rows that a model stores, all layers together."""

    token: int  # of the rows of one token
    window: int = 0  # of these, those of layers that have a window where others have none
    ratios: tuple[tuple[int, int], ...] = ()  # of a row that stands for several tokens, and these


class DraftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A draft head or draft model, as ``resolve`` needs it."""

    kind: str  # ``eagle3``, ``mtp`` or ``draft_model``
    num_params: int
    packed_experts: PackedSize = PackedSize()  # of these, on a device whose products upcast them
    slot_elements: int  # KV elements per token, all layers together
    step: DraftShape  # of a draft forward
    packed: StoredBytes | None = None  # of its rows if they are packed; None if they cannot be


DEFAULT_PAGE_SIZE = 16  # tokens


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as ``resolve`` needs it."""

    context_length: int  # longest context, in tokens
    checkpoint_dtype: DType  # type name of the stored weights
    window: int = 0  # the widest, of a model that has layers with and without one; else 0
    window_elements: int = 0  # of ``slot_elements``, those of layers with a window
    num_params: int
    packed_experts: PackedSize = PackedSize()  # of these, on a device whose products upcast them
    quantized_linears: PackedSize = PackedSize()  # likewise, on any device
    slot_elements: int  # KV elements per token, all layers together
    # Of groups whose rows stand for several tokens: elements of a row, all layers together, and its tokens.
    ratio_elements: tuple[tuple[int, int], ...] = ()
    page_size: int = DEFAULT_PAGE_SIZE  # tokens of a page under ``auto``
    page_multiple: int = 1  # of which the tokens of a page must be a multiple
    carried: CarriedBytes | None = None  # recurrent states and rings of inputs; None without any
    step: StepShape  # of a step
    draft: DraftFacts | None = None  # its draft head or model; None without a checkpoint of one
    packed: StoredBytes | None = None  # of its rows if they are packed; None if they cannot be
    inexact: str | None = None  # what it has that has no sums in one order, in words; None without
    asks_for_packed: bool = False  # the checkpoint was made for keys and values in 8 bits

    def stored_bytes(self, element_bytes: int, *, packs_rows: bool) -> StoredBytes:
        """Returns the bytes of its rows, packed or in elements of so many bytes."""
        if packs_rows:
            assert self.packed is not None, "rows of this model cannot be packed"
            return self.packed
        ratios = tuple((elements * element_bytes, ratio) for elements, ratio in self.ratio_elements)
        return StoredBytes(
            token=self.slot_elements * element_bytes, window=self.window_elements * element_bytes, ratios=ratios
        )


def index_tokens(num_tokens: int, num_rows: int) -> int:
    """Returns of how many tokens an index scores up to ``num_rows`` rows at once: all that fit its workspace, at least 1."""
    return max(1, min(num_tokens, INDEX_BYTES // (SCORE_BYTES * max(1, num_rows))))


def index_memory(num_tokens: int, num_rows: int) -> int:
    """Returns the bytes of these scores, and of what is chosen of them at first."""
    return index_tokens(num_tokens, num_rows) * num_rows * SCORE_BYTES


def segment_for(max_len: int) -> int:
    """Returns the keys of a segment of rows of up to so many tokens: a power of two."""
    return max(LEAST_SEGMENT, 1 << (-(-max_len // MAX_SEGMENTS) - 1).bit_length())


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
    frees_windows: bool = False,
    is_exact: bool = False,
) -> dict[str, int]:
    """Returns bytes by item; their sum bounds the memory of any step.

    Args:
        shape: Of the model.
        dtype_bytes: Of an element of weights and activations.
        max_rows: Most rows of a step.
        max_tokens: Most tokens of a step.
        max_len: Longest row, in tokens.
        page_size: Tokens per page.
        graphs: Captured steps.
        widths: Tokens per row of steps that sample from all of them: 1, and those of verifying steps.
        draft: Of the draft head or model; None without one.
        frees_windows: Layers with a window have page tables of their own; drafts do not read these.
        is_exact: Sums are made in one order.
    """
    table = max_rows * -(-max_len // page_size) * PAGE_BYTES
    tables = (1 + frees_windows) * table
    attention_bytes = 4 * MAX_PROGRAMS * PROGRAM_QUERIES * (shape.head_dim + 1)
    if shape.latent_elements:
        key_bytes = shape.latent_elements * dtype_bytes
        attention_bytes += 2 * min(max(EXPANDED_KEYS * key_bytes, EXPANDED_BYTES), max_rows * max_len * key_bytes)
    else:
        attention_bytes *= shape.num_heads // shape.num_kv_heads
    scored = min(MAX_SCORED_TOKENS, max_tokens)
    scores = scored * dtype_bytes + min(SCORED_SLICE, scored) * SCORED_BYTES
    num_drawn = max(max_rows, min(max_rows * max(widths), max_tokens))
    drawn = min(DRAWN_SLICE, num_drawn)
    activations = max_tokens * _token_bytes(shape, dtype_bytes) + tables
    items = {
        "activations of the largest step": activations,
        "logits, drawing and scores": shape.vocab_size * (num_drawn * dtype_bytes + drawn * DRAWN_BYTES + scores)
        + drawn * max_len * COUNTED_BYTES,
        "masks of grammars": max_rows * max(widths) * (1 + -(-shape.vocab_size // MASK_BITS)) * MASK_BYTES,
        "attention workspace": attention_bytes + SCHEDULE_BYTES,
    }
    if is_exact:
        queries = min(SPLIT_QUERIES, 2 * max(widths) * (shape.num_heads // shape.num_kv_heads))
        items["segments of attention"] = (
            4 * MAX_PROGRAMS * queries * -(-max_len // segment_for(max_len)) * (shape.head_dim + SEGMENT_WORDS)
        )
    if shape.index_ratio:
        items["scores of the index"] = index_memory(max_tokens, max_len // shape.index_ratio)
    if draft is not None:
        kept = (max_tokens * draft.shown_elements + (max_rows + 1) * draft.feature_size) * dtype_bytes
        logits = DRAFT_LOGITS * max_rows * draft.step.vocab_size * dtype_bytes
        # The activations of the step itself are free by then.
        drafting = (max_tokens + max_rows) * _draft_bytes(draft, dtype_bytes) + logits + tables
        items["features and drafts"] = kept + max(0, drafting - activations)
    if graphs != "off":
        captured = _graph_bytes(shape, dtype_bytes, max_rows, max_tokens, graphs, widths)
        items["captured graphs"] = captured + len(widths) * ROW_BUCKETS * tables
        if draft is not None:
            items["captured graphs of drafts"] = table + _draft_graph_bytes(
                draft, dtype_bytes, max_rows, max_tokens, graphs, widths
            )
    return items


def _token_bytes(shape: StepShape, dtype_bytes: int) -> int:
    """Most bytes of a token in a layer: four times the residual stream, and the parts of attention or of the MLP."""
    attention = shape.latent_elements or 2 * shape.qkv_elements + shape.num_heads * shape.head_dim
    elements = 4 * shape.hidden_size + max(attention, shape.mlp_elements)
    return elements * dtype_bytes + COLUMN_BYTES + ANGLE_BYTES * shape.head_dim


def _draft_bytes(draft: DraftShape, dtype_bytes: int) -> int:
    """Most bytes of a token in a draft forward."""
    return _token_bytes(draft.step, dtype_bytes) + FEATURE_COPIES * draft.feature_size * dtype_bytes


def _graph_bytes(
    shape: StepShape, dtype_bytes: int, max_rows: int, max_tokens: int, graphs: Graphs, widths: Sequence[int]
) -> int:
    """Bytes of the pool that all graphs share: the activations of the largest, and the outputs of each."""
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
    """Bytes of the hidden states of graphs of all sizes, of the logits per number of rows, and of the largest draft forward."""
    num_shown = ROW_BUCKETS * max_rows * sum(widths)
    if graphs == "all":
        num_shown += TOKEN_BUCKETS * min(max_tokens, MAX_PIECE_TOKENS) + MIXED_BUCKETS * min(
            max_tokens, MAX_MIXED_TOKENS
        )
    kept = ROW_BUCKETS * max_rows * (draft.step.vocab_size + draft.feature_size)
    forward = max_rows * (1 + max(widths)) * _draft_bytes(draft, dtype_bytes)
    forward += DRAFT_LOGITS * max_rows * draft.step.vocab_size * dtype_bytes
    num_trees = max(0, len(widths) - len(AUTO_TIERS))  # beside chains, of which there are no more
    num_graphs = NUM_BUCKETS * (FOLLOW_GRAPHS * len(widths) + CHAIN_GRAPHS + TREE_GRAPHS * num_trees)
    return (num_shown * draft.shown_elements + kept) * dtype_bytes + forward + num_graphs * GRAPH_BYTES
