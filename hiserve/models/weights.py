"""Reads weights from Hugging Face safetensors into the parameters of decoders and draft heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hiserve.core.quantization import Quantization, QuantSpec
from hiserve.distributed.shard import WHOLE, Shard
from hiserve.errors import ModelError
from hiserve.kernels.quantized import quantize
from hiserve.models.block_scales import FP8, SCALE_SUFFIX, multiply, scale_names, scaled_weights
from hiserve.models.checkpoint import StoredTensor, stored_tensors, weight_files
from hiserve.models.compressed_names import compressed_name, table_of
from hiserve.models.conversion import read_converted
from hiserve.models.draft_config import DraftConfig
from hiserve.models.expert_weights import draw_packed, packed_parameters, read_packed_experts
from hiserve.models.family import FAMILIES
from hiserve.models.four_bits import packed_names, packed_weights
from hiserve.models.model_config import ModelConfig
from hiserve.models.names import (
    ExpertNaming,
    Form,
    TensorSource,
    bundled_prefixes,
    parameter_shape,
    text_name,
)
from hiserve.models.packed_rows import FP4, read_packed
from hiserve.models.quantize import MADE
from hiserve.models.quantized_names import kept_specs, read_name
from hiserve.models.quantized_weights import read_kept, spell_out
from hiserve.models.reading import plan_chunks, read_chunks
from hiserve.models.shard_weights import cut_quantized, cut_whole, held_parts, is_scattered, read_scattered
from hiserve.models.shards import cut_table
from hiserve.models.tensor_checks import check_tensor, compare

_DUMMY_SEED = 0
_DUMMY_STD = 0.02
# Ends of the names of parameters that are float32 whatever the model's type is.
_WIDE = ("choice_bias", "sinks", "position_bias", "mix", "mix_base", "mix_scale", "decay_rate", "decay_bias")
_TABLE = "expert_table"  # that of the name of a parameter of experts' numbers


def load_parameters(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    shard: Shard = WHOLE,
) -> dict[str, Any]:
    """Allocates every parameter on the device and fills it: a tensor, or a ``QuantizedWeight`` of one that stays quantized.

    ``load_format`` is ``auto``, which reads safetensors, or ``dummy``, which draws weights from a fixed seed and reads
    no file. ``config`` is that of the whole model, of which a rank reads its ``shard``.

    Raises:
        ModelError: A file is missing or damaged; a tensor is missing, unexpected or of the wrong shape or type.
    """
    norm_dtype = _norm_dtype(config, dtype)
    if load_format == "dummy":
        parameters = draw_parameters(table_of(config), config, dtype, device, norm_dtype, shard, keeps=True)
        for name, parameter in parameters.items():
            if config.experts is not None and name.endswith(_TABLE):
                parameter.remainder_(config.experts.num_experts)
        return parameters
    rename = text_name if config.compressed is None else compressed_name
    held = _renamed(folder, rename, config.quantization, param="model")
    sources = _weight_names(held, config.quantization)
    ignored = {source for source in sources if _is_ignored(source, config)}
    table = table_of(config, ExpertNaming.of(sources - ignored))
    title = f"{config.architecture} as described by config.json"
    compare(
        folder, title, {piece.source for pieces in table.values() for piece in pieces}, sources - ignored, param="model"
    )
    table = cut_table(table, config, shard)
    parameters = read_parameters(held, table, config, dtype, device, param="model", norm_dtype=norm_dtype, keeps=True)
    _refuse_strange_experts(parameters, config)
    _offset_norms(parameters, config)
    return parameters


def _weight_names(held: dict[str, StoredTensor], quantization: Quantization | None) -> set[str]:
    """Returns the names of tensors, those of a quantized weight as one."""
    return set(held) - scale_names(held) - packed_names(held, quantization) | set(packed_weights(held, quantization))


def _offset_norms(parameters: dict[str, Any], config: ModelConfig) -> None:
    if config.norm_offset:
        for name, parameter in parameters.items():
            if name.endswith("norm"):
                parameter += config.norm_offset


def _norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if config.has_wide_norms else dtype


def draw_parameters(
    table: dict[str, tuple[TensorSource, ...]],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    norm_dtype: torch.dtype | None = None,
    shard: Shard = WHOLE,
    *,
    keeps: bool = False,
) -> dict[str, Any]:
    """Draws every parameter of a table from a fixed seed; norms are 1. Other arguments as for ``read_parameters``.

    A rank draws the whole model, one parameter at a time, and keeps its ``shard``.
    """
    cut = cut_table(table, config, shard)
    packed = packed_parameters(cut, config, dtype, device)
    kept, generator = kept_specs(table, config.quantization) if keeps else {}, None
    parameters: dict[str, Any] = {}
    for name, pieces in table.items():
        if name in packed:
            continue
        one = _allocate({name: pieces}, dtype, device, norm_dtype)
        generator = _draw(one, device, generator)
        if name in kept:
            parameters[name] = cut_quantized(quantize(one[name], kept[name]), cut[name], param="model")
        elif name in cut:
            parameters[name] = one[name] if shard.size == 1 else cut_whole(one[name], cut[name])
    return parameters | draw_packed(packed, device)


def read_parameters(
    held: dict[str, StoredTensor],
    table: dict[str, tuple[TensorSource, ...]],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    param: str,
    norm_dtype: torch.dtype | None = None,
    keeps: bool = False,
) -> dict[str, Any]:
    """Reads every parameter of a table, in the order of the files; ``held_tensors`` gave ``held``, which has all.

    ``param`` is the setting that names the checkpoint; ``norm_dtype`` the type of norms, None that of the others; ``keeps``
    says that linears stay in fewer bits, or become so, as the configuration says.

    Returns:
        The parameters; those of experts that stay packed are ``PackedWeights``, and such linears ``QuantizedWeight``.

    Raises:
        ModelError: A file is damaged, or a tensor has the wrong shape, type or scale.
    """
    quantization = config.quantization
    four_bits = packed_weights(held, quantization)
    for pieces in table.values():
        for piece in pieces:
            check_tensor(held, four_bits, piece, quantization, param=param)
    kept, stored = _kept(held, table, quantization) if keeps else {}, held
    others = {name: pieces for name, pieces in table.items() if name not in kept}
    held = held_parts(held, others)
    packed = packed_parameters(others, config, dtype, device, held)
    rest = {name: pieces for name, pieces in others.items() if name not in packed}
    parameters: dict[str, Any] = _allocate(rest, dtype, device, norm_dtype)
    places = [
        (piece, parameters[name][piece.start : piece.start + piece.num_rows])
        for name, pieces in rest.items()
        for piece in pieces
        if not piece.is_converted
    ]
    spelled = [each for each in places if each[0].source in four_bits]
    places = [each for each in places if each[0].source not in four_bits]
    unpacked = [each for each in places if held[each[0].source].dtype == FP4]
    places = [each for each in places if held[each[0].source].dtype != FP4]
    scaled = scaled_weights(held, places, device)
    targets = [(held[piece.source], part) for piece, part in places if not is_scattered(piece)]
    targets += [(held[piece.source + SCALE_SUFFIX], scales) for piece, scales, _ in scaled]
    with _reading_errors(param):
        read_chunks(plan_chunks(targets), device)
        read_scattered(held, [each for each in places if is_scattered(each[0])])
        multiply(scaled, param)
        read_packed(held, unpacked, device)
        read_converted(held, rest, parameters, device)
        parameters |= read_packed_experts(held, packed, device, param=param)
        if quantization is not None:
            spell_out(held, spelled, quantization, device, param=param)
            parameters |= read_kept(stored, kept, quantization, device, param=param)
    return parameters


def _kept(
    held: dict[str, StoredTensor], table: dict[str, tuple[TensorSource, ...]], quantization: Quantization | None
) -> dict[str, tuple[tuple[TensorSource, ...], QuantSpec]]:
    """Returns the parameters that stay quantized; one of which a part is not stored like that is spelled out."""
    four_bits, kept = packed_weights(held, quantization), {}
    for name, spec in kept_specs(table, quantization).items():
        sources = [piece.source for piece in table[name]]
        is_stored = all(each in four_bits or (each in held and held[each].dtype == FP8) for each in sources)
        if is_stored != (quantization is not None and quantization.method == MADE):
            kept[name] = (table[name], spec)
    return kept


def read_tensor(held: dict[str, StoredTensor], source: str, *, param: str) -> Tensor:
    """Reads one tensor in its stored type onto the CPU; arguments as for ``read_parameters``."""
    with _opened(held[source].path, param) as file:
        tensor: Tensor = file.get_tensor(source)
    return tensor


def held_tensors(folder: Path, *, param: str) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint, by name. ``param`` is the setting that names it.

    Raises:
        ModelError: A file is missing or damaged.
    """
    held: dict[str, StoredTensor] = {}
    for path in weight_files(folder, param=param):
        with _opened(path, param):  # the library checks the header
            held |= stored_tensors(path)
    return held


def _renamed(
    folder: Path, rename: Callable[[str], str], quantization: Quantization | None, *, param: str
) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint by the names that tables have for them; arguments as for ``held_tensors``.

    Raises:
        ModelError: As ``held_tensors``, or two tensors have one name, of which either may be the right one.
    """
    held: dict[str, StoredTensor] = {}
    for source, tensor in held_tensors(folder, param=param).items():
        if (name := read_name(rename(source), quantization)) is None:
            continue
        if name in held:
            raise ModelError(
                f"{str(folder)!r} has {name} under two names, {source} and another. Take all files from one checkpoint.",
                param=param,
            )
        held[name] = tensor
    return held


def _allocate(
    table: dict[str, tuple[TensorSource, ...]],
    dtype: torch.dtype,
    device: torch.device,
    norm_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Returns an empty vector or matrix for every parameter."""
    parameters = {}
    for name, pieces in table.items():
        kept = torch.promote_types(dtype, torch.float32) if name.endswith(_WIDE) else dtype
        kept = torch.int64 if pieces[0].form is Form.NUMBERS else kept
        if norm_dtype is not None and name.endswith("norm"):
            kept = norm_dtype
        parameters[name] = torch.empty(parameter_shape(pieces), dtype=kept, device=device)
    return parameters


def _draw(parameters: dict[str, Tensor], device: torch.device, generator: torch.Generator | None) -> torch.Generator:
    """Draws parameters; returns the generator to draw others with, which is made if there is none."""
    generator = generator or torch.Generator(device).manual_seed(_DUMMY_SEED)
    for name, parameter in parameters.items():
        if name.endswith(("norm", "delta_gain")):
            parameter.fill_(1.0)
        elif not parameter.is_floating_point():
            parameter.random_(generator=generator)
        else:
            parameter.normal_(0.0, _DUMMY_STD, generator=generator)
    return generator


def _is_ignored(source: str, config: ModelConfig) -> bool:
    """Whether a tensor is not needed: a tied head, rotary frequencies, part of a bundled draft head or of no text model."""
    is_copy = source.endswith("rotary_emb.inv_freq") or (source == "lm_head.weight" and config.tie_embeddings)
    others = FAMILIES[config.architecture].ignored_tensors
    return is_copy or source.startswith((*bundled_prefixes(config), *others))


def _refuse_strange_experts(parameters: dict[str, Tensor], config: ModelConfig) -> None:
    """Checks the tables of experts, which would be read out of bounds."""
    for name, table in parameters.items():
        if name.endswith(_TABLE) and config.experts is not None:
            low, high = (int(each) for each in table.aminmax())
            if low < 0 or high >= config.experts.num_experts:
                raise ModelError(
                    f"the table {name} names experts {low} to {high}, of {config.experts.num_experts}. Fetch the checkpoint again.",
                    param="model",
                )


@contextmanager
def _reading_errors(param: str) -> Iterator[None]:
    """Says of a file that cannot be read which setting names it."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise ModelError(
            f"the weights cannot be read: {error}. Fetch them again, and do not change them while they are read.",
            param=param,
        ) from None


@contextmanager
def _opened(path: Path, param: str) -> Iterator[Any]:
    """Opens a file of tensors.

    Raises:
        ModelError: It is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise ModelError(f"{path.name} is missing from {str(path.parent)!r}.", param=param) from None
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path.name} in {str(path.parent)!r} is damaged: {error}. Fetch it again.", param=param
        ) from None


def load_head_parameters(
    draft: DraftConfig, dtype: torch.dtype, device: torch.device, load_format: str, shard: Shard = WHOLE
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Allocates every parameter of a head on the device and fills it; ``load_format`` and ``shard`` as for ``load_parameters``.

    Returns:
        The parameters, named as in ``Head.table``; and the model's token of each token that the head can draft, int64
        ``[n]``, or None if they are the same.

    Raises:
        ModelError: A file is missing or damaged; a tensor is missing, unexpected or of the wrong shape or type.
    """
    head = draft.head
    assert head is not None, f"{draft.kind} is no head"
    is_reduced = head.vocab_size < draft.model.vocab_size
    if load_format == "dummy":
        tokens = torch.arange(head.vocab_size, device=device) if is_reduced else None
        norm_dtype = _norm_dtype(draft.model, dtype)
        return draw_parameters(head.table(draft.model), draft.model, dtype, device, norm_dtype, shard), tokens
    rename = compressed_name if draft.model.compressed is not None else str
    quantization = draft.model.quantization
    held = _renamed(draft.folder, rename, quantization, param="spec")
    sources = _weight_names(held, quantization) - head.ignored
    if head.is_in_model:
        prefix = head.format.prefix or head.named(head.format.layer)
        sources = {source for source in sources if source.startswith(prefix)}
    table = head.table(draft.model, ExpertNaming.of(sources))
    wanted = {piece.source for pieces in table.values() for piece in pieces}
    maps = head.format.maps
    if maps is not None and (is_reduced or maps in sources):
        wanted.add(maps)
    title = f"a head in the format {head.format.title} as described by config.json"
    compare(draft.folder, title, wanted, sources, param="spec")
    norm_dtype = _norm_dtype(draft.model, dtype)
    table = cut_table(table, draft.model, shard)
    parameters = read_parameters(held, table, draft.model, dtype, device, param="spec", norm_dtype=norm_dtype)
    _offset_norms(parameters, draft.model)
    if maps is None or maps not in wanted:
        return parameters, None
    tokens = _tokens(read_tensor(held, maps, param="spec"), draft.folder, maps, head.vocab_size, draft.model.vocab_size)
    is_same = not is_reduced and torch.equal(tokens, torch.arange(head.vocab_size))
    return parameters, None if is_same else tokens.to(device)


def _tokens(offsets: Tensor, folder: Path, name: str, num_drafted: int, num_tokens: int) -> Tensor:
    """Returns the model's token of each drafted one: its own number plus an offset."""
    if tuple(offsets.shape) != (num_drafted,) or offsets.is_floating_point() or offsets.is_complex():
        raise ModelError(
            f"tensor {name} in {str(folder)!r} is {offsets.dtype} {list(offsets.shape)}; {num_drafted} whole numbers are "
            "wanted.",
            param="spec",
        )
    tokens = torch.arange(num_drafted) + offsets
    if tokens.min() < 0 or tokens.max() >= num_tokens or len(set(tokens.tolist())) < num_drafted:
        raise ModelError(
            f"tensor {name} in {str(folder)!r} names tokens {int(tokens.min())} to {int(tokens.max())}; different ones of "
            f"the model's {num_tokens} are wanted.",
            param="spec",
        )
    return tokens
