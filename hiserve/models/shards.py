"""The share of a model that a rank of a tensor-parallel group computes: its configuration, and the part of each tensor.

Projections into heads and MLPs are cut by rows, those out of them by columns, so that each rank adds its part of a layer's
output (Shoeybi et al., Megatron-LM, 2019); the vocabulary is cut by tokens. Norms and routers are whole everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import msgspec

from hiserve.distributed.shard import Shard
from hiserve.errors import ConfigError
from hiserve.models.experts_config import packed_specs
from hiserve.models.model_config import ModelConfig
from hiserve.models.names import Cut, Form, TensorSource

Table = dict[str, tuple[TensorSource, ...]]

_HEADS, _INNER, _INNER_OF_EXPERTS, _INNER_OF_SHARED = "qkv", "gate_up", "experts_gate_up", "shared_gate_up"
_HEADS_OF_LATENTS = ("latents", "latent_up", "query_up")  # latents themselves are whole everywhere, as are their pages
# Rows by heads: of layers with states, of attention with gates, where each head has its query before its gate, and of attention whose
# heads are projected group by group.
_EVEN = ("delta_in", "delta_qkvz", "delta_ba", "decay_rate", "decay_bias", "query_gate", "out_groups")
_KEYS_AND_VALUES = "key_value"
_TOKENS = ("embedding", "head")
_COLUMNS = ("out", "down", "experts_down", "shared_down")
_ONCE = ("out_bias", "down_bias", "experts_down_bias")  # added by the first rank alone


def refuse_unshardable(model: ModelConfig, size: int, *, name: str = "this model") -> None:
    """Checks that a group of ``size`` ranks can compute a model.

    Raises:
        ConfigError: It cannot.
    """
    if size == 1:
        return
    experts = model.experts
    if not _divides(model, size):
        allowed = [1, *(each for each in range(2, model.num_heads + 1) if _divides(model, each))]
        inner = str(
            model.intermediate_size if experts is None else f"{model.intermediate_size} and {experts.intermediate_size}"
        )
        if (unit := max(*_units(model), _expert_unit(model))) > 1:
            inner = f"{inner}, in groups of {unit}"
        states = "" if model.delta is None else f", {model.delta.num_key_heads} of keys of states"
        groups = "" if model.compressed is None else f" in {model.compressed.num_groups} groups"
        raise ConfigError(
            f"--tp is {size}, but {name} has {model.num_heads} heads{groups}, {model.num_kv_heads} of keys and values{states}, and MLPs of width "
            f"{inner}. Use one of {', '.join(map(str, allowed))}.",
            param="tp",
        )


def _expert_unit(model: ModelConfig) -> int:
    """Returns the inner elements of an expert, or of the shared one, that share a scale, where it may stay packed; 1 where none do."""
    if model.quantization is None or model.experts is None or model.quantization.experts is None:
        return 1
    specs = packed_specs(model.experts, model.quantization, model.hidden_size).values()
    packed = (spec for spec in (model.quantization.experts, *specs) if spec.kind in ("e4m3", "e2m1"))
    return max([1, *(max(spec.group) for spec in packed)])


def _units(model: ModelConfig) -> tuple[int, int]:
    """Returns the rows and the columns of linears that share a scale, of which no rank has a part."""
    linears = None if model.quantization is None else model.quantization.linears
    return (1, 1) if linears is None else (max(1, linears.group[0]), max(1, linears.group[1]))


def _divides(model: ModelConfig, size: int) -> bool:
    heads, keys, experts, (rows, columns) = model.num_heads, model.num_kv_heads, model.experts, _units(model)
    if model.latent is not None:
        keys = heads
    if heads % size or (keys % size and size % keys) or model.intermediate_size % size:
        return False
    if experts is not None and (experts.intermediate_size % (size * _expert_unit(model)) or experts.shared_size % size):
        return False
    if model.compressed is not None and model.compressed.num_groups % size:
        return False
    by_rows, by_columns = [], [_out_columns(model) // size]
    if model.delta is not None:
        by_columns.append(model.delta.value_size // size)
        if model.delta.num_key_heads % size:
            return False
    elif model.latent is None and model.compressed is None:
        by_rows += [by_columns[0], max(1, keys // size) * model.head_dim]
    if experts is None or experts.num_layers(model.num_layers) < model.num_layers:
        by_rows.append(model.intermediate_size // size)
        by_columns.append(model.intermediate_size // size)
    has_units = not any(each % rows for each in by_rows) and not any(each % columns for each in by_columns)
    last, _ = Shard(size - 1, size).tokens(model.vocab_size)
    return has_units and last < model.vocab_size


def _out_columns(model: ModelConfig) -> int:
    """Returns the elements of a token that a layer's last projection of attention takes."""
    if model.compressed is not None:
        return model.compressed.num_groups * model.compressed.out_rank
    return model.num_heads * (model.head_dim if model.latent is None else model.latent.value_dim)


def local_config(model: ModelConfig, shard: Shard) -> ModelConfig:
    """Returns the configuration of a rank's share; the vocabulary is that of the model, which every rank draws from."""
    if shard.size == 1:
        return model
    experts = model.experts
    if experts is not None:
        sizes = {name: getattr(experts, name) // shard.size for name in ("intermediate_size", "shared_size")}
        experts = msgspec.structs.replace(experts, **sizes)
    delta = model.delta
    if delta is not None:
        sizes = {name: getattr(delta, name) // shard.size for name in ("num_key_heads", "num_value_heads")}
        delta = msgspec.structs.replace(delta, **sizes)
    compressed = model.compressed
    if compressed is not None:
        compressed = msgspec.structs.replace(compressed, num_groups=compressed.num_groups // shard.size)
    return msgspec.structs.replace(
        model,
        delta=delta,
        compressed=compressed,
        num_heads=model.num_heads // shard.size,
        num_kv_heads=max(1, model.num_kv_heads // shard.size),
        intermediate_size=model.intermediate_size // shard.size,
        experts=experts,
    )


def absent_params(model: ModelConfig, shard: Shard) -> int:
    """Returns the parameters of the vocabulary that a rank does not hold, of those that ``ModelConfig.num_params`` counts."""
    if shard.size == 1:
        return 0
    absent = model.vocab_size - shard.token_share(model.vocab_size)
    return absent * model.hidden_size * (1 if model.tie_embeddings else 2)


def cut_table(table: Table, model: ModelConfig, shard: Shard) -> Table:
    """Returns the parameters of a rank, and the parts of tensors stacked in each.

    Args:
        table: Of the whole model, head or draft model.
        model: Its whole configuration.
        shard: The rank's.
    """
    if shard.size == 1:
        return table
    cut: Table = {}
    for name, pieces in table.items():
        last = name.rpartition(".")[2]
        if last in _ONCE and shard.rank:
            continue
        cut[name] = _stacked([replace(piece, cut=_cut(last, i, piece, model, shard)) for i, piece in enumerate(pieces)])
    return cut


def _cut(name: str, index: int, piece: TensorSource, model: ModelConfig, shard: Shard) -> Cut | None:
    """Returns the part of a parameter's tensor, the ``index``-th stacked in it; None is all of it."""
    if name in (*_COLUMNS, _INNER_OF_EXPERTS) and (piece.form is not Form.PLAIN or len(piece.shape) != 2):
        return _cut_of_matrices(name == _INNER_OF_EXPERTS, piece, shard)
    if name in _COLUMNS:
        return Cut(1, *shard.part(piece.shape[1]))
    if name == "sinks":
        return Cut(0, *shard.part(model.num_heads))
    if name == _INNER_OF_EXPERTS + "_bias":
        return Cut(1, *shard.part(piece.shape[1]))
    rows = name.removesuffix("_bias")
    if rows in (_HEADS, _KEYS_AND_VALUES):
        is_query = rows == _HEADS and index == 0
        heads = shard.part(model.num_heads) if is_query else shard.kv_heads(model.num_kv_heads)
        return Cut(0, heads[0] * model.head_dim, heads[1] * model.head_dim)
    if model.delta is not None and (name == "delta_conv" or (name == "delta_in" and index == 0)):
        keys = model.delta.num_key_heads * model.delta.key_dim
        return _sections(0, shard, keys, keys, model.delta.value_size)
    if name in _HEADS_OF_LATENTS:
        if index or (name == "latents" and model.latent is not None and model.latent.query_rank is not None):
            return None  # behind queries lie latents, or the queries of an index
        return Cut(0, *shard.part(piece.shape[0]))
    if name in _EVEN or rows in (_INNER, _INNER_OF_EXPERTS, _INNER_OF_SHARED):
        return Cut(0, *shard.part(piece.shape[0]))
    if name in _TOKENS:
        return Cut(0, *shard.tokens(piece.shape[0]))
    return None


def _cut_of_matrices(is_inner: bool, piece: TensorSource, shard: Shard) -> Cut:
    """Returns the part of all experts in one tensor: of gates and ups if ``is_inner``, or of the projections back."""
    if piece.form in (Form.TRANSPOSED, Form.MXFP4):
        dim = 1 if is_inner == (piece.form is Form.MXFP4) else 2
        return Cut(dim, *shard.part(piece.shape[dim]))
    if is_inner:  # gates of an expert, then ups
        return _sections(1, shard, *[piece.shape[1] // 2] * 2)
    return Cut(2, *shard.part(piece.shape[2]))


def _sections(dim: int, shard: Shard, *sizes: int) -> Cut:
    """Returns the part of each of several sections, which lie behind each other."""
    starts = accumulate(sizes, initial=0)
    first, *others = (
        (start + part[0], start + part[1]) for start, part in zip(starts, map(shard.part, sizes), strict=False)
    )
    return Cut(dim, *first, tuple(others))


def _stacked(pieces: list[TensorSource]) -> tuple[TensorSource, ...]:
    stacked, start = [], 0
    for piece in pieces:
        stacked.append(replace(piece, start=start))
        start += piece.num_rows
    return tuple(stacked)
