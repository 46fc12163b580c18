"""Weights of experts that stay packed on the device: read as they are stored and reordered there, or drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.core.packed_experts import BLOCK, GROUP, unpacks_in_tiles
from hiserve.errors import ModelError
from hiserve.kernels.packed_weights import LARGEST_SCALE, PackedWeights, pack_words, packed_size
from hiserve.models.block_scales import FP8, SCALE_SUFFIX
from hiserve.models.checkpoint import StoredTensor
from hiserve.models.experts_config import packed_specs
from hiserve.models.model_config import ModelConfig
from hiserve.models.names import Form, TensorSource, parameter_shape
from hiserve.models.packed_rows import FP4
from hiserve.models.reading import plan_chunks, read_chunks
from hiserve.models.shard_weights import held_parts, is_scattered, read_scattered
from hiserve.models.staging import cut_pieces, stage

_DRAWN_SCALE = 0x78787878  # four exponents of 2**-7: numbers of random codes have a standard deviation of 0.02 then
_DRAWN_FACTOR = 0.02
_DRAWN_SEED = 1
_STORED = {"e4m3": (FP8,), "e2m1": (FP4, "U8")}


@dataclass(frozen=True, slots=True)
class PackedParameter:
    """A parameter that stays packed."""

    pieces: tuple[TensorSource, ...]  # tensors of its matrices
    kind: str  # of numbers, as ``PackedWeights`` has it
    num_experts: int | None  # matrices; None of the one of an expert that computes every token
    num_parts: int  # of a matrix: gate and up, or one


Packed = Mapping[str, PackedParameter]


def packed_parameters(
    table: Mapping[str, tuple[TensorSource, ...]],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    held: Mapping[str, StoredTensor] | None = None,
) -> dict[str, PackedParameter]:
    """Returns the parameters of a table that stay packed.

    Args:
        table: Of a decoder or head.
        config: Its shape.
        dtype: Of its states.
        device: Of its weights.
        held: The tensors of the checkpoint, which tell whether they are stored so; None of weights that are drawn.
    """
    if config.experts is None or not unpacks_in_tiles(device.type, str(dtype).removeprefix("torch.")):
        return {}
    specs = packed_specs(config.experts, config.quantization, config.hidden_size)
    found = {}
    for name, pieces in table.items():
        last = name.rpartition(".")[2]
        spec = specs.get(last)
        if spec is not None and (held is None or all(_is_stored(held, each, spec.kind) for each in pieces)):
            count = None if last.startswith("shared") else config.experts.num_experts
            found[name] = PackedParameter(pieces, spec.kind, count, 2 if last.endswith("gate_up") else 1)
    return found


def _is_stored(held: Mapping[str, StoredTensor], piece: TensorSource, kind: str) -> bool:
    return piece.source in held and held[piece.source].dtype in _STORED[kind]


def draw_packed(packed: Packed, device: torch.device) -> dict[str, PackedWeights]:
    """Draws matrices from a fixed seed, whose numbers have about the spread of other parameters."""
    if not packed:
        return {}
    made, generator = {}, torch.Generator(device).manual_seed(_DRAWN_SEED)
    for name, each in packed.items():
        weights = made[name] = _allocate(each, device)
        if each.kind == "e2m1":
            weights.codes.random_(-(1 << 31), 1 << 31, generator=generator)
            weights.scales.fill_(_DRAWN_SCALE)
        else:
            weights.scales.fill_(_DRAWN_FACTOR)
            for matrix in weights.codes.view(-1, *weights.codes.shape[-2:]):
                drawn = torch.empty(matrix.shape, dtype=torch.float16, device=matrix.device).normal_(
                    generator=generator
                )
                matrix.copy_(drawn.to(torch.float8_e4m3fn).view(torch.uint8))
    return made


def read_packed_experts(
    held: Mapping[str, StoredTensor],
    packed: Packed,
    device: torch.device,
    *,
    param: str,
) -> dict[str, PackedWeights]:
    """Reads parameters that stay packed; those in 8 bits as they are, those in 4 bits by a copy that is reordered.

    Args:
        held: The tensors of the checkpoint, by name, which have been checked; in place of matrices in 8 bits of which the parameters
            have some rows these rows.
        packed: The parameters.
        device: Of the weights.
        param: The setting that names the checkpoint.

    Raises:
        ModelError: A scale makes no sense.
        OSError: A file cannot be read; ``EOFError``: it is shorter than it was.
    """
    made = {name: _allocate(each, device) for name, each in packed.items()}
    eights = {name: each for name, each in packed.items() if each.kind == "e4m3"}
    places, factors = [], []
    for name, each in eights.items():
        codes = made[name].codes.view(-1, made[name].columns)
        scales = made[name].scales.view(len(each.pieces), -1)
        for number, piece in enumerate(each.pieces):
            rows = codes[piece.start : piece.start + piece.num_rows]
            places.append((piece, rows.view(torch.float8_e4m3fn)))
            factors.append((piece.in_units(piece.source + SCALE_SUFFIX, BLOCK, BLOCK), scales[number]))
    held = held_parts(held, {"scales": tuple(piece for piece, _ in factors)})
    places += factors
    read_chunks(plan_chunks([(held[piece.source], part) for piece, part in places if not is_scattered(piece)]), device)
    read_scattered(held, [each for each in places if is_scattered(each[0])])
    _check_factors({each.pieces[0].source: made[name].scales for name, each in eights.items()}, param)
    fours = {name: _stored(each.pieces) for name, each in packed.items() if each.kind == "e2m1"}
    wanted = {name: {piece.source: held[piece.source] for piece in pieces} for name, pieces in fours.items()}
    for name, staged in stage(wanted, device, cut_pieces(fours)):
        _pack(fours[name], staged, made[name], param)
    return made


def _allocate(parameter: PackedParameter, device: torch.device) -> PackedWeights:
    """Returns matrices that are not written."""
    rows, columns = parameter_shape(parameter.pieces)
    matrices: tuple[int, ...] = ()
    if parameter.num_experts is not None:
        rows, matrices = rows // parameter.num_experts, (parameter.num_experts,)
    if parameter.kind == "e2m1":
        sizes = packed_size(columns)
        codes, scales = (torch.empty(*matrices, rows, size, dtype=torch.int32, device=device) for size in sizes)
        return PackedWeights(codes, scales, columns)
    blocks = -(-rows // parameter.num_parts // BLOCK), -(-columns // BLOCK)
    codes = torch.empty(*matrices, rows, columns, dtype=torch.uint8, device=device)
    return PackedWeights(codes, torch.empty(*matrices, parameter.num_parts, *blocks, device=device), columns)


def _stored(pieces: tuple[TensorSource, ...]) -> tuple[TensorSource, ...]:
    """Returns tensors with numbers of 4 bits as they are stored, each before that of its scales."""
    if pieces[0].form is Form.MXFP4:
        return pieces
    units = (("", 2), (SCALE_SUFFIX, GROUP))
    return tuple(piece.in_units(piece.source + suffix, 1, columns) for piece in pieces for suffix, columns in units)


def _pack(pieces: tuple[TensorSource, ...], staged: Mapping[str, Tensor], made: PackedWeights, param: str) -> None:
    """Reorders the numbers of a parameter, expert by expert or matrix by matrix, which bounds the memory."""
    names = [piece.source for piece in pieces]
    numbers, scales = names[::2], names[1::2]
    _check_exponents({name: staged[name].view(torch.uint8) for name in scales}, param)
    if pieces[0].form is Form.MXFP4:
        matrices = list(zip(staged[numbers[0]], staged[scales[0]], strict=True))
    else:
        stored = zip(numbers, scales, strict=True)
        matrices = [(staged[name].view(torch.uint8), staged[scale].view(torch.uint8)) for name, scale in stored]
    start, words, factors = 0, made.codes.view(-1, made.codes.shape[-1]), made.scales.view(-1, made.scales.shape[-1])
    for codes, exponents in matrices:
        rows = slice(start, start := start + codes.shape[0])
        packed = pack_words(codes.view(codes.shape[0], -1, GROUP // 2), exponents)
        for target, part in zip((words, factors), packed, strict=True):
            if pieces[0].is_interleaved:  # the parameter has all gate rows first
                part = part.view(-1, 2, part.shape[1]).transpose(0, 1).flatten(0, 1)
            target[rows].copy_(part)


def _check_exponents(scales: Mapping[str, Tensor], param: str) -> None:
    """Refuses scales that products do not upcast, with one wait for the device."""
    largest = torch.stack([each.amax() for each in scales.values()]).tolist()
    for name, exponent in zip(scales, largest, strict=True):
        if exponent > LARGEST_SCALE:
            raise ModelError(
                f"tensor {name} has a scale of {'NaN' if exponent == 255 else f'2**{exponent - 127}'}, and 2 is the largest with "
                "which packed weights are multiplied. Fetch the checkpoint again, or take --dtype float32.",
                param=param,
            )


def _check_factors(scales: Mapping[str, Tensor], param: str) -> None:
    """Refuses scales that are 0, NaN or infinite, by the first tensor of a parameter, with one wait for the device."""
    good = [(each.isfinite() & (each != 0)).all() for each in scales.values()]
    for source, is_good in zip(scales, torch.stack(good).tolist() if good else [], strict=True):
        if not is_good:
            raise ModelError(
                f"the scales of {source}, or of tensors with which it is stacked, have one that is 0, NaN or infinite. Fetch the "
                "checkpoint again.",
                param=param,
            )
